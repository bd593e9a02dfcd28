"""Where every parameter stands: its axes by name, its kind, its unit, its exit.

A layer names the axis of each dimension of its parameters (``axes``): ``residual`` and ``classes`` are the whole
model's, ``/ffn`` belongs to the unit or exit that holds the layer, which gives it its full name (``3/ffn``).
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..core.slices import RANK, STEM, Axis, ParamInfo
from ..layers.norms import statistics


def slots_of(model: nn.Module) -> dict[str, tuple[dict, str]]:
    """Return by name where each tensor lies that a client may own: parameters and batch norm's statistics."""
    out = {}
    for path, module in model.named_modules():
        named = getattr(module, "axes", {})
        kept = [leaf for leaf, x in module._buffers.items() if leaf in named and x is not None]
        for own, leaves in ((module._parameters, list(module._parameters)), (module._buffers, kept)):
            out |= {f"{path}.{leaf}" if path else leaf: (own, leaf) for leaf in leaves}
    return out


def infos_of(model: nn.Module) -> dict[str, ParamInfo]:
    """Return axes, kind, unit, exit and full shape of every parameter and statistic of ``model`` (an ``ExitModel``)."""
    return {n: _info(model, n, p) for n, p in (dict(model.named_parameters()) | statistics(model)).items()}


def _info(model: nn.Module, name: str, p: torch.Tensor) -> ParamInfo:
    parts = name.split(".")
    owner, adapter = model, False
    for part, following in zip(parts[:-1], parts[1:], strict=True):
        owner = getattr(owner, part)
        adapter = adapter or (hasattr(owner, "base_layer") and following != "base_layer")
    exit = None
    if parts[0] == "head":
        kind, unit, exit = model.head.place(parts[1:])
    else:
        kind, unit = "adapter" if adapter else "backbone", int(parts[2]) if parts[1] == "blocks" else STEM
    of, kind = kind, "statistic" if parts[-1] in getattr(owner, "_buffers", {}) else kind
    where = f"exit{exit}" if exit is not None else "stem" if unit == STEM else str(unit)
    axes = getattr(owner, "axes", {}).get(parts[-1], (None,) * p.dim())
    axes = tuple(where + axis if axis is not None and axis[0] == "/" else axis for axis in axes)
    return ParamInfo(axes, kind, unit, tuple(p.shape), exit, of)


def axes_of(model: nn.Module, infos: Mapping[str, ParamInfo]) -> dict[str, Axis]:
    """Return every named axis of ``model``; ``ValueError`` if two parameters disagree on its size."""
    sizes: dict[str, int] = {}
    for name, info in infos.items():
        for axis, size in zip(info.axes, info.shape, strict=True):
            if axis is not None and sizes.setdefault(axis, size) != size:
                raise ValueError(f"axis {axis!r} has {sizes[axis]} entries, but {size} in {name}")
    fixed = {x: Axis(x, (n,), permutable=False) for x, n in sizes.items() if x == "classes" or x.endswith(RANK)}
    return {axis: model.backbone.axis(axis, size) for axis, size in sizes.items()} | fixed
