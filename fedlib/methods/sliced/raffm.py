"""RaFFM (Yu et al. 2023): each client gets a random sub-model of a transformer that its resources allow.

Server, every round: rank channels by salience, Eqs. 1, 2 and 5. Client: a width for every attention and feed-forward
layer and one for the residual stream, drawn until its constraint is met; it trains the highest-ranked channels, Eq. 6.
Server: the mean over the clients that hold an entry, weighted by examples.
The permutations that preserve a transformer's function are by group: ``qk`` (features of a head's queries and keys),
``vo`` (of its values), ``ffn``, ``heads`` (whole ones), ``residual`` (one for the whole net). Ranking an axis by
salience and keeping its first entries is a ranked slice.
Read next: ``core/slices.py`` (what a ranked slice is).

Deviations: nothing is permuted, a ranked slice is the same. Every head keeps its first features, as the paper's ranking
per head asks; the release cuts the flattened heads, which scrambles them. Eq. 7 has no normaliser: the mean over the
holders is built; ``fusion="shrunk"`` is the release's sum, which shrinks what few clients hold. ``draw="released"``
ignores constraints: the first sampled client gets the whole model, the second the smallest, the others any. After
``TRIES`` draws in vain the widest choices are dropped, as independent widths hardly ever meet a tight constraint. A
client that may hold everything does. A narrower head divides its scores by the root of its own width.

Clients of unequal widths do not stack: they train one by one, two processes 1.70 times as fast as one (few-shot
CIFAR-10, ``deit_micro``). Feed-forward layers could be padded to the widest by zero rows and columns, exactly. Where
all other widths are equal, ten ``deit_micro`` clients are then 1.4 times faster, as they stack, and four of MiniLM 1.1
times slower, as they compute zeros. By default they are not: a head's scores are divided by the root of its own width
and norms are over a client's own stream, which no zeros make equal. So nothing is padded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Le

from ...core.clients import Client
from ...core.experiment import Experiment
from ...core.slices import Axis, Indices, ParamInfo, Slice
from ...core.transfers import home
from ...core.validation import Positive, When
from ...models.exit_model import ExitModel
from ..jobs import Arrived, Round, Server, Serving, Setting, Tensors
from ..server import ServerStep
from ..sums import MaskedMean
from ..widths import CUTTABLE

TRIES = 20
ATTENTION = ("qk", "vo")
Share = Annotated[Positive, Le(1)]
CONSTRAINED = When(draw="constrained")


@dataclass(frozen=True)
class RaFFM(ServerStep):
    """Widths are shares of the whole; the defaults are the space of the release's GLUE script."""

    label, color, marker = "RaFFM", "#b60072", "d"

    one_slice: ClassVar[bool] = False

    rank: tuple[Literal["qk", "vo", "ffn", "heads", "residual"], ...] = ("qk",)  # (): no prioritisation
    attention: tuple[Share, ...] = tuple(1 - i / 32 for i in range(10))  # queries, keys and values of a layer
    ffn: tuple[Share, ...] = tuple(1 - i / 24 for i in range(24))
    residual: tuple[Share, ...] = tuple(1 - i / 32 for i in range(10))
    cut: Literal["features", "heads"] = "features"  # of attention: narrower heads, or fewer
    draw: Literal["constrained", "released"] = "constrained"
    constraint: Annotated[Literal["parameters", "memory", "macs", "upload"], CONSTRAINED] = "parameters"
    shares: Annotated[tuple[Share, ...], CONSTRAINED] = (0.5, 0.625, 0.75, 0.875, 1.0)  # tau, by budget
    fusion: Annotated[Literal["mean", "shrunk"], When(aggregation="mean")] = "mean"

    def check_options(self) -> None:
        super().check_options()
        if idle := set(self.rank) & ({"heads"} if self.cut == "features" else {"qk", "vo"}):
            raise ValueError(f"options of raffm: rank = {sorted(idle)} has no effect with cut = {self.cut!r}")
        for key in ("attention", "ffn", "residual", "shares"):
            if not getattr(self, key):
                raise ValueError(f"options of raffm: {key} = [] leaves nothing to choose; allowed: shares in (0, 1]")

    def check(self, setting: Setting, e: Experiment) -> None:
        check_widths(space := self.space(setting), self.rank, setting, e)
        if setting.measure is None or self.draw == "released":
            return
        least = self.cost(space.narrowest(), setting) / setting.measure.cost(self.constraint, setting.full())
        if least > min(self.shares):
            raise ValueError(
                f"raffm: shares = {list(self.shares)}: no sub-model has {min(self.shares):g} of the {self.constraint} "
                f"of the whole; the smallest that attention, ffn and residual allow has {least:.3f}"
            )

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,)

    def num_budgets(self, num_exits: int) -> int:
        return len(self.shares)

    def sizes(self, depth: int) -> tuple[float, ...]:
        """A random sub-model has none."""
        return ()

    def configure(self, model: ExitModel) -> None:
        model.context.whole_heads = self.cut == "heads"

    def prepare(self, server: Server, r: Round) -> dict[str, torch.Tensor]:
        """The salience of the global model, by axis, in host memory."""
        found = salience({**r.setting.frozen, **server.params}, r.setting.infos, r.setting.axes, self.rank)
        return dict(zip(found, home(list(found.values())), strict=True))

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        place = r.clients.index(client) if self.draw == "released" and client in r.clients else None
        if place == 0 or (self.draw == "constrained" and self.shares[client.budget] == 1):
            return r.setting.full()
        if place == 1:
            return self.part(self.space(r.setting).narrowest(), r.setting, r.notes)
        return self.sub_model(self.shares[client.budget], r, max(client.id, 0))

    def sub_model(self, share: float, r: Round, client: int = 0) -> Slice:
        """A random sub-model that costs at most ``share`` of the whole: of a client, or to deploy after training."""
        limit = share * r.setting.measure.cost(self.constraint, r.setting.full())
        fits = lambda w: self.draw == "released" or self.cost(w, r.setting) <= limit  # noqa: E731
        widths = self.space(r.setting).draw_until(fits, r.generator("sub-model", client), TRIES)
        return self.part(widths, r.setting, r.notes)

    def space(self, setting: Setting) -> "Space":
        return Space(setting.axes, {k: getattr(self, k) for k in ("attention", "ffn", "residual")}, self.cut == "heads")

    def part(self, widths: "Widths", setting: Setting, ranks: Tensors) -> Slice:
        return replace(setting.full(), index=self.space(setting).index(widths, ranks))

    def cost(self, widths: "Widths", setting: Setting) -> float:
        return setting.measure.cost(self.constraint, self.part(widths, setting, {}))

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if self.fusion == "mean":
            return super().aggregate(server, arrived, r)  # Eq. 7
        return replace(server, t=r.t, params={**server.params, **shrunk(arrived.mean, server.params)})

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """A sub-model of the trained model, not trained again."""
        return super().serve(client, server, replace(r, notes=self.prepare(server, r)))


def shrunk(mean: MaskedMean, old: Tensors) -> dict[str, torch.Tensor]:
    """The release's fusion: sum_i w_i theta_i / sum of *all* weights, so zero where nobody holds an entry."""
    everybody = max(float(weight.max()) for weight in mean.weight.values())  # the classifier's bias is everybody's
    return {n: (total / everybody).to(old[n].dtype) for n, total in mean.total.items()}


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
        if infos[name].kind != "backbone" or tensor.dim() < 2:
            continue
        for dim, axis in enumerate(infos[name].axes):
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
        return {place: self.kinds[place[1]][int(rng.integers(len(self.kinds[place[1]])))] for place in self.places}

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
        raise ValueError("raffm: not even the narrowest sub-model meets the constraint")

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


def check_widths(space: Space, rank: Sequence[str], setting: Setting, e: Experiment) -> None:
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
