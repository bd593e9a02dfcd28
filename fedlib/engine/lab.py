"""What the server may do itself: run a model, and train it on the public examples that an experiment grants.

Methods get it as ``Setting.lab`` (``methods/values.Lab``). Public rows are nobody's: ``FederatedData`` refuses others.
"""

import math

import numpy as np
import torch

from ..core.rng import numpy_generator
from ..core.slices import ParamInfo, Slice, scatter_add_, take, take_all
from ..data.federated import FederatedData
from ..methods.values import Setting, Tensors
from ..models.exit_model import ExitModel
from ..models.route import PartialForward
from .forward import Forward, by_example

BATCH, HELD_OUT = 250, 10  # examples that are answered at once; one in ``HELD_OUT`` public examples judges the training


class ServerLab:
    """Public rows of ``data``, if there are any, and the federation's model, of which any part can be put in place."""

    def __init__(self, data: FederatedData, model: ExitModel, setting: Setting, batch_size: int):
        self.data, self.model, self.setting, self.batch_size = data, model, setting, batch_size
        self.frozen = model.frozen()
        rows = data.public
        if not by_example(model, "batch", training=False):  # they are answered in batches
            rows = numpy_generator(data.seed, "in order").permutation(rows)
        self.rows = torch.from_numpy(rows).to(data.inputs.device)

    def answers(self, part: Slice, model: Tensors) -> torch.Tensor:
        """Return outputs (N, C) of the last exit of ``model``, tensors of ``part`` by local names, on public rows."""
        with torch.no_grad():
            return self._outputs(part, model, self.rows)

    def run_state(self, part: Slice, model: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run ``part`` from ``state``, its stem's output: return outputs (exits, N, C) and what exits read, (N, d).

        In training, and differentiable.
        """
        forward, read = self._forward(part, model, training=True), {}
        watch = lambda unit, before, feature, seen, back: read.update({unit: feature[0].flatten(1)})  # noqa: E731
        outputs = forward(PartialForward(0, state[None]), watch=watch)[list(part.exits), 0]
        return outputs, [read[self.setting.exit_units[j]] for j in part.exits]

    def distil(
        self, params: Tensors, part: Slice, target: torch.Tensor, passes: int, lr: float, patience: int,
        rng: np.random.Generator,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Train the server's tensors of ``part`` by Adam on the cross-entropy with ``target`` (N, C) probabilities.

        It makes ``passes`` over the public rows in batches of the experiment's size, stops where the loss on the
        held-out ones was lower ``patience`` steps ago, and takes the best it has seen.
        """
        infos = self.setting.infos
        start = {n: p.detach().clone() for n, p in take_all(params, infos, part).items()}
        trained = {n: p.requires_grad_() for n, p in start.items() if infos[n].kind != "statistic"}
        optimiser, judge = torch.optim.Adam(trained.values(), lr), torch.arange(0, len(self.rows), HELD_OUT)
        learn = np.setdiff1d(np.arange(len(self.rows)), judge.numpy())
        best, kept = torch.full((), math.inf, device=self.data.device), {n: p.detach() for n, p in trained.items()}
        since, every = 0, max(1, patience // 2)
        parts = -(-len(learn) // self.batch_size)
        batches = [b for _ in range(passes) for b in np.array_split(rng.permutation(learn), parts)]
        for step, chosen in enumerate([*batches, None]):
            if chosen is None or step % every == 0:
                loss = self._loss(part, start, judge, target)
                better = loss < best
                best = torch.where(better, loss, best)
                kept = {n: torch.where(better, p.detach(), kept[n]) for n, p in trained.items()}
                if 0 < step < len(batches) and (since := 0 if better else since + every) >= patience:
                    break
            if chosen is not None:
                optimiser.zero_grad()
                loss = self._loss(part, start, torch.from_numpy(chosen), target, training=True)
                loss.backward(inputs=list(trained.values()))
                optimiser.step()
        return {part.source(n): _overwritten(params[part.source(n)], p, infos[n], part) for n, p in kept.items()}

    def _loss(self, part: Slice, tensors: Tensors, rows: torch.Tensor, target: torch.Tensor, training: bool = False):
        """Return the mean cross-entropy of public ``rows`` with their targets: KL up to a constant."""
        rows = rows.to(self.rows.device)
        with torch.set_grad_enabled(training):
            logp = self._outputs(part, tensors, self.rows[rows], training).log_softmax(-1)
            return -(target[rows] * logp).sum(-1).mean()

    def _outputs(self, part: Slice, tensors: Tensors, rows: torch.Tensor, training: bool = False) -> torch.Tensor:
        """Return outputs (n, C) of the last exit of ``part`` on ``rows``; in training of all at once."""
        forward, context = self._forward(part, tensors, training), self.model.context
        parts = [rows] if training else rows.split(BATCH)
        with context.overridden(policy="batch" if context.training else context.policy):  # no statistics are moved
            return torch.cat([forward(forward.inputs(x[None]))[max(part.exits), 0] for x in parts])

    def _forward(self, part: Slice, tensors: Tensors, training: bool) -> Forward:
        """Put ``part`` of the model in place; where no statistics travel, those of the batch are taken."""
        infos, own = self.setting.infos, self.model.context.policy in ("batch", "tracked")
        frozen = {n: take(p, infos[n], part) for n, p in self.frozen.items()}
        return Forward(self.model, [part], frozen, tensors, data=self.data).place_(training=training or not own)


def _overwritten(whole: torch.Tensor, value: torch.Tensor, info: ParamInfo, part: Slice) -> torch.Tensor:
    """Return ``whole`` with ``value`` in the entries that ``part`` keeps."""
    held, new = torch.zeros_like(whole), torch.zeros_like(whole)
    scatter_add_(held, torch.ones((), dtype=whole.dtype, device=whole.device), info, part)
    scatter_add_(new, value, info, part)
    return torch.where(held > 0, new, whole)
