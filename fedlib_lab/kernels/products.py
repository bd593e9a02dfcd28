"""float32 matrix products that go straight to a BLAS, without their way through PyTorch's dispatcher.

A cohort's products are many and small. On AMD's CPUs OpenBLAS is faster at them than the library that PyTorch comes
with (``benchmarks/README.md``), and multiplies, as long as the calling thread has one intra-op thread, as all workers
do. Elsewhere, and for all that does not suit it, PyTorch multiplies. The numbers are the same up to float rounding.

Read next: ``engine/executors.py``, whose workers this is for; ``layers/linear.py``, whose products these are.
"""

import ctypes
import importlib.util
import os
import platform
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .switch import is_on

MOST = 2**31 - 1  # OpenBLAS counts in 32 bits
CPU_INFO = Path("/proc/cpuinfo")
ROWS, PLAIN, TRANSPOSED = 101, 111, 112  # of the CBLAS interface

_by_client: list[Callable] = []  # what multiplies (K, M, D) and (K, D, N), once OpenBLAS was chosen
_by_head: list[Callable] = []  # what multiplies the heads of an attention
_lock = threading.Lock()


def choose_products(stored: str = "") -> str:
    """Let OpenBLAS multiply in this process, on a CPU of AMD's. Returns who multiplies, for provenance.

    ``stored`` is what this returned for the first rounds of a run that goes on: it goes on with the same, if it can.
    """
    with _lock:
        name, *chosen = _choose(stored)
        _by_client[:], _by_head[:] = chosen
        return name


@cache
def _choose(stored: str) -> tuple[str, list[Callable], list[Callable]]:
    library = _load() if is_on("products") and torch.backends.mkl.is_available() and stored != "PyTorch" else None
    if library is None:
        return "PyTorch", [], []
    library.scipy_openblas_get_config.restype = ctypes.c_char_p
    name = " ".join(library.scipy_openblas_get_config().decode().split()[:2])
    if stored != name and "AMD" not in cpu()["family"]:
        return "PyTorch", [], []
    multiply, by_head = _multipliers(library)
    return name, [multiply], [by_head]


def cpu() -> dict[str, str]:
    """Describe this CPU: ``device``, what it calls itself (or its architecture), ``family`` and ``instructions``."""
    try:
        pairs = (line.partition(":") for line in CPU_INFO.read_text().split("\n\n")[0].splitlines())
        said = {key.strip(): value.strip() for key, _, value in pairs}
    except OSError:
        said = {}
    named = [said.get(k, "") for k in ("vendor_id", "cpu family", "model")]
    device = said.get("model name") or platform.processor() or platform.machine()
    family, instructions = " ".join(filter(None, named)), torch.backends.cpu.get_cpu_capability()
    return {"device": device, "family": family, "instructions": instructions}


