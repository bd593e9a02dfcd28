"""Convolutions of a cohort: stacked, shared, of one client, grouped or in a loop, against PyTorch's own, client by client."""

import pytest
import torch
import torch.nn.functional as F

from fedlib.layers import conv
from fedlib.layers.conv import (
    Conv2d,
    average_pool,
    fold_clients,
    init_kaiming_,
    init_uniform_,
    max_pool,
    sample_and_pad,
)
from fedlib.layers.linear import Linear
from fedlib.layers.norms import BatchNorm2d

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layer, x, weight, bias):
    """The output, and the gradients of x, weight and bias; the layer's parameters are replaced."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) + ((bias,) if bias is not None else ())]
    layer._parameters["weight"] = leaves[1]
    layer._parameters["bias"] = leaves[2] if bias is not None else None
    y = layer(leaves[0])
    return [y, *torch.autograd.grad((y * normal(*y.shape, seed=9)).sum(), leaves)]


def reference(layer, x, weight, bias):
    """The same of a plain convolution per client."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) + ((bias,) if bias is not None else ())]
    rows = [(leaves[1][k] if weight.dim() == 5 else leaves[1]) for k in range(len(x))]
    biases = [None if bias is None else leaves[2][k] if bias.dim() == 2 else leaves[2] for k in range(len(x))]
    y = torch.stack(
        [
            F.conv2d(one, w, b, layer.stride, layer.padding, groups=layer.groups)
            for one, w, b in zip(leaves[0], rows, biases, strict=True)
        ]
    )
    return [y, *torch.autograd.grad((y * normal(*y.shape, seed=9)).sum(), leaves)]


