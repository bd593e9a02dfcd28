"""Client memories across rounds: named tensors per client, on disk unless they changed since the last checkpoint."""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from .storage import read_tensors, write_tensors


class ClientFiles(MutableMapping[int, dict[str, torch.Tensor]]):
    """Client memories on disk, ``<client>-<round>.safetensors``; only what changed since the checkpoint is in RAM.

    A file that a checkpoint named stays as long as that checkpoint is one of the last two.
    """

    def __init__(self, folder: Path):
        self.folder, self.device = folder, "cpu"  # where what is read goes: a run's checkpoints set its device
        self.rounds: dict[int, int] = {}  # client -> the round that the checkpoint names
        self.replaced: list[tuple[int, int]] = []  # (client, round) that only the checkpoint before it names
        self.changed: dict[int, dict[str, torch.Tensor]] = {}

    def _file(self, client: int, t: int) -> Path:
        return self.folder / f"{client}-{t}.safetensors"

    def __getitem__(self, client: int) -> dict[str, torch.Tensor]:
        if client in self.changed:
            return self.changed[client]
        read = read_tensors(self._file(client, self.rounds[client]))[0]  # a count is asked for on the host
        return {n: x if x.dtype is torch.int64 and not x.dim() else x.to(self.device) for n, x in read.items()}

    def __setitem__(self, client: int, memory: dict[str, torch.Tensor]) -> None:
        self.changed[client] = memory

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's memory is never forgotten during a run")

    def __contains__(self, client: object) -> bool:
        return client in self.changed or client in self.rounds

    def __iter__(self) -> Iterator[int]:
        return iter(self.rounds | self.changed)

    def __len__(self) -> int:
        return len(self.rounds | self.changed)

    def write(self, t: int) -> None:
        """Write what changed, for a checkpoint of round ``t`` to name."""
        self.replaced = [(c, self.rounds[c]) for c in self.changed if self.rounds.get(c, t) != t]
        for client, memory in self.changed.items():
            write_tensors(self._file(client, t), memory, {})
        self.rounds |= dict.fromkeys(self.changed, t)
        self.changed = {}

    def drop_unnamed(self) -> None:
        """Delete the files that neither of the last two checkpoints names."""
        named = {self._file(c, t).name for c, t in (*self.rounds.items(), *self.replaced)}
        for file in self.folder.glob("*.safetensors"):
            if file.name not in named and re.fullmatch(r"\d+-\d+\.safetensors", file.name):
                file.unlink(missing_ok=True)

    def check(self) -> None:
        """Read every named file once: ``DamagedFile`` now and not at round 900."""
        for client, t in self.rounds.items():
            read_tensors(self._file(client, t))


class Overlay(ChainMap[int, Mapping[str, torch.Tensor]]):
    """A mapping with some entries replaced; ``changes`` alone are in memory, the rest stays where it is."""

    def __init__(self, base: Mapping[int, Mapping[str, torch.Tensor]], changes: Mapping[int, Mapping]):
        before, below = base.maps if isinstance(base, Overlay) else ({}, base)  # never a chain of more than two
        super().__init__({**before, **changes}, below)  # pyright: ignore (below is only read)

    @property
    def changes(self) -> dict[int, Any]:
        return dict(self.maps[0])
