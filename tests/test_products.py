"""OpenBLAS as the kernel of float32 matrix products on a CPU (``fedlib/layers/matmul.py``)."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlib.layers import matmul as products
from fedlib.layers.matmul import VARIABLE, choose_products

FORM = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],  # neither rows nor columns: copied
    "a part of wider rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


@pytest.fixture
def openblas(monkeypatch):
    """OpenBLAS multiplies in this thread; skips where PyTorch's own products are kept."""
    if not choose_products().startswith("OpenBLAS"):
        pytest.skip("PyTorch's own products are used on this machine")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls = []
    suit = products._suit
    monkeypatch.setattr(products, "_suit", lambda *a: calls.append(suit(*a)) or calls[-1])
    yield calls
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("right", FORM)
@pytest.mark.parametrize("left", FORM)
@pytest.mark.parametrize(
    ("batch", "m", "d", "n"), [(1, 1, 1, 1), (3, 1, 5, 4), (2, 7, 1, 3), (4, 33, 17, 9), (2, 5, 70, 1)]
)
def test_all_four_products_in_every_layout(openblas, batch, m, d, n, left, right):
    x, y, start = FORM[left](normal(batch, m, d)), FORM[right](normal(batch, d, n, seed=1)), normal(batch, 1, n, seed=2)
    exact = x.double() @ y.double()
    close = dict(rtol=1e-5, atol=1e-5)
    openblas.clear()
    torch.testing.assert_close(torch.bmm(x, y), exact.float(), **close)
    torch.testing.assert_close(torch.baddbmm(start, x, y), (exact + start).float(), **close)
    torch.testing.assert_close(torch.mm(x[0], y[0]), exact[0].float(), **close)
    torch.testing.assert_close(torch.addmm(start[0, 0], x[0], y[0]), (exact + start)[0].float(), **close)
    assert openblas == [True] * 4


@pytest.mark.parametrize("right", FORM)
@pytest.mark.parametrize("left", FORM)
@pytest.mark.parametrize("chosen", [True, False])
def test_matmul_in_every_layout(openblas, monkeypatch, chosen, left, right):
    x, y, start = FORM[left](normal(4, 33, 17)), FORM[right](normal(4, 17, 9, seed=1)), normal(4, 33, 9, seed=2)
    if not chosen:
        monkeypatch.setattr(products, "_by_client", [])
    for matrix in (y, y[0]):
        exact = x.double() @ matrix.double()
        torch.testing.assert_close(products.matmul(x, matrix), exact.float(), rtol=1e-5, atol=1e-5)
        to = start.clone()
        assert products.matmul(x, matrix, to).data_ptr() == to.data_ptr()
        torch.testing.assert_close(to, (start + exact).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4), (2, 5, 6)),
        ((2, 3, 4), (3, 4, 6)),
        ((2, 3, 4), (5, 6)),
        ((2, 3, 4), (2, 4, 6), (2, 4, 6)),
        ((2, 3, 4), (4, 6), (2, 3, 5)),
    ],
)
def test_matmul_refuses_what_does_not_fit(openblas, shapes):
    with pytest.raises(RuntimeError):
        products.matmul(*(torch.zeros(s) for s in shapes))


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize(("batch", "m", "d", "n"), [(1, 1, 1, 1), (3, 1, 5, 4), (2, 7, 1, 3), (4, 33, 17, 9)])
def test_products_added_in_place_in_every_layout(openblas, batch, m, d, n, form):
    x, y, start = normal(batch, m, d), normal(batch, d, n, seed=1), normal(batch, m, n, seed=2)
    exact = (start.double() + x.double() @ y.double()).float()
    for out, expected in ((start, exact), (start[0], exact[0])):
        out = FORM[form](out.clone())
        whole = out._base if out._base is not None else out
        around = whole.clone()
        done = out.baddbmm_(x, y) if out.dim() == 3 else out.addmm_(x[0], y[0])
        assert done is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        added = whole.clone()
        out.zero_()
        was = whole != 0  # what lies between the rows is as it was
        assert torch.equal(added[was], around[was])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.zeros(2, 1, 6).baddbmm_(x, y),
        lambda x, y: torch.zeros(2, 1, 6).expand(2, 3, 6).baddbmm_(x, y),
        lambda x, y: torch.zeros(1, 3, 6).expand(2, 3, 6).baddbmm_(x, y),
        lambda x, y: torch.zeros(2, 3, 5).baddbmm_(x, y),
        lambda x, y: torch.zeros(6).addmm_(x[0], y[0]),
        lambda x, y: torch.zeros(6).expand(3, 6).addmm_(x[0], y[0]),
    ],
)
def test_nothing_is_written_where_a_product_does_not_fit(openblas, call):
    with pytest.raises(RuntimeError):
        call(normal(2, 3, 4), normal(2, 4, 6))


def test_a_product_worked_out_by_hand(openblas):
    x, y = torch.tensor([[[1.0, -2.0], [3.0, 4.0]]]), torch.tensor([[[5.0, 6.0], [-7.0, 8.0]]])
    # 1*5 + -2*-7 = 19, 1*6 + -2*8 = -10, 3*5 + 4*-7 = -13, 3*6 + 4*8 = 50; plus (1, -1)
    assert torch.bmm(x, y).tolist() == [[[19, -10], [-13, 50]]]
    assert torch.baddbmm(torch.tensor([[[1.0, -1.0]]]), x, y).tolist() == [[[20, -11], [-12, 49]]]
    assert openblas == [True, True]


