"""FedBABU (Oh et al., ICLR 2022): only the backbone is federated, exits stay as drawn, clients tune at the end.

Client: receives the backbone, trains it under the common random exits, which nobody ever changes, and sends it. Server:
the mean of the backbones, by examples. To answer, a client fine-tunes a copy of the whole model on its own training
data, which is thrown away (``tune_epochs``); without training data it answers with the model as it is.
Read next: ``fedrod.py``.

Deviations: the current global model is tuned at every evaluation, the paper's reading (some public code tunes each
client's last local model, once). The exits follow from the seed and are not sent.
"""

from dataclasses import dataclass

from ...core.annotations import Count
from ..base import Client, Cohort, Experiment, JointExits, Sizes
from ..values import Member, Round, Server, Serving, Setting, Stage


@dataclass(frozen=True)
class FedBABU(JointExits):
    """Body aggregation, body update; the whole is tuned for an answer."""

    label, color, marker = "FedBABU", "#f8a459", "P"

    tune_epochs: Count = 5  # E_ft

    def check(self, setting: Setting, e: Experiment) -> None:
        if e.finetune == "frozen":
            raise ValueError("fedbabu: finetune = 'frozen' leaves nothing to train: its exits are; allowed: others")

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        return [Member(client, full := r.setting.full(), upload=full.only(exits=()))]

    def travels(self, shared: dict[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """Leave out the exits, which are as they began."""
        return (body := [n for name, n in shared.items() if setting.infos[name].exit is None]), body

    def local_update(self, cohort: Cohort) -> None:
        cohort.train(self.local_loss, Stage(lambda i: i.exit is None))

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving(tuple(self.members(client, server, r)), tune=Stage(epochs=self.tune_epochs))
