"""A backbone cut into units with exits, run for one client or a whole cohort in one pass.

The head decides what an exit is: ``Classifiers`` (one per exit) or ``Ree`` (shared, and handing a class token back).
Both answer ``step(block, token, past)`` after every block.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..slices import STEM, ParamInfo, Slice
from .vit import ViT


class ExitModel(nn.Module):
    """``vit`` (a backbone: ``stem``, ``run``, ``config``) and ``head``; parameters may be stacked (see ``layers.py``).

    In a cohort the clients are sorted deepest first, so block l runs for the first ``alive[l]`` clients only and exit j
    belongs to the clients ``spans[j] = (lo, hi)``.
    """

    def __init__(self, vit: ViT, head: nn.Module, exit_blocks: Sequence[int]):
        super().__init__()
        self.vit, self.head, self.exit_blocks = vit, head, tuple(exit_blocks)
        self._slots: dict[str, tuple[nn.Module, str]] | None = None

    def forward(
        self,
        images: torch.Tensor,
        alive: Sequence[int] | None = None,
        spans: Mapping[int, tuple[int, int]] | None = None,
    ) -> torch.Tensor:
        """Images (K, B, 3, H, W) -> logits (E, K, B, C); zeros where client k does not hold exit e.

        By default all K clients run every block and every exit.
        """
        clients, depth = len(images), self.exit_blocks[-1] + 1
        alive = alive if alive is not None else [clients] * depth
        spans = spans if spans is not None else {j: (0, clients) for j in range(len(self.exit_blocks))}
        exit_of = {block: j for j, block in enumerate(self.exit_blocks)}
        at, reads_update = self.vit.config.class_token, self.vit.config.reads_update
        z = self.vit.stem(images)  # (K, B, T, d)
        past: list = []  # the head's history, restarted for every batch
        logits: list[torch.Tensor | None] = [None] * len(self.exit_blocks)
        for block in range(depth):
            if not alive[block]:
                break
            entering = z[: alive[block], :, at]
            z = self.vit.run(z[: alive[block]], block, block + 1)
            lo, hi = spans.get(exit_of.get(block), (0, 0))
            token = z[..., at, :] - entering if reads_update else z[..., at, :]
            out, handed_back = self.head.step(block, token[lo:hi] if self.head.per_exit else token, past)
            if out is not None and hi > lo:
                out = out if self.head.per_exit else out[lo:hi]
                logits[exit_of[block]] = F.pad(out, (0, 0, 0, 0, lo, clients - hi))
            if handed_back is not None:
                new = entering + handed_back if reads_update else handed_back
                z = torch.cat((z[..., :at, :], new.unsqueeze(-2), z[..., at + 1 :, :]), -2)  # Eq. 4
        blank = torch.zeros_like(next(x for x in logits if x is not None))
        return torch.stack([blank if x is None else x for x in logits])

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
        if self._slots is None:
            self._slots = {
                f"{path}.{leaf}" if path else leaf: (module, leaf)
                for path, module in self.named_modules()
                for leaf in module._parameters
            }
        for name, tensor in tensors.items():
            module, leaf = self._slots[name]
            module._parameters[leaf] = tensor

    def full_slice(self) -> Slice:
        """The whole model."""
        return Slice.prefix(self.exit_blocks[-1] + 1, range(len(self.exit_blocks)))
