"""Properties over thousands of drawn cases: config parsing, layers, slices, partitions, aggregation."""

import json
import math
import random

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.core.clients import Client
from fedlib.core.slices import ParamInfo, Slice, scatter_add_, take
from fedlib.data.partition import partition_examples
from fedlib.engine.checks import check_experiment
from fedlib.methods.sums import MaskedMean, Update, merge_sums
from fedlib.runs.params import load_grid
from fedlib.runs.params_files import load_yaml, merge

# --- configurations ----------------------------------------------------------------------------------------------

positive = st.integers(1, 10**6)
rate = st.floats(1e-6, 1e6)
scalar = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(max_size=20), st.none(), st.lists(st.integers(0, 9), max_size=3))  # fmt: skip
experiments = st.fixed_dictionaries(
    {},
    optional={
        "method": st.text(max_size=30), "options": st.dictionaries(st.text(max_size=9), scalar, max_size=3),
        "dataset": st.text(max_size=60), "num_train": st.none() | positive, "dirichlet_alpha": rate,
        "partition": st.sampled_from(["dirichlet", "class_dirichlet", "pathological", "natural", "iid"]),
        "pretrained": st.booleans(), "exit_blocks": st.none() | st.just([2, 5, 8, 11]), "rounds": positive,
        "num_clients": st.integers(10, 10**6), "batch_size": positive, "lr": st.floats(0.001, 1e6) | st.integers(1, 99),
        "momentum": st.floats(0, 0.99), "clip_value": st.none() | rate, "seed": st.integers(0, 2**62),
        "nonfinite": st.sampled_from(["record", "drop", "fail"]),
    },
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(experiments)
def test_an_experiment_survives_dict_json_and_yaml(values):
    e = Experiment.from_dict(values)
    assert Experiment.from_dict(e.to_dict()) == e == Experiment.from_dict(json.loads(json.dumps(e.to_dict())))
    assert Experiment.from_dict(yaml.safe_load(yaml.safe_dump(e.to_dict()))).hash == e.hash
    assert Experiment.from_dict(e.identity()) == e and e.replace() == e
    assert "/" not in e.slug and len(e.slug.encode()) < 100 and e.slug.isascii() and e.slug.endswith(e.hash)


@settings(deadline=None, max_examples=100)
@given(experiments)
def test_a_params_file_reads_back_as_written(values):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "e.yaml"
        file.write_text(yaml.safe_dump(values, allow_unicode=False))
        assert Experiment.from_dict(load_yaml(file)) == Experiment.from_dict(values)


layers = st.lists(
    st.fixed_dictionaries(
        {}, optional={"lr": scalar, "rounds": scalar, "options": st.dictionaries(st.sampled_from("xyz"), st.integers())}
    )
)


@given(layers, st.integers(0, 9))
def test_merging_layers_is_associative_and_later_wins(given_layers, cut):
    out = merge(*given_layers)
    assert merge(merge(*given_layers[:cut]), merge(*given_layers[cut:])) == out == merge({}, *given_layers, {})
    for key in out:
        last = [layer[key] for layer in given_layers if key in layer][-1]
        assert all(out[key][k] == v for k, v in last.items()) if isinstance(last, dict) else out[key] == last
    assert set(out) == set().union(*given_layers)


VALID = dict(
    method="depthfl", options={"distill": "best", "zeta": 0.3}, dataset="mnist", num_train=100, num_test=None,
    partition="dirichlet", dirichlet_alpha=0.5, classes_per_client=2, augment="crop", crop_pad=2, crop_scale=0.1,
    backbone="deit_micro", pretrained=True, finetune="frozen", finetune_options={}, num_exits=4,
    exit_blocks=[2, 5, 8, 11], num_clients=20, clients_per_round=5, budgets="uniform", rounds=3, local_epochs=1,
    batch_size=8, lr=0.1, min_lr=0.01, momentum=0.5, weight_decay=0.1, clip_value=1.0, nonfinite="drop",
    evaluate_every=1, seed=1,
)  # fmt: skip
NUMBERS = {k for k, v in VALID.items() if type(v) in (int, float)} | {"num_test"}


def wrong(key, rng):
    """A value that ``key`` cannot have."""
    deep = nested = []
    for _ in range(rng.choice([1, 5, 2000])):
        nested.append([])
        nested = nested[0]
    odd = [b"bytes", {"a": {"b": 1}}, {1: 2}, object(), {"set"}, 1j, deep, float("nan"), float("inf"), -float("inf"), 10**400,
           -(10**400), 2**64, "\ud800\0", "數" * rng.randint(1, 2000), "", "1e-3", range(3), np.float64("nan"), {"k": float("nan")},
           {"k": object()}, {"k": deep}, [[None]], [1, "2"], type, np.complex64(3), np.datetime64("2024"), np.array([3, 3])]  # fmt: skip
    if key in NUMBERS:
        odd += [True, -1, -0.5, "3", -(2**63)]
    if type(VALID[key]) is float:
        odd.remove(2**64)  # large, but a number
    if type(VALID[key]) is bool:
        odd += [0, 1, "true", None]
    return rng.choice(odd)


def mutated(rng):
    """A valid configuration with one thing wrong, and the word that a message about it must hold."""
    values = json.loads(json.dumps(VALID))
    kind = rng.randrange(4)
    if kind == 0:
        key = rng.choice(
            [rng.choice(list(VALID)) + rng.choice("sz_ é\n"), rng.choice(["", "\0", "数据", "__class__", "x" * 5000])]
        )
        values[key] = rng.choice([1, None, VALID])
        return values, "unknown key"
    if kind == 1:
        values["options"][rng.choice(["zetta", "", "数", "lr"])] = 1
        return values, "options of depthfl: unknown key"
    if kind == 2:
        key = rng.choice(["zeta", "temperature", "beta1", "kd_weight"])
        values["options"][key] = rng.choice([float("nan"), "0.1", True, [1], {"a": 1}, 10**400, b"x", float("inf")])
        return values, key
    key = rng.choice(list(VALID))
    values[key] = wrong(key, rng)
    return values, key


def test_ten_thousand_invalid_configurations_give_clear_errors():
    """``ValueError`` with the key's name in a few lines, and no other exception from the depths."""
    rng, escaped, tried = random.Random(0), [], 0
    while tried < 10_000:
        values, word = mutated(rng)
        try:
            check_experiment(Experiment.from_dict(values))
        except ValueError as error:
            text = str(error)
            tried += 1
            if word not in text or len(text) > 4000 or text.count("\n") > 2:
                escaped.append((word, text[:300]))
        except Exception as error:
            tried += 1
            escaped.append((word, repr(error)[:300]))
        else:  # the few draws that are valid after all
            assert word in ("dataset", "num_test", "exit_blocks", "options", "finetune_options", "clip_value"), (
                word,
                values[word],
            )
    assert not escaped, f"{len(escaped)}: {escaped[:5]}"


@pytest.mark.parametrize(
    "overrides, word",
    [("rounds", "overrides"), ([1], "overrides"), ({1: 2}, "unknown key 1"), ({"seeds": 3.5}, "seeds"), ({"seeds": [True]}, "seeds"),
     ({"columns": [{}]}, "columns"), ({"columns": [[]]}, "columns"), ({"method": [[1]]}, "method"), ({"method": {}}, "method"),
     ({"finetune": 3}, "finetune"), ({"options": [1]}, "options"), ({"seed": "x"}, "seed"), ({"x" * 10**6: 1}, "unknown key"),
     ({"rounds": "9" * 10**6}, "rounds"), ({"num_clients": 10**500}, "num_clients")],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_overrides_of_any_shape_give_clear_errors(overrides, word):
    with pytest.raises(ValueError, match=word) as error:
        load_grid("reefl", "table1", "smoke", overrides)
    assert len(str(error.value)) < 4000


# --- slices ------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def cut_tensor(draw):
    """A shape, its axes (one may occur twice), and two nested lists of kept indices per axis."""
    names = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=3))
    length = {n: draw(st.integers(1, 5)) for n in ("a", "b", None)}
    info = ParamInfo(tuple(names), "backbone", 0, tuple(length[n] for n in names))
    outer = {n: draw(st.lists(st.integers(0, length[n] - 1), min_size=1, unique=True)) for n in ("a", "b")}
    inner = {n: draw(st.lists(st.integers(0, len(v) - 1), min_size=1, unique=True)) for n, v in outer.items()}
    return info, outer, inner


