"""FedProto: its distance and prototypes by hand, two rounds against a plain loop, who answers with what."""

import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.slices import Slice
from fedlib.engine.serving import client_outputs
from fedlib.methods import Arrived, Round, Server, build_method
from fedlib_lab.rivals.fedproto import nearest
from fedlib_lab.runs.costs import exit_costs
from tests.helpers.plain_personal import LAST, ONE, World, close, experiment, features, images_of, two_rounds


def feature(p, x):
    """What the last exit, here the only one, reads: (B, 6)."""
    return features(p, x)[1].flatten(1)


def world(**changes):
    w = World("fedproto", num_exits=1, **changes)
    w.last = [n.replace("exits.1", "exits.0") for n in LAST]
    return w


def cross_entropy(w, p, x, y):
    return F.cross_entropy(F.linear(feature(p, x), p[w.last[0]].flatten(1), p[w.last[1]]), y)


def class_means(f, y):
    """(10, d), zero where there is none, and counts (10,), label by label."""
    mean = torch.stack([f[y == c].mean(0) if (y == c).any() else torch.zeros(f.shape[1]) for c in range(10)])
    return mean, torch.bincount(y, minlength=10).float()


@pytest.mark.parametrize(
    "options",
    [{}, {"distance": "example", "weighting": "clients", "collected": "training", "prototype_weight": 0.5}],
    ids=["paper", "release"],
)
def test_two_rounds_equal_a_plain_loop(options):
    w = world(options=options, partition="pathological", classes_per_client=3)
    own, mean, known = [w.initial] * 3, None, None
    for t in (1, 2):
        told = []
        for k in w.clients:
            read = []

            def loss(p, x, y, read=read, mean=mean, known=known):
                f, ce = feature(p, x), cross_entropy(w, p, x, y)
                read.append((f.detach(), y))
                if mean is None:
                    return ce
                if options:  # the mean over all values of the batch, of which those without a prototype are zero
                    return ce + 0.5 * sum((f[i] - mean[c]).square().mean() * known[c] for i, c in enumerate(y)) / len(y)
                return ce + sum((f[y == c].mean(0) - mean[c]).square().mean() for c in set(y.tolist()) if known[c])

            own[k] = w.train(own[k], k, t, loss)
            if options:
                f, y = (torch.cat(x) for x in zip(*read, strict=True))
            else:
                f, y = feature(own[k], w.examples(k)[0]), w.examples(k)[1]
            told.append((class_means(f, y)[0], w.counts(k).float()))
        means, counts = (torch.stack(x) for x in zip(*told, strict=True))
        weights = (counts > 0).float() if options else counts
        new, now = (weights[..., None] * means).sum(0) / weights.sum(0).clamp(min=1)[:, None], weights.sum(0) > 0
        mean = new if mean is None else torch.where(now[:, None], new, mean)
        known = now if known is None else known | now
    server, memories, _ = two_rounds(w)
    close(server.memory, {"prototypes/mean": mean})
    assert torch.equal(server.memory["prototypes/known"], known) and not known.all()
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items()})
        (_, out, labels, _) = next(client_outputs(w.f, server, memories, [k]))
        f = feature(own[k], images_of(w, k))
        squares = (f[:, None] - mean).square().mean(-1).masked_fill(~known, torch.inf)  # (B, 10)
        assert torch.equal(out[0, 0].argmax(-1), squares.argmin(-1))
        close({"out": out[0, 0][:, known]}, {"out": f.square().mean(1, keepdim=True) - squares[:, known]})
    assert all(torch.equal(p, w.initial[n]) for n, p in server.params.items())  # no model is shared


def test_prototypes_by_hand():
    """Class 0: (2, 1) of two examples and (4, 3) of one: (8/3, 5/3) by examples, (3, 2) by clients; class 1 stays."""
    told = {
        7: {"prototypes/mean": torch.tensor([[2.0, 1.0], [0.0, 0.0]]), "prototypes/counts": torch.tensor([2.0, 0.0])},
        9: {"prototypes/mean": torch.tensor([[4.0, 3.0], [0.0, 0.0]]), "prototypes/counts": torch.tensor([1.0, 0.0])},
    }
    old = {"prototypes/mean": torch.tensor([[9.0, 9.0], [5.0, 5.0]]), "prototypes/known": torch.tensor([True, True])}
    f = build_federation(experiment("fedproto", num_exits=1))
    for weighting, want in (("examples", [8 / 3, 5 / 3]), ("clients", [3.0, 2.0])):
        method = build_method("fedproto", {"weighting": weighting})
        for memory, second in (({}, [0.0, 0.0]), (old, [5.0, 5.0])):
            server = method.aggregate(Server(1, {}, memory), Arrived({}, told), Round(2, (), f.setting))
            torch.testing.assert_close(server.memory["prototypes/mean"], torch.tensor([want, second]))
            assert server.memory["prototypes/known"].tolist() == [True, bool(memory)]


