"""Batch norm of a cohort against ``nn.BatchNorm2d``, under every policy; padding never reaches the statistics."""

import copy

import pytest
import torch
from torch import nn

from fedlib.layers import norms
from fedlib.layers.context import Context, Scaler, share
from fedlib.layers.conv import fold_clients
from fedlib.layers.norms import BatchNorm2d, LayerNorm, recomputed_statistics, set_policy_, statistics

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
CHANNELS = 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(policy="batch", clients=None):
    """A batch norm with random affine parameters, stacked for ``clients``."""
    norm = BatchNorm2d(CHANNELS, "a")
    context = set_policy_(norm, policy)
    lead = () if clients is None else (clients,)
    norm._parameters["weight"] = normal(*lead, CHANNELS, seed=1).requires_grad_()
    norm._parameters["bias"] = normal(*lead, CHANNELS, seed=2).requires_grad_()
    if clients is not None and policy in ("tracked", "local"):
        norm.running_mean, norm.running_var = torch.zeros(clients, CHANNELS), torch.ones(clients, CHANNELS)
    return norm, context


def plain(norm, k, tracks=True):
    """PyTorch's own layer with the parameters of client k."""
    theirs = nn.BatchNorm2d(CHANNELS, track_running_stats=tracks)
    with torch.no_grad():
        theirs.weight.copy_(norm.weight[k])
        theirs.bias.copy_(norm.bias[k])
    return theirs


