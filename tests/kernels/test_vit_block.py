"""A block's backward written out against the same block as modules under PyTorch's autograd, and its attention by hand."""

import math
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

from fedlib import Execution, Experiment
from fedlib.engine.federation import build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.layers.attention import attend
from fedlib.layers.linear import init_normal_
from fedlib.methods import METHODS
from fedlib.models.adapters import apply_finetune_
from fedlib.models.exits import Classifiers
from fedlib.models.vit import Block, ViT, ViTSpec
from fedlib_lab.kernels import swap_in_, switch, vit_block
from fedlib_lab.kernels.switch import VARIABLE
from fedlib_lab.kernels.vit_block import attend_short, attend_short_backward
from tests.helpers.granted import few_blocks
from tests.system.test_gpu import apart, products, rounds, tiny

SMALL = ViTSpec(img_size=8, patch_size=4, dim=12, depth=1, heads=2, ffn_dim=20)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_block(mode="full", config=SMALL, **options) -> Block:
    """A block with random weights, norms included, and the adapters of ``mode``."""
    model = ViT(config)
    apply_finetune_(model, Classifiers(config.dim, 3, (0,)), mode, options, seed=1)
    block = swap_in_(model).blocks[0]
    init_normal_(block, generator(), std=0.3)
    with torch.no_grad():
        for p in block.parameters():
            if p.dim() == 1:
                p += torch.randn(p.shape, generator=generator(len(p))) / 3
    return block


def stack(block: Block, clients: int, names: str) -> None:
    """Give each client its own of the parameters whose name contains one of ``names``."""
    for path, module in block.named_modules():
        for leaf, p in list(module._parameters.items()):
            if p is not None and any(n in f"{path}.{leaf}" for n in names.split()):
                noise = torch.randn(clients, *p.shape, generator=generator(len(path)))
                module._parameters[leaf] = (p.detach() + noise / 5).requires_grad_(p.requires_grad)


def results(block, z, weights, first=None):
    """The output, and the gradients of z and of every parameter that has one."""
    leaves = [x for x in (z, *(p for m in block.modules() for p in m._parameters.values() if p is not None))]
    out = block(z, first)
    return out, torch.autograd.grad(out, [x for x in leaves if x.requires_grad], weights)


def assert_near(a, b):
    """Equal up to float32's rounding of the largest entry."""
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))


LORA = {"r": 2, "lora_alpha": 6, "target_modules": ["q", "v"]}
CASES = {
    "each client's own": ("full", {}, "."),
    "one for all": ("full", {}, ""),
    "weights only": ("full", {}, "weight"),
    "biases only": ("full", {}, "bias"),
    "lora": ("lora", LORA, "lora"),
    "lora for all": ("lora", LORA, ""),
    "lora everywhere": ("lora", LORA | {"target_modules": ["q", "k", "v", "proj", "fc1", "fc2"]}, "lora"),
    "lora on each client's own": ("lora", LORA, "."),
    "frozen": ("frozen", {}, ""),
}