def test_the_nearest_prototype_by_hand():
    """x = (1, 1), prototypes (3, 2) and (0, 0): mean squares 2.5 and 1, the second wins; an unknown third never does."""
    mean = torch.tensor([[3.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    layer = nearest(mean, torch.tensor([True, True, False]), (3, 2))
    out = F.linear(torch.ones(1, 2), layer["head.exits.0.linear.weight"], layer["head.exits.0.linear.bias"])
    torch.testing.assert_close(out[0, :2], torch.tensor([1 - 2.5, 1 - 1.0]))
    assert out.argmax() == 1 and out.isfinite().all()


@pytest.mark.parametrize("answer", ["own", "classifier"])
def test_other_answers(answer):
    w = world(options={"answer": answer})
    server, memories, _ = two_rounds(w)
    (_, out, *_) = next(client_outputs(w.f, server, memories, [0]))
    own = {n.removeprefix("model/"): x for n, x in memories[0].items()}
    f = feature(own, images_of(w, 0))
    if answer == "classifier":
        close({"out": out[0, 0]}, {"out": F.linear(f, own[w.last[0]].flatten(1), own[w.last[1]])})
    else:
        absent = w.counts(0) == 0
        assert absent.any() and (out[0, 0][:, absent] < -1e29).all() and (out[0, 0][:, ~absent] > -1e29).all()


def test_narrow_clients_keep_the_width_of_their_features():
    """Half of a convnet's four and six channels: the first layer's; the last one's are the features."""
    w = world(options={"rates": [0.5, 1.0]}, budgets="uniform")
    parts = [w.f.method.slice_for(c, w.f.server, Round(1, (), w.f.setting)) for c in w.f.clients([0, 1])]
    assert [len(i) for i in parts[0].index.values()] == [2] and parts[1] == Slice.prefix(2, (0,))
    ends = [list(run_rounds(w.f, Execution(workers=1, cohort_size=k))) for k in (1, 3)]
    assert ends[0][-1].server.memory["prototypes/mean"].shape == (10, 6)
    close(ends[0][-1].server.memory, {n: x for n, x in ends[1][-1].server.memory.items() if "mean" in n})


def test_a_run_goes_on_where_it_stopped():
    w, memories = world(), {}
    rounds = run_rounds(w.f, ONE, memories=memories)
    first = next(rounds)
    kept = {k: dict(m) for k, m in memories.items()}
    *_, whole = rounds
    *_, resumed = run_rounds(w.f, ONE, first.server, kept)
    assert all(torch.equal(x, resumed.server.memory[n]) for n, x in whole.server.memory.items())
    assert whole.metrics["personal"] == resumed.metrics["personal"]


def test_prototypes_are_all_that_travels():
    """Ten classes of six numbers and a count each, both ways: 70 float32."""
    (row,) = exit_costs(experiment("fedproto", num_exits=1), 10)
    assert row["upload_mib"] == row["download_mib"] == 4 * 70 / 2**20
    (whole,) = exit_costs(experiment("fedavg"), 10)
    same = "parameters", "macs", "training_memory_mib"
    assert [row[k] for k in same] == [whole[k] for k in same]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="fedproto: test_mask = True is of a classifier; allowed: False, or"):
        build_federation(experiment("fedproto", num_exits=1, test_mask=True))
    narrow = dict(num_exits=1, options={"rates": [0.5, 1.0]})
    with pytest.raises(ValueError, match="fedproto: backbone = 'vim_micro' cannot be cut in width"):
        build_federation(experiment("fedproto", backbone="vim_micro", **narrow))
    with pytest.raises(ValueError, match=r"fedproto: rates = \[0.5, 1.0\]: backbone = 'msdnet.*' concatenates its"):
        build_federation(experiment("fedproto", backbone="msdnet24", **narrow))
    with pytest.raises(ValueError, match=r"fedproto: exit_blocks = \[0, 1\]: its network has one exit; allowed: one"):
        build_federation(experiment("fedproto", exit_blocks=(0, 1)))
    with pytest.raises(ValueError, match="'nearest'"):
        build_method("fedproto", {"answer": "nearest"})