def _load() -> ctypes.CDLL | None:
    """Load OpenBLAS with its AVX-512 kernels.

    None where they cannot run, or it is not installed or cannot be loaded.
    """
    may = torch.backends.cpu.get_cpu_capability() == "AVX512"
    package = importlib.util.find_spec("scipy_openblas32") if may else None  # not imported: that would load it now
    if package is None:
        return None
    # Read while it loads: OpenBLAS takes the newest AMD CPUs for old ones; and it needs no threads of its own.
    wanted = {"OPENBLAS_CORETYPE": "SkylakeX", "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        return ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libscipy_openblas.so"))
    except OSError:
        return None
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def matmul(x: torch.Tensor, y: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x (K, M, D) by y (D, N) or (K, D, N) -> (K, M, N), added to ``to`` in place if given. Not for autograd.

    The numbers of ``bmm`` and ``mm``, without their way through PyTorch's dispatcher. ``RuntimeError`` if the shapes do
    not fit.
    """
    together = y.dim() == 2  # one matrix for all: their rows are one matrix too
    shape = (*x.shape[:2], y.shape[-1])
    if together:
        x, y = x.reshape(1, -1, x.shape[-1]), y.unsqueeze(0)
    out = to if to is None else to.view(x.shape[0], -1, shape[-1])
    fits = x.shape[0] == y.shape[0] and (out is None or (out.shape[1] == x.shape[1] and _is_by_rows(out)))
    if _by_client and fits and not is_in_torch_dispatch_mode() and _is_suitable(x, y, out):
        beta = 0.0 if out is None else 1.0
        out = x.new_empty(*x.shape[:2], shape[-1]) if out is None else out
        return _by_client[0](x, y, out, beta).view(shape)
    if together:
        return torch.mm(x[0], y[0]).view(shape) if out is None else out[0].addmm_(x[0], y[0]).view(shape)
    return torch.bmm(x, y) if out is None else out.baddbmm_(x, y)


def heads_multiplier() -> Callable[..., torch.Tensor]:
    """Return ``multiply(x, y, out, scale=1)``: out[n, h] becomes scale * x[n, h] @ y[n, h], for all n and h.

    x (N, heads, M, D), y (N, heads, D, L), out (N, heads, M, L), float32 and not empty, may lie in memory in any order
    that keeps the entries of a row (of x and y: or of a column) side by side. OpenBLAS copies nothing; PyTorch
    multiplies where it was not chosen, or where something listens to the operations (a counter of FLOPs).
    """
    listening = is_in_torch_dispatch_mode()
    return _by_head[0] if _by_head and not listening and torch.get_num_threads() == 1 else _multiply_heads


def _multiply_heads(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    out.copy_(torch.matmul(x, y))
    return out if scale == 1 else out.mul_(scale)


def _is_suitable(x: torch.Tensor, y: torch.Tensor, start: torch.Tensor | None = None) -> bool:
    """Return whether these matrices suit OpenBLAS, and this is one of the threads it is for."""
    inner, columns = x.shape[-1], y.shape[-1]
    sizes = (x.numel(), y.numel(), x.numel() // max(inner, 1) * columns)
    plain = x.device.type == "cpu" and x.dtype is y.dtype is torch.float32 and inner == y.shape[-2]
    plain = plain and (start is None or start.dtype is torch.float32)
    return plain and 0 < min(sizes) <= max(sizes) <= MOST and torch.get_num_threads() == 1


def _is_by_rows(out: torch.Tensor) -> bool:
    """Return whether matrices (batch, rows, columns) can be written in place: rows in one piece, none over another."""
    (batch, rows, columns), (to_next, row, column) = out.shape, out.stride()
    apart = (row >= columns or rows == 1) and (to_next >= rows * max(row, columns) or batch == 1)
    return column == 1 and apart and max(to_next, row) <= MOST


def _multipliers(library: ctypes.CDLL) -> tuple[Callable, Callable]:
    """Build ``multiply(x, y, out, beta)``, out (K, M, N) = x (K, M, D) @ y (K, D, N) + beta * out; and one by heads.

    The entries of a row of ``out`` must lie side by side.
    """
    gemm = library.scipy_cblas_sgemm_batch_strided
    integer, number, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    matrix = (pointer, integer, integer)  # where, from row to row, from matrix to matrix
    gemm.argtypes, gemm.restype = [*[integer] * 6, number, *matrix, *matrix, number, *matrix, integer], None

    def multiply(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, beta: float) -> torch.Tensor:
        multiply_heads(_by_lines(x).unsqueeze(1), _by_lines(y).unsqueeze(1), out.unsqueeze(1), 1.0, beta)
        return out

    def multiply_heads(
        x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, scale: float = 1.0, beta: float = 0.0
    ) -> torch.Tensor:
        (n, heads, rows, inner), columns = x.shape, y.shape[3]
        (x_order, x_row, x_next, x_head), (y_order, y_row, y_next, y_head) = _layout(x), _layout(y)
        _, out_row, out_next, out_head = _layout(out)
        x_at, y_at, out_at = x.data_ptr(), y.data_ptr(), out.data_ptr()
        for _ in range(heads):
            gemm(
                ROWS, x_order, y_order, rows, columns, inner, scale, x_at, x_row, x_next, y_at, y_row, y_next,
                beta, out_at, out_row, out_next, n,
            )  # fmt: skip
            x_at, y_at, out_at = x_at + x_head, y_at + y_head, out_at + out_head
        return out

    return multiply, multiply_heads


def _layout(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return order, distance of rows (or columns), distance in n, bytes between heads of (N, heads, rows, columns)."""
    (_, _, rows, columns), (to_next, to_head, row, column) = x.shape, x.stride()
    if column == 1:
        return PLAIN, max(row, columns), to_next, 4 * to_head  # of a single row the distance says nothing
    return TRANSPOSED, max(column, rows), to_next, 4 * to_head


def _by_lines(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` (batch, rows, columns) as it is if its rows or its columns lie in one piece, one after the other."""
    (_, rows, columns), (to_next, row, column) = x.shape, x.stride()
    in_lines = column == 1 and row >= columns or row == 1 and column >= rows
    return x if in_lines and max(to_next, row, column) <= MOST else x.contiguous()
