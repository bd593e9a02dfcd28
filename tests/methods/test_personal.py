"""Every personalised baseline: two rounds against a plain loop, value by value; what travels; who answers with what."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.methods import METHODS, build_method
from tests.helpers.plain_personal import (
    BACKBONE,
    EXITS,
    LAST_EXIT,
    ONE,
    experiment,
    kl,
)
from tests.helpers.traffic import round_traffic

PERSONAL = ["local", "fedprox", "fedper", "fedrep", "fedbabu", "fedamp", "pfedgraph", "fedrod", "ditto", "fedpac",
            "fedproto", "cafedistill"]  # fmt: skip


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu", "fedrod", "fedpac"])
def test_local_distillation_is_an_option_of_the_personalised(method):
    """Table 3: 1/m sum_j [CE_j + lambda KL(exit m || exit j)], the teacher without gradient."""
    from fedlib.methods.losses import Batch

    m = build_method(method, {"distill": "last", "kd_weight": 0.7})
    outputs = torch.randn(2, 1, 5, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4, 0]])
    batch = Batch(outputs, labels, torch.full((1, 5), 0.2), torch.ones(2, 1))
    ce = [F.cross_entropy(out[0], labels[0]) for out in outputs]
    by_hand = (sum(ce) + 0.7 * kl(outputs[1, 0], outputs[0, 0])) / 2
    torch.testing.assert_close(m.local_loss(batch)[0], by_hand)
    assert build_method(method, {}).distill == "none"


TRAFFIC = {  # numbers per round and client, once everybody has been sampled: down, up (facts' table)
    "local": (0, 0), "fedavg": (BACKBONE + EXITS, BACKBONE + EXITS), "fedprox": (BACKBONE + EXITS, BACKBONE + EXITS),
    "fedper": (BACKBONE, BACKBONE), "fedrep": (BACKBONE, BACKBONE), "fedbabu": (BACKBONE, BACKBONE),
    "fedamp": (BACKBONE + EXITS, BACKBONE + EXITS),
    "pfedgraph": (2 * (BACKBONE + EXITS), BACKBONE + EXITS),  # the mixed model and c_i
    "fedrod": (BACKBONE + EXITS, BACKBONE + EXITS), "ditto": (BACKBONE + EXITS, BACKBONE + EXITS),
    # prototypes and whether they are known; prototypes, h, V and class counts
    "fedpac": (BACKBONE + EXITS + 10 * 6 + 10, BACKBONE + EXITS + 2 * 10 * 6 + 1 + 10),
    "fedproto": (10 * 6 + 10, 10 * 6 + 10),  # prototypes and whether they are known; prototypes and class counts
    "cafedistill": (BACKBONE + LAST_EXIT + 2, BACKBONE + LAST_EXIT),  # S_i: a number an exit
}  # fmt: skip


@pytest.mark.parametrize("method", TRAFFIC)
def test_traffic_per_round_is_the_tables(method):
    e = experiment(method, options={"exits": "all"} if method == "fedavg" else {})
    assert round_traffic(e) == TRAFFIC[method]


@pytest.mark.parametrize("method", PERSONAL)
def test_a_cohort_of_three_is_three_cohorts_of_one(method):
    ends = []
    for size in (1, 4):
        memories, mirrors = {}, {}
        f = build_federation(experiment(method, rounds=2))
        *_, r = run_rounds(f, Execution(workers=1, cohort_size=size), memories=memories, mirrors=mirrors)
        ends.append((r, memories, mirrors))
    (a, *kept), (b, *others) = ends
    for name, p in a.server.params.items():
        torch.testing.assert_close(p, b.server.params[name], rtol=0, atol=1e-5)
    for here, there in zip(kept, others, strict=True):
        assert here.keys() == there.keys()
        for k in here:
            for name, p in here[k].items():
                torch.testing.assert_close(p, there[k][name], rtol=0, atol=1e-4)
    assert a.metrics["personal"]["exits"] == pytest.approx(b.metrics["personal"]["exits"], abs=2.0)


@pytest.mark.parametrize("method", PERSONAL)
def test_with_one_exit_it_is_the_published_single_exit_method(method):
    f = build_federation(experiment(method, num_exits=1, rounds=2, num_clients=4, clients_per_round=2))
    assert f.setting.exit_units == (1,)
    *_, r = run_rounds(f, ONE)
    assert len(r.metrics["personal"]["exits"]) == 1 and not r.diverged and "leaving" not in r.metrics["personal"]


@pytest.mark.parametrize("method", PERSONAL)
def test_clients_never_sampled_of_one_example_and_without_a_class(method):
    """12 clients of 1 to 20 examples, 3 sampled once: everybody with test examples answers, with finite numbers."""
    e = experiment(
        method, num_clients=12, clients_per_round=3, rounds=1, partition="class_dirichlet", dirichlet_alpha=0.2,
        test_split="contiguous", num_test=120, batch_size=4,
    )  # fmt: skip
    f = build_federation(e)
    examples = f.data.num_examples
    assert examples.min() <= 2 and len(f.candidates()) >= 10
    trained = {c.id: set(f.data.labels[torch.as_tensor(f.data.client(c.id))].tolist()) for c in f.clients(range(12))}
    tested = {k: set(f.data.test_labels[torch.as_tensor(f.data.client_test(k))].tolist()) for k in range(12)}
    assert any(tested[k] - trained[k] for k in range(12))  # asked for a class it never saw
    small = [k for k in f.candidates() if examples[k] <= 2]
    for ids in (None, small[:3]):
        g = f if ids is None else with_sampled(f, ids)
        *_, r = run_rounds(g, ONE)
        assert not r.diverged and r.metrics["personal"]["clients"] == 12
        assert np.isfinite([*r.metrics["personal"]["by_client"].values()]).all()


def with_sampled(f, ids):
    """``f`` whose rounds sample the clients ``ids``."""

    class Fixed(type(f)):
        def sample_clients(self, t):
            return self.clients(sorted(ids))

    return Fixed(**{k: getattr(f, k) for k in f.__dataclass_fields__})


@pytest.mark.parametrize("method", ["fedamp", "pfedgraph", "fedpac", "fedproto", "cafedistill"])
def test_noise_is_refused_where_the_server_looks_at_single_clients(method):
    options = {"update_norm": 1.0, "noise_multiplier": 1.0, "weighting": "clients"}
    with pytest.raises(ValueError, match=f"options of {method}: noise_multiplier protects sums"):
        build_method(method, options)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedrod", "ditto", "fedproto", "cafedistill"])
def test_who_keeps_something_at_its_clients_says_so(method):
    assert build_method(method, {}).remembers and not build_method("fedprox", {}).remembers


@pytest.mark.parametrize("method", ["fedrod", "fedpac", "fedproto"])
def test_labels_must_be_classes(method):
    with pytest.raises(ValueError, match="is for classes, and the labels of dataset = 'stsb' are none"):
        build_federation(experiment(method, dataset="stsb", backbone="bert_micro", num_exits=3))


def test_compressed_models_mix_in_single_precision():
    e = experiment("fedamp", options={"compress": "quantise"}, rounds=2)
    mirrors = {}
    *_, r = run_rounds(build_federation(e), ONE, mirrors=mirrors)
    assert {x.dtype for m in mirrors.values() for x in m.values()} == {torch.float32} and not r.diverged


def test_all_personalised_methods_are_listed():
    from fedlib.methods import personal

    listed = {name for name, cls in METHODS.items() if cls.__module__.startswith(personal.__name__)}
    assert listed | {"fedproto"} == set(PERSONAL)  # which is a rival, of the lab


@pytest.mark.parametrize("method", PERSONAL)
def test_training_that_overflows_is_recorded_and_does_not_stop_the_program(method, tmp_path):
    found = run(experiment(method, lr=1e12, rounds=3), ONE, tmp_path, progress=False)
    assert found.summary["status"] == "diverged"