def test_nothing_of_the_memory_it_writes_to_is_kept(openblas):
    multiply, by_head = products._multipliers(products._load())
    for m, d, n in ((2, 3, 2), (64, 64, 256)):  # small matrices have kernels of their own
        x, y = normal(2, m, d), normal(2, d, n)
        out = multiply(x, y, torch.full((2, m, n), torch.nan), 0.0)
        torch.testing.assert_close(out, (x.double() @ y.double()).float(), rtol=1e-4, atol=1e-4)
        x, y, out = x.view(1, 2, m, d), y.view(1, 2, d, n), out.fill_(torch.nan).view(1, 2, m, n)
        torch.testing.assert_close(by_head(x, y, out, 0.5), x @ y / 2, rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_come_through(openblas):
    x, y = normal(2, 40, 20), normal(2, 20, 30)
    x[0, 3, 4], x[1, 5, 6] = torch.nan, torch.inf
    out = torch.bmm(x, y)
    assert out[0, 3].isnan().all() and out[1, 5].isinf().all()
    assert out.isfinite().sum() == out.numel() - 2 * 30


def test_what_does_not_suit_it_is_pytorchs(openblas):
    x, y = normal(2, 6, 4), normal(2, 4, 3)
    torch.testing.assert_close(torch.bmm(x.double(), y.double()), x.double() @ y.double())
    torch.testing.assert_close(torch.baddbmm(torch.ones(3), x, y, beta=2, alpha=-1), 2 - torch.matmul(x, y))
    assert torch.bmm(x[:, :0], y).shape == (2, 0, 3) and torch.equal(
        torch.bmm(x[..., :0], y[:, :0]), torch.zeros(2, 6, 3)
    )
    assert torch.equal(
        torch.mm(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64)), torch.full((2, 2), 3)
    )
    openblas.clear()
    torch.set_num_threads(2)
    torch.testing.assert_close(torch.bmm(x, y), torch.stack([a @ b for a, b in zip(x, y, strict=True)]))
    assert set(openblas) == {False}


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 5, 6)),
        lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 6)),
        lambda: torch.bmm(torch.ones(3, 4), torch.ones(2, 4, 6)),
        lambda: torch.mm(torch.ones(3, 4), torch.ones(5, 6)),
        lambda: torch.mm(torch.ones(3, 4), torch.ones(4, 6, dtype=torch.float64)),
        lambda: torch.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 6)),
        lambda: torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 6)),
    ],
)
def test_matrices_that_do_not_fit_are_refused(openblas, call):
    with pytest.raises(RuntimeError):
        call()


def test_gradients_and_counted_work_are_the_same(openblas):
    x, weight, bias = normal(3, 8, 6), normal(3, 5, 6, seed=1), normal(3, 1, 5, seed=2)

    def loss(x, weight, bias):
        return torch.baddbmm(bias, x, weight.mT).sin().sum()

    ours, exact = (
        [t.to(dtype).requires_grad_() for t in (x, weight, bias)] for dtype in (torch.float32, torch.float64)
    )
    with FlopCounterMode(display=False) as counter:
        gradients = torch.autograd.grad(loss(*ours), ours)
    for a, b in zip(gradients, torch.autograd.grad(loss(*exact), exact), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)
    assert counter.get_total_flops() == 3 * 2 * 3 * 8 * 6 * 5  # forward, and towards the input and the weight


def test_threads_multiply_at_the_same_time(openblas):
    x, y = normal(5, 100, 64), normal(5, 64, 100)
    expected = torch.bmm(x, y)
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for out in pool.map(lambda _: torch.bmm(x, y), range(200)):
            assert torch.equal(out, expected)


TRAIN = """
import json
from fedlib.engine.federation import build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.layers.matmul import choose_products
from stored import ONE, short
numbers = {}
for method, finetune in (("reefl", "full"), ("depthfl", "lora")):
    *_, last = run_rounds(build_federation(short(method, finetune=finetune, rounds=2)), ONE)
    numbers |= {f"{method} {n}": p.flatten()[:50].tolist() for n, p in last.server.params.items()}
print(json.dumps({"by": choose_products(), "numbers": numbers}))
"""


def test_training_ends_with_the_same_parameters_whoever_multiplies():
    def train(wanted: str) -> dict:
        environment = {
            **os.environ,
            VARIABLE: wanted,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}",
        }
        command = [sys.executable, "-c", TRAIN]
        return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    pytorchs = train("0")  # on every machine, so that the script does not go stale where OpenBLAS is not chosen
    assert pytorchs["by"] == "PyTorch" and {n.split()[0] for n in pytorchs["numbers"]} == {"reefl", "depthfl"}
    if not choose_products().startswith("OpenBLAS"):
        pytest.skip("PyTorch's own products are used on this machine")
    ours = train("1")
    assert ours["by"].startswith("OpenBLAS") and ours["numbers"].keys() == pytorchs["numbers"].keys()
    for name, numbers in pytorchs["numbers"].items():
        assert ours["numbers"][name] == pytest.approx(numbers, rel=1e-4, abs=2e-5), name


@pytest.mark.parametrize(
    ("vendor", "capability", "mkl", "expected"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
        ("GenuineIntel", "AVX512", True, False),  # MKL uses it there
    ],
)
def test_only_where_mkl_leaves_avx512_unused(monkeypatch, tmp_path, vendor, capability, mkl, expected):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nmodel name\t: some CPU\n")
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert products._leaves_avx512_unused() is expected


def test_without_the_package_or_its_library_pytorch_multiplies(monkeypatch, tmp_path):
    monkeypatch.setattr(products.importlib.util, "find_spec", lambda name: None)
    assert products._load() is None
    elsewhere = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(products.importlib.util, "find_spec", lambda name: elsewhere)
    assert products._load() is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libscipy_openblas.so").write_bytes(b"not a library")
    assert products._load() is None


def test_loading_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    before = dict(os.environ)
    products._load()
    assert dict(os.environ) == before
