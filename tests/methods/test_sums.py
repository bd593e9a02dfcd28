"""The server's arithmetic against values worked out by hand: mixed signs, unequal sizes, an untouched entry."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.clients import Client
from fedlib.core.slices import ParamInfo, Slice
from fedlib.methods import Server, build_method
from fedlib.methods.sums import MaskedMean, Update, all_finite
from tests.helpers.server_rounds import infos, merged, one_round, setting, two_clients


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
    parts = [MaskedMean(info), MaskedMean(info)]
    for part, updates in zip(parts, order, strict=True):
        for update in updates:
            part.add({"wide": wide, "cut": cut}[update], [1.0])
    mean = merged(parts)
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
            parts.append(MaskedMean(info))
            parts[-1].add(update, [n for n, _ in group])
        sums = merged(parts)
        assert sums.count["stem"].item() == len(clients)
        return sums.result({"stem": torch.zeros(1)})["stem"].item()

    shuffled = random.sample(clients, len(clients))
    cut = random.randint(0, len(clients))
    expected = np.average([v for _, v in clients], weights=[n for n, _ in clients])
    assert mean([clients]) == pytest.approx(expected, abs=1e-6)
    assert mean([g for g in (shuffled[:cut], shuffled[cut:]) if g]) == pytest.approx(expected, abs=1e-6)


def keep(index):
    return Slice.prefix(1, (), index={n: tuple(v) for n, v in index.items()})


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WIDE = {"w": ParamInfo(("a", None), "backbone", 0, (4, 2))}
widths = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, unique=True), st.integers(1, 50), st.integers(0, 99)),
    min_size=1,
    max_size=6,
)


def mean_of(clients, groups):
    parts = []
    for group in groups:
        parts.append(MaskedMean(WIDE))
        for i in group:
            kept, n, seed = clients[i]
            value = drawn((len(kept), 2), seed).float()
            update = Update((Client(i, 0, n),), (keep({"a": kept}),), {"w": value[None]}, {"w": range(1)})
            parts[-1].add(update, [n])
    return merged(parts)


@settings(deadline=None, max_examples=60)
@given(widths, st.randoms())
def test_the_mean_of_width_slices_is_convex_and_does_not_depend_on_order_or_grouping(clients, random):
    order = random.sample(range(len(clients)), len(clients))
    at = random.randint(0, len(order))
    old = {"w": torch.full((4, 2), 1e6)}
    one = mean_of(clients, [range(len(clients))]).result(old)["w"]
    other = mean_of(clients, [g for g in (order[:at], order[at:]) if g]).result(old)["w"]
    torch.testing.assert_close(one, other)
    for row in range(4):
        held = [(n, drawn((len(k), 2), s).float()[k.index(row)]) for k, n, s in clients if row in k]
        if not held:
            assert torch.equal(one[row], old["w"][row])
            continue
        values = torch.stack([v for _, v in held])
        assert (one[row] >= values.min(0).values - 1e-5).all() and (one[row] <= values.max(0).values + 1e-5).all()
        expected = sum(n * v.double() for n, v in held) / math.fsum(n for n, _ in held)
        torch.testing.assert_close(one[row].double(), expected, atol=1e-5, rtol=0)


INFO = {n: ParamInfo((None,), "backbone", u, (2,)) for u, n in enumerate(("low", "high"))}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.sampled_from([0.0, -3.0, 7.5, math.nan, math.inf])), min_size=1, max_size=6))  # fmt: skip
def test_dropping_equals_never_having_taken_part(clients):
    """Any pattern of deep and shallow, good and bad clients: sums equal those of the good clients alone."""
    clients = sorted(clients, key=lambda c: not c[1])  # deep ones first, as in a cohort

    def update_of(members):
        slices = tuple(Slice.prefix(2 if d else 1, ()) for _, d, _ in members)
        params = {"low": torch.tensor([[v, 1.0] for *_, v in members])}
        rows = {"low": range(len(members))}
        if held := sum(d for _, d, _ in members):
            params["high"], rows["high"] = torch.tensor([[2.0, v] for _, d, v in members if d]), range(held)
        return Update(tuple(Client(ids[id(m)], 0, m[0]) for m in members), slices, params, rows)

    clients = [list(c) for c in clients]
    ids = {id(c): i for i, c in enumerate(clients)}
    good = [c for c in clients if math.isfinite(c[2])]
    update = update_of(clients)
    bad = update.nonfinite()
    assert bad == {i: "low" for i, c in enumerate(clients) if not math.isfinite(c[2])}
    kept = update.without(bad)
    assert [c.id for c in kept.clients] == [ids[id(c)] for c in good]
    if good:
        means = []
        for u in (kept, update_of(good)):
            assert u.rows.keys() == u.params.keys()
            means.append(MaskedMean(INFO))
            means[-1].add(u, [c.num_examples for c in u.clients])
        old = {n: torch.full((2,), 5.0) for n in INFO}
        for name, value in means[0].result(old).items():
            assert torch.equal(value, means[1].result(old)[name])
    else:
        nothing = build_method("reefl", {}).summarise(kept, SimpleNamespace(infos=INFO))
        assert not kept.params and not nothing.total
