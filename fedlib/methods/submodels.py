"""Random sub-models of a transformer: which entries are salient, how wide each layer is, what is kept of every axis.

The permutations that preserve a transformer's function are by group: ``qk`` (features of a head's queries and keys),
``vo`` (of its values), ``ffn``, ``heads`` (whole ones), ``residual`` (one for the whole net). Ranking an axis by
salience and keeping its first entries is a ranked slice. Read next: ``sliced/raffm.py``.

Clients of unequal widths do not stack: they train one by one, two processes 1.70 times as fast as one (few-shot
CIFAR-10, ``deit_micro``). Feed-forward layers could be padded to the widest by zero rows and columns, exactly. Where
all other widths are equal, ten ``deit_micro`` clients are then 1.4 times faster, as they stack, and four of MiniLM 1.1
times slower, as they compute zeros. By default they are not: a head's scores are divided by the root of its own width
and norms are over a client's own stream, which no zeros make equal. So nothing is padded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ..core.slices import Axis, Indices, ParamInfo
from .widths import CUTTABLE

ATTENTION = ("qk", "vo")


def place_of(axis: str) -> tuple[str, str]:
    """(layer, group) of an axis: ``3/qk`` is ``qk`` of ``3``, ``residual`` that of the whole net."""
    layer, _, group = axis.rpartition("/")
    return layer, group


def salience(
    tensors: Mapping[str, torch.Tensor], infos: Mapping[str, ParamInfo], axes: Mapping[str, Axis], groups: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Eqs. 1 and 5: of every entry of the axes of ``groups`` the L1 norm of its weights, mean over the matrices on it.

    A head's, under ``<layer>/heads``, is the mean over its features. Biases, norms, adapters and exits do not count.
    """
    wanted = {n for n in axes if place_of(n)[1] in groups or ("heads" in groups and place_of(n)[1] in ATTENTION)}
    norms: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
    for name, tensor in tensors.items():
        info = infos[name]
        if info.kind != "backbone" or tensor.dim() < 2:
            continue
        for dim, axis in enumerate(info.axes):
            if axis in wanted:
                others = tuple(d for d in range(tensor.dim()) if d != dim)
                norms[axis].append(torch.linalg.vector_norm(tensor.double(), 1, others))
    means = {axis: torch.stack(found).mean(0) for axis, found in norms.items() if found}
    heads: dict[str, list[torch.Tensor]] = {}
    for name, scores in means.items():
        layer, group = place_of(name)
        if group in ATTENTION:
            heads.setdefault(f"{layer}/heads", []).append(scores.view(len(axes[name].segments), -1).mean(1))
    kept = {name: scores for name, scores in means.items() if place_of(name)[1] in groups}
    return kept | ({name: torch.stack(x).mean(0) for name, x in heads.items()} if "heads" in groups else {})


def kind_of(axis: str) -> tuple[str, str] | None:
    """(layer, kind of width) of an axis; queries, keys and values of a layer share one. None: it is never cut."""
    layer, group = place_of(axis)
    kind = "attention" if group in ATTENTION else group
    return (layer, kind) if kind in ("attention", "ffn", "residual") else None


Widths = Mapping[tuple[str, str], float]  # by (layer, kind): the share of its entries that is kept


