"""Clipping, quantisation and top-k against values worked out by hand, and in every method."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.core.slices import Slice
from fedlib.core.storage import read_tensors
from fedlib.engine.cohort import Cohort
from fedlib.methods import METHODS, Round, build_method
from fedlib.methods.sums import Update
from fedlib.methods.uploads import clip_factors, kept_entries, quantise, top_k
from fedlib_lab.rivals.ranks import Ranks
from fedlib_lab.runs import store as runs_module
from fedlib_lab.runs.costs import exit_costs, upload_mib
from fedlib_lab.runs.run_paths import run_path
from tests.helpers.granted import few_blocks, granted

ONE = Execution(workers=1)


def two_clients(start, params, memories=None, t=1):
    """A trained cohort: client 7 holds ``low`` and ``high``, client 3 only ``low``; rows as in ``params``."""
    rows, memory = {"low": range(2), "high": range(1)}, memories if memories is not None else {}
    clients, slices = (Client(7, 1, 30), Client(3, 0, 10)), (Slice.prefix(2, (0, 1)), Slice.prefix(1, (0,)))
    zeros = {n: torch.zeros_like(p) for n, p in params.items()}
    return SimpleNamespace(
        clients=clients, start=start, params=params, rows=rows, generator=lambda purpose, client: torch_generator(5, purpose, t, client),
        new_memories={}, update=lambda: Update(clients, slices, params, rows),
        recall=lambda key: memory.get(key, zeros), remember=lambda key, x, rows: memory.__setitem__(key, x),
    )  # fmt: skip


def start():
    return {"low": torch.tensor([[1.0, -1.0], [1.0, -1.0]]), "high": torch.tensor([[2.0]])}


def sent(options, deltas, **kwargs):
    """What the two clients send beyond what they received."""
    received = start()
    cohort = two_clients(received, {n: received[n] + d for n, d in deltas.items()}, **kwargs)
    update = build_method("reefl", options).upload(cohort)
    return {n: p - received[n] for n, p in update.params.items()}


def test_clipping_is_over_all_tensors_a_client_holds():
    deltas = {"low": torch.tensor([[3.0, -4.0], [-0.5, 0.75]]), "high": torch.tensor([[-12.0]])}
    # client 7: |(3, -4, -12)| = 13 > 6.5: halved. Client 3: |(-0.5, 0.75)| = 0.901 < 6.5: as it is.
    out = sent({"update_norm": 6.5}, deltas)
    assert torch.equal(out["low"], torch.tensor([[1.5, -2.0], [-0.5, 0.75]], dtype=torch.float64))
    assert torch.equal(out["high"], torch.tensor([[-6.0]], dtype=torch.float64))
    rows = {"low": range(2), "high": range(1)}
    assert clip_factors(deltas, rows, 2, 6.5).tolist() == [0.5, 1.0]
    assert clip_factors({"low": torch.zeros(2, 3)}, rows, 2, 1.0).tolist() == [1.0, 1.0]  # nobody moved


def test_quantisation_by_hand_and_unbiased():
    # 3 bits: m = 3. Row 0: s = 1, 3x = (0.9, -3, 0, -1.65): between 0 and 1 at 0.9, exact, exact, between -2 and -1 at 0.35
    # Row 1: s = 6, x m/s = (1, -3, 0.25, 0): exact, exact, between 0 and 2 at 0.25, exact.
    x = torch.tensor([[0.3, -1.0, 0.0, -0.55], [2.0, -6.0, 0.5, 0.0]])
    low = quantise(x, torch.full_like(x, 0.9999), 3)
    high = quantise(x, torch.zeros_like(x), 3)
    third = 1 / 3
    expected = torch.tensor([[0.0, -1.0, 0.0, -2 * third], [2.0, -6.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(low, expected)
    expected = torch.tensor([[third, -1.0, 0.0, -third], [2.0, -6.0, 2.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(high, expected)
    chance = torch.tensor([[0.9, 0.0, 0.0, 0.35], [0.0, 0.0, 0.25, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(chance * high + (1 - chance) * low, x.double(), rtol=0, atol=1e-7)
    assert torch.equal(quantise(x, (chance - 1e-4).clamp(min=0), 3), torch.where(chance > 0, high, low))  # u < frac: up
    assert torch.equal(quantise(x, chance + 1e-4, 3), low)
    assert torch.equal(quantise(torch.zeros(2, 3), torch.zeros(2, 3), 8), torch.zeros(2, 3, dtype=torch.float64))


def test_quantisation_draws_are_unbiased_and_many_bits_are_exact():
    x = torch.tensor([0.3, -1.0, 0.1, -0.55])
    draws = quantise(x.expand(20_000, 4), torch.rand(20_000, 4, generator=torch_generator(0, "test")), 2)
    assert set(draws.unique().tolist()) == {-1.0, 0.0, 1.0}  # two bits: three levels
    # one draw has variance |x| (1 - |x|) <= 1/4, the mean of 20,000 an SD <= 0.0036
    assert (draws.mean(0) - x).abs().max() < 0.015
    assert (quantise(x[None], torch.full((1, 4), 0.5), 32) - x).abs().max() <= 1 / (2**31 - 1)


def test_a_client_quantises_with_its_own_draws():
    deltas = {"low": torch.linspace(-1, 1, 64).expand(2, 64), "high": torch.ones(1, 1)}
    received = {n: torch.zeros_like(d) for n, d in deltas.items()}

    def low(t):
        cohort = two_clients(received, deltas, t=t)
        return build_method("reefl", {"compress": "quantise", "bits": 2}).upload(cohort).params["low"]

    assert torch.equal(low(1), low(1)) and not torch.equal(low(1), low(2)) and not torch.equal(*low(1))


def test_top_k_by_hand_with_ties():
    x = torch.tensor([[1.0, -3.0, 3.0, 0.5, -3.0], [0.0, 2.0, -2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    # of equal magnitudes the first stay
    assert top_k(x, 2).tolist() == [[0, -3, 3, 0, 0], [0, 2, -2, 0, 0], [0] * 5]
    assert top_k(x, 4).tolist() == [[1, -3, 3, 0, -3], [0, 2, -2, 2, 2], [0] * 5]
    assert torch.equal(top_k(x, 5), x)
    assert top_k(x.view(3, 5, 1), 1).view(3, 5).tolist() == [[0, -3, 0, 0, 0], [0, 2, 0, 0, 0], [0] * 5]
    assert [kept_entries(n, 0.1) for n in (1, 14, 16, 30, 100)] == [1, 1, 2, 3, 10]


def test_error_feedback_over_two_rounds_by_hand():
    options, memories = {"compress": "topk", "topk_fraction": 0.5, "error_feedback": True}, {}
    deltas = {"low": torch.tensor([[0.5, -0.25], [0.25, 0.375]]), "high": torch.tensor([[4.0]])}
    first = sent(options, deltas, memories=memories)
    # k = 1 of low's two entries: (0.5, 0) and (0, 0.375); left out: (0, -0.25) and (0.25, 0)
    assert first["low"].tolist() == [[0.5, 0], [0, 0.375]] and first["high"].tolist() == [[4]]
    assert memories["residual"]["low"].tolist() == [[0, -0.25], [0.25, 0]]
    second = sent(
        options, {"low": torch.tensor([[0.375, -0.25], [-0.125, 0.0]]), "high": torch.zeros(1, 1)}, memories=memories
    )
    # with the residual: (0.375, -0.5) -> (0, -0.5), left (0.375, 0); (0.125, 0) -> itself, left nothing
    assert second["low"].tolist() == [[0, -0.5], [0.125, 0]]
    assert memories["residual"]["low"].tolist() == [[0.375, 0], [0, 0]]
    without = sent(options | {"error_feedback": False}, deltas, memories=memories)
    assert without["low"].tolist() == first["low"].tolist()


def test_quantisation_with_error_feedback_rounds_to_the_nearest_and_stays_bounded():
    options, memories = {"compress": "quantise", "bits": 3, "error_feedback": True}, {}
    out = sent(
        options, {"low": torch.tensor([[3.0, 0.75], [-1.5, 0.5]]), "high": torch.tensor([[4.0]])}, memories=memories
    )
    # steps 3/3 = 1 and 1.5/3 = 0.5: 0.75 -> 1, so -0.25 is left
    assert out["low"].tolist() == [[3, 1], [-1.5, 0.5]]
    assert memories["residual"]["low"].tolist() == [[0, -0.25], [0, 0]]
    g, memories = torch_generator(0, "bounded"), {}
    for t in range(60):
        delta = torch.randn(2, 500, generator=g)
        received = {"low": torch.zeros(2, 500), "high": torch.zeros(1, 1)}
        cohort = two_clients(received, {"low": delta, "high": torch.zeros(1, 1)}, memories=memories, t=t)
        build_method("reefl", options | {"bits": 2}).upload(cohort)
    assert memories["residual"]["low"].norm() < 10 * delta.norm()  # unbiased rounding would have grown it without end


def test_clipping_comes_last_and_its_cut_is_not_fed_back():
    options, memories = {"compress": "topk", "topk_fraction": 0.5, "error_feedback": True, "update_norm": 2.5}, {}
    out = sent(
        options, {"low": torch.tensor([[3.0, -2.0], [0.5, 0.0]]), "high": torch.tensor([[-4.0]])}, memories=memories
    )
    # client 7 keeps (3, 0) and -4: norm 5, halved; the residual is (0, -2), not what the clip took
    assert out["low"].tolist() == [[1.5, 0], [0.5, 0]] and out["high"].tolist() == [[-2]]
    assert memories["residual"]["low"].tolist() == [[0, -2], [0, 0]] and memories["residual"]["high"].tolist() == [[0]]


@pytest.mark.parametrize("method", ["reefl", "inclusivefl"])
@pytest.mark.parametrize("options", [
    {"update_norm": 0.5}, {"compress": "quantise", "bits": 4}, {"compress": "topk"},
    {"compress": "quantise", "bits": 4, "error_feedback": True, "update_norm": 0.5},
], ids=lambda o: "-".join(map(str, o.values())))  # fmt: skip
def test_an_upload_does_not_depend_on_the_cohort(tiny, method, options):
    """The same trained tensors, sent by one cohort of all clients or by a cohort each: the same numbers."""
    f = build_federation(tiny.replace(method=method, options=options))
    clients = f.sample_clients(1)
    r = Round(1, tuple(clients), f.setting)

    def upload(clients):
        cohort = Cohort(f, f.model, f.server, r, [m for c in clients for m in f.method.members(c, f.server, r)], {})
        for name, p in cohort.params.items():
            for row, i in enumerate(cohort.rows[name]):
                g = torch_generator(9, name, 1, cohort.clients[i].id)
                p[row] += 0.1 * torch.randn(p.shape[1:], generator=g)
        update = f.method.upload(cohort)
        rows = {}
        for name, p in update.params.items():
            for i, row in zip(update.rows[name], p, strict=True):
                rows[update.clients[i].id, name] = row
        return rows, cohort.new_memories

    together, memories = upload(clients)
    alone = [upload([c]) for c in clients]
    assert len(together) == sum(len(rows) for rows, _ in alone)
    for rows, memory in alone:
        for key, row in rows.items():
            torch.testing.assert_close(row, together[key], rtol=0, atol=1e-12)
        assert all(torch.equal(x, memories[c][k]) for c, m in memory.items() for k, x in m.items())


def train(e):
    """What the server holds of all and of single clients at the end, and what stays with them."""
    memories, mirrors = {}, {}
    *_, last = run_rounds(build_federation(e), ONE, memories=memories, mirrors=mirrors)
    of_clients = {(k, n): x for held in (memories, mirrors) for k, m in held.items() for n, x in m.items()}
    return last.server.params | {n: x for n, x in of_clients.items() if not n[1].startswith("residual")}


@pytest.mark.parametrize("method", [m for m, cls in METHODS.items() if cls.sends_model])
def test_every_method_compresses(tiny, monkeypatch, method):
    """Two rounds: with all bits or entries as without compression, with few another, finite result."""
    sliced = METHODS[method].__module__.startswith("fedlib.methods.sliced")
    mode = "frozen" if sliced and not issubclass(METHODS[method], Ranks) else "lora"
    e = tiny.replace(
        method=method, finetune=mode, finetune_options={}, num_train=96, num_test=20, num_clients=8, clients_per_round=4,
        backbone=few_blocks(monkeypatch, method), **granted(method),
    )  # fmt: skip
    if method == "flexlora":  # of products that are hardly more than rounding, the factors are rounding's
        e = e.replace(lr=0.2)
    plain, fed_back = train(e), build_method(method, {}).one_slice
    atol = 2e-4 if method == "flexlora" else 1e-5  # the server's factors amplify rounding
    if not fed_back:
        with pytest.raises(ValueError, match="error_feedback = True needs clients that send one model"):
            build_method(method, {"compress": "topk", "error_feedback": True})
    for options in (
        {"compress": "quantise", "bits": 32},
        {"compress": "topk", "topk_fraction": 1.0},
        {"update_norm": 1e6},
    ):
        for name, p in train(e.replace(options=options)).items():
            torch.testing.assert_close(p, plain[name], rtol=0, atol=atol)
    coarse = {
        "quantise": {"bits": 4, "error_feedback": fed_back}, "topk": {"topk_fraction": 0.05, "error_feedback": fed_back},
    }  # fmt: skip
    for compress, options in coarse.items():
        params = train(e.replace(options={"compress": compress, **options}))
        assert all(p.isfinite().all() for p in params.values())
        assert max((p - plain[n]).abs().max() for n, p in params.items()) > 5e-5


@pytest.mark.parametrize("method", [m for m, cls in METHODS.items() if not cls.sends_model])
@pytest.mark.parametrize("options", [{"update_norm": 1.0}, {"compress": "topk"}])
def test_a_method_that_sends_no_model_has_nothing_to_compress(method, options):
    with pytest.raises(ValueError, match=f"options of {method}: no model is sent"):
        build_method(method, options)


def test_a_second_model_that_stays_leaves_the_sent_ones_residual_alone(tiny):
    """Ditto's personal models are stacked with those that are sent: of a client's two, one has a residual."""
    options = {"compress": "topk", "topk_fraction": 0.05, "error_feedback": True}
    e = tiny.replace(num_train=200, num_clients=4, clients_per_round=4, rounds=1, options=options, budgets="maximum")
    memories, alone = {}, {}
    (both,) = run_rounds(build_federation(e.replace(method="ditto")), ONE, memories=memories)
    plain = e.replace(method="fedprox", options=options | {"mu": 0.0})
    (one,) = run_rounds(build_federation(plain), ONE, memories=alone)
    for n, p in one.server.params.items():
        torch.testing.assert_close(both.server.params[n], p, rtol=0, atol=1e-5)
    for k, memory in alone.items():
        assert memory and any(x.abs().max() > 0 for x in memory.values())
        for n, x in memory.items():
            torch.testing.assert_close(memories[k][n], x, rtol=0, atol=1e-5)


def test_a_round_hardly_depends_on_the_cohort_size(tiny):
    """Float rounding may move an entry to the neighbouring level (or past the k-th): few do, by one step."""
    e = tiny.replace(method="depthfl", options={"compress": "quantise", "bits": 8, "update_norm": 0.2})
    first = [next(iter(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))) for k in (1, None)]
    a, b = (torch.cat([p.flatten() for p in r.server.params.values()]) for r in first)
    assert ((a - b).abs() > 1e-6).double().mean() < 0.01 and (a - b).abs().max() < 0.01


def test_an_interrupted_run_with_residuals_ends_with_the_same_numbers(tmp_path, monkeypatch):
    e = Experiment(
        method="depthfl", finetune="frozen", pretrained=False, num_train=160, num_test=40, num_clients=6,
        clients_per_round=4, rounds=3, evaluate_every=1, seed=3,
        options={"compress": "topk", "topk_fraction": 0.05, "error_feedback": True, "update_norm": 0.5},
    )  # fmt: skip
    whole = run(e, ONE, tmp_path / "whole", progress=False)
    original = runs_module.run_rounds

    def one_round(*args):
        yield next(original(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(runs_module, "run_rounds", one_round)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    monkeypatch.setattr(runs_module, "run_rounds", original)
    parts = run(e, ONE, tmp_path / "parts", progress=False)
    (a, meta), (b, _) = (read_tensors(r.path / "checkpoint.safetensors") for r in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    client = max(meta["memories"])
    memory = read_tensors(next((parts.path / "clients").glob(f"{client}-*.safetensors")))[0]
    assert {k.split("/")[0] for k in memory} == {"residual", "feddyn_gradient"}


def test_a_run_that_was_stored_with_the_option_called_clip_norm_is_found_and_goes_on(tiny, tmp_path, monkeypatch):
    """Updates are clipped by ``update_norm``, which older runs call as gradients' limit: the same folder and numbers."""
    old, new = ({"compress": "quantise", norm: 0.5} for norm in ("clip_norm", "update_norm"))
    e, stored = (tiny.replace(method="depthfl", options=o, rounds=2, evaluate_every=1) for o in (new, old))
    assert build_method("depthfl", old) == build_method("depthfl", new) and run_path(stored, tmp_path).name == e.slug
    wanted, original = run(e, ONE, tmp_path / "new", progress=False), runs_module.run_rounds

    def one_round(*args):
        yield from itertools.islice(original(*args), 1)
        raise KeyboardInterrupt

    (tmp_path / "old" / stored.slug).mkdir(parents=True)
    monkeypatch.setattr(runs_module, "run_rounds", one_round)
    with pytest.raises(KeyboardInterrupt, match=f"{stored.slug} is stored up to round 1"):
        run(e, ONE, tmp_path / "old", progress=False, checkpoint_seconds=0)
    monkeypatch.setattr(runs_module, "run_rounds", original)
    found = run(e, ONE, tmp_path / "old", progress=False)
    assert (
        found.path.name == stored.slug
        and found.experiment.options == old
        and runs_module.find_run(e, tmp_path / "old") == found
    )
    assert [m["exits"] for m in found.metrics] == [m["exits"] for m in wanted.metrics]
    Own = type("Own", (METHODS["fedavg"],), {"clip_norm": 1.0, "__annotations__": {"clip_norm": float}})
    monkeypatch.setitem(METHODS, "own", dataclass(frozen=True)(Own))
    own = build_method("own", {"clip_norm": 3.0})  # a method of one's own may call what it likes so
    assert (own.clip_norm, own.update_norm) == (3.0, None)


