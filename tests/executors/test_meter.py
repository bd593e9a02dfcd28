"""What training takes, counted as it runs: beside hand-counted MACs, plain PyTorch, and a machine's own memory."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedlib import Experiment
from fedlib.core.clients import Client
from fedlib.methods import METHODS, Stage, build_method, register
from fedlib.methods.base import JointExits
from fedlib_lab.executors.meter import Macs, count_training
from fedlib_lab.runs.costs import kind_of, load_shapes, taken

NET = Experiment(
    method="fedavg", dataset="cifar10", backbone="convnet3_slim", pretrained=False, finetune="full", num_exits=1,
    num_clients=10, clients_per_round=2, local_epochs=2, batch_size=8,
)  # fmt: skip
FORWARD, FIRST = 4_484_992, 777_600  # MACs of an image: 27 x 32 x 30 x 30 and so on; of the first layer


def count(e, budget=0, examples=40):
    shapes = load_shapes(e, 10)
    return count_training(e, shapes.method, shapes.setting, shapes.model, Client(-1, budget, examples))


def test_a_step_is_a_forward_pass_and_two_backward_but_for_the_input_s_gradient():
    assert count(NET).macs == 2 * (3 * FORWARD - FIRST)
    assert count(NET.replace(local_epochs=5)).macs == 5 * (3 * FORWARD - FIRST)


@pytest.mark.parametrize(
    "method, options, forward",
    [("fedper", {}, 0), ("fedrep", {"head_epochs": 3}, 3), ("fedpac", {"head_epochs": 1}, 3), ("fedrod", {"head_epochs": 4}, 4)],
)  # fmt: skip
def test_heads_trained_alone_take_forward_passes(method, options, forward):
    e = NET.replace(method=method, options=options)
    assert count(e).macs == pytest.approx(2 * (3 * FORWARD - FIRST) + forward * FORWARD, rel=0.002)


def test_two_models_take_twice():
    assert count(NET.replace(method="ditto")).macs == 2 * count(NET).macs
    pair, one = (count(NET.replace(method="splitmix", options={"bases": 4, "ratios": [r]})) for r in (0.5, 0.25))
    assert pair.macs == 2 * one.macs and pair.peak > 1.5 * one.peak


def test_what_is_frozen_takes_no_gradients_of_weights():
    e = NET.replace(backbone="vit_digits", dataset="mnist", finetune="frozen")
    whole, frozen = count(e.replace(finetune="full")).macs, count(e).macs
    shapes = load_shapes(e, 10)
    forward = shapes.setting.measure.macs(shapes.slice_for(0))
    assert frozen < 2 * 1.01 * forward and whole > 2 * 2.5 * forward  # two epochs


def test_grouped_convolutions_are_counted_by_their_groups():
    """PyTorch's own counter takes the gradient of a depthwise kernel for that of a dense one, nine times too much."""
    for groups in (1, 2, 8):
        layer, x = nn.Conv2d(8, 16, 3, groups=groups), torch.empty(4, 8, 10, 10, requires_grad=True)
        with Macs() as counted:
            torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
        assert counted.macs == 3 * 4 * 64 * 16 * 9 * 8 // groups


def test_widths_drawn_in_each_step_take_their_mean():
    """FjORD with self-distillation: the mean over widths, and the largest once more as the teacher."""
    e = NET.replace(method="fjord", local_epochs=1, options={"rates": [0.25, 0.5, 1.0], "distill": False})
    each = [
        count(NET.replace(method="heterofl", local_epochs=1, options={"rates": [r]})).macs for r in (0.25, 0.5, 1.0)
    ]
    assert count(e, budget=0).macs == pytest.approx(each[0], rel=0.01)
    assert count(e, budget=2).macs == pytest.approx(sum(each) / 3, rel=0.03)
    taught = e.replace(options={"rates": [0.25, 0.5, 1.0], "distill": True})
    assert count(taught, budget=2).macs == pytest.approx(sum(each) / 3 + each[-1], rel=0.1)


def test_a_batch_stands_for_all_unless_examples_decide():
    assert count(NET, examples=40) == count(NET, examples=4000)
    staged = NET.replace(
        method="fedepth", backbone="preresnet20", batch_size=32, augment="none", options={"buffered": True}
    )  # z of few examples fits beside a stage, z of many does not
    assert count(staged, examples=32).macs < count(staged, examples=320).macs


