"""A cohort: clients of one round that train together as one batched program.

Trainable tensors are stacked along a new client dimension, frozen ones are kept once. Clients are sorted deepest first,
so block l runs only for the clients still alive, and a parameter is stacked only for the clients that hold it. The
clients' losses are summed: no trainable parameter is shared, so each client gets exactly its own gradient.
A cohort of one is ordinary sequential training on the same path.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.profiling import phase
from ..core.rng import torch_generator
from ..core.slices import Slice, take
from ..data.transforms import sample_views
from ..methods.base import Server
from ..methods.losses import Batch
from ..methods.server import Update
from ..models.exit_model import ExitModel
from .federation import Federation

Tensors = dict[str, torch.Tensor]


def learning_rate(e: Experiment, t: int) -> float:
    """max(min_lr, lr/2 (1 + cos(pi t / rounds))) for round t = 1..rounds: a plain cosine to zero with a floor."""
    return max(e.min_lr, 0.5 * e.lr * (1 + math.cos(math.pi * t / e.rounds)))


@dataclass(frozen=True)
class Plan:
    """Every batch of a cohort's local training: example rows (S, K, B), views, weights, and who is active (S, K)."""

    rows: torch.Tensor
    views: torch.Tensor | None
    weights: torch.Tensor
    examples: np.ndarray  # rows, in host memory
    width: list[int]  # examples in the fullest batch of each step
    active: np.ndarray


