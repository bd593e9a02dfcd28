"""float32 matrix products that go straight to OpenBLAS (``fedlib_lab/kernels/products.py``)."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlib_lab.kernels import products, switch
from fedlib_lab.kernels.products import matmul
from fedlib_lab.kernels.switch import VARIABLE

FORM = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],  # neither rows nor columns: copied
    "a part of wider rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


@pytest.fixture
def openblas(monkeypatch):
    """OpenBLAS multiplies in this thread, whoever made the CPU; skips where it cannot."""
    library = products._load()
    if library is None:
        pytest.skip("OpenBLAS cannot run on this machine")
    multiply, by_head = products._multipliers(library)
    calls = []
    monkeypatch.setattr(products, "_by_client", [lambda *a: calls.append(1) or multiply(*a)])
    monkeypatch.setattr(products, "_by_head", [by_head])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield calls
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("right", FORM)
@pytest.mark.parametrize("left", FORM)
@pytest.mark.parametrize(
    ("batch", "m", "d", "n"), [(1, 1, 1, 1), (3, 1, 5, 4), (2, 7, 1, 3), (4, 33, 17, 9), (2, 5, 70, 1)]
)
def test_a_product_of_every_shape_in_every_layout(openblas, batch, m, d, n, left, right):
    x, y, start = FORM[left](normal(batch, m, d)), FORM[right](normal(batch, d, n, seed=1)), normal(batch, m, n, seed=2)
    exact = x.double() @ y.double()
    torch.testing.assert_close(matmul(x, y), exact.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matmul(x, y, start.clone()), (exact + start).float(), rtol=1e-5, atol=1e-5)
    assert len(openblas) == 2


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


def test_a_product_worked_out_by_hand(openblas):
    x, y = torch.tensor([[[1.0, -2.0], [3.0, 4.0]]]), torch.tensor([[[5.0, 6.0], [-7.0, 8.0]]])
    # 1*5 + -2*-7 = 19, 1*6 + -2*8 = -10, 3*5 + 4*-7 = -13, 3*6 + 4*8 = 50; plus (1, -1)
    assert matmul(x, y).tolist() == [[[19, -10], [-13, 50]]]
    assert matmul(x, y, torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])).tolist() == [[[20, -11], [-12, 49]]]
    assert len(openblas) == 2


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
    out = matmul(x, y)
    assert out[0, 3].isnan().all() and out[1, 5].isinf().all()
    assert out.isfinite().sum() == out.numel() - 2 * 30


def test_what_does_not_suit_it_is_pytorchs(openblas):
    x, y = normal(2, 6, 4), normal(2, 4, 3)
    assert torch.equal(matmul(x.double(), y.double()), torch.bmm(x.double(), y.double()))
    assert matmul(x[:, :0], y).shape == (2, 0, 3)
    assert torch.equal(matmul(x[..., :0], y[:, :0]), torch.zeros(2, 6, 3))
    with FlopCounterMode(display=False) as counter:
        matmul(x, y)
    assert counter.get_total_flops() == 2 * 2 * 6 * 4 * 3
    torch.set_num_threads(2)
    assert torch.equal(matmul(x, y), torch.bmm(x, y))
    assert not openblas


def test_threads_multiply_at_the_same_time(openblas):
    x, y = normal(5, 100, 64), normal(5, 64, 100)
    expected = matmul(x, y)
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for out in pool.map(lambda _: matmul(x, y), range(200)):
            assert torch.equal(out, expected)


TRAIN = """
import json
from fedlib.engine.federation import build_federation
from fedlib.engine.rounds import run_rounds
from fedlib_lab.kernels import products
from tests.helpers.stored import ONE, short
products.cpu = lambda: {'family': 'AuthenticAMD'}
numbers = {}
for method, finetune in (("reefl", "full"), ("depthfl", "lora")):
    *_, last = run_rounds(build_federation(short(method, finetune=finetune, rounds=2)), ONE)
    numbers |= {f"{method} {n}": p.flatten()[:50].tolist() for n, p in last.server.params.items()}
print(json.dumps({"by": products.choose_products(), "numbers": numbers}))
"""


def test_training_ends_with_the_same_parameters_whoever_multiplies():
    def train(wanted: str) -> dict:
        environment = {**os.environ, VARIABLE: wanted, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TRAIN]
        return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    pytorchs = train("0")  # on every machine, so that the script does not go stale where OpenBLAS is not chosen
    assert pytorchs["by"] == "PyTorch" and {n.split()[0] for n in pytorchs["numbers"]} == {"reefl", "depthfl"}
    if products._load() is None:
        pytest.skip("OpenBLAS cannot run on this machine")
    ours = train("products,vit_block")
    assert ours["by"].startswith("OpenBLAS") and ours["numbers"].keys() == pytorchs["numbers"].keys()
    for name, numbers in pytorchs["numbers"].items():
        assert ours["numbers"][name] == pytest.approx(numbers, rel=1e-4, abs=2e-5), name


def test_the_cpu_is_named_with_family_and_instructions(monkeypatch, tmp_path):
    text = "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: some CPU\n\nvendor_id\t: other\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert products.cpu() == {"device": "some CPU", "family": "AuthenticAMD 26 2", "instructions": "AVX2"}
    assert products._load() is None  # its kernels need AVX-512
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "none")
    assert products.cpu()["device"] and products.cpu()["family"] == ""


def test_the_switch_names_kernels(monkeypatch):
    for value, on in ((None, 2), ("0", 0), ("", 0), ("products", 1), ("products, vit_block", 2)):
        monkeypatch.delenv(VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        assert sum(map(switch.is_on, switch.NAMES)) == on
    monkeypatch.setenv(VARIABLE, "product")
    with pytest.raises(ValueError, match="has no kernel 'product'; did you mean 'products'"):
        switch.is_on("products")


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


def test_openblas_multiplies_on_amds_and_who_multiplied_before_goes_on(openblas, monkeypatch):
    monkeypatch.setattr(products, "cpu", lambda: {"family": "AuthenticAMD 25 17"})
    products._choose.cache_clear()
    name = products.choose_products()
    assert name.startswith("OpenBLAS") and products.choose_products("PyTorch") == "PyTorch" and not products._by_client
    monkeypatch.setattr(products, "cpu", lambda: {"family": "GenuineIntel 6 143"})
    products._choose.cache_clear()
    assert products.choose_products(name) == name and products._by_client and products._by_head
    assert products.choose_products("OpenBLAS 0.0") == products.choose_products() == "PyTorch"
    products._choose.cache_clear()
