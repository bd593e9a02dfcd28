"""What the tests of unequal LoRA ranks compare with: one small transformer of the kit's, trained by torch.optim.

A client of rank r is the whole rank with zeros beyond r in A and B: their gradients are zero, so they stay.
"""

import copy

import torch
import torch.nn.functional as F

from fedlib import Experiment
from fedlib.core.rng import torch_generator
from fedlib.engine.schedules import round_rate
from fedlib.models.registry import OWN
from fedlib.models.vit import ViTSpec

OWN["two_blocks"] = ViTSpec(img_size=16, patch_size=8, dim=16, depth=2, heads=2, ffn_dim=24)
SHARES, RANKS = [0.25, 0.5, 1.0], (1, 2, 4)


def experiment(method, **changes):
    """Three clients of ranks 1, 2 and 4 and of unequal size, all of them in every round."""
    values = dict(
        method=method, options={"rank_shares": SHARES}, backbone="two_blocks", pretrained=False, finetune="lora",
        finetune_options={"r": 4, "lora_alpha": 8}, augment="none", num_exits=1, partition="class_dirichlet",
        dirichlet_alpha=1.0, num_train=90, num_test=40, num_clients=3, clients_per_round=3, rounds=2, batch_size=16,
        lr=0.5, momentum=0.9, weight_decay=0.0, clip_value=None, test_split="like_train",
    )  # fmt: skip
    return Experiment(**(values | changes))


def adapters(f):
    """(A's name, B's name) of every adapter."""
    down = [n for n in f.server.params if n.endswith("lora_A.default.weight")]
    return [(a, a.replace("lora_A", "lora_B")) for a in down]


def cut(params, pairs, rank):
    """``params`` with zeros beyond ``rank``."""
    out = {n: p.clone() for n, p in params.items()}
    for a, b in pairs:
        out[a][rank:], out[b][:, rank:] = 0, 0
    return out


def train(f, client, t, params, extra=None):
    """``params`` after client's local training of round t on cross-entropy + ``extra(own)``."""
    e, model = f.experiment, copy.deepcopy(f.model)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in params.items():
            own[name].copy_(p)
    trained = {n: p for n, p in own.items() if p.requires_grad}
    sgd = torch.optim.SGD(trained.values(), round_rate(e, t), momentum=e.momentum)
    mine = f.data.client(client.id)
    order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
    for at in range(0, len(mine), e.batch_size):
        rows = torch.from_numpy(mine[order[at : at + e.batch_size]])
        sgd.zero_grad()
        loss = F.cross_entropy(model(f.data.view(f.data.inputs, (3, 16, 16), rows)[None])[0, 0], f.data.labels[rows])
        (loss if extra is None else loss + extra(trained)).backward()
        sgd.step()
    return {n: p.detach().clone() for n, p in trained.items()}


def close(found, wanted, atol=2e-5):
    for name, x in wanted.items():
        torch.testing.assert_close(
            found[name].double(), x.double(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