@pytest.mark.parametrize("way", ["grouped", "loop", "columns"])
@pytest.mark.parametrize("stacked", ["all", "weight", "bias", "none"])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "groups", "bias"),
    [(3, 1, 1, 1, False), (3, 2, 1, 1, True), (1, 2, 0, 1, True), (3, 1, 0, 2, True), (3, 2, 1, 4, False), (5, 1, 2, 4, True)],
)  # fmt: skip
def test_a_cohorts_convolution_is_each_clients(
    way, stacked, clients, kernel, stride, padding, groups, bias, monkeypatch
):
    if way == "columns" and groups > 1:
        pytest.skip("products of columns are of one group")
    monkeypatch.setattr(conv, "path_of", lambda *_: way)
    layer = Conv2d(4, 8, kernel, stride, padding, groups, bias)
    x = normal(clients, 2, 4, 7, 6)
    weight = normal(*(clients,) * (stacked in ("all", "weight")), *layer.weight.shape, seed=1)
    b = normal(*(clients,) * (stacked in ("all", "bias")), 8, seed=2) if bias else None
    for got, want in zip(run(layer, x, weight, b), reference(layer, x, weight, b), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_a_gpu_takes_the_path_that_was_fastest_once_a_shape_and_a_cpu_goes_by_a_rule(monkeypatch):
    class There(torch.Tensor):
        """A tensor that says that it lies on a GPU."""

        device = torch.device("cuda:0")

    tried = []
    monkeypatch.setattr(conv, "CHOSEN", {})
    monkeypatch.setattr(
        conv, "_seconds", lambda run, path, device: tried.append(path) or {"columns": 1, "loop": 2}.get(path, 3)
    )
    x, weight = torch.zeros(3, 2, 4, 7, 6), torch.zeros(3, 8, 4, 3, 3)
    there = x.as_subclass(There)
    for _ in range(2):
        assert conv.path_of(there, weight, lambda path: None, 1) == "columns"
    assert tried == ["grouped", "loop", "columns"]
    assert conv.path_of(there, torch.zeros(3, 8, 2, 3, 3), lambda path: None, 1) == "loop"  # of two groups
    assert conv.CHOSEN == {
        "3 clients, 4 to 8 channels, 3x3 / 1, 6 px, float32": "columns",
        "3 clients, 4 to 8 channels of 2, 3x3 / 1, 6 px, float32": "loop",
    }
    assert conv.path_of(x, weight, lambda path: None, 1) == "grouped"
    assert conv.path_of(torch.zeros(8, 1, 128, 2, 2), torch.zeros(8, 8, 128, 3, 3), lambda path: None, 1) == "loop"


@pytest.mark.parametrize("path", ["grouped", "loop", "columns"])
def test_a_trial_leaves_nothing_behind_even_where_no_gradient_is_asked_for(path):
    layer = Conv2d(4, 8, 3, padding=1)
    with torch.inference_mode():
        x, weight = torch.randn(3, 2, 4, 6, 6), torch.randn(3, 8, 4, 3, 3)
        before = x.clone()
        layer._try(path, x, weight, None, 1)
    assert torch.equal(x, before) and layer.weight.grad is None


@pytest.mark.parametrize("channels", [4, 9, 15, 16])
def test_a_narrow_shortcut_of_an_odd_batch_has_gradients(channels):
    """oneDNN's own strided 1x1 convolution crashes here, on two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer = Conv2d(channels, 19, 1, stride=2)
        x, weight = normal(1, 9, channels, 32, 32), normal(19, channels, 1, 1, seed=1)
        _, dx, dw = run(layer, x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2), weight, None)
    finally:
        torch.set_num_threads(threads)
    dy = normal(1, 9, 19, 16, 16, seed=9)[0]
    torch.testing.assert_close(
        dw[..., 0, 0], torch.einsum("nohw,nchw->oc", dy, x[0, :, :, ::2, ::2]), rtol=1e-4, atol=1e-3
    )
    torch.testing.assert_close(dx[0, :, :, ::2, ::2], torch.einsum("nohw,oc->nchw", dy, weight[..., 0, 0]))
    assert not dx[..., 1::2, :].any() and not dx[..., 1::2].any()


def test_the_first_rows_serve_the_clients_still_alive():
    layer, x = Conv2d(3, 5, 3, padding=1, bias=True), normal(2, 2, 3, 4, 4)
    weight, bias = normal(4, 5, 3, 3, 3, seed=1), normal(4, 5, seed=2)
    layer._parameters.update(weight=weight, bias=bias)
    want = torch.stack([F.conv2d(x[k], weight[k], bias[k], padding=1) for k in range(2)])
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer(x[:1]), want[:1])


def test_a_cut_depthwise_weight_needs_no_other_number_of_groups():
    layer, x = Conv2d(6, 6, 3, padding=1, groups=6, axes=("a", None)), normal(2, 2, 4, 5, 5)
    weight = normal(2, 4, 1, 3, 3, seed=1)  # four of six channels
    layer._parameters["weight"] = weight
    want = torch.stack([F.conv2d(x[k], weight[k], padding=1, groups=4) for k in range(2)])
    torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_maps_layout_is_channels_last_and_kept_so_that_layers_copy_nothing(clients):
    layer, x = Conv2d(3, 4, 3, padding=1), normal(clients, 5, 3, 8, 8)
    layer._parameters["weight"] = normal(clients, 4, 3, 3, 3)
    y = F.relu(layer(x)) + layer(x)
    assert y.permute(1, 3, 4, 0, 2).is_contiguous() and fold_clients(y).data_ptr() == y.data_ptr()
    assert fold_clients(max_pool(y, 2)).is_contiguous(memory_format=torch.channels_last)


def test_pooling_is_each_examples():
    x = normal(2, 3, 4, 7, 7)
    by_client = x.permute(0, 1, 3, 4, 2).contiguous().movedim(4, 2)  # as products of columns lie
    for maps in (x, by_client):
        torch.testing.assert_close(max_pool(maps, 2), torch.stack([F.max_pool2d(one, 2) for one in x]))
    torch.testing.assert_close(average_pool(x), torch.stack([F.adaptive_avg_pool2d(o, 1).flatten(1) for o in x]))


def test_a_bridge_takes_every_second_pixel_and_pads_channels_on_both_sides():
    x = torch.arange(2 * 16, dtype=torch.float32).view(1, 1, 2, 4, 4)
    y = sample_and_pad(x, (5, 2, 2))  # 3 more channels: one before, two behind
    assert y.shape == (1, 1, 5, 2, 2)
    assert y[0, 0, 1].tolist() == [[0, 2], [8, 10]] and y[0, 0, 2].tolist() == [[16, 18], [24, 26]]
    assert not y[0, 0, [0, 3, 4]].any()
    assert sample_and_pad(x, (2, 4, 4)).equal(x)


def test_initialisation_is_a_function_of_its_generator():
    def build():
        return torch.nn.Sequential(Conv2d(64, 32, 3, bias=True), BatchNorm2d(32, "a"), Linear(100, 50))

    net, again = (init_kaiming_(m, torch.Generator().manual_seed(3)) or m for m in (build(), build()))
    assert all(p.equal(q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    assert net[0].weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert net[2].weight.abs().max().item() == pytest.approx(0.1, rel=0.01)  # U(-1/10, 1/10)
    assert net[1].weight.eq(1).all() and not any(m.bias.any() for m in net)


def test_what_answers_classes_is_drawn_as_a_classifier_whatever_layer_it_is():
    """A convolution of all of a 4x4 map of 16 channels reads d = 256 numbers: U(-1/16, 1/16), SD 1/16/sqrt(3)."""
    head = Conv2d(16, 100, 4, bias=True, axes=("classes", "a"))
    init_kaiming_(head, torch.Generator().manual_seed(3))
    assert head.weight.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert head.weight.abs().max().item() <= 1 / 16 and not head.bias.any()


def test_the_uniform_initialisation_is_pytorchs_default():
    """Bounds 1/sqrt(fan-in) of weights and biases alike, those of torch's own layers; norms are (1, 0)."""
    ours = torch.nn.Sequential(Conv2d(64, 512, 3, bias=True), BatchNorm2d(512, "a"), Linear(100, 500))
    init_uniform_(ours, torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    for mine, theirs in ((ours[0], torch.nn.Conv2d(64, 512, 3)), (ours[2], torch.nn.Linear(100, 500))):
        for p, q in ((mine.weight, theirs.weight), (mine.bias, theirs.bias)):
            assert p.std().item() == pytest.approx(q.std().item(), rel=0.1)
            assert p.abs().max().item() == pytest.approx(q.abs().max().item(), rel=0.02)
    assert ours[1].weight.eq(1).all() and not ours[1].bias.any()


def test_gradients_of_strided_1x1_convolutions_and_of_the_pool_lie_as_maps_do():
    """Added to gradients of another layout, they cost a ResNet's step a tenth of its time."""
    shortcut = Conv2d(16, 32, 1, stride=2)
    for clients in (1, 2):
        shortcut.weight = torch.nn.Parameter(torch.ones(clients, 32, 16, 1, 1))
        z = conv.split_clients(torch.randn(4, 16 * clients, 8, 8).to(memory_format=torch.channels_last), clients)
        for layer in (shortcut, average_pool):
            y = layer(z.requires_grad_())
            (grad,) = torch.autograd.grad(y, z, torch.ones_like(y) if y.dim() == 5 else torch.ones(y.shape))
            assert fold_clients(grad).data_ptr() == grad.data_ptr()  # a view
