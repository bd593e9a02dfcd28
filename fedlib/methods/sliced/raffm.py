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

from ...core.annotations import Share, When
from ...core.devices import to_host
from ...core.slices import Axis, Indices
from ..base import Arrived, Client, ExitModel, Experiment, ParamInfo, Round, Server, Serving, Setting, Slice, Tensors
from ..server import ServerStep
from ..sums import MaskedMean
from ..widths import check_axes

TRIES = 20
ATTENTION = ("qk", "vo")
KINDS = {"qk": "attention", "vo": "attention", "ffn": "ffn", "residual": "residual"}  # of widths, by group of axes
CONSTRAINED = When(draw="constrained")
Widths = Mapping[tuple[str, str], float]  # by (layer, kind): the share of its entries that is kept


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
            self.refuse(f"rank = {sorted(idle)} has no effect with cut = {self.cut!r}")
        for key in ("attention", "ffn", "residual", "shares"):
            if not getattr(self, key):
                self.refuse(f"{key} = [] leaves nothing to choose; allowed: shares in (0, 1]")

    def check(self, setting: Setting, e: Experiment) -> None:
        check_widths(space := self.space(setting), self.rank, setting, e)
        if setting.measure is None or self.draw == "released":
            return
        narrowest, whole = self.part(space.narrowest(), setting, {}), setting.full()
        least = setting.measure.cost(self.constraint, narrowest) / setting.measure.cost(self.constraint, whole)
        if least > min(self.shares):
            why = f"no sub-model has {min(self.shares):g} of the {self.constraint} of the whole"
            least = f"the smallest that attention, ffn and residual allow has {least:.3f}"
            raise ValueError(f"raffm: shares = {list(self.shares)}: {why}; {least}")

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,)

    def num_budgets(self, num_exits: int) -> int:
        return len(self.shares)

    def sizes(self, depth: int) -> tuple[float, ...]:
        """A random sub-model has none."""
        return ()

    def configure(self, model: ExitModel) -> None:
        model.context.whole_heads = self.cut == "heads"

    def prepare(self, server: Server, r: Round) -> Tensors:
        """Rank the global model's channels by salience, by axis, in host memory; once for a model, whoever asks."""
        model, ranks = r.setting.solved.get(self, (None, {}))
        if model is not server.params:
            found = salience({**r.setting.frozen, **server.params}, r.setting.infos, r.setting.axes, self.rank)
            ranks = dict(zip(found, to_host(list(found.values())), strict=True))
            r.setting.solved[self] = server.params, ranks
        return ranks

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        place = r.clients.index(client) if self.draw == "released" and client in r.clients else None
        if place == 0 or (self.draw == "constrained" and self.shares[client.budget] == 1):
            return r.setting.full()
        if place == 1:
            return self.part(self.space(r.setting).narrowest(), r.setting, r.notes)
        return self.sub_model(self.shares[client.budget], r, max(client.id, 0))

    def sub_model(self, share: float, r: Round, client: int = 0) -> Slice:
        """Draw a sub-model that costs at most ``share`` of the whole: of a client, or to deploy after training."""
        cost, space = partial(r.setting.measure.cost, self.constraint), self.space(r.setting)
        limit = share * cost(r.setting.full())

        def fits(widths: Widths) -> bool:
            return self.draw == "released" or cost(self.part(widths, r.setting, {})) <= limit

        return self.part(space.draw_until(fits, r.generator("sub-model", client), TRIES), r.setting, r.notes)

    def space(self, setting: Setting) -> "Space":
        return Space(setting.axes, {k: getattr(self, k) for k in ("attention", "ffn", "residual")}, self.cut == "heads")

    def part(self, widths: Widths, setting: Setting, ranks: Tensors) -> Slice:
        return replace(setting.full(), index=self.space(setting).index(widths, ranks))

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if self.fusion == "mean":
            return super().aggregate(server, arrived, r)  # Eq. 7
        return replace(server, t=r.t, params={**server.params, **shrunk(arrived.mean, server.params)})

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Return the whole net: every entry is in some sub-model that may be drawn, though no client may hold all."""
        return r.setting.full()

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Serve a sub-model of the trained model, not trained again."""
        return super().serve(client, server, replace(r, notes=self.prepare(server, r)))


def shrunk(mean: MaskedMean, old: Tensors) -> dict[str, torch.Tensor]:
    """Fuse as released: sum_i w_i theta_i / sum of *all* weights, so zero where nobody holds an entry."""
    everybody = max(float(weight.max()) for weight in mean.weight.values())  # the classifier's bias is everybody's
    return {n: (total / everybody).to(old[n].dtype) for n, total in mean.total.items()}


