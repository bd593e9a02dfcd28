"""The Flower executor without Flower: what travels to a SuperNode and back, and answers that nobody should believe."""

import json
import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.slices import Slice
from fedlib.methods import METHODS, Round
from fedlib.methods.sums import MaskedMean
from fedlib_lab.executors import flower
from fedlib_lab.executors.messages import deserialise, serialise
from tests.helpers.stored import assert_same_rounds, small

TWO = Execution(workers=2, executor="threads")


class Loopback:
    """A SuperLink whose two SuperNodes answer at once, in this process."""

    def __init__(self, *_):
        self.grid, self.online, self.answers, self.sent, self.asked = self, [1, 2], {}, [], []
        self.reply = lambda node, data: flower.train_message(data)

    def get_node_ids(self):
        return self.online

    def send(self, node, data, ttl):
        self.sent.append(data)
        self.asked.append(node)
        self.answers[name := str(len(self.sent))] = self.reply(node, data)
        return name

    def pull_messages(self, names):
        return [r for n in names if (r := self._message(n, self.answers.pop(n, None))) is not None]

    def _message(self, name, data):
        if data is None:  # lost
            return None
        content = {"cohort": {"data": SimpleNamespace(data=data)}}
        return SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=name), content=content, has_error=lambda: False
        )

    def close(self):
        pass


@pytest.fixture
def link(monkeypatch):
    made = Loopback()
    monkeypatch.setattr(flower, "Link", lambda *_: made)
    monkeypatch.setattr(flower.time, "sleep", lambda _: None)
    return made


@pytest.mark.parametrize(
    "method, finetune",
    [
        ("reefl", "frozen"), ("depthfl", "lora"), ("scalefl_vit", "full"), ("splitmix", "full"), ("raffm", "full"),
        ("fedrolex", "full"), ("flora", "lora"), ("fedamp", "frozen"), ("ditto", "frozen"), ("fedpac", "frozen"),
    ],
)  # fmt: skip
def test_supernodes_give_the_numbers_of_threads(method, finetune, link):
    exits = {"splitmix": {"num_exits": 1}, "fedrolex": {"num_exits": 1}, "raffm": {"num_exits": 1}}.get(method, {})
    f = build_federation(small(method, finetune=finetune, finetune_options={}, rounds=2, **exits))
    there = list(run_rounds(f, Execution(workers=2, executor="flower")))
    assert_same_rounds(list(run_rounds(f, TWO)), there)
    assert set(link.asked) == {1, 2}


def test_a_clients_slice_travels_and_no_more(link):
    """One client a cohort, budgets 0 and 3: the whole net of 12 blocks is sent to nobody but who holds it."""
    f = build_federation(
        small(
            "depthfl",
            finetune="full",
            finetune_options={},
            rounds=1,
            num_clients=2,
            clients_per_round=2,
            budgets=[0, 3],
        )
    )
    list(run_rounds(f, Execution(workers=2, executor="flower", cohort_size=1)))
    held = {}
    for data in link.sent:
        *_, members, got, _, _ = deserialise(data, flower.KINDS)
        held[members[0].client.budget] = sum(x.nbytes for *_, x in got)
        assert len(data) < held[members[0].client.budget] + 40_000

    def mine(part):
        return sum(p.nbytes for n, p in f.server.params.items() if part.holds(f.setting.infos[n]))

    r = Round(1, (), f.setting)
    assert held == {c.budget: mine(f.method.slice_for(c, f.server, r)) for c in f.clients([0, 1])}
    assert held[0] < 0.4 * held[3]


def test_a_cohort_of_a_node_that_lies_fails_or_is_late_is_trained_by_the_other(link):
    f = build_federation(small("reefl", finetune="frozen", rounds=1))
    lies = iter([b"", pickle.dumps(print), serialise(("trained", 1)), None])

    def reply(node, data):
        return next(lies) if node == 1 and len(link.sent) < 5 else flower.train_message(data)

    link.reply = reply
    there = list(run_rounds(f, Execution(workers=2, executor="flower", patience_seconds=0.5)))
    assert_same_rounds(list(run_rounds(f, TWO)), there)
    link.reply = lambda node, data: b"no"
    with pytest.raises(
        RuntimeError, match=r"cohort of clients .* lost its SuperNode 4 times in round 1 .*these 2 bytes"
    ):
        list(run_rounds(f, Execution(workers=2, executor="flower")))
    link.reply = lambda node, data: None
    with pytest.raises(RuntimeError, match="took longer than patience_seconds = 0.1"):
        list(run_rounds(f, Execution(workers=2, executor="flower", patience_seconds=0.1)))
    link.online = []
    with pytest.raises(RuntimeError, match="no SuperNode was to be had for 0.1 s"):
        list(run_rounds(f, Execution(workers=2, executor="flower", patience_seconds=0.1)))