def keep(index):
    return Slice.prefix(1, (), index={n: tuple(v) for n, v in index.items()})


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None)
@given(cut_tensor())
def test_take_and_scatter_are_adjoint_in_any_number_of_dimensions(case):
    info, outer, _ = case
    x = drawn(info.shape, 0)
    small = take(x, info, keep(outer))
    y, total = drawn(small.shape, 1), torch.zeros(info.shape, dtype=torch.float64)
    scatter_add_(total, y, info, keep(outer))
    assert (small * y).sum().item() == pytest.approx((x * total).sum().item())
    assert torch.equal(take(total, info, keep(outer)), y)
    grid = np.ix_(*[outer.get(n, range(s)) for n, s in zip(info.axes, info.shape, strict=True)])
    np.testing.assert_array_equal(small, x.numpy()[grid])  # an independent reading of the same indices


@settings(deadline=None)
@given(cut_tensor())
def test_a_slice_of_a_slice_is_the_slice_of_composed_indices(case):
    info, outer, inner = case
    x, composed = drawn(info.shape, 0), {n: [outer[n][i] for i in v] for n, v in inner.items()}
    middle = take(x, info, keep(outer))
    inside = ParamInfo(info.axes, info.kind, info.unit, tuple(middle.shape))
    assert torch.equal(take(middle, inside, keep(inner)), take(x, info, keep(composed)))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_prefixes_are_nested_in_depth_and_width(d1, d2, w1, w2):
    small, large = sorted((d1, d2)), sorted((w1, w2))
    one, other = (Slice.prefix(d, (), index={"a": range(w)}) for d, w in zip(small, large, strict=True))
    for unit in range(-1, 12):
        info = ParamInfo(("a",), "backbone", unit, (8,))
        assert not one.holds(info) or other.holds(info)
    info, x = ParamInfo(("a",), "backbone", 0, (8,)), drawn((8,), 0)
    assert torch.equal(take(x, info, other)[: large[0]], take(x, info, one))


