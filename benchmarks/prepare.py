"""The shared file of a workload, by fedlib's own rules: partition, sampled clients, batch order, initial weights.

All rivals read it; fedlib itself draws the same clients and the same batches from the same seed.
Read next: ``rivals/workload.py`` (who reads it), ``harness.py`` (who runs them).
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.functional import interpolate

from benchmarks.names import to_plain
from benchmarks.rivals.workload import ViT, Workload
from fedlib.core.experiment import Experiment
from fedlib.core.rng import torch_generator
from fedlib.data.datasets import load_dataset
from fedlib.engine.federation import build_federation
from fedlib.layers.linear import init_normal_
from fedlib.models.registry import build_backbone

BACKBONES = {"vit": "vit_digits"}  # fedlib's names of what rivals build, where they differ
LAST_THIRD, ALL = (8, 9, 10, 11), tuple(range(12))
CIFAR = {"dataset": "cifar10", "img_size": 32, "num_clients": 50, "examples": 320, "batch_size": 64}
RESNET, CONVNET = ({"architecture": a, **CIFAR} for a in ("resnet8", "convnet3_slim"))
WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1"),
        Workload("W1, batch 8", batch_size=8),
        Workload("W2", lora_blocks=ALL),
        Workload("W2, batch 8", lora_blocks=ALL, batch_size=8),
        Workload("W2'", lora_blocks=LAST_THIRD),
        Workload("W3, LoRA", "reefl", lora_blocks=ALL),
        Workload("W3, full", "reefl"),
        Workload("W4", **RESNET),
        Workload("W4, batch 10", **RESNET | {"batch_size": 10}),
        Workload("W5, FedPer", "fedper", **CONVNET),
        Workload("W5, FedPer, batch 10", "fedper", **CONVNET | {"batch_size": 10}),
        Workload("W5, FedPer, tested", "fedper", tested=True, **CONVNET),
        Workload("W5, Ditto, tested", "ditto", tested=True, **CONVNET),
    )
}


SHARED = ("fedavg", "reefl")  # methods whose clients answer with the global model


def experiment(w: Workload) -> Experiment:
    """The workload in fedlib's terms. Plain SGD: no clipping, no cosine."""
    reefl = w.method == "reefl"
    lora = {"r": w.lora_rank, "lora_alpha": w.lora_alpha, "layers_to_transform": list(w.lora_blocks)}
    return Experiment(
        method=w.method, dataset=w.dataset, num_train=w.num_clients * w.examples, partition="iid", augment="none",
        options={"mu": w.mu} if w.method == "ditto" else {},
        test_split="central" if w.method in SHARED else "contiguous",
        backbone=BACKBONES.get(w.architecture, w.architecture), pretrained=False, num_exits=4 if reefl else 1,
        finetune="lora" if w.lora_blocks else "full", finetune_options=lora if w.lora_blocks else {},
        num_clients=w.num_clients, clients_per_round=w.per_round, budgets="uniform" if reefl else "maximum",
        rounds=w.rounds, evaluate_every=int(w.tested), batch_size=w.batch_size, lr=w.lr, min_lr=w.lr,
        clip_value=None, seed=w.seed,
    )  # fmt: skip


@torch.no_grad()
def initial_weights(w: Workload, fresh: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A plain ViT's weights: deit_micro's with resized patch filters, or N(0, 0.02); the head N(0, 0.02).

    LoRA starts as peft starts it: A Kaiming uniform, B zero. A ResNet starts as fedlib's does, from ``fresh``.
    """
    if w.architecture != "vit":
        return to_plain(fresh, w)
    model, generator = ViT(w), torch_generator(w.seed, "benchmark init")
    init_normal_(model, generator)
    for p in (model.prefix, model.pos_embed):
        p.normal_(0, 0.02, generator=generator)
    for b in w.lora_blocks:
        attn = model.blocks[b].attn
        attn.lora_a.weight.uniform_(-(w.dim**-0.5), w.dim**-0.5, generator=generator)
        for up in (attn.lora_bq, attn.lora_bv):
            up.weight.zero_()
    if w.pretrained:
        backbone = to_plain(build_backbone("deit_micro").state_dict(), w)
        filters = backbone["patch_embed.weight"].view(w.dim, 3, 8, 8).sum(1, keepdim=True)  # of a grey image
        scale = (8 / w.patch_size) ** 2  # a flat patch gets the same answer
        filters = interpolate(filters, (w.patch_size, w.patch_size), mode="bilinear") * scale
        model.load_state_dict(backbone | {"patch_embed.weight": filters.flatten(1)}, strict=False)
    return model.state_dict()


def write_workload(w: Workload, path: Path) -> Path:
    """Write the shared file of ``w`` as safetensors and return its path."""
    from safetensors.torch import save_file

    e, data = experiment(w), load_dataset(w.dataset)
    plain = e.replace(method="fedavg", options={}, finetune="full", finetune_options={}, num_exits=1, budgets="maximum")
    federation = build_federation(plain)  # clients and batches are functions of the seed, whatever is trained
    sampled = [[c.id for c in federation.sample_clients(t)] for t in range(1, w.rounds + 1)]
    rows = torch.stack(
        [torch.stack([_order(federation, w, t, c) for c in clients]) for t, clients in enumerate(sampled, 1)]
    )
    used, rows = rows.unique(return_inverse=True)
    pad = (data.train_inputs.shape[-1] - w.img_size) // 2  # fedlib pads digits to 32 pixels
    crop = slice(pad, pad + w.img_size)
    images, test_images = (x[..., crop, crop] for x in (data.train_inputs, data.test_inputs))
    pixels = images.float() / 255
    mean, std = (f((0, 2, 3), keepdim=True)[0] for f in (pixels.mean, pixels.std))
    tensors = {
        "images": images[used], "labels": data.train_labels[used].int(), "test_images": test_images,
        "test_labels": data.test_labels.int(), "mean_std": torch.stack((mean, std)),
        "sampled": torch.tensor(sampled, dtype=torch.int32), "rows": rows.to(torch.int32),
        **{f"initial/{k}": v for k, v in initial_weights(w, federation.server.params).items()},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"workload": json.dumps(asdict(w))})
    return path


def _order(federation, w: Workload, t: int, client: int) -> torch.Tensor:
    """Rows of a client's examples in training order: the first draw of fedlib's cohort in round ``t`` = 1, 2, ..."""
    order = torch.randperm(w.examples, generator=torch_generator(w.seed, "local", t, client))
    return torch.from_numpy(federation.data.client(client))[order]
