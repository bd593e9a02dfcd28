"""RaFFM (Yu et al. 2023): each client gets a random sub-model of a transformer that its resources allow.

Server, every round: rank channels by salience, Eqs. 1, 2 and 5. Client: a width for every attention and feed-forward
layer and one for the residual stream, drawn until its constraint is met; it trains the highest-ranked channels, Eq. 6.
Server: the mean over the clients that hold an entry, weighted by examples.
Read next: ``methods/submodels.py`` (salience, widths), ``core/slices.py`` (what a ranked slice is).

Deviations: nothing is permuted, a ranked slice is the same. Every head keeps its first features, as the paper's ranking
per head asks; the release cuts the flattened heads, which scrambles them. Eq. 7 has no normaliser: the mean over the
holders is built; ``fusion="shrunk"`` is the release's sum, which shrinks what few clients hold. ``draw="released"``
ignores constraints: the first sampled client gets the whole model, the second the smallest, the others any. After
``TRIES`` draws in vain the widest choices are dropped, as independent widths hardly ever meet a tight constraint. A
client that may hold everything does. A narrower head divides its scores by the root of its own width.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch

from ...core.clients import Client
from ...core.slices import Slice
from ...core.validation import AtMost, Positive, When
from ..base import Method
from ..jobs import Arrived, Round, Server, Serving, Setting
from ..options import ServerStep
from ..server import MaskedMean
from ..submodels import Space, check_choices, check_widths, salience

TRIES = 20
Share = Annotated[Positive, AtMost(1)]
CONSTRAINED = When(draw="constrained")


@dataclass(frozen=True)
class RaFFM(ServerStep, Method):
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
        idle = set(self.rank) & ({"heads"} if self.cut == "features" else {"qk", "vo"})
        if idle:
            raise ValueError(f"options of raffm: rank = {sorted(idle)} has no effect with cut = {self.cut!r}")
        check_choices(self, "raffm", ("attention", "ffn", "residual", "shares"))

    def check(self, setting: Setting, e) -> None:
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

    def configure(self, model) -> None:
        model.context.whole_heads = self.cut == "heads"

    def prepare(self, server: Server, r: Round) -> dict[str, torch.Tensor]:
        """The salience of the global model, by axis."""
        return salience({**r.setting.frozen, **server.params}, r.setting.infos, r.setting.axes, self.rank)

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

    def space(self, setting: Setting) -> Space:
        kinds = {"attention": self.attention, "ffn": self.ffn, "residual": self.residual}
        return Space(setting.axes, kinds, self.cut == "heads")

    def part(self, widths, setting: Setting, ranks) -> Slice:
        return replace(setting.full(), index=self.space(setting).index(widths, ranks))

    def cost(self, widths, setting: Setting) -> float:
        return setting.measure.cost(self.constraint, self.part(widths, setting, {}))

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if self.fusion == "mean":
            return super().aggregate(server, arrived, r)  # Eq. 7
        return replace(server, t=r.t, params={**server.params, **shrunk(arrived.sums[0], server.params)})

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """A sub-model of the trained model, not trained again."""
        return super().serve(client, server, replace(r, notes=self.prepare(server, r)))


def shrunk(mean: MaskedMean, old) -> dict[str, torch.Tensor]:
    """The release's fusion: sum_i w_i theta_i / sum of *all* weights, so zero where nobody holds an entry."""
    everybody = max(float(weight.max()) for weight in mean.weight.values())  # the classifier's bias is everybody's
    return {n: (total / everybody).to(old[n].dtype) for n, total in mean.total.items()}
