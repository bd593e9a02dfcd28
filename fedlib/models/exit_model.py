"""A backbone cut into units with exits, run for one client or a whole cohort in one pass.

The head decides what an exit is: ``Classifiers`` (one per exit) or ``Ree`` (shared, and handing a class token back).
Both answer ``step(block, token, past)`` after every block.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..core.slices import STEM, ParamInfo
from ..layers.tokens import put_token, take_token
from .vit import ViT


def _first(x: torch.Tensor, clients: int) -> torch.Tensor:
    """``x`` of the first ``clients``."""
    return x if x.shape[0] == clients else x[:clients]


@dataclass(frozen=True)
class Prefix:
    """What leading ``blocks`` made of a batch: all tokens after the last, and the class tokens that the head reads."""

    blocks: int
    z: torch.Tensor  # (K, B, T, d)
    class_tokens: Mapping[int, torch.Tensor]  # by block, (K, B, d)


class ExitModel(nn.Module):
    """``vit`` (a backbone: ``stem``, ``run``, ``config``) and ``head``; parameters may be stacked (see ``layers.py``).

    In a cohort the clients are sorted deepest first, so block l runs for the first ``alive[l]`` clients only and exit j
    belongs to the clients ``spans[j] = (lo, hi)``.
    """

    def __init__(self, vit: ViT, head: nn.Module, exit_blocks: Sequence[int]):
        super().__init__()
        self.vit, self.head, self.exit_blocks = vit, head, tuple(exit_blocks)
        self.whole_blocks = False  # compute every token of a client's last block, as plain implementations do
        self._slots = {
            f"{path}.{leaf}" if path else leaf: (module, leaf)
            for path, module in self.named_modules()
            for leaf in module._parameters
        }
        infos = self.infos()
        self._of_block: list[list[tuple[nn.Module, str, int]]] = [[] for _ in range(self.vit.config.depth)]
        for name, slot in self._slots.items():
            if name.startswith("vit.") and name in infos and infos[name].unit != STEM:
                self._of_block[infos[name].unit].append((*slot, len(infos[name].shape)))

    def forward(
        self,
        images: torch.Tensor | Prefix,
        alive: Sequence[int] | None = None,
        spans: Mapping[int, tuple[int, int]] | None = None,
    ) -> torch.Tensor:
        """Images (K, B, C, H, W), or leading blocks' output -> logits (E, K, B, classes); zero for exits not held.

        By default all K clients run every block and every exit. Of a client's last block only the class token is read,
        so only that is computed (unless ``whole_blocks``).
        """
        cached = images if isinstance(images, Prefix) else None
        z = self.vit.stem(images) if cached is None else cached.z  # (K, B, T, d)
        clients, depth = z.shape[0], self.exit_blocks[-1] + 1
        alive = [*(alive if alive is not None else [clients] * depth), 0]
        spans = spans if spans is not None else {j: (0, clients) for j in range(len(self.exit_blocks))}
        exit_of = {block: j for j, block in enumerate(self.exit_blocks)}
        at, reads_update = self.vit.config.class_token, self.vit.config.reads_update
        past: list = []  # the head's history, restarted for every batch
        logits: list[torch.Tensor | None] = [None] * len(self.exit_blocks)
        for block in range(depth):
            if not alive[block]:
                break
            origin, scale = self._units(block)
            if cached is not None and block < cached.blocks:
                if not self.head.reads(block):
                    continue
                token = _first(cached.class_tokens[block], alive[block])
            else:
                z = _first(z, alive[block])
                origin = z[..., at, :] if reads_update else origin
                token, z = self._advance(block, z, alive[block + 1])
                token = (token - origin) / scale if origin is not None else token
            lo, hi = spans.get(exit_of.get(block), (0, 0))
            out, handed_back = self.head.step(block, token[lo:hi] if self.head.per_exit else token, past)
            if out is not None and hi > lo:
                out = out if self.head.per_exit else out[lo:hi]
                logits[exit_of[block]] = F.pad(out, (0, 0, 0, 0, lo, clients - hi))
            if handed_back is not None and alive[block + 1]:
                z = _first(z, alive[block + 1])
                new = _first(origin + scale * handed_back if origin is not None else handed_back, alive[block + 1])
                z = put_token(z, new, at)  # Eq. 4
        blank = torch.zeros_like(next(x for x in logits if x is not None))
        return torch.stack([blank if x is None else x for x in logits])

    def _units(self, block: int) -> tuple[torch.Tensor | None, torch.Tensor | float]:
        """Origin and scale in which the head reads the class token after ``block`` and hands one back."""
        vit = self.vit
        return (None, 1.0) if vit.origins is None else (vit.origins[block], vit.scales[block])

    def _advance(self, block: int, z: torch.Tensor, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``block``: the class token (K, B, d) of all clients, and all tokens of the first ``on``, which go on."""
        at = self.vit.config.class_token
        if on == len(z) or self.whole_blocks:
            z = self.vit.run(z, block, block + 1)
            return take_token(z, at)
        if not on:
            return self.vit.run_to_token(z, block), z
        with self._clients_of(block, slice(0, on)):
            further = self.vit.run(z[:on], block, block + 1)
        with self._clients_of(block, slice(on, len(z))):
            ending = self.vit.run_to_token(z[on:], block)
        token, further = take_token(further, at)
        return torch.cat((token, ending)), further

    @contextmanager
    def _clients_of(self, block: int, rows: slice):
        """Inside, the stacked parameters of ``block`` are those of some of the clients."""
        stacked = [(m, leaf, p) for m, leaf, dims in self._of_block[block] if (p := m._parameters[leaf]).dim() > dims]
        for module, leaf, p in stacked:
            module._parameters[leaf] = p[rows]
        try:
            yield
        finally:
            for module, leaf, p in stacked:
                module._parameters[leaf] = p

    def prefix_blocks(self) -> int:
        """How many leading blocks give the same output all run long: nothing in or before them is trained or fed back.

        Ask before :meth:`put_` replaces the parameters.
        """
        vit = {n: i for n, i in self.infos().items() if n.startswith("vit.")}
        trained = [vit[n].unit for n in self.trainable() if n in vit]
        fed_back = self.head.first_hand_back + (0 if self.vit.config.reads_update else 1)
        return max(0, min([len(self.vit.blocks), fed_back, *trained]))

    @torch.no_grad()
    def prefix(self, images: torch.Tensor, blocks: int) -> Prefix:
        """The output of the first ``blocks`` blocks for one model's images (1, B, C, H, W)."""
        z, tokens, config = self.vit.stem(images), {}, self.vit.config
        for block in range(blocks):
            origin, scale = self._units(block)
            origin = z[..., config.class_token, :] if config.reads_update else origin
            z = self.vit.run(z, block, block + 1)
            if self.head.reads(block):
                token = z[..., config.class_token, :]
                tokens[block] = (token - origin) / scale if origin is not None else token
        return Prefix(blocks, z, tokens)

    def infos(self) -> dict[str, ParamInfo]:
        """Axes, role, unit and full shape of every parameter."""
        out = {}
        for name, p in self.named_parameters():
            parts = name.split(".")
            owner, adapter = self, False
            for part, following in zip(parts[:-1], parts[1:], strict=True):
                owner = getattr(owner, part)
                adapter = adapter or (hasattr(owner, "base_layer") and following != "base_layer")
            axes = getattr(owner, "axes", {}).get(parts[-1], (None,) * p.dim())
            if parts[0] == "head":
                role, unit = self.head.place(parts[1:])
            else:
                role = "adapter" if adapter else "backbone"
                unit = int(parts[2]) if parts[1] == "blocks" else STEM
            out[name] = ParamInfo(tuple(axes), role, unit, tuple(p.shape))
        return out

    def trainable(self) -> dict[str, torch.Tensor]:
        """The tensors that clients train and communicate, detached."""
        return {n: p.detach() for n, p in self.named_parameters() if p.requires_grad}

    def frozen(self) -> dict[str, torch.Tensor]:
        """The tensors that are the same for all clients and rounds, detached."""
        return {n: p.detach() for n, p in self.named_parameters() if not p.requires_grad}

    def put_(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make ``tensors`` (of any leading client dimension and width) this model's parameters. Copies nothing."""
        for name, tensor in tensors.items():
            module, leaf = self._slots[name]
            module._parameters[leaf] = tensor
