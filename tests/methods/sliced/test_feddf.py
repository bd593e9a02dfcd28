"""FedDF: a round against a plain loop, distillation on public examples included."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.methods import Round
from tests.helpers.plain_levels import TOY, WIDTHS, PlainNet, deepest, kept, local_training, plain_name, whole

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)


def test_a_round_of_feddf_distils_every_level_on_the_mean_logits(convnet):
    """One pass over the public rows of which none judges: by hand from Decoupled's round with Adam."""
    e = convnet.replace(method="feddf", options={"widths": WIDTHS, "patience": 1000}, public_fraction=0.3)
    f = build_federation(e)
    (last,) = run_rounds(f, ONE)
    start, public = whole(f), f.setting.lab.rows
    x = f.data.view(f.data.inputs, TOY.input_shape, public)
    fused, logits = {}, []
    for client in f.sample_clients(1):  # one client a level, so its model is the level's mean
        level = client.budget
        values, index = local_training(f, client, WIDTHS[level], level + 1, start, deepest)
        net = PlainNet([int(WIDTHS[level] * n) for n in TOY.widths], level + 1)
        net.load_state_dict({n: torch.tensor(v).float() for n, v in values.items()}, strict=False)
        fused[level] = net
        logits.append(net(x, WIDTHS[level])[-1].detach())
    target, compared, same = torch.stack(logits).mean(0).softmax(-1), 0, 0
    judge = np.arange(0, len(public), 10)
    learn = np.setdiff1d(np.arange(len(public)), judge)
    for level, net in fused.items():
        part = f.method.part(level, f.setting)

        def loss(rows, net=net, level=level):
            return -(target[rows] * net(x[rows], WIDTHS[level])[-1].log_softmax(-1)).sum(-1).mean()

        used = [p for n, p in net.named_parameters() if not n.startswith("exits.") or n.startswith(f"exits.{level}.")]
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        optimiser, first = torch.optim.Adam(used, 1e-3), loss(judge).item()
        rng = Round(1, (), f.setting).generator("distillation", level)
        for chosen in np.array_split(rng.permutation(learn), math.ceil(len(learn) / e.batch_size)):
            optimiser.zero_grad()
            loss(chosen).backward()
            optimiser.step()
        kept_ = dict(net.named_parameters()) if loss(judge).item() < first else before
        for name, alias in part.aliases.items():
            plain = plain_name(name)
            index = np.ix_(*kept(plain, tuple(f.server.params[alias].shape), WIDTHS[level]))
            found = last.server.params[alias].double().numpy()
            wanted = kept_[plain].detach().double().numpy()
            near = np.isclose(found[index], wanted, rtol=1e-3, atol=1e-4)
            compared, same = compared + near.size, same + near.sum()
            beyond = np.ones(found.shape, bool)
            beyond[index] = False
            assert (found[beyond] == f.server.params[alias].double().numpy()[beyond]).all()
    assert (
        same > 0.98 * compared > 1000
    )  # Adam's first steps are signs: where a gradient is all but zero, rounding decides


def test_public_examples_are_nobodys(convnet):
    """Of 90 a fifth: from what ``num_train`` leaves out, so that clients lose none; held out where that is too little."""
    f = build_federation(convnet.replace(public_fraction=0.2))
    held = np.concatenate([f.data.client(i) for i in range(3)])
    assert len(held) == 90 and len(f.data.public) == 20 and not set(held) & set(f.data.public)
    assert np.bincount(f.data.labels[f.data.public]).tolist() == [2] * 10
    again = build_federation(convnet.replace(public_fraction=0.2, seed=7)).data.public
    assert again.tolist() == f.data.public.tolist()
    full = build_federation(convnet.replace(public_fraction=0.2, num_train=None)).data
    held = np.concatenate([full.client(i) for i in range(3)])
    assert len(held) + len(full.public) == len(full.labels) and not set(held) & set(full.public)
    with pytest.raises(ValueError, match="public examples must be nobody's: client 1 holds 2 of these 2"):
        replace(f.data, public=f.data.client(1)[:2])
