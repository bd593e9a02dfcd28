"""FLoRA (Wang et al., NeurIPS 2024): adapters of unequal rank are stacked, not averaged, and merged into the backbone.

Client (rank r_k): merges what all clients of the last round learnt into its backbone; starts every adapter anew, A at
random and B at zero; trains them and sends them. Server: stacked, B A = sum_k p_k B_k A_k is the mean of the products
by examples; W <- W + scaling * B A; heads by examples.
Read next: ``rivals/ranks.py``, ``flexlora.py``.

Deviations: none of the arithmetic. What is counted as received is the stack of all clients' ranks, or the sum itself
where that is smaller. LoRA's scaling is one constant for all, as in the release.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedlib.methods.base import Arrived, Client, Experiment, Member, Round, Server, Serving, Setting, Sizes
from fedlib.methods.mixtures import under

from .ranks import Products, factors, rest_and_products


@dataclass(frozen=True)
class FLoRA(Products):
    """Stacked adapters."""

    label, color, marker = "FLoRA", "#9ad58b", "o"

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        """Draw A from U(-1/sqrt(in), 1/sqrt(in)), as LoRA's own; every B of the server's is zero."""
        part, rng, start = self.slice_for(client, server, r), r.generator("lora", client.id), {}
        for axis, (a, _) in factors(r.setting).items():
            width = r.setting.infos[a].shape[1]
            drawn = rng.uniform(-(width**-0.5), width**-0.5, (len(part.index[axis]), width))
            start[a] = torch.from_numpy(drawn).float()
        return [Member(client, part, payload={"start": start})]

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        new, products = rest_and_products(server, arrived, r)
        layers: Any = r.setting.measure.model
        merged: dict[str, torch.Tensor] = {}
        for axis, (a, _) in factors(r.setting).items():
            path = a.removesuffix(".lora_A.default.weight")
            base, scaling = f"{path}.base_layer.weight", layers.get_submodule(path).scaling["default"]
            old = {**r.setting.frozen, **server.changed}[base]
            merged[base] = (old.double() + scaling * products[axis]).to(old.dtype)
        return replace(server, t=r.t, params=new, memory={**server.memory, **under("frozen", merged)})

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, self.slice_for(client, server, r)),))

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """The heads, and of every adapter the ranks of a round's clients; everybody's own adapters."""
        inner = {n for pair in factors(setting).values() for n in pair}
        heads, share = [n for name, n in shared.items() if name not in inner], sum(self.rank_shares)
        ranks = e.clients_per_round * share / len(self.rank_shares)  # in those of the largest rank
        stacks = []
        for axis, (a, b) in factors(setting).items():
            out, into = setting.infos[b].shape[0], setting.infos[a].shape[1]
            stacks.append(min(round(ranks * setting.axes[axis].size) * (out + into), out * into))
        return [*heads, *stacks], [*shared.values()]
