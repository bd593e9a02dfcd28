"""Further models of a client, which learn with its main one and never leave it (FeDepth's mutual distillation)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from ..core.clients import Client
from ..core.rng import torch_generator
from ..core.slices import NOTHING, Slice
from ..models.exit_model import ExitModel
from .jobs import Member, Setting


def fresh_peers(
    params: Mapping[str, torch.Tensor], setting: Setting, heads: list[nn.Module]
) -> dict[str, torch.Tensor]:
    """What peers 1, 2, ... start from, a random model for each of ``heads``, as ``peer<i>/<name>`` beside ``params``.

    What a random model does not have, such as adapters, is that of ``params``.
    """
    out = {}
    for i, head in enumerate(heads, 1):
        generator = torch_generator(setting.seed, "peer", client=i)
        model = ExitModel(setting.spec.build().init_(generator), head.init_(generator), setting.exit_units)
        own = model.trainable()
        out |= {f"peer{i}/{n}": own[n].to(p.device) if n in own else p.clone() for n, p in params.items()}
    return out


def peer_members(client: Client, part: Slice, count: int, names: Iterable[str] = ()) -> list[Member]:
    """Members ``peer1`` to ``peer<count>``; the tensors ``names`` are at first those of :func:`fresh_peers`."""
    names = list(names)
    own = [replace(part, aliases={n: f"peer{i}/{n}" for n in names}) for i in range(1, count + 1)]
    return [Member(client, p, f"peer{i}", upload=NOTHING, keeps="all") for i, p in enumerate(own, 1)]
