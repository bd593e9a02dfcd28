"""Everything an experiment needs before its first round: data on the device, the model, the method, the budgets."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.rng import numpy_generator, torch_generator
from ..data.datasets import is_text
from ..data.federated import FederatedData, load_federated
from ..methods import Method, Server, Setting
from ..methods.base import clients_of
from ..models.adapters import apply_finetune_
from ..models.exit_model import ExitModel
from ..models.registry import backbone_config, build_backbone
from .checks import check_device, check_experiment, check_input, check_population
from .frozen_cache import PrefixCache, build_prefix_cache
from .memory import check_memory


@dataclass(frozen=True)
class Federation:
    """The pieces that stay the same in every round."""

    experiment: Experiment
    method: Method
    setting: Setting
    data: FederatedData
    model: ExitModel
    frozen: dict[str, torch.Tensor]
    budgets: np.ndarray  # deepest exit per client
    server: Server  # before round 1
    train_prefix: PrefixCache | None = None  # by row of the data; None: augmented, nothing frozen, or too large
    test_prefix: PrefixCache | None = None

    @property
    def device(self) -> torch.device:
        return self.data.images.device

    def candidates(self) -> np.ndarray:
        """Ids of the clients that may be sampled: the eligible with examples."""
        eligible = self.method.eligible(self.budgets, self.setting)
        return eligible[self.data.num_examples[eligible] > 0]

    @property
    def sample_size(self) -> int:
        """Clients of a round."""
        return min(self.experiment.clients_per_round, len(self.candidates()))

    def sample_clients(self, t: int) -> list[Client]:
        """The clients of round t, a function of (seed, t): without replacement among the candidates."""
        rng = numpy_generator(self.experiment.seed, "clients", t)
        ids = rng.choice(self.candidates(), self.sample_size, replace=False)
        return clients_of(self.budgets, np.sort(ids), self.data.num_examples)


def build_model(e: Experiment, method: Method, num_classes: int, meta: bool = False) -> ExitModel:
    """Backbone, exits and fine-tuning mode of ``e``. ``meta``: shapes only, without weights or memory."""
    with torch.device("meta" if meta else "cpu"):
        vit = backbone_config(e.backbone).build() if meta else build_backbone(e.backbone, e.pretrained, e.seed)
        depth = vit.config.depth
        exit_blocks = e.exit_blocks if e.exit_blocks is not None else method.exit_blocks(depth, e.num_exits)
        head = method.build_head(vit.config.dim, depth, num_classes, exit_blocks)
        if not meta:
            head.init_(torch_generator(e.seed, "head init"))
        apply_finetune_(vit, head, e.finetune, dict(e.finetune_options), e.seed)
    return ExitModel(vit, head, exit_blocks).eval()


def build_federation(e: Experiment, device: str = "cpu") -> Federation:
    """Check ``e`` against its data and model, then build them. Raises before any compute."""
    check_device(device)
    method = check_experiment(e)
    data = load_federated(e, device)
    check_input(e, backbone_config(e.backbone), is_text(data.images))
    check_population(e, data)
    check_memory(e, build_model(e, method, len(data.classes), meta=True), int(data.num_examples.max()), device)
    model = build_model(e, method, len(data.classes)).to(device)
    infos = model.infos()
    setting = Setting(model.vit.config, model.exit_blocks, infos, e.num_clients, e.rounds)
    method.check(setting, e.finetune)
    budgets = budgets_of(e)
    eligible = method.eligible(budgets, setting)
    if not len(eligible):
        raise ValueError(f"experiment: no client is eligible for {e.method} with budgets = {e.budgets!r}")
    if not data.num_examples[eligible].any():
        raise ValueError(
            f"experiment: partition = {e.partition!r} leaves none of the {len(eligible)} clients that {e.method} can "
            "sample an example"
        )
    server = method.init_server(model.trainable(), setting)
    return with_prefix_caches(Federation(e, method, setting, data, model, model.frozen(), budgets, server))


def with_prefix_caches(f: Federation) -> Federation:
    """``f`` with empty caches for the answers of its frozen first blocks, where they pay."""
    blocks = f.model.prefix_blocks()
    return replace(f, train_prefix=build_train_prefix(f, blocks), test_prefix=_prefix(f, blocks, f.data.test_images))


def build_train_prefix(f: Federation, blocks: int) -> PrefixCache | None:
    """The cache of the training examples' first ``blocks`` blocks; None with augmentation, or where it does not pay."""
    return _prefix(f, blocks if f.experiment.augment == "none" else 0, f.data.images)


def _prefix(f: Federation, blocks: int, images: torch.Tensor) -> PrefixCache | None:
    view = partial(f.data.view, images, f.model.vit.config.input_shape)
    return build_prefix_cache(f.model, blocks, len(images), view, images.device)


def budgets_of(e: Experiment) -> np.ndarray:
    """Deepest exit each client can hold: ``uniform`` i mod E, ``maximum`` E - 1 for all."""
    if e.budgets == "maximum":
        return np.full(e.num_clients, e.num_exits - 1)
    return np.arange(e.num_clients) % e.num_exits
