"""Where every parameter stands: its axes by name, its kind, its unit, its exit.

A layer names the axis of each dimension of its parameters (``axes``): ``residual`` and ``classes`` are the whole
model's, ``/ffn`` belongs to the unit or exit that holds the layer, which gives it its full name (``3/ffn``).
"""

from collections.abc import Mapping

from torch import nn

from ..core.slices import STEM, Axis, ParamInfo


def infos_of(model: nn.Module) -> dict[str, ParamInfo]:
    """Axes, kind, unit, exit and full shape of every parameter of ``model`` (an ``ExitModel``)."""
    out = {}
    for name, p in model.named_parameters():
        parts = name.split(".")
        owner, adapter = model, False
        for part, following in zip(parts[:-1], parts[1:], strict=True):
            owner = getattr(owner, part)
            adapter = adapter or (hasattr(owner, "base_layer") and following != "base_layer")
        exit = None
        if parts[0] == "head":
            kind, unit, exit = model.head.place(parts[1:])
        else:
            kind = "adapter" if adapter else "backbone"
            unit = int(parts[2]) if parts[1] == "blocks" else STEM
        where = f"exit{exit}" if exit is not None else "stem" if unit == STEM else str(unit)
        axes = getattr(owner, "axes", {}).get(parts[-1], (None,) * p.dim())
        axes = tuple(where + axis if axis is not None and axis[0] == "/" else axis for axis in axes)
        out[name] = ParamInfo(axes, kind, unit, tuple(p.shape), exit)
    return out


def axes_of(model: nn.Module, infos: Mapping[str, ParamInfo]) -> dict[str, Axis]:
    """Every named axis of ``model``; ``ValueError`` if two parameters disagree on its size."""
    sizes: dict[str, int] = {}
    for name, info in infos.items():
        for axis, size in zip(info.axes, info.shape, strict=True):
            if axis is not None and sizes.setdefault(axis, size) != size:
                raise ValueError(f"axis {axis!r} has {sizes[axis]} entries, but {size} in {name}")
    fixed = {"classes": Axis("classes", (sizes["classes"],), permutable=False)} if "classes" in sizes else {}
    return {axis: model.backbone.axis(axis, size) for axis, size in sizes.items()} | fixed