# --- partitions --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(12, 90), st.floats(0.05, 100), st.integers(0, 2**32))
def test_dirichlet_gives_every_client_its_share_and_no_example_twice(clients, classes, n, alpha, seed):
    labels = np.random.default_rng(0).integers(0, classes, n)
    parts = partition_examples("dirichlet", labels, clients, seed, alpha)
    rows = np.concatenate(parts)
    assert [len(p) for p in parts] == [n // clients] * clients and len(set(rows)) == len(rows) and rows.max() < n
    again = partition_examples("dirichlet", labels, clients, seed, alpha)
    assert all(np.array_equal(p, q) and np.array_equal(p, np.sort(p)) for p, q in zip(parts, again, strict=True))


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(["iid", "class_dirichlet", "pathological"]), st.integers(2, 6), st.integers(0, 1000))
def test_every_partition_holds_each_example_once_and_covers_all_clients(kind, clients, seed):
    labels = np.arange(120) % 4
    parts = partition_examples(kind, labels, clients, seed, 1.0, 2)
    rows = np.concatenate(parts)
    assert len(parts) == clients and min(map(len, parts)) > 0 and len(set(rows)) == len(rows)
    covered = set(labels[rows]) if kind == "pathological" else set(range(4))  # a class that nobody drew stays out
    assert set(rows) == set(np.where(np.isin(labels, list(covered)))[0])
    assert all(
        np.array_equal(p, q)
        for p, q in zip(parts, partition_examples(kind, labels, clients, seed, 1.0, 2), strict=True)
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.data())
def test_natural_clients_are_the_largest_owners_whole(owners, data):
    owners = np.array(owners)
    clients = data.draw(st.integers(1, len(np.unique(owners))))
    parts = partition_examples("natural", np.zeros(len(owners), int), clients, 0, owners=owners)
    assert all(len(set(owners[p])) == 1 and (owners == owners[p[0]]).sum() == len(p) for p in parts)
    counts = sorted(np.unique(owners, return_counts=True)[1])
    assert sorted(map(len, parts)) == counts[-clients:]


# --- aggregation with width slices -------------------------------------------------------------------------------

WIDE = {"w": ParamInfo(("a", None), "backbone", 0, (4, 2))}
widths = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, unique=True), st.integers(1, 50), st.integers(0, 99)),
    min_size=1,
    max_size=6,
)


def mean_of(clients, groups):
    parts = []
    for group in groups:
        parts.append({0: MaskedMean(WIDE)})
        for i in group:
            kept, n, seed = clients[i]
            value = drawn((len(kept), 2), seed).float()
            update = Update((Client(i, 0, n),), (keep({"a": kept}),), {"w": value[None]}, {"w": range(1)})
            parts[-1][0].add(update, [n])
    return merge_sums(parts)[0]


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
