"""A net for each level, against a plain loop."""

import pytest

from fedlib import Execution, build_federation, run_rounds
from tests.helpers.plain_levels import WIDTHS, check, deepest, local_training, mean_over_holders, whole

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)


def test_a_round_of_decoupled_equals_a_plain_loop(convnet):
    f = build_federation(convnet.replace(method="decoupled", num_clients=6, clients_per_round=6, num_train=120))
    (last,) = run_rounds(f, ONE)
    for level in range(3):
        start = whole(f, f"level{level}/")
        mine = [c for c in f.sample_clients(1) if c.budget == level]
        trained = [local_training(f, c, WIDTHS[level], level + 1, whole(f), deepest) for c in mine]
        assert len(trained) == 2
        check(last, mean_over_holders(start, [({n: v for n, v in t.items() if n in start}, i) for t, i in trained]), level)  # fmt: skip
