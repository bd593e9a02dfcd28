"""FedRoD (Chen & Chao, ICLR 2022): one backbone, generic exits for all classes, personal exits for one's own.

Client: receives backbone and generic exits g; trains them with the balanced softmax, the cross-entropy of g's logits +
log of the client's examples by class (so g does not learn who has what); then ``head_epochs`` of its own exits p on the
cross-entropy of g(z) + p(z) with everything else frozen; sends backbone and g. Server: the mean, by examples. A client
answers with g + p.
Read next: ``models/exits.py``, ``fedpac.py``.

Deviations: public code updates p in the same mini-batches, on features without gradient: ``head_epochs=None``. A class
that the client lacks has log 0, as in the official form: it is masked. Local distillation uses each stage's own
logits.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...core.annotations import Count
from ...layers.context import frozen_statistics
from ...models.exits import PairedExits
from ..base import Batch, Cohort, Head, JointExits, ParamInfo, Spec, classifiers
from ..values import Stage


@dataclass(frozen=True)
class FedRoD(JointExits):
    """Robust decoupling: two predictors on one representation."""

    label, color, marker = "FedRoD", "#005300", "<"

    needs_classes: ClassVar[str] = "its balanced softmax"

    head_epochs: Count | None = 5  # E_p; None: in the same mini-batches

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> Head:
        return PairedExits(*(classifiers(spec, num_classes, exit_units) for _ in range(2)))

    def personal(self, info: ParamInfo) -> bool:
        return info.of == "personal"

    def local_update(self, cohort: Cohort) -> None:
        head, units = cohort.model.head, cohort.setting.exit_units
        assert isinstance(head, PairedExits)  # as built above

        def logits(part: Head, batch: Batch, detach: bool = False) -> torch.Tensor:
            seen = [batch.features[j].detach() if detach else batch.features[j] for j in range(len(units))]
            with frozen_statistics(cohort.model.context):
                outputs = [part.step(unit, z, [])[0] for unit, z in zip(units, seen, strict=True)]
            return torch.stack([out for out in outputs if out is not None]).float()

        def generic(batch: Batch) -> torch.Tensor:
            return self.balanced(batch, logits(head.generic, batch))

        def both(batch: Batch) -> torch.Tensor:
            g, p = logits(head.generic, batch), logits(head.personal, batch, detach=True)
            return self.balanced(batch, g) + self.local_loss(replace(batch, outputs=g.detach() + p))

        if self.head_epochs is None:
            cohort.train(both)
            return
        cohort.train(generic, Stage(lambda i: i.kind != "personal"))
        cohort.train(self.local_loss, Stage(lambda i: i.kind == "personal", self.head_epochs))

    def balanced(self, batch: Batch, generic: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``generic`` logits (E, M, B, C) with the log of the clients' class counts added, (M,)."""
        # log 0 as a number whose exp is 0: the same loss, and distillation does not subtract infinities
        prior = batch.label_counts().log().clamp(min=-1e4).to(generic.dtype)  # (M, C)
        return self.local_loss(replace(batch, outputs=generic + prior[:, None]))
