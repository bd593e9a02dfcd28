"""InclusiveFL's momentum distillation and its server, by hand."""

import numpy as np
import pytest
import torch

from fedlib.core.clients import Client
from fedlib.core.slices import ParamInfo
from fedlib.methods import Round, Setting, build_method
from fedlib.methods.sums import Update
from fedlib.models.vit import ViTSpec
from tests.helpers.server_rounds import one_round


def block_infos():
    """Two exits of two blocks each; one parameter a block and a classifier an exit."""
    out = {f"backbone.blocks.{b}.w": ParamInfo((None,), "backbone", b, (1,)) for b in range(4)}
    return out | {f"head.exits.{j}.w": ParamInfo((None,), "head", 2 * j + 1, (1,), j) for j in range(2)}


def inclusive_round(method, server, s, shallow, deep):
    """One round with two shallow clients (budget 0) and one deep client (budget 1); values per parameter."""
    clients = (Client(9, 1, 5), Client(1, 0, 30), Client(2, 0, 10))
    members = members_of(method, clients, server, s)
    slices, uploads = (tuple(getattr(m, x) for m in members) for x in ("part", "upload"))
    params, held_by = {}, {}
    for name, info in s.infos.items():
        rows = [torch.tensor([v]) for x, v in zip(slices, (deep, *shallow), strict=True) if x.holds(info)]
        held = [i for i, x in enumerate(slices) if x.holds(info)]
        params[name], held_by[name] = torch.stack(rows), held
    return one_round(method, server, [Update(clients, slices, params, held_by, uploads)], s)


def members_of(method, clients, server, s):
    r = Round(server.t + 1, clients, s)
    return [m for c in clients for m in method.members(c, server, r)]


def test_inclusivefl_momentum_distillation_by_hand():
    info = block_infos()
    s = Setting(ViTSpec(depth=4), (1, 3), info, 10, rounds=10)
    method = build_method("inclusivefl", {"aggregation": "mean"})
    server = method.init_server({n: torch.zeros(1) for n in info}, s)
    assert set(server.params) == set(info)  # an exit without a client so far is served the shared block
    first = inclusive_round(method, server, s, shallow=(4.0, -8.0), deep=-3.0)
    # exit 0: mean of (4, -8) weighted 30:10 = 1, Delta_0 = -1; exit 1: Delta_1 = 3, M_1 = mean over blocks 2, 3 = 3.
    # Block 1 of exit 0 is personal: no momentum yet, so Delta = 0.8 * -1 and theta = 0.8. The deep client moved the
    # shared block 1 to -3. Block 0 is shared: by number of clients (2 * 1 + 1 * -3) / 3 = -1/3.
    values = {n: p.item() for n, p in first.params.items()}
    assert values["exit0/backbone.blocks.1.w"] == pytest.approx(0.8)
    assert values["backbone.blocks.1.w"] == pytest.approx(-3) and values["backbone.blocks.0.w"] == pytest.approx(-1 / 3)
    assert values["head.exits.0.w"] == pytest.approx(1) and values["head.exits.1.w"] == pytest.approx(-3)
    # Second round, nobody moves: Delta = 0 but exit 0's personal block gets 0.2 * M_1 = 0.6: theta = 0.8 - 0.6 = 0.2
    # (Delta_0 of that block is 0.8 - mean(0.8) = 0 when clients return what they got).
    clients = (Client(9, 1, 5), Client(1, 0, 30))
    members = members_of(method, clients, first, s)
    slices, uploads = (tuple(getattr(m, x) for m in members) for x in ("part", "upload"))
    assert slices[1].source("backbone.blocks.1.w") == "exit0/backbone.blocks.1.w"
    params, rows = {}, {}
    for name, i in info.items():
        held = [k for k, x in enumerate(slices) if x.holds(i)]
        params[name], rows[name] = torch.stack([first.params[slices[k].source(name)] for k in held]), held
    update = Update(clients, slices, params, rows, uploads)
    second = one_round(method, first, [update], s)
    assert second.params["exit0/backbone.blocks.1.w"].item() == pytest.approx(0.2)
    assert second.params["backbone.blocks.0.w"].item() == pytest.approx(-1 / 3)


def test_a_stage_s_momentum_is_of_the_blocks_after_the_exit_before():
    """Exit 1's client moves blocks 0..3 by 1, 2, 4 and 8: its stage is blocks 2 and 3, M_1 = -(4 + 8) / 2."""
    info = block_infos()
    s = Setting(ViTSpec(depth=4), (1, 3), info, 10, rounds=10)
    method = build_method("inclusivefl", {"aggregation": "mean"})
    server = method.init_server({n: torch.zeros(1) for n in info}, s)
    (member,) = members_of(method, clients := (Client(9, 1, 5),), server, s)
    params = {n: torch.tensor([[2.0**i.unit]]) for n, i in info.items() if member.part.holds(i)}
    update = Update(clients, (member.part,), params, dict.fromkeys(params, [0]), (member.upload,))
    new = one_round(method, server, [update], s)
    assert new.memory["momentum/1/w"].item() == pytest.approx(-6) and "momentum/0/w" not in new.memory


def test_inclusivefl_fedadam_steps_each_exit_apart():
    info = block_infos()
    s = Setting(ViTSpec(depth=4), (1, 3), info, 10, rounds=10)
    method = build_method("inclusivefl", {})
    server = method.init_server({n: torch.zeros(1) for n in info}, s)
    new = inclusive_round(method, server, s, shallow=(1.0, 1.0), deep=-1.0)
    # Every first step is lr * 0.1 d / (sqrt(0.001) |d| + tau) against the sign of Delta: 0.001 * 0.1 / 0.031624 = 0.0031622
    step = 1e-3 * 0.1 / (np.sqrt(0.001) + 1e-6)
    assert new.params["head.exits.0.w"].item() == pytest.approx(step, rel=1e-4)
    assert new.params["backbone.blocks.3.w"].item() == pytest.approx(-step, rel=1e-4)
    assert new.params["backbone.blocks.0.w"].item() == pytest.approx((2 * step - step) / 3, rel=1e-3)
    # personal block: Delta = 0.8 * -1, m = 0.1 * -0.8, v = 0.001 * 0.64: the same step size
    assert new.params["exit0/backbone.blocks.1.w"].item() == pytest.approx(step, rel=1e-4)