@pytest.mark.parametrize("first", [None, 1, 2])
@pytest.mark.parametrize("alive", [3, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_written_out_equals_modules(case, alive, first, multiplying, monkeypatch):
    mode, options, own = CASES[case]
    block = make_block(mode, **options)
    if own:
        stack(block, 3, own)
    z = torch.randn(3, 4, 5, 12, generator=generator(7))[:alive].requires_grad_()
    weights = torch.randn(z[..., :first, :].shape, generator=generator(8))
    called = []
    apply = vit_block._Block.apply
    monkeypatch.setattr(vit_block._Block, "apply", lambda *a: called.append(1) or apply(*a))
    out, grads = results(block, z, weights, first)
    # a norm whose weight and bias are not both each client's own runs as modules
    assert bool(called) == (case not in ("weights only", "biases only"))
    monkeypatch.setenv(VARIABLE, "0")
    expected, wanted = results(block, z, weights, first)
    for a, b in zip((out, *grads), (expected, *wanted), strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("mode", ["frozen", "lora", "full"])
def test_one_sequence_of_one_client_leaves_the_parameters_as_they_are(mode, first, multiplying, monkeypatch):
    """A bias that need not be repeated for other rows is still not the memory that is written to."""
    block = make_block(mode, **(LORA if mode == "lora" else {}))
    before = {n: p.clone() for n, p in block.named_parameters()}
    z = torch.randn(1, 1, 5, 12, generator=generator(7)).requires_grad_()
    out, _ = results(block, z, torch.ones_like(z[..., :first, :]), first)
    for n, p in block.named_parameters():
        assert torch.equal(p, before[n]), n
    monkeypatch.setenv(VARIABLE, "0")
    assert_near(out, results(block, z, torch.ones_like(z[..., :first, :]), first)[0])


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_low_rank_gradients_through_either_product(rank, multiplying, monkeypatch):
    """A rank of 7 goes through the gradient of W (12 * 12 < 2 * 7 * 24), lower ones do not."""
    block = make_block("lora", **LORA | {"r": rank})
    stack(block, 3, "lora")
    z, weights = (torch.randn(3, 4, 5, 12, generator=generator(i)) for i in range(2))
    ours = results(block, z.requires_grad_(), weights)
    monkeypatch.setenv(VARIABLE, "0")
    expected = results(block, z, weights)
    for a, b in zip((ours[0], *ours[1]), (expected[0], *expected[1]), strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("own", ["mlp.fc1.weight attn.proj.bias", "attn.q.bias attn.k.bias attn.v.bias", "norm"])
def test_some_tensors_may_be_each_clients_own(own, multiplying, monkeypatch):
    block = make_block()
    stack(block, 3, own)
    z, weights = (torch.randn(3, 4, 5, 12, generator=generator(i)) for i in range(2))
    ours = results(block, z, weights)  # z is data: nothing is trained before
    monkeypatch.setenv(VARIABLE, "0")
    expected = results(block, z, weights)
    for a, b in zip((ours[0], *ours[1]), (expected[0], *expected[1]), strict=True):
        assert_near(a, b)


def test_gradients_equal_differences_of_the_loss(multiplying):
    """d/de of sum(out * weights) at parameters moved by e along a random direction."""
    block = make_block()
    stack(block, 2, ".")
    z, weights = (torch.randn(2, 2, 5, 12, generator=generator(i)) for i in range(2))
    leaves = [(m, leaf) for m in block.modules() for leaf, p in m._parameters.items() if p is not None]
    at = [m._parameters[leaf].detach() for m, leaf in leaves]
    along = [torch.randn(p.shape, generator=generator(i)) for i, p in enumerate(at)]

    def loss(e):
        for (m, leaf), p, d in zip(leaves, at, along, strict=True):
            m._parameters[leaf] = (p + e * d).requires_grad_()
        return (block(z).double() * weights).sum()

    slope = ((loss(1e-3) - loss(-1e-3)) / 2e-3).item()
    value = loss(0)
    grads = torch.autograd.grad(value, [m._parameters[leaf] for m, leaf in leaves])
    expected = sum((g.double() * d).sum() for g, d in zip(grads, along, strict=True)).item()
    assert slope == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    "case",
    [
        "pa",
        "sa",
        "ssf",
        "ia3",
        "layer scale",
        "lora dropout",
        "autocast",
        "no gradient",
        "inference",
        "a long sequence",
        "a counter",
    ],
)
def test_anything_else_runs_as_modules(case, monkeypatch):
    monkeypatch.setattr(vit_block._Block, "apply", lambda *_: pytest.fail("written out"))
    config = ViTSpec(8, 4, 12, 1, 2, 20, layer_scale=case == "layer scale")
    mode, options = (case, {}) if case in ("pa", "sa", "ssf", "ia3") else ("full", {})
    if case == "lora dropout":
        mode, options = "lora", LORA | {"lora_dropout": 0.5}
    block = make_block(mode, config, **options)
    z = torch.randn(2, 3, 13 if case == "a long sequence" else 5, 12, generator=generator()).requires_grad_()
    if case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            block(z)
    elif case in ("no gradient", "inference"):
        with torch.no_grad() if case == "no gradient" else torch.inference_mode():
            block(z)
    elif case == "a counter":
        with FlopCounterMode(display=False) as counter:
            block(z)
        assert counter.get_total_flops() > 0
    else:
        block(z)


@pytest.mark.parametrize("name", ["norm1", "attn", "attn.q", "attn.proj", "mlp", "mlp.fc2"])
def test_hooks_of_a_blocks_modules_are_called(name):
    block, seen = make_block(), []
    module = block.get_submodule(name)
    z = torch.randn(2, 3, 5, 12, generator=generator()).requires_grad_()
    handles = [module.register_forward_hook(lambda *_: seen.append("forward"))]
    handles.append(module.register_full_backward_hook(lambda *_: seen.append("backward")))
    block(z).sum().backward()
    assert seen == ["forward", "backward"]
    for handle in handles:
        handle.remove()
    assert "_Block" in block(z).grad_fn.name()


@pytest.mark.parametrize("method, finetune", [("reefl", "lora"), ("depthfl", "full"), ("scalefl_vit", "full")])
def test_training_gives_the_same_numbers_either_way(method, finetune, monkeypatch):
    e = Experiment(
        method=method, finetune=finetune, finetune_options={"r": 4} if finetune == "lora" else {}, pretrained=False,
        num_train=200, num_test=50, num_clients=10, clients_per_round=6, rounds=2, partition="iid",
    )  # fmt: skip
    ours = list(run_rounds(build_federation(e)))
    monkeypatch.setenv(VARIABLE, "0")
    wanted = list(run_rounds(build_federation(e), Execution(executor="threads")))
    for a, b in zip(ours, wanted, strict=True):
        for name, p in a.server.params.items():
            torch.testing.assert_close(p, b.server.params[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted, calls", [("0", 0), ("products", 0), ("vit_block", 1), (None, 1)])
def test_a_block_can_be_switched_off(monkeypatch, wanted, calls):
    block, seen = swap_in_(Block(ViTSpec(dim=8, heads=2, ffn_dim=16))), []
    if wanted is not None:
        monkeypatch.setenv(VARIABLE, wanted)
    monkeypatch.setattr(vit_block._Block, "apply", lambda op, z, *t: seen.append(1) or z)
    block(torch.ones(1, 2, 3, 8, requires_grad=True))
    assert len(seen) == calls


# --- attention of short sequences -------------------------------------------------------------------------------------


class Short(torch.autograd.Function):
    """A step of autograd, as one block of a ViT has it."""

    @staticmethod
    def forward(ctx, heads, scale, *qkv):
        qkv = tuple(x.contiguous() for x in qkv)
        out, attention = attend_short(heads, qkv, scale)
        ctx.save_for_backward(attention, *qkv)
        ctx.options = heads, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (attention, *qkv), (heads, scale) = ctx.saved_tensors, ctx.options
        return None, None, *attend_short_backward(heads, qkv, attention, grad.contiguous(), scale)


def attend_by_kernel(heads, q, k, v, scale=None):
    return Short.apply(heads, scale, q, k, v)


@pytest.mark.parametrize(
    ("queries", "tokens", "heads", "scale"),
    [
        (7, 7, 3, None),
        (1, 7, 3, None),
        (2, 5, 2, 0.3),
        (3, 1, 2, 0),
        (1, 1, 1, None),
        (2, 4, 24, 0.5),
        (40, 40, 3, None),
        (16, 16, 3, None),
        (3, 20, 12, 0.5),
        (1, 13, 12, None),
    ],
)
def test_attention_written_out_equals_the_fused_kernel(queries, tokens, heads, scale, multiplying):
    """One query or as many as tokens, one key, narrow heads."""
    shapes = [(2, 3, queries, 24), (2, 3, tokens, 24), (2, 3, tokens, 24)]
    ours, fused = (
        [torch.randn(s, generator=generator(i)).requires_grad_() for i, s in enumerate(shapes)] for _ in "ab"
    )
    weights = torch.randn(shapes[0], generator=generator(9))
    by_head = [x.view(6, -1, heads, 24 // heads).transpose(1, 2) for x in fused]
    expected = (
        torch.nn.functional.scaled_dot_product_attention(*by_head, scale=scale).transpose(1, 2).reshape(shapes[0])
    )
    out = attend_by_kernel(heads, *ours, scale=scale)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, fused, weights)
    for a, b in zip(torch.autograd.grad(out, ours, weights), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_of_one_tensor_equals_that_of_three(heads, multiplying):
    qkv, grad = torch.randn(2, 3, 5, 24, generator=generator(0)), torch.randn(2, 3, 5, 8, generator=generator(1))
    parts = [x.contiguous() for x in qkv.chunk(3, -1)]
    (together, attention), (apart, _) = attend_short(heads, (qkv,)), attend_short(heads, parts)
    torch.testing.assert_close(together, apart)
    (one,), three = (attend_short_backward(heads, x, attention, grad) for x in ((qkv,), parts))
    torch.testing.assert_close(one, torch.cat(three, -1))


@pytest.mark.parametrize("tokens", [5, 20])
def test_attention_to_one_of_many_does_not_overflow(tokens, multiplying):
    """Scores of up to 4e6: each query attends to the key that points its way, and no gradient is left."""
    q = 1000 * torch.eye(4).view(1, 1, 4, 4)
    k = torch.cat((4 * q, torch.zeros(1, 1, tokens - 4, 4)), 2)
    v = torch.randn(1, 1, tokens, 4, generator=generator())
    q, k = q.requires_grad_(), k.requires_grad_()
    out = attend_by_kernel(1, q, k, v, scale=1.0)
    torch.testing.assert_close(out, v[:, :, :4])
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("queries", [5, 40])
def test_attention_under_autocast_is_that_of_rounded_inputs_in_float32(queries, multiplying):
    shapes = [(2, 3, queries, 24), (2, 3, 20, 24), (2, 3, 20, 24)]
    rounded = [torch.randn(s, generator=generator(i)).bfloat16() for i, s in enumerate(shapes)]
    ours, exact = ([x.to(dtype).requires_grad_() for x in rounded] for dtype in (torch.bfloat16, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(3, *ours)
    expected = attend(3, *exact)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected.bfloat16())
    grad = torch.randn(shapes[0], generator=generator(9)).bfloat16()
    wanted = torch.autograd.grad(expected, exact, grad.float())
    for a, b in zip(torch.autograd.grad(out, ours, grad), wanted, strict=True):
        assert torch.equal(a, b.bfloat16())


def test_attention_by_hand(multiplying):
    """Two tokens, one head of width 1, q = (1, 0), k = (ln 3, 0), v = (8, 4), scale 1.

    Scores of the first query (ln 3, 0): weights 3/4 and 1/4, output 7. Of the second (0, 0): 1/2 each, output 6.
    d out_1 / d q_1 = sum_j a_j (v_j - out_1) k_j = 3/4 * (8 - 7) * ln 3; d (out_1 + out_2) / d v = (5/4, 3/4).
    """
    q, k, v = (torch.tensor(x).view(1, 1, 2, 1).requires_grad_() for x in ([1.0, 0], [math.log(3), 0], [8.0, 4]))
    out = attend_by_kernel(1, q, k, v)
    assert out.flatten().tolist() == pytest.approx([7, 6])
    by_q, by_v = torch.autograd.grad(out.sum(), (q, v))
    assert by_q.flatten()[0].item() == pytest.approx(0.75 * math.log(3))
    assert by_v.flatten().tolist() == pytest.approx([1.25, 0.75])


def test_attention_is_counted_by_who_counts(multiplying):
    """Two products of 2 * 5 * 5 * 4 FLOPs for each of 6 examples and 2 heads, twice that backwards."""
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator(i)).requires_grad_() for i in range(3))
    with FlopCounterMode(display=False) as counter:
        attend_by_kernel(2, q, k, v).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 5 * 5 * 4) * 6 * 2


# --- compiled by PyTorch: the numbers of blocks that are not; other cohorts compile nothing anew ----------------------


@pytest.fixture
def traced(monkeypatch):
    """What is compiled is traced, and runs by PyTorch's own operations: a compiler takes long."""
    if not switch.COMPILES:
        pytest.skip(f"PyTorch {torch.__version__} compiles blocks to other gradients")
    monkeypatch.setenv(VARIABLE, "compiled")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    vit_block.compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield counters
    vit_block.compiled.cache_clear()


@pytest.mark.parametrize(
    "method", [m if m == "cafedistill" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
@pytest.mark.filterwarnings("ignore")
def test_every_method_has_the_numbers_of_blocks_that_are_not_compiled(method, traced, monkeypatch):
    e = tiny(method, backbone=few_blocks(monkeypatch, method))
    there, start = rounds(e, "cpu")
    assert traced["stats"]["unique_graphs"] > 1 and not traced["graph_break"]
    monkeypatch.setenv(VARIABLE, "0")
    here, _ = rounds(e, "cpu")
    whole = products if method == "flexlora" else dict
    # darkdistill and feddf distil at the server by Adam, which amplifies rounding
    limit = 1e-3 if method in ("feddf", "darkdistill") else 1e-4
    assert apart(there[-1].server, here[-1].server, start, whole) < limit


@pytest.mark.filterwarnings("ignore")
def test_cohorts_of_other_sizes_compile_nothing_anew(traced, monkeypatch):
    """In forty rounds there are 18 kinds of input and 11 graphs; as many as inputs where sizes are written in."""
    shapes = set()

    def forward(self, z, first=None, of=vit_block.WrittenBlock.forward):
        shapes.add((z.shape, first, z.requires_grad, torch.is_grad_enabled()))
        return of(self, z, first)

    monkeypatch.setattr(vit_block.WrittenBlock, "forward", forward)
    e = tiny("depthfl", backbone=few_blocks(monkeypatch, "depthfl"), num_clients=20, num_train=120, evaluate_every=0)
    rounds(e.replace(clients_per_round=9, rounds=6), "cpu")
    assert traced["stats"]["unique_graphs"] < len(shapes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_of_pytorch_has_the_same_numbers(traced, monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile.func)
    e = tiny("reefl", backbone=few_blocks(monkeypatch, "reefl"), finetune="lora", rounds=1)
    there, start = rounds(e, "cpu")
    monkeypatch.setenv(VARIABLE, "0")
    here, _ = rounds(e, "cpu")
    assert apart(there[-1].server, here[-1].server, start) < 1e-4


def test_only_where_it_is_asked_for_and_nothing_counts_operations(traced, monkeypatch):
    spec, z = ViTSpec(dim=8, heads=2, ffn_dim=16), torch.randn(1, 2, 5, 8)
    block, plain = swap_in_(Block(spec)), Block(spec)
    with FlopCounterMode(display=False) as one, torch.no_grad():
        block(z)
    with FlopCounterMode(display=False) as other, torch.no_grad():
        plain(z)
    assert one.get_total_flops() == other.get_total_flops() > 0 == traced["stats"]["unique_graphs"]
    monkeypatch.delenv(VARIABLE)
    swap_in_(Block(spec))(z)
    assert not traced["stats"]["unique_graphs"]