@pytest.mark.parametrize("optimiser, state", [("sgd", 2), ("adamw", 4)])
def test_memory_is_what_is_trained_its_gradients_its_moments_and_activations(optimiser, state):
    """Of a batch of one on layers of many weights, activations are little: parameters, gradients, and two moments."""
    e = NET.replace(backbone="minilm.32", dataset="sst2", optimiser=optimiser, batch_size=1, local_epochs=1)
    numbers = sum(p.numel() for p in load_shapes(e, 2).everything.values())
    held = count(e).peak / (4 * numbers)
    assert state <= held < state + 2.5


def test_what_is_counted_is_what_a_machine_holds_and_at_most_half_more():
    """Live bytes of the same training on the CPU, seen by PyTorch's allocator; its convolutions keep less."""
    from torch.profiler import ProfilerActivity, profile

    from fedlib import build_federation
    from fedlib.engine.executors import plan_round, train_cohort
    from fedlib.methods import Round

    e = NET.replace(dataset="mnist", num_train=80, num_test=20, local_epochs=1, batch_size=8, seed=2)
    f = build_federation(e)
    r = Round(1, tuple(f.clients([0])), f.setting)
    (members,) = plan_round(f, f.server, r, 1, None)
    train_cohort(f, f.model, f.server, r, members, {})  # what is allocated once is there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train_cohort(f, f.model, f.server, r, members, {})
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak <= count(e, examples=r.clients[0].num_examples).peak <= 1.5 * peak


def test_a_users_own_method_is_priced_without_a_word():
    @register("thrice")
    @dataclass(frozen=True)
    class Thrice(JointExits):
        """Trains all, then twice its exits, and asks for a value on the way."""

        def local_update(self, cohort):
            cohort.train(self.local_loss)
            assert float(next(iter(cohort.params.values())).sum()) < 1e9
            for _ in range(2):
                cohort.train(self.local_loss, Stage(lambda i: i.exit is not None))

    try:
        e = NET.replace(method="thrice", local_epochs=1)
        assert count(e).macs == pytest.approx(3 * FORWARD - FIRST + 2 * FORWARD, rel=0.002)
        assert taken(kind_of(e))[0].macs == count(e).macs
    finally:
        METHODS.pop("thrice")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_counted_and_leaves_its_model_as_it_was(method):
    for e in (
        NET.replace(method=method, num_exits=3, local_epochs=1),
        NET.replace(method=method, local_epochs=1),
        NET.replace(method=method, local_epochs=1, backbone="vit_digits", dataset="mnist", finetune="lora"),
        NET.replace(method=method, local_epochs=1, public_fraction=0.1),
        NET.replace(method=method, local_epochs=1, backbone="deit_micro", finetune="frozen", num_exits=4),
    ):
        try:
            shapes = load_shapes(e, 10)
        except ValueError:
            continue
        before = {n: p.shape for n, p in shapes.model.named_parameters()}
        found = [
            count_training(e, shapes.method, shapes.setting, shapes.model, Client(-1, b, 40))
            for b in range(shapes.budgets)
        ]
        assert all(t.macs > 0 and t.peak > 0 for t in found)
        assert {n: p.shape for n, p in shapes.model.named_parameters()} == before
        assert build_method(method, {}) is not None
        return
    pytest.fail(f"{method} runs on none of these")


@pytest.mark.parametrize("hook", ["effort", "training_mib", "weights_of"])
def test_a_hook_that_nothing_calls_any_more_is_refused_by_name(hook):
    with pytest.raises(ValueError, match=f"method 'priced' has hooks that nothing calls any more: {hook}"):
        register("priced")(type("PricedByHand", (JointExits,), {hook: lambda self, *_: 1.0}))
    assert "priced" not in METHODS


def test_products_that_add_in_place_count_as_others_do():
    """As a cohort's layers do with a bias of each client's own."""
    x, y, to = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.zeros(2, 3, 5)
    with Macs() as counted:
        to.baddbmm_(x, y)
        to[0].addmm_(x[0], y[0])
    assert counted.macs == (2 + 1) * 3 * 4 * 5


def test_bilinear_layers_and_products_by_a_vector_count():
    """They were free: PyTorch's own counter knows neither."""
    x, y, v = torch.empty(2, 5, 8), torch.empty(2, 5, 6), torch.empty(8)
    for made, macs in (
        (lambda: nn.Bilinear(8, 6, 3)(x, y), 2 * 5 * 8 * 6 * 3),
        (lambda: x @ v, 2 * 5 * 8),
        (lambda: v @ v, 8),
        (lambda: torch.addmv(y[0, :, 0], x[0], v), 5 * 8),
    ):
        with Macs() as counted:
            made()
        assert counted.macs == macs