class Cohort:
    """The clients of a round that share one width, from download to upload."""

    def __init__(
        self, federation: Federation, model: ExitModel, server: Server, t: int, clients: Sequence[Client],
        slices: Mapping[int, Slice], memories: Mapping[int, Tensors],
    ):  # fmt: skip
        self.experiment, self.data, self.model, self.t = federation.experiment, federation.data, model, t
        self.infos = infos = federation.setting.infos
        self.clients = tuple(sorted(clients, key=lambda c: (-slices[c.budget].depth, -c.budget, c.id)))
        self.slices = tuple(slices[c.budget] for c in self.clients)
        self.memories = [memories.get(c.id, {}) for c in self.clients]
        self.new_memories: dict[int, Tensors] = {}
        self.losses: np.ndarray | None = None
        depth = model.exit_units[-1] + 1
        self.alive = [sum(b in s.units for s in self.slices) for b in range(depth)]
        self.exit_spans = {j: self._span(lambda s, j=j: j in s.exits) for j in range(len(model.exit_units))}
        device = self.data.images.device
        self.held = torch.tensor(
            [[j in s.exits for s in self.slices] for j in self.exit_spans], dtype=torch.float32, device=device
        )
        self.spans: dict[str, tuple[int, int]] = {}
        self.start = self._download(server.params)  # what the clients received, stacked
        self.params = {n: p.clone() for n, p in self.start.items()}  # what they train
        narrow = self.slices[0]
        model.put_({n: take(p, infos[n], narrow) for n, p in federation.frozen.items()})
        self.prefix = None if narrow.index else federation.train_prefix

    def _span(self, holds: Callable[[Slice], bool]) -> tuple[int, int]:
        """(lo, hi) of the clients for which ``holds``; they are contiguous because the cohort is sorted."""
        members = [i for i, s in enumerate(self.slices) if holds(s)]
        return (members[0], members[-1] + 1) if members else (0, 0)

    def _download(self, params: Tensors) -> Tensors:
        out = {}
        for name, info in self.infos.items():
            if name not in params:
                continue
            lo, hi = self._span(lambda s, info=info: s.holds(info))
            if hi == lo:
                continue
            self.spans[name] = (lo, hi)
            cut: Tensors = {}  # by server name: clients of one source share one cut
            for s in self.slices[lo:hi]:
                source = s.source(name)
                if source not in cut:
                    cut[source] = take(params[source], info, s)
            if len(cut) == 1:
                out[name] = next(iter(cut.values())).expand(hi - lo, *next(iter(cut.values())).shape)
            else:
                out[name] = torch.stack([cut[s.source(name)] for s in self.slices[lo:hi]])
        return out

    # --- client memory -------------------------------------------------------------------------------------------

    def recall(self, key: str) -> Tensors:
        """Each client's stored tensors ``key/<parameter>``, stacked like ``params``; zeros where there are none."""
        out = {}
        for name, p in self.params.items():
            lo, hi = self.spans[name]
            rows = [self.memories[i].get(f"{key}/{name}") for i in range(lo, hi)]
            out[name] = torch.stack([torch.zeros_like(p[0]) if r is None else r.to(p.device) for r in rows])
        return out

    def remember(self, key: str, tensors: Tensors) -> None:
        """Store ``tensors`` (stacked like ``params``) with each client, across rounds."""
        for name, stack in tensors.items():
            lo, hi = self.spans[name]
            for i in range(lo, hi):
                self.new_memories.setdefault(self.clients[i].id, {})[f"{key}/{name}"] = stack[i - lo].clone()

    # --- training ------------------------------------------------------------------------------------------------

    def sgd(
        self,
        local_loss: Callable[[Batch], torch.Tensor],
        extra_gradient: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``local_epochs`` of SGD from ``params``, in place: fresh momentum, element-wise clipping, then weight decay.

        ``extra_gradient(name, p)`` is added before clipping. Clients that ran out of batches stand still.
        """
        e, device = self.experiment, self.data.images.device
        leaves = list(self.params.values())
        for p in leaves:
            p.requires_grad_(True)
        self.model.put_(self.params)
        with phase("data"):
            plan, rate, scratch = self._plan(), learning_rate(e, self.t), {}
        if self.prefix is not None:
            with phase("forward"):
                self.prefix.fill(self.model, plan.examples)
        velocity = [torch.zeros_like(p) for p in leaves] if e.momentum else None
        total = torch.zeros(len(self.clients), device=device)
        for step, width in enumerate(plan.width):
            with phase("data"):
                rows = plan.rows[step, :, :width]  # (K, width)
                x = self.prefix(rows) if self.prefix is not None else self._render(rows, plan.views, step)
                labels, weights = self.data.labels[rows], plan.weights[step, :, :width]
            with phase("forward"):
                with torch.autocast(device.type, torch.bfloat16, enabled=e.precision == "bfloat16"):
                    logits = self.model(x, self.alive, self.exit_spans).float()
                loss = local_loss(Batch(logits, labels, weights, self.held, self.t, e.rounds, scratch))
            with phase("backward"):
                grads = list(torch.autograd.grad(loss.sum(), leaves, materialize_grads=True))
            with phase("step"), torch.no_grad():
                total += loss.detach()
                self._step_(grads, velocity, rate, extra_gradient, plan.active[step])
            del x, logits, loss, grads  # kept any longer, they keep the next step out of the memory this one has freed
        for p in leaves:
            p.requires_grad_(False)
        steps = torch.as_tensor(plan.active.sum(0), device=device)
        with phase("backward"):  # on a GPU what is still queued
            self.losses = (total / steps).cpu().numpy()  # one sync a local training: recorded, a check for divergence

    def _step_(self, grads: list, velocity: list | None, rate: float, extra_gradient, active: np.ndarray) -> None:
        """One step of SGD on all leaves at once."""
        e, leaves = self.experiment, list(self.params.values())
        if extra_gradient is not None:  # not in place: in a batch of one, gradients share memory (prefix, positions)
            grads = list(torch._foreach_add(grads, [extra_gradient(n, p) for n, p in self.params.items()]))
        if e.clip_value is not None:
            torch._foreach_clamp_min_(grads, -e.clip_value)
            torch._foreach_clamp_max_(grads, e.clip_value)
        if e.weight_decay:
            grads = list(torch._foreach_add(grads, leaves, alpha=e.weight_decay))
        if velocity is not None:
            torch._foreach_mul_(velocity, e.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        if not active.all():
            self._stop_inactive_(grads, active)
        torch._foreach_add_(leaves, grads, alpha=-rate)

    def _render(self, rows: torch.Tensor, views: torch.Tensor | None, step: int) -> torch.Tensor:
        """Images (K, width, C, H, W) of one step, augmented as planned, or token ids (K, width, T)."""
        views = views[step, :, : rows.shape[1]].reshape(-1, 5) if views is not None else None
        x = self.data.view(self.data.images, self.model.backbone.spec.input_shape, rows.reshape(-1), views)
        return x.view(*rows.shape, *x.shape[1:])

    def _stop_inactive_(self, grads: list[torch.Tensor], active: np.ndarray) -> None:
        """Zero the step of clients without a batch: their loss is zero, but decay, momentum and extra terms are not."""
        mask = torch.as_tensor(active, dtype=grads[0].dtype, device=grads[0].device)
        for name, g in zip(self.params, grads, strict=True):
            lo, hi = self.spans[name]
            g *= mask[lo:hi].view(-1, *(1,) * (g.dim() - 1))

    def _plan(self) -> Plan:
        """Draw every client's order and views from its own generator, a function of (seed, round, client)."""
        e, data, device = self.experiment, self.data, self.data.images.device
        counts, k = [c.num_examples for c in self.clients], len(self.clients)
        b = min(e.batch_size, max(counts))
        per_epoch = [math.ceil(n / b) for n in counts]
        steps = e.local_epochs * max(per_epoch)
        rows = np.zeros((steps, k, b), np.int64)
        weights = np.zeros((steps, k, b), np.float32)
        augment = e.augment != "none"
        views = torch.zeros(steps, k, b, 5) if augment else None
        if augment:
            views[..., 2:4] = 1.0
        for i, (client, n) in enumerate(zip(self.clients, counts, strict=True)):
            mine, generator = data.client(client.id), torch_generator(e.seed, "local", self.t, client.id)
            for epoch in range(e.local_epochs):
                order = torch.randperm(n, generator=generator).numpy()
                drawn = None
                if augment:
                    drawn = sample_views(e.augment, n, data.images.shape[-1], generator, e.crop_pad, e.crop_scale)
                for s in range(per_epoch[i]):
                    take_rows = order[s * b : (s + 1) * b]
                    at, m = epoch * per_epoch[i] + s, len(take_rows)
                    rows[at, i, :m] = mine[take_rows]
                    rows[at, i, m:] = mine[0]  # padding has weight zero
                    weights[at, i, :m] = 1 / m
                    if drawn is not None:
                        views[at, i, :m] = drawn[s * b : s * b + m]
        width = [int((weights[s] > 0).sum(-1).max()) for s in range(steps)]
        return Plan(
            torch.from_numpy(rows).to(device), views.to(device) if views is not None else None,
            torch.from_numpy(weights).to(device), rows, width, (weights > 0).any(-1),
        )  # fmt: skip

    def update(self) -> Update:
        """What the cohort uploads."""
        return Update(self.clients, self.slices, self.params, self.spans)
