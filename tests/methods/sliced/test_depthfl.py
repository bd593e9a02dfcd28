"""DepthFL's server, and its mutual learning by hand."""

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.methods import Server, build_method
from fedlib.methods.losses import Batch
from fedlib.methods.sliced.depthfl import mutual_kl
from tests.helpers.plain_depthfl import plain_depthfl
from tests.helpers.server_rounds import infos, one_round, setting, two_clients
from tests.helpers.two_exits import LN3, two_exits


def test_depthfl_aggregates_with_feddyn_over_all_clients():
    info = infos(low=(1,), high=(1,))
    old = {"low": torch.tensor([1.0]), "high": torch.tensor([-1.0])}
    update = two_clients({"low": torch.tensor([[2.0], [-4.0]]), "high": torch.tensor([[3.0]])}, info)
    new = one_round(build_method("depthfl", {}), Server(0, old, {}), [update], setting(info))
    # h = 0, so theta' = mean + (n_k / N)(mean - theta). low: unweighted mean -1, n/N = 2/4: -1 + 0.5 (-2) = -2.
    # high: mean 3, n/N = 1/4 (all four clients, not those with the budget): 3 + 0.25 * 4 = 4
    assert new.params["low"].item() == pytest.approx(-2) and new.params["high"].item() == pytest.approx(4)
    assert new.memory["h/low"].item() == pytest.approx(-0.1 * 0.5 * -2)


def test_mutual_kl_averages_over_the_others():
    # two exits: (KL(p_1||p_0) + KL(p_0||p_1)) / (2 - 1) = (3/4 ln 3 - ln 2) + (ln 2 - 1/2 ln 3) = 1/4 ln 3
    torch.testing.assert_close(mutual_kl(two_exits()), torch.tensor([LN3 / 4]))
    assert mutual_kl(two_exits(held=((1.0,), (0.0,)))) == 0


def test_mutual_kl_equals_the_double_loop():
    g = torch.Generator().manual_seed(0)
    logits, held = torch.randn(4, 3, 5, 7, generator=g), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0.0]])
    batch = Batch(logits, torch.zeros(3, 5, dtype=torch.long), torch.full((3, 5), 0.2), held)
    for k, n in enumerate((4, 2, 1)):
        logp = logits[:n, k].log_softmax(-1)
        pairs = [(logp[j].exp() * (logp[j] - logp[i])).sum(-1).mean() for i in range(n) for j in range(n) if i != j]
        expected = sum(pairs) / (n - 1) if pairs else torch.tensor(0.0)
        torch.testing.assert_close(mutual_kl(batch)[k], expected)


def test_rounds_equal_a_plain_loop_in_which_what_clients_remember_matters(tiny):
    """What the memory is worth in round 2 is a thousand times the tolerance; its sign is Acar et al.'s."""
    e = tiny.replace(
        method="depthfl", options={"feddyn_alpha": 0.5, "kd_weight": 0.5}, finetune="frozen", finetune_options={},
        augment="none", schedule="constant", clip_value=None, lr=0.1, num_clients=4, clients_per_round=4, num_train=120,
        batch_size=8, local_epochs=2,
    )  # fmt: skip
    *_, last = run_rounds(f := build_federation(e), Execution(workers=1))
    want, forgetful = plain_depthfl(f, 2), plain_depthfl(f, 2, remembers=False)
    assert max(float((p - forgetful[n]).abs().max()) for n, p in want.items()) > 2e-2
    for name, p in last.server.params.items():
        torch.testing.assert_close(p, want[name], rtol=0, atol=2e-5)