@pytest.mark.parametrize("options, message", [
    ({"update_norm": 0.0}, "options of reefl: update_norm = 0.0 must be above 0"),
    ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0 must be at least 0"),
    ({"noise_multiplier": 1.0, "weighting": "clients"}, "noise_multiplier = 1.0 needs an update_norm"),
    ({"noise_multiplier": 1.0, "update_norm": 1.0}, "needs weighting = 'clients', not 'examples'"),
    ({"dp_delta": 1.0}, "dp_delta = 1.0 must be above 0 and below 1"),
    ({"compress": "quantize"}, "did you mean 'quantise'"),
    ({"bits": 1}, "bits = 1 must be at least 2 and at most 32"),
    ({"bits": 33}, "bits = 33 must be"),
    ({"topk_fraction": 0.0}, "topk_fraction = 0.0 must be above 0"),
    ({"topk_fraction": 1.5}, "topk_fraction = 1.5 must be above 0 and at most 1"),
    ({"dp_delta": 0.1}, "dp_delta = 0.1 has no effect without a noise_multiplier"),
    ({"bits": 4}, "bits = 4 has no effect with compress = 'none'; it needs compress = 'quantise'"),
    ({"topk_fraction": 0.5}, "topk_fraction = 0.5 has no effect with compress = 'none'"),
    ({"error_feedback": True}, "error_feedback = True has no effect with compress = 'none'"),
])  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_method("reefl", options)