def spoil(what):
    """Answers of another form than a cohort's, each wrong in one place."""

    def first(trained, **changes):
        stores, cut = trained.mean
        name = next(iter(stores[0]))
        return replace(trained, mean=(tuple({**s, **{name: changes["to"](s[name])}} for s in stores), cut))

    return {
        "the shape": lambda t: first(t, to=lambda x: torch.zeros(3, dtype=torch.float64)),
        "the sum": lambda t: first(t, to=lambda x: x.float()),
        "a weight": lambda t: replace(
            t, mean=((t.mean[0][0], {n: 1.01 * x for n, x in t.mean[0][1].items()}, t.mean[0][2]), t.mean[1])
        ),
        "a weight ": lambda t: replace(t, mean=((*t.mean[0][:2], {n: -x for n, x in t.mean[0][2].items()}), t.mean[1])),
        "not finite": lambda t: first(t, to=lambda x: x * float("nan")),
        "a client": lambda t: replace(t, losses={99: 1.0}),
        "a loss": lambda t: replace(t, losses=dict.fromkeys(t.losses, "1")),
        "a client's tensors": lambda t: replace(t, memories={next(iter(t.losses)): {"x": 1}}),
        "the slice": lambda t: replace(
            t, mean=(t.mean[0], {n: (n, Slice.prefix(1, (0,), index={"residual": range(3)})) for n in t.mean[0][0]})
        ),
        "its names": lambda t: replace(t, mean=((t.mean[0][0], {}, {}), {})),
        "one of its names": lambda t: replace(t, mean=tuple([({"x": torch.zeros(1)},) * 3, {}])),
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "the shape",
        "the sum",
        "a weight",
        "a weight ",
        "not finite",
        "a client",
        "a loss",
        "a client's tensors",
        "the slice",
        "its names",
        "one of its names",
    ],
)
def test_sums_of_another_form_are_not_taken(what, link):
    f = build_federation(small("reefl", finetune="frozen", rounds=1))

    def reply(node, data):
        kind, trained = deserialise(flower.train_message(data), flower.KINDS)
        return serialise((kind, spoil(what)(trained)), flower.KINDS)

    link.reply = reply
    with pytest.raises(RuntimeError, match=f"its answer is not a cohort's: .*{what}"):
        list(run_rounds(f, Execution(workers=2, executor="flower")))


def test_a_mistake_arrives_as_itself_and_other_versions_are_told(link, monkeypatch):
    f = build_federation(small("reefl", finetune="frozen", rounds=1))
    monkeypatch.setattr(flower, "train_task", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        list(run_rounds(f, Execution(workers=2, executor="flower")))
    link.reply = lambda node, data: serialise(("raised", "__import__", "os"))
    with pytest.raises(RuntimeError, match="os"):
        list(run_rounds(f, Execution(workers=2, executor="flower")))
    data = serialise((("0", "0"), f.experiment.to_dict(), 1, [], [], {}, {}))
    assert "on a SuperNode, ('0', '0') where the run was started" in deserialise(flower.train_message(data))[2]


def test_code_does_not_travel(link, monkeypatch):
    @dataclass(frozen=True)
    class Mine(METHODS["depthfl"]):
        pass

    monkeypatch.setitem(METHODS, "mine", Mine)
    with pytest.raises(
        ValueError, match="executor = 'flower' sends no code, and Mine is of tests.executors.test_flower"
    ):
        list(run_rounds(build_federation(small("mine")), Execution(executor="flower")))


def test_a_message_is_what_was_packed_or_an_error():
    part = Slice.prefix(2, (0, 1), index={"residual": range(0, 8, 2), "1/ffn": (3, 1)})
    x = torch.arange(3.0)
    value = {1: (part, [x, x], None, float("inf")), "a": {"b": True}}
    data = serialise(value, [Slice])
    back = deserialise(data, [Slice])
    assert back["a"] == value["a"] and back[1][0] == part and back[1][2:] == value[1][2:]
    assert torch.equal(back[1][1][0], x) and len(data) < 600
    with pytest.raises(TypeError, match="MaskedMean cannot be sent"):
        serialise(MaskedMean({}))
    deep = json.dumps({"__metadata__": {"value": '{"list": [' * 9999}}).encode()
    for bad in (b"", b"\0" * 8, pickle.dumps(print), serialise(part, [Slice]), len(deep).to_bytes(8, "little") + deep):
        with pytest.raises(ValueError, match="bytes are no message"):
            deserialise(bad)
