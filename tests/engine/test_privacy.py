"""Differential privacy: denominators and noise by hand, what may not show, epsilon against independent formulas."""

import itertools
import math
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.clients import Client
from fedlib.core.slices import STEM, ParamInfo, Slice
from fedlib.core.storage import read_tensors
from fedlib.engine import privacy as privacy_module
from fedlib.engine.executors import plan_round, train_cohort
from fedlib.engine.privacy import epsilon, privacy_spent, privatise
from fedlib.methods import METHODS, Arrived, Method, Round, Server, Setting, build_method
from fedlib.methods.sums import MaskedMean, Update
from fedlib.methods.values import Member
from fedlib.models.vit import ViTSpec
from fedlib_lab.runs import store as runs_module
from tests.helpers.server_rounds import merged

ONE = Execution(workers=1)
NOBODY = MaskedMean({})
DP = {"update_norm": 0.5, "noise_multiplier": 1.0, "weighting": "clients"}


def accountant():
    """dp-accounting, or the test skips."""
    return pytest.importorskip(
        "dp_accounting", reason="dp-accounting is not installed: pip install 'fedlib-kit[privacy]'"
    )


def federation(info, budgets, sampled, noise, method="reefl", **options):
    """The parts of a federation that the noise needs; client i has budget ``budgets[i]``."""
    exits = tuple(sorted({i.unit for i in info.values()} - {STEM}))
    budgets, experiment = np.array(budgets), SimpleNamespace(seed=4, method=method)
    return SimpleNamespace(
        method=build_method(method, {"update_norm": 2.0, "noise_multiplier": noise, "weighting": "clients"} | options),
        setting=Setting(ViTSpec(depth=len(exits)), exits, info, len(budgets), rounds=10), experiment=experiment,
        budgets=budgets, data=SimpleNamespace(num_examples=np.full(len(budgets), 9)), sample_size=sampled,
        candidates=lambda: np.arange(len(budgets)),
    )  # fmt: skip


def two_blocks(low, high):
    return {"low": ParamInfo((None,), "backbone", 0, (low,)), "high": ParamInfo((None,), "backbone", 1, (high,))}


def uploads(f, server, low, high):
    """Client 1 (budget 1) changes both parameters, client 0 (budget 0) only ``low``; changes as rows."""
    clients = Client(1, 1, 9), Client(0, 0, 9)
    slices = tuple(f.method.slice_for(c, server, Round(1, clients, f.setting)) for c in clients)
    params = {"low": server.params["low"] + torch.tensor(low), "high": server.params["high"] + torch.tensor(high)}
    return f.method.summarise(Update(clients, slices, params, {"low": range(2), "high": range(1)}), f.setting)


def test_the_mean_divides_by_the_holders_to_be_expected():
    info = two_blocks(2, 1)
    f = federation(info, [0, 1, 0, 1, 0, 1, 0, 0], sampled=4, noise=1e-12)
    server = Server(0, {"low": torch.tensor([1.0, -1.0]), "high": torch.tensor([2.0])}, {})
    mean = privatise(f, server, uploads(f, server, [[0.5, 0.0], [-0.25, 1.0]], [[-1.0]]), 1)
    new = f.method.aggregate(server, Arrived(mean), Round(1, (), f.setting)).params
    # all 4 of 4 sampled hold low: (1, -1) + (0.25, 1) / 4; 3 of the 8 clients hold high: 4 * 3/8 = 1.5: 2 - 1 / 1.5
    torch.testing.assert_close(new["low"], torch.tensor([1.0625, -0.75]))
    torch.testing.assert_close(new["high"], torch.tensor([2 - 2 / 3]))
    assert mean.weight["low"].item() == mean.count["low"].item() == 4 and mean.weight["high"].item() == 1.5