@dataclass(frozen=True)
class Space:
    """All sub-models of a net: for every layer a width of its ``kinds``, one for the whole net's residual stream."""

    axes: Mapping[str, Axis]
    kinds: Mapping[str, Sequence[float]]  # attention, ffn, residual -> widths to draw from
    whole_heads: bool = False  # narrower attention has fewer heads, not narrower ones

    @property
    def places(self) -> list[tuple[str, str]]:
        """(layer, kind) of every width."""
        return list(dict.fromkeys(place for name in self.axes if (place := kind_of(name))))

    def narrowest(self) -> Widths:
        return {place: min(self.kinds[place[1]]) for place in self.places}

    def draw(self, rng: np.random.Generator) -> Widths:
        """Every width drawn on its own."""
        return {place: self.kinds[place[1]][rng.integers(len(self.kinds[place[1]]))] for place in self.places}

    def draw_until(self, fits: Callable[[Widths], bool], rng: np.random.Generator, tries: int) -> Widths:
        """The first draw that ``fits``. After ``tries`` in vain the widest of every kind is dropped.

        ``ValueError`` if not even the narrowest fits.
        """
        space = replace(self, kinds={kind: sorted(shares) for kind, shares in self.kinds.items()})
        while any(len(shares) > 1 for shares in space.kinds.values()):
            for _ in range(tries):
                if fits(widths := space.draw(rng)):
                    return widths
            space = replace(space, kinds={kind: shares[:-1] or shares for kind, shares in space.kinds.items()})
        if fits(widths := space.narrowest()):
            return widths
        raise ValueError("submodels: not even the narrowest sub-model meets the constraint")

    def index(self, widths: Widths, ranks: Mapping[str, torch.Tensor]) -> dict[str, Indices]:
        """What is kept of every axis that is cut: the best by ``ranks``, or the first where an axis has no rank."""
        index = {}
        for name, axis in self.axes.items():
            place = kind_of(name)
            if place is None or (width := widths[place]) == 1:
                continue
            keep = partial(_kept, width)
            if self.whole_heads and place[1] == "attention":
                index[name] = axis.whole(_best(Axis(f"{place[0]}/heads", (len(axis.segments),)), ranks, keep))
            else:
                index[name] = _best(axis, ranks, keep)
        return index


def _kept(share: float, size: int) -> int:
    return max(1, round(share * size))


def _best(axis: Axis, ranks: Mapping[str, torch.Tensor], keep: Callable[[int], int]) -> Indices:
    return axis.ranked(ranks[axis.name], keep) if axis.name in ranks else axis.leading(keep)


def check_widths(space: Space, rank: Sequence[str], setting, e) -> None:
    """Raise ``ValueError`` for a backbone, a fine-tuning mode or widths that cannot be cut as asked.

    ``setting`` may be of shapes alone, before there are axes.
    """
    spec = setting.spec
    if not spec.heads:
        kind = type(spec).__name__.removesuffix("Spec")
        raise ValueError(
            f"{e.method}: backbone: a {kind} has no attention heads to cut; allowed: a ViT, BERT or foreign"
        )
    if e.finetune not in CUTTABLE:
        raise ValueError(
            f"{e.method}: finetune = {e.finetune!r} cannot be cut in width; allowed: {', '.join(CUTTABLE)}"
        )
    if spec.centred and min(space.kinds["residual"]) < 1:
        raise ValueError(
            f"{e.method}: backbone = {e.backbone!r} standardises what exits read by whole features, which a narrower "
            f"residual stream has not; allowed: residual = [1.0], or backbone = '{e.backbone}.stream'"
        )
    if space.whole_heads and spec.shares_heads and min(space.kinds["attention"]) < 1:
        raise ValueError(
            f"{e.method}: cut = 'heads': the layers of {e.backbone!r} share positions per head; allowed: features"
        )
    narrow = min(space.kinds["attention"]) < 1 and not space.whole_heads
    if spec.grouped and (min(space.kinds["attention"]) < 1 or {"qk", "vo", "heads"} & set(rank)):
        raise ValueError(
            f"{e.method}: heads of {e.backbone!r} share keys and values and are never cut; allowed: attention = [1.0] "
            "and rank of ffn and residual"
        )
    if spec.rotary and ("qk" in rank or narrow):
        key, allowed = ("rank = ['qk']", "vo, ffn, heads, residual") if "qk" in rank else ("attention", "[1.0]")
        raise ValueError(
            f"{e.method}: {key}: queries and keys of {e.backbone!r} are rotated in pairs by position, so their order "
            f"means something; allowed: {allowed}" + ("" if "qk" in rank else ", or cut = 'heads'")
        )


def check_choices(method, name: str, keys: Sequence[str]) -> None:
    """Raise ``ValueError`` if nothing is left to choose."""
    for key in keys:
        if not getattr(method, key):
            raise ValueError(f"options of {name}: {key} = [] leaves nothing to choose; allowed: shares in (0, 1]")
