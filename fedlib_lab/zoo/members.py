"""Modules that know of one model, run for the members of a cohort; ``linear.py`` says what a stacked tensor is.

Read next: ``zoo/wrapped.py``, ``models/adapters.py`` (whose modules these are).
"""

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from fedlib.core.threads import Switches
from fedlib.layers.context import Context
from fedlib.layers.norms import BatchNorm2d, statistics

FUSION = Switches()


def unfused(device: str) -> AbstractContextManager[None]:
    """Run no fused attention or encoder layer, which has no derivative under ``vmap``, inside the block.

    Where attention falls back by itself (not on a CPU), only encoder layers are asked.
    """
    mha, sdp = torch.backends.mha, torch.backends.cuda  # its switches are those of a CPU, too
    switches = [(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)]
    if device == "cpu":
        switches.append((sdp.flash_sdp_enabled, sdp.enable_flash_sdp, False))
        switches.append((sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp, False))
    return FUSION.held(switches)


class PerClient(nn.Module):
    """A module of one model on (B, ...), for inputs (K, B, ...) and tensors that may be stacked.

    Under ``vmap`` where PyTorch can batch it, else one member after the other. The latter for layers with in-place
    writes or an autograd function of their own (peft's OFT, LoHa). What nobody has of its own runs once on all rows.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.base_layer, self.vmap, self.context = layer, True, Context()
        self.writes = False  # into its input, which others may read, too?
        self.count_dims_()
        self.normalises = any(isinstance(m, BatchNorm2d) for m in layer.modules())  # by what shares a member's batch

    def count_dims_(self) -> None:
        """Note how many dimensions each parameter has where nothing is stacked."""
        self.dims = {n: p.dim() for n, p in self.base_layer.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = dict(self.base_layer.named_parameters()) | statistics(self.base_layer)
        stacked = {n: t.dim() > self.dims.get(n, 1) for n, t in tensors.items()}  # a statistic is (C,)
        if not any(stacked.values()) and (len(x) == 1 or not self.normalises):
            return self.base_layer((x.clone() if self.writes else x).flatten(0, 1)).unflatten(0, x.shape[:2])
        real = self.context.real(x.device) if self.normalises else None
        real = None if real is None else real[: len(x)]
        tensors = {n: t[: len(x)] if stacked[n] else t for n, t in tensors.items()}
        y, after, gathered = self._run(tensors, stacked, real, x)
        if self.context.gathered is not None:
            for norm, ((count, mean, var),) in gathered.items():
                seen = (count.flatten(0, 1), mean.flatten(0, 1), var.flatten(0, 1))
                self.context.gathered.setdefault(norm, []).append(seen)
        elif self.context.tracks:
            for name, fresh in after.items():
                path, _, leaf = name.rpartition(".")
                self.base_layer.get_submodule(path).replace_(leaf, fresh)
        return y

    def try_vmap_(self, x: torch.Tensor) -> torch.Tensor:
        """Keep to ``vmap`` if two copies then answer x (2, B, ...), and learn, as one by one; their answer."""

        def answer(vmap: bool) -> torch.Tensor:
            self.vmap = vmap
            parameters = self.base_layer.named_parameters()
            copies = {n: torch.stack((p, p)).detach().requires_grad_(p.requires_grad) for n, p in parameters}
            y, *_ = self._run(copies, dict.fromkeys(copies, True), None, x)
            if y.requires_grad:
                learn = [p for p in copies.values() if p.requires_grad]
                torch.autograd.grad(y.square().mean(), learn, allow_unused=True)
            return y.detach()

        alone = answer(False)
        try:
            # norms of few values enlarge rounding; ``vmap`` is asked last, as an answer sets it
            self.vmap = float((answer(True) - alone).norm()) <= 1e-2 * float(alone.norm()) and self.vmap
        except Exception:  # whatever a layer raises that sees a batched tensor
            self.vmap = False
        return alone

    def _run(self, tensors: dict, stacked: dict[str, bool], real: torch.Tensor | None, x: torch.Tensor) -> tuple:
        """Return the results of :meth:`_one` for every member, stacked."""
        if self.vmap and len(x) > 1:
            try:
                dims = {n: 0 if own else None for n, own in stacked.items()}
                with unfused(x.device.type):
                    return torch.func.vmap(self._one, (dims, None if real is None else 0, 0))(tensors, real, x)
            except RuntimeError as error:
                if not any(word in str(error) for word in ("functorch", "vmap")):
                    raise
                self.vmap = False
        rows = []
        for i in range(len(x)):
            own = {n: t[i] if stacked[n] else t for n, t in tensors.items()}
            rows.append(self._one(own, None if real is None else real[i], x[i]))
        return tree_map(lambda *each: torch.stack(each), *rows)

    def _one(self, tensors: dict, real: torch.Tensor | None, x: torch.Tensor) -> tuple:
        """Return one member's output, batch norm's statistics after it, and what batch norm gathered."""
        with self.context.alone(real) as context:
            call = torch.func.functional_call  # puts changed statistics into ``tensors``
            x = x.clone() if self.writes else x
            y = call(self.base_layer, tensors, (x,), tie_weights=False)  # what is tied is one module under two names
            return y, {n: t for n, t in tensors.items() if n not in self.dims}, context.gathered or {}


class MemberNorm(BatchNorm2d):
    """:class:`BatchNorm2d` where layers know of one member: maps or rows (B, C, ...), whose real rows count.

    It takes the place of ``norm``, a batch norm of PyTorch's or one that goes on with ``drop`` and ``act`` as timm's
    do, and begins with its statistics. ``ValueError`` for one that it cannot stand for.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm):
        own = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
        plain = type(norm).forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
        if not (plain or own) or not norm.affine or norm.momentum is None:
            raise ValueError(f"{norm} computes otherwise than a plain batch norm with weights and momentum")
        super().__init__(norm.num_features, None, norm.eps, norm.momentum)
        self.weight, self.bias, self.then = norm.weight, norm.bias, nn.Sequential(*own)
        if norm.running_mean is not None:
            self.first = norm.running_mean, norm.running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(super().forward(x.reshape(1, *x.shape[:2], -1, 1)).view(x.shape))

    def _native(self, x, mean, var, training: bool) -> torch.Tensor:
        mean, var = (p.squeeze(0) if p is not None else None for p in (mean, var))
        x = x.squeeze(0).contiguous()
        y = F.batch_norm(x, mean, var, self.weight, self.bias, training, self.momentum, self.eps)
        return laid_out(y).unsqueeze(0)


def laid_out(y: torch.Tensor) -> torch.Tensor:
    """Return ``y``, whose gradient will lie as it does.

    Of one map, or maps one wide, PyTorch's batch norm takes a gradient that lies channels last for one that does not.
    """
    return y.flatten().view(y.shape)
