"""What a dataclass's annotations say of its fields holds: types, options, limits, conditions."""

import pathlib
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt

import fedlib
from fedlib.core.annotations import When
from fedlib.core.validation import check_conditions, check_fields, check_instance
from fedlib.methods.sliced.reefl import ReeFL

ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True)
class Options:
    kind: Literal["plain", "fancy"] = "plain"
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    count: Annotated[int, Ge(1), Lt(9)] | None = None
    parts: tuple[Annotated[float, Gt(0)], ...] = (1.0,)
    extra: Annotated[float, Ge(0), When(kind="fancy")] = 0.0

    def __post_init__(self):
        check_instance(self, "options")
        check_conditions(self, "options")


@dataclass(frozen=True)
class Own(Options):
    """A user's own: other defaults under the plain types."""

    kind: str = "fancy"
    share: float = 0.25
    extra: float = 2.0


@dataclass(frozen=True)
class Wider(Options):
    kind: Literal["plain", "mine"] = "mine"
    share: Annotated[float, Le(2)] = 1.5


@pytest.mark.parametrize(
    "cls, values, message",
    [
        (Options, {"share": 0}, "options: share = 0.0 must be above 0 and at most 1"),
        (Options, {"share": 1.5}, "share = 1.5 must be above 0 and at most 1"),
        (Options, {"share": float("nan")}, "share = nan: expected a finite number"),
        (Options, {"count": 9}, "count = 9 must be at least 1 and below 9"),
        (Options, {"parts": [1, -1]}, "parts = -1.0 must be above 0"),
        (Options, {"kind": "fanzy"}, "kind = 'fanzy' is not possible; did you mean 'fancy'?"),
        (Options, {"extra": 1}, "extra = 1.0 has no effect with kind = 'plain'; it needs kind = 'fancy'"),
        (Own, {"kind": "x"}, "kind = 'x' is not possible"),
        (Own, {"share": 7}, "share = 7.0 must be above 0 and at most 1"),
        (Own, {"extra": -1}, "extra = -1.0 must be at least 0"),
        (Wider, {"kind": "fancy"}, "kind = 'fancy' is not possible"),
        (Wider, {"share": 3}, "share = 3.0 must be at most 2"),
    ],
)
def test_limits_and_options_hold_and_plain_types_of_a_subclass_keep_them(cls, values, message):
    with pytest.raises(ValueError) as error:
        cls(**values)
    assert message in str(error.value)


def test_what_is_allowed_is_converted():
    o = Options("fancy", np.float64(1), np.int64(8), np.array([1, 2]), 3)
    assert o == Options("fancy", 1.0, 8, (1.0, 2.0), 3.0) and type(o.count) is int and type(o.parts[0]) is float
    assert Options(count=None).count is None
    # a field declared anew may mean something else: its limits stay, its condition does not
    assert Own(kind="plain", extra=1.0).extra == 1.0 and Wider().share == 1.5
    assert check_fields(Options, {"share": 1}, "x") == {"share": 1.0}


def test_the_front_door_shows_what_there_is():
    import pydoc

    assert set(fedlib.__all__) <= set(dir(fedlib))
    text = pydoc.render_doc(fedlib, renderer=pydoc.plaintext)
    for line in ("class Experiment", "class Execution", "run(e:", "run_all(", "run_rounds(", "largest gradient entry"):
        assert line in text, line


def test_a_method_made_by_hand_refuses_too():
    @dataclass(frozen=True)
    class Mine(ReeFL):
        """A user's own, with the plainest of types."""

        distill: str = "none"
        temperature: float = 2.0

    for make, message in (
        (lambda: ReeFL(distill="x"), "options of reefl: distill = 'x' is not possible"),
        (lambda: Mine(distill="bets"), "options of mine: distill = 'bets' is not possible; did you mean 'best'?"),
        (lambda: Mine(temperature=0), "temperature = 0.0 must be above 0"),
        (lambda: ReeFL(weighting=3), "weighting = 3 is not possible"),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)
    assert Mine(distill="best").temperature == 2.0