def test_options_at_their_defaults_change_no_name_and_no_upload():
    assert Experiment().hash == Experiment(options={}).hash and "options" not in Experiment().identity()
    cohort = two_clients(start(), {n: p + 1 for n, p in start().items()})
    assert build_method("reefl", {}).upload(cohort).params is cohort.params


def test_upload_sizes_by_hand():
    """DepthFL's classifier on a frozen DeiT-S, 100 classes: LN 384 + 384, Linear 38,400 + 100; budgets hold 1 to 4."""
    values = dict(method="depthfl", finetune="frozen", backbone="deit_small_patch16_224.fb_in1k", augment="none")

    def mib(**options):
        return upload_mib(Experiment(**values, options=options), 100)

    bits = {
        "plain": 32 * 39_268,
        "quantise": 6 * 39_268 + 4 * 32,  # a scale a tensor
        # 38 of 384 with 9-bit indices, 3840 of 38,400 with 16, 10 of 100 with 7
        "topk": 2 * 38 * (32 + 9) + 3840 * (32 + 16) + 10 * (32 + 7),
    }
    assert mib() == pytest.approx(2.5 * bits["plain"] / 8 / 2**20)
    assert mib(update_norm=1.0, noise_multiplier=1.0) == mib()
    assert mib(compress="quantise", bits=6) == pytest.approx(2.5 * bits["quantise"] / 8 / 2**20)
    compressed = Experiment(**values, options={"compress": "topk"})
    assert upload_mib(compressed, 100) == pytest.approx(2.5 * bits["topk"] / 8 / 2**20)
    assert [c["upload_mib"] for c in exit_costs(compressed, 100)] == pytest.approx(
        [n * bits["topk"] / 8 / 2**20 for n in (1, 2, 3, 4)]
    )
    with pytest.raises(ValueError, match="convention = 'paper' counts float32, not compress = 'topk'; use 'honest'"):
        upload_mib(compressed, 100, "paper")


def test_the_bits_of_an_upload_are_those_of_its_message():
    """Write a quantised and a top-k message out, count its bits, and read the update back from them."""
    x = torch.randn(1, 300, generator=torch_generator(0, "message"))
    u = torch.rand(1, 300, generator=torch_generator(0, "draws"))
    q, kept = quantise(x, u, 5)[0], top_k(x, kept_entries(300, 0.1))[0]
    scale = q.abs().max()
    levels = (q / scale * 15).round().int().tolist()
    assert all(0 <= level + 15 < 2**5 for level in levels)  # fits in five bits
    torch.testing.assert_close(torch.tensor(levels) * scale / 15, q)
    assert build_method("reefl", {"compress": "quantise", "bits": 5}).upload_bits([300]) == 300 * 5 + 32
    index = kept.nonzero()[:, 0]
    assert len(index) == 30 and int(index.max()) < 2**9
    assert build_method("reefl", {"compress": "topk"}).upload_bits([300]) == 30 * (32 + 9)
