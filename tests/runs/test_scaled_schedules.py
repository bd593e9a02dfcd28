"""A profile shrinks by one factor, and what follows from it follows."""

import pytest

from fedlib import Experiment
from fedlib.engine.schedules import round_rate
from fedlib.methods import build_method
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.scaled_schedules import following


def test_what_follows_from_the_size_of_a_profile():
    """100 rounds of 2 epochs for 300 of 5: 0.99^299 = 0.0495 = d^99 at d = 0.970102; five epochs of exits are two."""
    one = {"columns": ["cifar10_alpha0.3"], "seeds": [1]}
    small, paper = (
        {c.variant: c.experiment for t in ("table1", "figure2") for c in load_grid("cafedistill", t, size, {"seeds": [1]})
         if c.column == ("cifar100_alpha0.3" if (t, size) == ("figure2", "paper") else "cifar10_alpha0.3")}
        for size in ("small", "paper")
    )  # fmt: skip
    e = small["cafedistill"]
    assert (e.rounds, e.local_epochs, e.decay) == (100, 2, 0.970102)
    for e in (*small.values(), *paper.values()):  # the last rate is the paper's
        assert round_rate(e, e.rounds) == pytest.approx(0.1 * 0.99**299, rel=1e-4)
    epochs = {
        "fedrep": "head_epochs",
        "fedrod": "head_epochs",
        "fedbabu": "tune_epochs",
        "fedper_afterwards": "tune_epochs",
    }
    for variant, key in epochs.items():
        assert (
            small[variant].options[key] == 2
            and getattr(build_method(paper[variant].method, paper[variant].options), key) == 5
        )
    assert "tune_epochs" not in small["fedper"].options  # it would have no effect there
    assert small["fedpac"].options == {}  # one epoch stays one
    news = {
        c.variant: c.experiment for c in load_grid("cafedistill", "table1", "small", {"columns": ["ag_news_alpha0.3"]})
    }
    assert news["fedrep"].options == {"head_epochs": 10}  # five beside one epoch of the paper's, here two
    assert round_rate(news["local"], 60) == pytest.approx(0.1 * 0.99**99, rel=1e-4)
    # an override of the size is one, too; what it says itself stands
    e = load_grid("cafedistill", "table1", "paper", {**one, "variant": ["fedrep"], "rounds": 11, "local_epochs": 10})[
        0
    ].experiment
    assert e.options == {"head_epochs": 10} and round_rate(e, 11) == pytest.approx(0.1 * 0.99**299, rel=1e-4)
    said = {"rounds": 11, "decay": 0.5, "local_epochs": 1, "options": {"head_epochs": 3}}
    e = load_grid("cafedistill", "table1", "small", {**one, "variant": ["fedrep"], **said})[0].experiment
    assert e.options == {"head_epochs": 3} and e.decay == 0.5


def test_what_counts_rounds_is_a_share_of_them():
    """Milestones at 100 and 200 of 300 rounds, and a warm-up of 30, fall at 33.3, 66.7 and 10 of 100, rounded up."""
    published = {
        "method": "local",
        "rounds": 300,
        "schedule": "step",
        "decay": 0.1,
        "milestones": [100, 200],
        "warmup_rounds": 30,
    }
    found = following(published, published | {"rounds": 100}, set())
    e = Experiment.from_dict(published | {"rounds": 100} | found)
    assert [round_rate(e, t) / e.lr for t in (10, 11, 34, 35, 67, 68, 100)] == pytest.approx(
        [10 / 11, 1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    assert following(published, published, set()) == {} == following(published, published | {"rounds": 9}, set(found))