def place_of(axis: str) -> tuple[str, str]:
    """Split an axis' name into (layer, group): ``3/qk`` is ``qk`` of ``3``, ``residual`` that of the whole net."""
    layer, _, group = axis.rpartition("/")
    return layer, group


def salience(
    tensors: Mapping[str, torch.Tensor], infos: Mapping[str, ParamInfo], axes: Mapping[str, Axis], groups: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Compute Eqs. 1 and 5: of every entry of the axes of ``groups`` the L1 norm, mean over the matrices on it.

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


@dataclass(frozen=True)
class Space:
    """All sub-models of a net: for every layer a width of its ``kinds``, one for the whole net's residual stream."""

    axes: Mapping[str, Axis]
    kinds: Mapping[str, Sequence[float]]  # attention, ffn, residual -> widths to draw from
    whole_heads: bool = False  # narrower attention has fewer heads, not narrower ones

    def narrowest(self) -> Widths:
        found = (place_of(name) for name in self.axes)
        places = dict.fromkeys((layer, KINDS[group]) for layer, group in found if group in KINDS)
        return {place: min(self.kinds[place[1]]) for place in places}

    def draw_until(self, fits: Callable[[Widths], bool], rng: np.random.Generator, tries: int) -> Widths:
        """Draw widths on their own until they ``fit``. After ``tries`` in vain the widest of every kind is dropped.

        ``ValueError`` if not even the narrowest fits.
        """
        narrowest, kinds = self.narrowest(), {kind: sorted(shares) for kind, shares in self.kinds.items()}
        while any(len(shares) > 1 for shares in kinds.values()):
            for _ in range(tries):
                widths = {place: kinds[place[1]][int(rng.integers(len(kinds[place[1]])))] for place in narrowest}
                if fits(widths):
                    return widths
            kinds = {kind: shares[:-1] or shares for kind, shares in kinds.items()}
        if fits(narrowest):
            return narrowest
        raise ValueError("raffm: not even the narrowest sub-model meets the constraint")

    def index(self, widths: Widths, ranks: Tensors) -> dict[str, Indices]:
        """Return the indices kept of every axis that is cut."""
        index = {}
        for name, axis in self.axes.items():
            layer, group = place_of(name)
            if (width := widths.get((layer, KINDS.get(group, "")), 1)) == 1:
                continue
            if self.whole_heads and group in ATTENTION:
                index[name] = axis.whole(best(Axis(f"{layer}/heads", (len(axis.segments),)), ranks, width))
            else:
                index[name] = best(axis, ranks, width)
        return index


def best(axis: Axis, ranks: Tensors, share: float) -> Indices:
    """Keep that share of every segment, at least one: the best by ``ranks``, or the first where there is no rank."""

    def keep(size: int) -> int:
        return max(1, round(share * size))

    return axis.ranked(ranks[axis.name], keep) if axis.name in ranks else axis.leading(keep)


def check_widths(space: Space, rank: Sequence[str], setting: Setting, e: Experiment) -> None:
    """Raise ``ValueError`` for a backbone, a fine-tuning mode or widths that cannot be cut as asked.

    ``setting`` may be of shapes alone, before there are axes.
    """
    spec, attention = setting.spec, min(space.kinds["attention"]) < 1

    def refuse(reason: str) -> None:
        raise ValueError(f"{e.method}: {reason}")

    if not spec.heads:
        kind = type(spec).__name__.removesuffix("Spec")
        refuse(f"backbone: a {kind} has no attention heads to cut; allowed: a ViT, BERT or foreign")
    check_axes(e)
    if spec.centred and min(space.kinds["residual"]) < 1:
        why = "standardises what exits read by whole features, which a narrower residual stream has not"
        refuse(f"backbone = {e.backbone!r} {why}; allowed: residual = [1.0], or backbone = '{e.backbone}.stream'")
    if space.whole_heads and spec.shares_heads and attention:
        refuse(f"cut = 'heads': the layers of {e.backbone!r} share positions per head; allowed: features")
    if spec.grouped and (attention or {"qk", "vo", "heads"} & set(rank)):
        allowed = "attention = [1.0] and rank of ffn and residual"
        refuse(f"heads of {e.backbone!r} share keys and values and are never cut; allowed: {allowed}")
    if spec.rotary and ("qk" in rank or (attention and not space.whole_heads)):
        key, allowed = ("rank = ['qk']", "vo, ffn, heads, residual") if "qk" in rank else ("attention", "[1.0]")
        why = f"queries and keys of {e.backbone!r} are rotated in pairs by position, so their order means something"
        refuse(f"{key}: {why}; allowed: {allowed}" + ("" if "qk" in rank else ", or cut = 'heads'"))
