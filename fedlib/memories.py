"""Client memories across rounds: named tensors per client, on disk unless they changed since the last checkpoint."""

from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from .storage import read_tensors, write_tensors


class ClientFiles(MutableMapping[int, dict[str, torch.Tensor]]):
    """Client memories on disk, ``<client>-<round>.safetensors``; only what changed since the checkpoint is in RAM."""

    def __init__(self, folder: Path, device: str = "cpu"):
        self.folder, self.device = folder, device
        self.rounds: dict[int, int] = {}  # client -> the round that the checkpoint names
        self.changed: dict[int, dict[str, torch.Tensor]] = {}
        self.replaced: list[Path] = []

    def _file(self, client: int, t: int) -> Path:
        return self.folder / f"{client}-{t}.safetensors"

    def __getitem__(self, client: int) -> dict[str, torch.Tensor]:
        if client in self.changed:
            return self.changed[client]
        return read_tensors(self._file(client, self.rounds[client]), self.device)[0]

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
        """Write what changed; the files it replaces stay until :meth:`drop_replaced`."""
        for client, memory in self.changed.items():
            write_tensors(self._file(client, t), memory, {})
            if self.rounds.get(client, t) != t:
                self.replaced.append(self._file(client, self.rounds[client]))
            self.rounds[client] = t
        self.changed = {}

    def drop_replaced(self) -> None:
        """Delete what no checkpoint names any more."""
        for file in self.replaced:
            file.unlink(missing_ok=True)
        self.replaced = []

    def drop_unnamed(self) -> None:
        """Delete files of rounds that did not count: written before a kill, but named by no checkpoint."""
        named = {self._file(c, t).name for c, t in self.rounds.items()}
        for file in self.folder.glob("*.safetensors"):
            if file.name not in named:
                file.unlink(missing_ok=True)