def batches(counts=(5, 3, 2)):
    """A padded batch (K, B, C, H, W) whose padding is wild, its weights (K, B), and the unpadded ones."""
    width = max(counts)
    x = normal(len(counts), width, CHANNELS, 4, 3, seed=5) * 2 + 1
    weights = torch.zeros(len(counts), width)
    for k, n in enumerate(counts):
        x[k, n:] *= 100
        weights[k, :n] = 1 / max(n, 1)
    return x, weights, [x[k, :n] for k, n in enumerate(counts)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", ["batch", "tracked", "local", "static"])
def test_training_normalises_each_client_by_its_real_rows(policy, padded):
    norm, context = layer(policy, clients=3)
    x, weights, real = batches((5, 3, 2) if padded else (4, 4, 4))
    context.weights = weights
    x.requires_grad_()
    y = norm(x)
    towards = normal(*x.shape, seed=7) * (weights > 0)[..., None, None, None]
    grads = torch.autograd.grad((y * towards).sum(), [x, norm.weight, norm.bias])
    for k, rows in enumerate(real):
        theirs, rows = plain(norm, k), rows.detach().requires_grad_()
        want = theirs(rows)
        wanted = torch.autograd.grad((want * towards[k, : len(rows)]).sum(), [rows, theirs.weight, theirs.bias])
        torch.testing.assert_close(y[k, : len(rows)], want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads[0][k, : len(rows)], wanted[0], rtol=1e-5, atol=1e-6)
        assert not grads[0][k, len(rows) :].any()
        for got, expected in zip(grads[1:], wanted[1:], strict=True):
            torch.testing.assert_close(got[k], expected, rtol=1e-5, atol=1e-5)
        if policy in ("tracked", "local"):
            torch.testing.assert_close(norm.running_mean[k], theirs.running_mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(norm.running_var[k], theirs.running_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_layout_in_which_it_runs_changes_nothing(training, monkeypatch):
    assert [norms.is_slow_channels_last(torch.ones(4, 2, c, 4, 3)) for c in (6, 8, 30, 36)] == [
        True,
        False,
        True,
        False,
    ]
    results = []
    for slow in (True, False):
        monkeypatch.setattr(norms, "is_slow_channels_last", lambda x, slow=slow: slow)
        norm, context = layer("tracked", clients=3)
        context.training = training
        x = normal(3, 4, CHANNELS, 4, 3, seed=5).requires_grad_()
        y = norm(x)
        assert fold_clients(y).is_contiguous(memory_format=torch.channels_last) and fold_clients(y)._is_view()
        results.append([y, *torch.autograd.grad((y * normal(*y.shape, seed=7)).sum(), [x, norm.weight, norm.bias])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gradients_of_channels_last_maps_are_plain_batch_norms(rows, clients):
    """Of one map too, where a layout says little: PyTorch's kernel can take its gradient for another's."""
    norm, _ = layer("batch", clients)
    x = normal(rows, 4, 3, clients, CHANNELS, seed=5).permute(3, 0, 4, 1, 2).requires_grad_()
    y = norm(x)
    towards = torch.empty_like(y).copy_(normal(*y.shape, seed=7))
    grads = torch.autograd.grad(y, [x, norm.weight, norm.bias], towards)
    for k in range(clients):
        theirs, mine = plain(norm, k, tracks=False), x[k].detach().contiguous().requires_grad_()
        wanted = torch.autograd.grad(theirs(mine), [mine, theirs.weight, theirs.bias], towards[k].contiguous())
        for got, expected in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got[k], expected, rtol=1e-5, atol=1e-5)


def test_a_padded_batch_gives_the_gradients_of_the_unpadded_one():
    x, weights, real = batches((4, 2))
    for k, rows in enumerate(real):
        grads = []
        for z, w in ((x[k : k + 1], weights[k : k + 1]), (rows[None], None)):
            norm, context = layer(clients=1)
            context.weights = w
            out = norm(z)[:, : len(rows)]
            grads.append(torch.autograd.grad((out * normal(*out.shape, seed=3)).sum(), [norm.weight, norm.bias]))
        for padded, unpadded in zip(*grads, strict=True):
            torch.testing.assert_close(padded, unpadded, rtol=1e-6, atol=1e-6)


def test_tracked_statistics_serve_in_evaluation_and_their_old_tensors_stay():
    norm, context = layer("tracked", clients=3)
    given = norm.running_mean, norm.running_var
    theirs = [plain(norm, k) for k in range(3)]
    for seed in (1, 2):
        x = normal(3, 4, CHANNELS, 5, 5, seed=seed) + seed
        norm(x)
        for k, t in enumerate(theirs):
            t(x[k])
    assert not given[0].any() and given[1].eq(1).all()
    context.training = False
    x = normal(3, 2, CHANNELS, 5, 5, seed=9)
    want = torch.stack([t.eval()(x[k]) for k, t in enumerate(theirs)])
    torch.testing.assert_close(norm(x), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(x[:, :1]), want[:, :1], rtol=1e-5, atol=1e-5)  # not the batch's own


def test_clients_without_a_batch_and_clients_that_stopped_keep_their_statistics():
    norm, context = layer("tracked", clients=4)
    x, weights, _ = batches((3, 2, 0))
    context.weights = weights
    assert norm(x).isfinite().all()  # three of four run, one of them without an example
    assert norm.running_mean.shape == (4, CHANNELS)
    assert norm.running_mean[:2].all() and not norm.running_mean[2:].any()
    assert not norm.running_var[:2].eq(1).any() and norm.running_var[2:].eq(1).all()


def test_one_model_keeps_the_shape_of_its_statistics():
    norm, _ = layer("tracked")
    norm(normal(1, 4, CHANNELS, 5, 5))
    assert norm.running_mean.shape == norm.running_var.shape == (CHANNELS,)
    assert set(statistics(norm)) == {"running_mean", "running_var"}


def test_one_value_per_channel_is_normalised_to_the_bias():
    norm, _ = layer("tracked", clients=2)
    torch.testing.assert_close(norm(normal(2, 1, CHANNELS, 1, 1)).flatten(1), norm.bias)
    assert norm.running_var.isfinite().all()


def test_batch_has_no_statistics_and_reads_the_batch_in_evaluation_too():
    norm, context = layer("batch")
    x = normal(1, 4, CHANNELS, 3, 3)
    context.training = False
    want = norm(x)
    assert not statistics(norm)
    torch.testing.assert_close(want.mean((0, 1, 3, 4)), norm.bias, rtol=0, atol=1e-5)


def test_static_statistics_are_recomputed_in_one_pass():
    norm, context = layer("static")
    parts = [normal(1, n, CHANNELS, 3, 3, seed=n) * n + n for n in (7, 2)]
    context.training = False
    with pytest.raises(ValueError, match="batch_norm = 'static': evaluation needs statistics, and none are there"):
        norm(parts[0])
    with recomputed_statistics(norm):
        for x in parts:
            norm(x)
    assert not context.training and context.gathered is None
    values = torch.cat(parts, 1).transpose(0, 2).flatten(1).double()
    mean, var = values.mean(1), values.var(1)
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-5, atol=1e-6)
    want = (parts[1] - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + norm.eps).sqrt() * norm.weight[:, None, None]
    torch.testing.assert_close(norm(parts[1]), (want + norm.bias[:, None, None]).float(), rtol=1e-5, atol=1e-5)


def test_static_statistics_of_a_cohort_leave_padding_out():
    norm, context = layer("static", clients=3)
    x, context.weights, real = batches((5, 3, 2))
    with recomputed_statistics(norm):
        norm(x)
        norm(x)
    for k, rows in enumerate(real):
        twice = torch.cat((rows, rows)).transpose(0, 1).flatten(1)
        torch.testing.assert_close(norm.running_mean[k], twice.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.running_var[k], twice.var(1), rtol=1e-5, atol=1e-5)


def test_recomputing_what_ends_in_an_error_leaves_training_and_statistics_as_they_were():
    norm, context = layer("static")
    with pytest.raises(RuntimeError, match="stop"), recomputed_statistics(norm):
        norm(normal(1, 2, CHANNELS, 2, 2))
        raise RuntimeError("stop")
    assert norm.running_mean is None and context.gathered is None


def test_a_copied_model_has_a_context_of_its_own_that_its_layers_share():
    model = nn.Sequential(BatchNorm2d(2, "a"), Scaler("conv"), BatchNorm2d(2, "a"))
    context = share(model, "tracked")
    assert all(m.context is context for m in model)
    twin = copy.deepcopy(model)
    assert twin[0].context is twin[1].context is twin[2].context is not context
    twin[0].context.scale = 0.5
    assert context.scale == 1.0


def test_a_scaler_divides_at_its_places():
    first, second, x = Scaler("conv", "norm"), Scaler("shortcut"), normal(2, 3, 4, 2, 2)
    context = share(nn.Sequential(first, second))
    assert first(x) is x
    context.scale = 0.5
    torch.testing.assert_close(first(x), 2 * x)
    assert second(x) is x
    context.scaled = ("conv", "shortcut")
    context.scale = torch.tensor([0.5, 0.25, 1.0])  # of three clients; two are alive
    torch.testing.assert_close(second(x), torch.stack((2 * x[0], 4 * x[1])))


def test_a_client_without_a_real_row_stays_finite_however_deep_the_net():
    """In a cohort's last step some clients have no batch left; 1 / sqrt(eps) a layer overflows after a dozen."""
    layers = [BatchNorm2d(2, "c") for _ in range(20)]
    context, x = Context(), torch.randn(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    context.weights = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for layer in layers:
        layer.context = context
        x = layer(x)
    assert x.isfinite().all() and x[1].eq(0).all() and x[0].ne(0).all()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stacked(layer, clients, seed):
    """``layer`` with weights of each client's own."""
    g = generator(seed)
    own = {n: torch.randn(clients, *p.shape, generator=g) for n, p in layer.named_parameters()}
    layer._parameters.update(own)
    return layer


@pytest.mark.parametrize("shared_bias", [False, True])
def test_a_stacked_layer_norm_has_autograds_gradients(shared_bias):
    norm = stacked(LayerNorm(6), 3, 0)
    if shared_bias:
        norm._parameters["bias"] = norm.bias[0].clone()
    x = torch.randn(3, 2, 5, 6, generator=generator(1)).requires_grad_()
    leaves = [x, norm.weight.requires_grad_(), norm.bias.requires_grad_()]
    weights = torch.randn(x.shape, generator=generator(2))
    bias = norm.bias if shared_bias else norm.bias[:, None, None]
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    y = (x - mean) / (var + norm.eps).sqrt() * norm.weight[:, None, None] + bias
    torch.testing.assert_close(norm(x), y)
    for a, b in zip(*(torch.autograd.grad(out, leaves, weights) for out in (norm(x), y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
