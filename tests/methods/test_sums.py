"""The server's arithmetic against values worked out by hand: mixed signs, unequal sizes, an untouched entry."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.clients import Client
from fedlib.core.slices import STEM, ParamInfo, Slice
from fedlib.methods import Arrived, Round, Server, Setting, build_method
from fedlib.methods.server import fedadam, feddyn_gradient, feddyn_server
from fedlib.methods.sums import MaskedMean, Update, all_finite, merge_sums
from fedlib.models.vit import ViTSpec


def infos(**shapes):
    units = {"stem": STEM, "low": 0, "high": 1, "unheld": 2}
    return {n: ParamInfo(("a",) + (None,) * (len(s) - 1), "backbone", units[n], s) for n, s in shapes.items()}


def two_clients(params, info):
    """Client 7 (30 examples) holds blocks 0-1, client 3 (10 examples) block 0 only."""
    clients = (Client(7, 1, 30), Client(3, 0, 10))
    slices = (Slice.prefix(2, (0, 1)), Slice.prefix(1, (0,)))
    rows = {n: range(sum(s.holds(info[n]) for s in slices)) for n in params}
    return Update(clients, slices, params, rows)


def setting(info, num_clients=4):
    return Setting(ViTSpec(), (0, 1), info, num_clients, rounds=10)


def one_round(method, server, updates, s):
    """What executor and round loop do with the cohorts' updates."""
    sums = merge_sums(method.summarise(update, s) for update in updates)
    return method.aggregate(server, Arrived(sums), Round(server.t + 1, (), s))


def test_early_exit_fedavg_weights_holders_by_examples():
    info = infos(low=(2,), high=(2,), unheld=(1,))
    old = {"low": torch.zeros(2), "high": torch.ones(2), "unheld": torch.tensor([5.0])}
    update = two_clients({"low": torch.tensor([[1.0, -2.0], [-3.0, 2.0]]), "high": torch.tensor([[4.0, -4.0]])}, info)
    new = one_round(build_method("reefl", {}), Server(0, old, {}), [update], setting(info))
    # low: (30 (1, -2) + 10 (-3, 2)) / 40 = (0, -1); high: only client 7; unheld keeps 5
    torch.testing.assert_close(new.params["low"], torch.tensor([0.0, -1.0]))
    torch.testing.assert_close(new.params["high"], torch.tensor([4.0, -4.0]))
    assert new.params["unheld"] is old["unheld"] and new.t == 1
    torch.testing.assert_close(old["low"], torch.zeros(2))  # state is a value


@pytest.mark.parametrize("order", [(["wide", "cut"], []), (["cut"], ["wide"]), (["wide"], ["cut"])])
def test_width_masked_mean_counts_holders_per_entry(order):
    info = infos(low=(3,))
    narrow = Slice.prefix(1, (0,), index={"a": range(2)})
    wide = Update(
        (Client(0, 0, 9),), (Slice.prefix(1, (0,)),), {"low": torch.tensor([[2.0, -2.0, 6.0]])}, {"low": range(1)}
    )
    cut = Update((Client(1, 0, 1),), (narrow,), {"low": torch.tensor([[-4.0, 4.0]])}, {"low": range(1)})
    parts = [{0: MaskedMean(info)}, {0: MaskedMean(info)}]
    for part, updates in zip(parts, order, strict=True):
        for update in updates:
            part[0].add({"wide": wide, "cut": cut}[update], [1.0])
    mean = merge_sums(parts)[0]
    # entries 0 and 1: ((2, -2) + (-4, 4)) / 2 = (-1, 1), unweighted; entry 2: 6
    torch.testing.assert_close(mean.result({"low": torch.zeros(3)})["low"], torch.tensor([-1.0, 1.0, 6.0]))
    assert mean.count["low"].tolist() == [2, 2, 1]


@pytest.mark.parametrize(
    "values, finite",
    [([1, -2], True), ([3e38, 3e38], True), ([3e38, 3e38, float("-inf")], False), ([float("nan"), 1], False),
     ([float("inf"), float("-inf")], False)],
)  # fmt: skip
def test_finite_numbers_are_told_from_others_even_if_their_sum_is_not(values, finite):
    x = torch.tensor(values, dtype=torch.float32)
    assert all_finite([torch.ones(2), x]) == finite == bool(x.isfinite().all())
    update = Update((Client(5, 0, 1),), (Slice.prefix(1, (0,)),), {"p": x[None]}, {"p": range(1)})
    assert update.nonfinite() == ({} if finite else {5: "p"})


