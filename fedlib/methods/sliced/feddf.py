"""FedDF (Lin et al., NeurIPS 2020): models of unequal levels, which the server lets learn from their ensemble.

Client (level j): ScaleFL's sub-model of level j with its last exit alone; cross-entropy. Server: (1) per level the
plain mean over the level's clients; (2) every level's model of the round learns, by Adam on public examples without
labels, the softmax of the mean logits of all models that arrived, until the loss on a held-out tenth of these stands
still. The experiment grants the public examples: ``public_fraction``. Level j is evaluated with its own model.
Read next: ``engine/lab.py`` (how the server trains), ``decoupled.py`` (without step 2).

Deviations: the paper distils up to 10,000 steps in a round, from another data set and with a cosine rate; here it is
``passes`` over the public examples, which are of the clients' own data set, at a constant rate. Levels share nothing,
as the paper's prototypes do.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...core.annotations import Count, Positive
from ..base import Arrived, Experiment, Round, Server, Setting
from ..scaling import ModelsApart


@dataclass(frozen=True)
class FedDF(ModelsApart):
    """The levels are ScaleFL's."""

    label, color, marker = "FedDF", "#7f8e27", ">"

    version: ClassVar[int] = 2  # the public examples were taken from the clients
    needs_models: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "its ensemble's softmax"

    passes: Count = 1  # over the public examples, for each level and round
    server_lr: Positive = 1e-3
    patience: Count = 50  # steps without a lower loss on the held-out public examples

    def check(self, setting: Setting, e: Experiment) -> None:
        super().check(setting, e)
        if not e.public_fraction:
            raise ValueError("feddf: public_fraction = 0 grants the server no examples to distil on; allowed: above 0")

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        fused = super().aggregate(server, arrived, r)  # (1)
        lab, levels = r.setting.lab, {c.id: c.budget for c in r.clients}
        logits = [lab.answers(self.part(levels[k], r.setting), model) for k, model in arrived.models.items()]
        target = torch.stack(logits).mean(0).softmax(-1)  # (N, C)
        new = dict(fused.params)
        for level in sorted({levels[k] for k in arrived.models}):  # (2)
            part, rng = self.part(level, r.setting), r.generator("distillation", level)
            new |= lab.distil(new, part, target, self.passes, self.server_lr, self.patience, rng)
        return replace(fused, params=new)