def test_what_came_shows_only_through_the_noised_total():
    """Weights, counts and names are those of the budgets, whoever was sampled, even nobody with the deep part."""
    info = two_blocks(2, 1)
    f = federation(info, [0, 1] * 4, sampled=2, noise=1.0)
    server = Server(0, {"low": torch.tensor([1.0, -1.0]), "high": torch.tensor([2.0])}, {})
    some, none = (privatise(f, server, s, 3) for s in (uploads(f, server, [[0.5, 0.0], [0.0, 1.0]], [[-1.0]]), NOBODY))
    for a, b in ((some.weight, none.weight), (some.count, none.count)):
        assert a.keys() == b.keys() == info.keys() and all(torch.equal(a[n], b[n]) for n in a)
    torch.testing.assert_close(some.total["low"] - none.total["low"], torch.tensor([0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(some.total["high"] - none.total["high"], torch.tensor([-1.0], dtype=torch.float64))
    assert (none.total["high"] - none.weight["high"] * 2.0).abs() > 1e-3  # noise although nobody came with it


def test_the_noise_has_the_stated_deviation_and_its_own_stream():
    size = 40_000
    f = federation(two_blocks(size, size), [0, 1, 0, 1], sampled=2, noise=1.5)
    server = Server(0, {n: torch.zeros(size) for n in ("low", "high")}, {})
    first, again, later = (privatise(f, server, NOBODY, t) for t in (7, 7, 8))
    new = f.method.aggregate(server, Arrived(first), Round(7, (), f.setting)).params
    # z C = 3 on the sums; expected holders 2 and 1: SD 1.5 and 3 on the means. SD of an SD over 40,000: 0.35 %
    assert new["low"].std().item() == pytest.approx(1.5, rel=0.02) and abs(new["low"].mean()) < 4 * 1.5 / 200
    assert new["high"].std().item() == pytest.approx(3.0, rel=0.02)
    assert torch.equal(first.total["low"], again.total["low"])
    for other in (later.total["low"], first.total["high"]):  # uncorrelated between rounds and tensors
        assert abs(np.corrcoef(first.total["low"], other)[0, 1]) < 4 / 200


def test_width_slices_are_expected_per_entry():
    info = {"low": ParamInfo(("residual",), "backbone", 0, (8,))}
    f = federation(info, [0, 0, 0, 1], sampled=2, noise=1e-12)
    cut = Slice.prefix(1, (0,), index={"residual": range(2)})

    @dataclass(frozen=True)
    class Cut(Method):
        def slice_for(self, client, server, r):
            return cut if client.budget == 0 else Slice.prefix(1, (0,))

    f.method = Cut(noise_multiplier=1e-12, update_norm=1.0, weighting="clients")
    weight = privatise(f, Server(0, {"low": torch.ones(8)}, {}), NOBODY, 1).weight["low"]
    assert weight.tolist() == [2, 2] + [0.5] * 6  # 2 * 4/4 and 2 * 1/4


def test_inclusivefl_expects_clients_per_exit():
    info = {f"backbone.blocks.{b}.w": ParamInfo((None,), "backbone", b, (1,)) for b in range(2)}
    f = federation(info, [0, 0, 0, 1], sampled=2, noise=1e-12, method="inclusivefl", aggregation="mean")
    server = f.method.init_server({n: torch.zeros(1) for n in info}, f.setting)
    mean = privatise(f, server, NOBODY, 1)
    assert {n: c.item() for n, c in mean.count.items()} == {
        "0/exit0/backbone.blocks.0.w": 1.5, **{f"1/{n}": 0.5 for n in info},
    }  # fmt: skip
    assert mean.total.keys() == mean.count.keys()


@pytest.mark.parametrize("method", ["reefl", "inclusivefl", "scalefl_vit"])
def test_replacing_a_client_moves_the_sums_by_at_most_two_clips(tiny, method):
    """The sensitivity that the accountant is told, measured: other labels for one sampled client, the same noise."""
    options = {"update_norm": 0.05, "noise_multiplier": 1.0, "weighting": "clients"}
    e = tiny.replace(
        method=method, options=options, num_train=200, clients_per_round=4, finetune="frozen", finetune_options={}
    )
    totals = []
    for swap in (False, True):
        f = build_federation(e)
        clients = f.sample_clients(1)
        if swap:
            rows = f.data.client(clients[-1].id)
            labels = f.data.labels.clone()  # the federation's own are shared by all of this process
            labels[rows] = (labels[rows] + 1) % 10
            f = replace(f, data=replace(f.data, labels=labels))
        r = Round(1, tuple(clients), f.setting)
        cohorts = plan_round(f, f.server, r, 1, None)
        parts = [train_cohort(f, f.model, f.server, r, cohort, {}).mean for cohort in cohorts]
        out = privatise(f, f.server, merged(parts), 1)
        totals.append(torch.cat([v.flatten() for _, v in sorted(out.total.items())]))
    moved = (totals[0] - totals[1]).norm().item()
    assert 0.05 < moved <= 2 * 0.05 * (1 + 1e-6)  # more than one clip: replacement is the right neighbour


SUMS = [n for n, cls in METHODS.items() if cls.one_slice and not (cls.needs_models or cls.needs_extras)]


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SUMS)))
def test_a_method_that_looks_at_single_clients_or_sends_several_models_is_refused_noise(method):
    with pytest.raises(ValueError, match="noise_multiplier"):
        build_method(method, DP | {"weighting": "clients"})


@pytest.mark.parametrize(
    "options, told",
    [
        ({}, "noise_multiplier needs masked = False: which"),
        ({"masked": False, "averaged_from": 1}, "needs clients that"),
    ],
)
def test_heterofl_is_refused_noise_where_what_a_client_sends_is_not_public(options, told):
    """Its classifier stood still: of the rows of classes nobody was expected to send any."""
    with pytest.raises(ValueError, match=told):
        build_method("heterofl", DP | {"weighting": "clients"} | options)