def test_sums_of_equal_groups_stay_apart():
    """Names held by the same clients share a weight; what one of them gets later, the other does not."""
    info, parts = infos(low=(2,), high=(1,)), (Slice.prefix(2, (0, 1)), Slice.prefix(1, (0,)))
    assert parts[0].holds(info["high"]) and not parts[1].holds(info["high"])
    mean = MaskedMean(info)
    both = {"low": torch.tensor([[1.0, 2]]), "high": torch.tensor([[3.0]])}
    mean.add(Update((Client(0, 1, 2),), parts[:1], both, {"low": range(1), "high": range(1)}), [2.0])
    mean.add(Update((Client(1, 0, 3),), parts[1:], {"low": torch.tensor([[6.0, -3]])}, {"low": range(1)}), [3.0])
    # low: (2 (1, 2) + 3 (6, -3)) / 5 = (4, -1); high: 3 of weight 2
    assert (mean.weight["low"].item(), mean.weight["high"].item()) == (5, 2)
    assert (mean.count["low"].item(), mean.count["high"].item()) == (2, 1)
    new = mean.result({"low": torch.zeros(2), "high": torch.zeros(1)})
    assert new["low"].tolist() == [4, -1] and new["high"].tolist() == [3]


def test_feddyn_server_by_hand():
    # alpha 0.1, share 2/4, theta 1, mean 0.6, h 0.02: h' = 0.02 - 0.1 * 0.5 * (0.6 - 1) = 0.04; theta' = 0.6 - 0.4 = 0.2
    theta, h = feddyn_server(*(torch.tensor(x) for x in (1.0, 0.6, 0.02, 0.5)), alpha=0.1)
    assert theta.item() == pytest.approx(0.2) and h.item() == pytest.approx(0.04)


def test_feddyn_leaves_unheld_entries_alone():
    theta, h = feddyn_server(
        *(torch.tensor([1.0, -2.0]), torch.zeros(2), torch.tensor([0.3, 0.3])), torch.tensor([0.0, 1.0]), 0.1
    )
    assert theta[0] == 1 and h[0] == pytest.approx(0.3)


def test_depthfl_aggregates_with_feddyn_over_all_clients():
    info = infos(low=(1,), high=(1,))
    old = {"low": torch.tensor([1.0]), "high": torch.tensor([-1.0])}
    update = two_clients({"low": torch.tensor([[2.0], [-4.0]]), "high": torch.tensor([[3.0]])}, info)
    new = one_round(build_method("depthfl", {}), Server(0, old, {}), [update], setting(info))
    # h = 0, so theta' = mean + (n_k / N)(mean - theta). low: unweighted mean -1, n/N = 2/4: -1 + 0.5 (-2) = -2.
    # high: mean 3, n/N = 1/4 (all four clients, not those with the budget): 3 + 0.25 * 4 = 4
    assert new.params["low"].item() == pytest.approx(-2) and new.params["high"].item() == pytest.approx(4)
    assert new.memory["h/low"].item() == pytest.approx(-0.1 * 0.5 * -2)


def test_feddyn_gradient_is_that_of_its_penalty():
    p, start, g = torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([0.1, 0.4]), torch.tensor([0.3, -0.2])
    penalty = -(p * g).sum() + 0.1 / 2 * ((p - start) ** 2).sum()
    (expected,) = torch.autograd.grad(penalty, p)
    torch.testing.assert_close(feddyn_gradient(p.detach(), start, g, 0.1), expected)


def test_fedadam_by_hand():
    # theta 1, delta -0.5, m 0.2, v 0.01: m' = 0.18 - 0.05 = 0.13; v' = 0.00999 + 0.00025 = 0.01024; sqrt = 0.101193
    # theta' = 1 - 0.001 * 0.13 / (0.101193 + 1e-6) = 1 - 0.00128466
    theta, m, v = fedadam(
        *(torch.tensor(x, dtype=torch.float64) for x in (1.0, -0.5, 0.2, 0.01)), 1e-3, 0.9, 0.999, 1e-6
    )
    assert m.item() == pytest.approx(0.13) and v.item() == pytest.approx(0.01024)
    assert theta.item() == pytest.approx(1 - 0.00128466, abs=1e-8)


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


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(-5, 5, width=32)), min_size=1, max_size=8), st.randoms())
def test_mean_does_not_depend_on_order_or_grouping(clients, random):
    info = infos(stem=(1,))

    def mean(groups):
        parts = []
        for group in groups:
            update = Update(
                tuple(Client(i, 0, n) for i, (n, _) in enumerate(group)), tuple(Slice.prefix(1, (0,)) for _ in group),
                {"stem": torch.tensor([[v] for _, v in group])}, {"stem": range(len(group))},
            )  # fmt: skip
            parts.append({0: MaskedMean(info)})
            parts[-1][0].add(update, [n for n, _ in group])
        merged = merge_sums(parts)[0]
        assert merged.clients == len(clients)
        return merged.result({"stem": torch.zeros(1)})["stem"].item()

    shuffled = random.sample(clients, len(clients))
    cut = random.randint(0, len(clients))
    expected = np.average([v for _, v in clients], weights=[n for n, _ in clients])
    assert mean([clients]) == pytest.approx(expected, abs=1e-6)
    assert mean([g for g in (shuffled[:cut], shuffled[cut:]) if g]) == pytest.approx(expected, abs=1e-6)
