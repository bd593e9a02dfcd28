"""What the members of a cohort hold, stacked: the server's parameters, personal ones, payloads, memories."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from ..core.slices import is_cut, take
from ..core.validation import check_type
from ..methods.values import Member
from .federation import Federation

Tensors = dict[str, torch.Tensor]


class Stack:
    """Members in order, deepest first. ``rows[name]`` are those that hold a parameter, in the order of its stack."""

    def __init__(self, federation: Federation, members: Sequence[Member], memories: Mapping[int, Tensors]):
        self.federation, self.members, self.memories = federation, tuple(members), memories
        self.infos = federation.setting.infos
        self.slices = tuple(m.part for m in members)
        indices: dict[tuple, int] = {}  # members that keep the same entries
        self._cut = [indices.setdefault(tuple(sorted(s.index.items())), len(indices)) for s in self.slices]
        self.is_cut = any(s.index and any(is_cut(i, s) for i in self.infos.values()) for s in set(self.slices))
        self.rows: dict[str, Sequence[int]] = {}
        everybody = range(len(members))
        for name, info in self.infos.items():
            if name not in federation.frozen:
                if held := [i for i, s in enumerate(self.slices) if s.holds(info)]:
                    self.rows[name] = everybody if len(held) == len(members) else tuple(held)

    def tensors(self, params: Tensors, own: bool = True, merge: bool = False) -> Tensors:
        """Stack the server's ``params`` as the members start from them; ``own``: with what is their clients'.

        ``merge``: what all of them share is not stacked, so that layers run it once on all examples.
        """
        out, initial = {}, self.federation.server.params
        for name, rows in self.rows.items():
            info, cut, tensors = self.infos[name], {}, []  # members of one source and cut share one
            for i in rows:
                fresh = own and self.members[i].fresh
                if (key := (self.slices[i].source(name), self._cut[i], fresh)) not in cut:
                    cut[key] = take((initial if fresh else params)[key[0]], info, self.slices[i])
                tensors.append(cut[key])
            if own:
                tensors = [self._own(i, name, served) for i, served in zip(rows, tensors, strict=True)]
            first, alike = tensors[0], all(x is tensors[0] for x in tensors)
            once = merge and alike and len(rows) == len(self.members)
            out[name] = first if once else first.expand(len(rows), *first.shape) if alike else torch.stack(tensors)
        return out

    def frozen(self, changed: Tensors) -> Tensors:
        """Return the frozen parameters, some ``changed``: once if all members keep the same entries, else stacked."""
        params, first = {**self.federation.frozen, **changed}, self.slices[0]
        if len(set(self._cut)) == 1:
            return {n: take(p, self.infos[n], first) for n, p in params.items()}
        return {
            n: torch.stack([take(p, self.infos[n], s) for s in self.slices]) if is_cut(self.infos[n], first) else p
            for n, p in params.items()
        }

    def personal(self) -> Iterator[tuple[int, str, int]]:
        """Yield (member, parameter, its row in the parameter's stack) of all that stays with the clients."""
        for name, rows in self.rows.items():
            for row, i in enumerate(rows):
                if self._stays(i, name):
                    yield i, name, row

    def recall(self, key: str, like: Tensors) -> Tensors:
        """Return each client's remembered ``key/<parameter>``, stacked like ``like``; zeros where there is none."""
        out = {}
        for name, p in like.items():
            found = [self._memory(i).get(f"{key}/{name}") for i in self.rows[name]]
            out[name] = torch.stack([torch.zeros_like(p[0]) if x is None else x.to(p.device) for x in found])
        return out

    def payload(self, key: str, like: Tensors) -> Tensors:
        """Return what members brought under ``key``; zeros for members that brought none of it."""
        brought = [m.payload.get(key, {}) for m in self.members]
        out = {}
        for name in dict.fromkeys(n for tensors in brought for n in tensors):
            rows = self.rows.get(name, range(len(self.members)))
            blank = torch.zeros_like(next(tensors[name] for tensors in brought if name in tensors))
            device = like[name].device if name in like else self.federation.device
            out[name] = torch.stack([brought[i].get(name, blank) for i in rows]).to(device)
        return out

    @cached_property
    def owners(self) -> torch.Tensor | None:
        """Whose model each member is, (M,): peers of one client have the same number. None if there are no peers."""
        order = {c: k for k, c in enumerate(dict.fromkeys(m.client.id for m in self.members))}
        if len(order) == len(self.members):
            return None
        return torch.tensor([order[m.client.id] for m in self.members], device=self.federation.device)

    @cached_property
    def label_counts(self) -> torch.Tensor:
        """Training examples by label of each member's client, (M, classes)."""
        counts = [torch.as_tensor(self.federation.setting.label_counts(m.client.id)) for m in self.members]
        return torch.stack(counts).to(self.federation.device)

    @cached_property
    def personal_names(self) -> frozenset[str]:
        """The parameters that stay with the clients, of every member."""
        method, local = self.federation.method, self.federation.experiment.batch_norm == "local"
        own = {n: check_type(method.personal(self.infos[n]), bool, "personal()") for n in self.rows}
        return frozenset(n for n in own if own[n] or (local and self.infos[n].kind == "statistic"))

    def _stays(self, i: int, name: str) -> bool:
        return self.members[i].keeps == "all" or name in self.personal_names

    def _memory(self, i: int) -> Tensors:
        return self.memories.get(self.members[i].client.id, {})

    def _own(self, i: int, name: str, served: torch.Tensor) -> torch.Tensor:
        """Return member i's starting tensor: its payload's, what its client kept, else what the server serves."""
        member = self.members[i]
        if (start := member.payload.get("start", {}).get(name)) is not None:
            return start.to(served.device)
        if self._stays(i, name) and (kept := self._memory(i).get(f"{member.name}/{name}")) is not None:
            return kept.to(served.device)
        return served