def test_labels_do_not_say_who_is_expected_to_send_what(tiny, own):
    """What no client has was counted as nobody's."""
    classes = lambda r, client: tuple(np.flatnonzero(r.setting.label_counts(client.id)).tolist())  # noqa: E731
    own.members = lambda self, client, server, r: [
        Member(client, r.setting.full(), upload=r.setting.full().only(classes=classes(r, client)))
    ]
    e = tiny.replace(method="own", options=DP, finetune="frozen", finetune_options={}, num_train=200)
    with pytest.raises(ValueError, match="not known here"):
        next(run_rounds(build_federation(e), ONE))


@pytest.mark.parametrize("method", [m for m in SUMS if m != "local"])
def test_every_method_runs_with_noise(tiny, method):
    """Two rounds, in one cohort or one by one: the same numbers, finite, and not those without noise."""
    mode = "lora" if method == "fedbabu" else "frozen"
    options = DP | ({"masked": False} if method == "heterofl" else {})
    e = tiny.replace(method=method, options=options, rounds=3, finetune=mode, finetune_options={}, num_train=200)

    def train(e, **execution):
        return list(itertools.islice(run_rounds(build_federation(e), Execution(workers=1, **execution)), 2))[-1]

    together, alone = train(e), train(e, cohort_size=1)
    silent = train(e.replace(options=options | {"noise_multiplier": 0.0}))
    for name, p in together.server.params.items():
        assert p.isfinite().all()
        torch.testing.assert_close(alone.server.params[name], p, rtol=0, atol=2e-5)
    assert max((p - silent.server.params[n]).abs().max() for n, p in together.server.params.items()) > 1e-3


def gaussian_epsilon(sigma, delta):
    """Exact epsilon of one Gaussian mechanism with SD sigma and sensitivity 1 (Balle & Wang 2018), by bisection."""
    phi = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    low, high = 0.0, 1e3
    for _ in range(100):
        e = (low + high) / 2
        a, b = (
            torch.tensor(x, dtype=torch.float64) for x in (1 / (2 * sigma) - e * sigma, -1 / (2 * sigma) - e * sigma)
        )
        over = phi.cdf(a) - math.exp(min(e, 700)) * phi.cdf(b) > delta
        low, high = (e, high) if over else (low, e)
    return high


@pytest.mark.parametrize("z, rounds", [(2.0, 1), (4.0, 10), (10.0, 50), (20.0, 20)])
def test_epsilon_without_sampling_is_the_analytic_one(z, rounds):
    """T sums, each Gaussian with SD z C and sensitivity 2 C: Renyi divergence alpha T / (2 (z/2)^2)."""
    accountant()
    delta = 1e-3
    alphas = np.linspace(1.0001, 400, 2_000_000)
    bound = alphas * rounds / (2 * (z / 2) ** 2) + np.log1p(-1 / alphas) - np.log(delta * alphas) / (alphas - 1)
    found = epsilon(z, 100, 100, rounds, delta, True)
    assert bound.min() - 1e-9 <= found <= bound.min() * 1.01 + 1e-3  # the library's orders are a grid
    exact = gaussian_epsilon(z / 2 / math.sqrt(rounds), delta)  # T of them are one with SD / sqrt(T)
    assert exact <= found <= 1.25 * exact + 0.05


def test_epsilon_with_sampling_is_above_the_truth_and_below_no_sampling():
    """One round, 10 of 100, z = 4: client j has +C or -C, the others 0, is the hardest case in one dimension."""
    accountant()
    q, z, delta = 0.1, 4.0, 1e-3
    found = epsilon(z, 100, 10, 1, delta, True)
    x = np.linspace(-40, 40, 400_001)

    def density(mean):
        return np.exp(-((x - mean) ** 2) / (2 * z**2)) / (z * math.sqrt(2 * math.pi))

    p, r = (q * density(s) + (1 - q) * density(0.0) for s in (1.0, -1.0))
    spent = np.maximum(p - math.exp(found) * r, 0).sum() * (x[1] - x[0])
    assert spent <= delta
    known = epsilon(z, 100, 10, 1, delta, False)
    assert 0 < found < known == epsilon(z, 100, 100, 1, delta, True)
    assert found < epsilon(z, 100, 10, 2, delta, True) and epsilon(z, 100, 10, 0, delta, True) == 0


