"""LoRA of unequal rank: budgets are shares of the adapters' rank, and what is summed of their factors.

A client of rank r holds the leading r rows of every A and columns of every B. LoRA's scaling is one constant for all,
alpha / r of the largest rank, so that holding fewer ranks is cutting the product B A and nothing else.
A method whose clients differ in rank derives from :class:`Ranks`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from fedlib.core.annotations import Share
from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.slices import RANK, ParamInfo, Slice
from fedlib.methods.sums import MaskedMean, Update
from fedlib.methods.values import Arrived, Round, Server, Setting
from fedlib.methods.widths import Shares, rounded_up


@dataclass(frozen=True)
class Ranks(Shares):
    """A client holds the whole net and a share of the rank of every adapter."""

    share_option: ClassVar[str] = "rank_shares"
    one_slice: ClassVar[bool] = False  # an entry of a factor means something else in every round

    rank_shares: tuple[Share, ...] = (1 / 8, 1 / 4, 1 / 2, 1.0)  # one a budget, rounded up

    def check(self, setting: Setting, e: Experiment) -> None:
        super().check(setting, e)
        if e.finetune != "lora":
            raise ValueError(f"{e.method}: finetune = {e.finetune!r} has no rank; allowed: lora")
        adapters = {n for n, i in setting.infos.items() if i.kind == "adapter"}
        if adapters != {n for pair in factors(setting).values() for n in pair}:
            of = f"{e.method}: backbone = {e.backbone!r} with {dict(e.finetune_options)}"
            raise ValueError(f"{of} has adapters that are no pairs of factors; allowed: plain LoRA of linear layers")

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return of_rank(r.setting, partial(rounded_up, self.rank_shares[client.budget]))


def factors(setting: Setting) -> dict[str, tuple[str, str]]:
    """Return the names of A (r, in) and B (out, r) of every adapter, by the axis between them."""
    found: dict[str, dict[int, str]] = {}
    for name, info in setting.infos.items():
        for dim, axis in enumerate(info.axes):
            if axis is not None and axis.endswith(RANK) and len(info.axes) == 2:
                found.setdefault(axis, {})[dim] = name
    return {axis: (pair[0], pair[1]) for axis, pair in found.items()}


def of_rank(setting: Setting, keep: Callable[[int], int]) -> Slice:
    """Cut the whole net to the leading ``keep(r)`` of every adapter's r ranks."""
    return replace(setting.full(), index={axis: setting.axes[axis].leading(keep) for axis in factors(setting)})


def without_factors(update: Update, setting: Setting) -> Update:
    """Select what else a cohort sends: heads, statistics."""
    inner = {n for pair in factors(setting).values() for n in pair}
    return replace(update, params={n: p for n, p in update.params.items() if n not in inner})


@dataclass(frozen=True)
class Products(Ranks):
    """What is summed of the factors is the product B A (out, in) of every adapter, under its axis' name."""

    def summarise(self, update: Update, setting: Setting) -> MaskedMean:
        mean = super().summarise(without_factors(update, setting), setting)
        params, rows, infos = {}, {}, dict(mean.infos)
        for axis, (a, b) in factors(setting).items():
            if a in update.params:
                params[axis], rows[axis] = update.params[b].double() @ update.params[a].double(), update.rows[a]
                infos[axis] = ParamInfo((None, None), "adapter", setting.infos[a].unit, tuple(params[axis].shape[1:]))
        mean.infos = infos
        mean.add(replace(update, params=params, rows=rows), update.weights(self.weighting))
        return mean


def rest_and_products(
    server: Server, arrived: Arrived, r: Round
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Average what is no factor into the server's parameters; and the products (out, in) by axis, in float64."""
    axes = factors(r.setting)
    mean = arrived.mean.result({**server.params, **dict.fromkeys(axes, torch.zeros((), dtype=torch.float64))})
    products = {axis: mean.pop(axis) for axis in axes}
    return {**server.params, **mean}, products
