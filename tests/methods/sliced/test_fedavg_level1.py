"""FedAvg of the net that every client can hold, against a plain loop."""

import pytest

from fedlib import Execution, build_federation, run_rounds
from tests.helpers.plain_levels import check, deepest, local_training, mean_over_holders, whole

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)


def test_a_round_of_fedavg_at_level_1_equals_a_plain_loop(convnet):
    f = build_federation(convnet.replace(method="fedavg_level1"))
    start = whole(f)
    trained = [local_training(f, c, 0.5, 1, start, deepest) for c in f.sample_clients(1)]
    (last,) = run_rounds(f, ONE)
    check(last, mean_over_holders(start, trained))
    assert len(set(last.metrics["exits"])) == 1  # level 1's model answers at every exit