def test_epsilon_by_hand_at_order_two():
    """Theorem 9 of Wang et al. 2019 at alpha = 2: log(1 + q^2 min(4 (exp(r) - 1), 2 exp(r))), r = 2 / (2 (z/2)^2)."""
    accountant()
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    q, z, rounds, delta = 0.05, 6.0, 30, 1e-3
    r = 2 / (2 * (z / 2) ** 2)  # 1/9, so 4 (exp(r) - 1) = 0.47 is the smaller
    hand = rounds * math.log1p(q**2 * min(4 * math.expm1(r), 2 * math.exp(r)))
    events = RdpAccountant(orders=[2], neighboring_relation=NeighboringRelation.REPLACE_ONE)
    events.compose(SampledWithoutReplacementDpEvent(1000, 50, GaussianDpEvent(z / 2)), rounds)
    assert events.rdp[0] == pytest.approx(hand, rel=1e-6)
    # epsilon takes the best order, so at most that of order 2: rdp + log(1/2) - log(2 delta)
    assert epsilon(z, 1000, 50, rounds, delta, True) <= hand + math.log(0.5) - math.log(2 * delta)


def test_memory_gives_up_amplification(tiny):
    accountant()
    values = tiny.replace(finetune="frozen", finetune_options={}, rounds=2)
    spent = {}
    for name, options in {"feddyn": {}, "mean": {"aggregation": "mean"}}.items():
        f = build_federation(values.replace(method="depthfl", options=DP | options))
        spent[name] = privacy_spent(f, 2)
    clients = len(f.candidates())
    assert spent["mean"]["delta"] == 1 / (10 * clients) and spent["mean"]["epsilon"] < spent["feddyn"]["epsilon"]
    assert spent["feddyn"]["epsilon"] == round(epsilon(1.0, clients, clients, 2, 1 / (10 * clients), True), 4)
    f = build_federation(values.replace(method="depthfl", options=DP | {"aggregation": "mean", "dp_delta": 1e-4}))
    assert privacy_spent(f, 2)["delta"] == 1e-4
    assert privacy_spent(build_federation(values), 2) == {}


def test_statistics_that_stay_with_clients_are_a_memory(tiny):
    """The first round ended in the sentence that the kit's class must say that its clients keep memory."""
    accountant()
    e = tiny.replace(method="fedavg", options=DP, backbone="resnet8", finetune="full", finetune_options={}, num_exits=1,
                     num_train=60, num_clients=6, clients_per_round=2, rounds=1)  # fmt: skip
    spent = {}
    for policy in ("batch", "local"):
        *_, last = run_rounds(build_federation(e.replace(batch_norm=policy)), ONE)
        spent[policy] = last.metrics["epsilon"]
    assert spent["batch"] < spent["local"] == round(epsilon(1.0, 6, 6, 1, 1 / 60, True), 4)


def test_methods_that_would_leak_are_refused(tiny):
    @dataclass(frozen=True)
    class Remembering(Method):
        def local_update(self, cohort):
            cohort.train(self.local_loss)
            cohort.remember("own", cohort.params)

    @dataclass(frozen=True)
    class Weighted(Method):
        def summarise(self, update, setting):
            mean = MaskedMean(setting.infos)
            mean.add(update, update.weights("examples"))
            return mean

    f = build_federation(tiny.replace(options=DP, rounds=3, finetune="frozen", finetune_options={}))
    for cls, message in ((Remembering, "its property remembers must be True"), (Weighted, "clients of weight 1")):
        own = replace(f, method=cls(**DP), model=build_federation(f.experiment).model)
        with pytest.raises(ValueError, match=message):
            next(run_rounds(own, ONE))


def test_noise_without_an_accountant_is_refused_before_any_compute(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy_module.epsilon.cache_clear()
    e = small(DP)
    with pytest.raises(ImportError, match=r"pip install 'fedlib-kit\[privacy\]'"):
        run(e, ONE, tmp_path)
    assert not list(tmp_path.iterdir())


def small(options):
    return Experiment(
        method="reefl", finetune="frozen", pretrained=False, num_train=160, num_test=40, num_clients=8,
        clients_per_round=4, rounds=3, evaluate_every=1, seed=3, options=options,
    )  # fmt: skip


def test_a_private_run_records_epsilon_and_resumes(tmp_path, monkeypatch):
    accountant()
    e = small(DP | {"compress": "quantise"})
    whole = run(e, ONE, tmp_path / "whole", progress=False)
    spent = [m["epsilon"] for m in whole.metrics]
    assert spent == sorted(spent) and spent[0] > 0 and whole.summary["epsilon"] == spent[-1]
    clients = len(build_federation(e).candidates())
    assert whole.summary["delta"] == 1 / (10 * clients)
    assert spent == [round(epsilon(1.0, clients, 4, t, 1 / (10 * clients), True), 4) for t in (1, 2, 3)]
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
    a, b = (read_tensors(r.path / "checkpoint.safetensors")[0] for r in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert parts.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
