"""Everything an experiment needs before its first round: data on the device, the model, the method, the budgets."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ..core.annotations import Count
from ..core.clients import Client, clients_of
from ..core.experiment import Experiment
from ..core.rng import numpy_generator, torch_generator
from ..core.validation import check_type, convert, shown
from ..data.datasets import is_text
from ..data.federated import FederatedData, check_task, load_federated
from ..data.tasks import Span, Task, task_of
from ..layers.dropout import TokenDropout
from ..layers.overrides import override
from ..methods import Method, Round, Server, Setting
from ..methods.values import unknown
from ..models.adapters import apply_finetune_
from ..models.exit_model import ExitModel
from ..models.exits import EveryToken, Head
from ..models.measure import Measure
from ..models.parameter_info import axes_of
from ..models.registry import backbone_spec, build_backbone, tokenizer_of
from . import checks
from .frozen_cache import FrozenCache, build_frozen_cache
from .lab import ServerLab
from .memory import check_memory
from .schedules import round_rate


@dataclass(frozen=True)
class Federation:
    """The pieces that stay the same in every round."""

    experiment: Experiment
    method: Method
    setting: Setting
    data: FederatedData
    model: ExitModel
    frozen: dict[str, torch.Tensor]
    budgets: np.ndarray  # per client; by default its deepest exit
    server: Server  # before round 1
    train_cache: FrozenCache | None = None  # by row of the data; None: augmented, nothing frozen, or too large
    test_cache: FrozenCache | None = None

    @property
    def task(self) -> Task:
        """What outputs mean; of questions with the key that says what an answer is worth."""
        task = task_of(self.experiment.dataset)
        return replace(task, key=self.data.answers) if isinstance(task, Span) else task

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def answering(self) -> list[int]:
        """The exits that are evaluated."""
        exits = list(range(self.setting.num_exits))
        return exits[-1:] if self.method.last_answers else exits

    def candidates(self) -> np.ndarray:
        """Return the ids of the clients that may be sampled: the eligible ones with examples."""
        eligible = np.atleast_1d(self.method.eligible(self.budgets, self.setting))
        return eligible[self.data.num_examples[eligible] > 0]

    @property
    def sample_size(self) -> int:
        """Clients of a round."""
        return min(self.experiment.clients_per_round, len(self.candidates()))

    def clients(self, ids: Iterable[int]) -> list[Client]:
        """Return the clients ``ids`` as values."""
        return clients_of(self.budgets, ids, self.data.num_examples)

    def generator(self, purpose: str, t: int, client: int) -> torch.Generator:
        """Return a client's generator of round t, a function of (seed, purpose, t, client)."""
        return torch_generator(self.experiment.seed, purpose, t, client)

    def rate(self, t: int, clients: Sequence[Client]) -> float | torch.Tensor:
        """Return the learning rate of round t: one for all ``clients`` that train, or each one's (M,)."""
        return round_rate(self.experiment, t)

    def sample_clients(self, t: int) -> list[Client]:
        """Sample the clients of round t, a function of (seed, t): without replacement among the candidates."""
        rng = numpy_generator(self.experiment.seed, "clients", t)
        return self.clients(np.sort(rng.choice(self.candidates(), self.sample_size, replace=False)))


def build_model(
    e: Experiment, method: Method, num_classes: int, meta: bool = False, exit_units: Sequence[int] | None = None
) -> ExitModel:
    """Build backbone, exits and fine-tuning mode of ``e``. ``meta``: shapes only, without weights or memory.

    ``exit_units``: where exits stand; None: as the experiment or the method says.
    """
    with torch.device("meta" if meta else "cpu"):
        backbone = backbone_spec(e.backbone).build() if meta else build_backbone(e.backbone, e.pretrained, e.seed)
        if e.exit_head is not None:
            backbone.spec = backbone_spec(e.backbone, e.exit_head)
        if (units := e.exit_blocks if exit_units is None else tuple(exit_units)) is None:
            placed = method.place_exits(backbone.spec, e.num_exits, partial(_measured, e, method, num_classes))
            units = checks.increasing(placed, f"{e.method}: place_exits()")
        task = task_of(e.dataset)
        head = method.build_head(backbone.spec, task.outputs(num_classes), units)
        check_type(head, Head, f"{e.method}: build_head()")
        if task.reads == "tokens":
            backbone.reads_all = True
            head = EveryToken(head, backbone.spec.input_shape[0], isinstance(task, Span))
        if not meta:
            head.init_(torch_generator(e.seed, "head init"))
        apply_finetune_(backbone, head, e.finetune, dict(e.finetune_options), e.seed)
    model = ExitModel(backbone, head, units, e.batch_norm).eval()
    if (swap_in_ := override("swap_in")) is not None:
        model = swap_in_(model)
    method.configure(model)
    return model


def _measured(e: Experiment, method: Method, num_classes: int, exit_units: tuple[int, ...]) -> Setting:
    """Return the setting of ``e`` with exits after ``exit_units``, of shapes alone."""
    e = e.replace(num_exits=len(exit_units), exit_blocks=exit_units)
    return setting_of(e, build_model(e, method, num_classes, meta=True))


def setting_of(e: Experiment, model: ExitModel, data: FederatedData | None = None) -> Setting:
    """Return what methods may know of ``e`` with ``model``, fresh or of shapes alone."""
    infos, counts = model.infos(), partial(label_counts, data) if data is not None else unknown
    return Setting(
        model.backbone.spec, model.exit_units, infos, e.num_clients, e.rounds, axes_of(model, infos), e.seed, counts,
        e.batch_size, Measure(model), model.frozen(),
    )  # fmt: skip


def label_counts(data: FederatedData, client: int) -> np.ndarray:
    """Count a client's training examples by label, (classes,)."""
    return np.bincount(data.host_labels[data.client(client)], minlength=len(data.classes))


def build_federation(e: Experiment, device: str = "cpu") -> Federation:
    """Check ``e`` against its data and model, then build them. Raises before any compute."""
    checks.check_device(device)
    method, spec = checks.check_experiment(e), backbone_spec(e.backbone)
    checks.check_tokenizer(e, spec)
    data = load_federated(e, device, spec.input_shape[-1], tokenizer_of(e.backbone))
    if spec.pixels and spec.as_trained:  # images as the checkpoint saw them
        mean, std = torch.tensor(spec.pixels, device=data.mean.device)
        data = replace(data, mean=mean, std=std)
    checks.check_input(e, spec, is_text(data.inputs))
    checks.check_channels(e, spec, data)
    check_task(e, data)
    shapes = build_model(e, method, data.num_outputs, meta=True)
    checks.check_norms(e, shapes)
    check_memory(e, shapes, int(data.num_examples.max()), device)
    setting = setting_of(e, shapes, data)
    method.check(setting, e)
    model = build_model(e, method, data.num_outputs, exit_units=shapes.exit_units).to(device)
    setting = replace(setting, frozen=model.frozen())
    setting = replace(setting, lab=ServerLab(data, model, setting, e.batch_size))
    budgets = budgets_of(e, method)
    eligible = np.atleast_1d(method.eligible(budgets, setting))
    if not len(eligible):
        raise ValueError(f"experiment: no client is eligible for {e.method} with budgets = {e.budgets!r}")
    if np.isin(np.arange(e.num_clients), eligible).sum() != len(eligible) or eligible.dtype.kind not in "iu":  # a mask
        given = eligible[:9].tolist()
        raise ValueError(f"{e.method}: eligible() gave {given}; allowed: distinct ids, < {e.num_clients}")
    if not data.num_examples[eligible].any():
        why = f"leaves none of the {len(eligible)} clients that {e.method} can sample an example"
        raise e.refused("partition", why)
    setting = replace(setting, budgets=tuple(np.unique(budgets[eligible[data.num_examples[eligible] > 0]]).tolist()))
    server = check_type(method.init_server(model.trainable(), setting), Server, f"{e.method}: init_server()")
    check_answers(f := Federation(e, method, setting, data, model, model.frozen(), budgets, server))
    return with_caches(f)


def check_answers(f: Federation) -> None:
    """Raise ``ValueError`` if the last exit alone answers and clients, each on its own test set, are served none."""
    one_of_each = np.unique(f.budgets, return_index=True)[1]
    for c in f.clients(one_of_each) if f.method.last_answers and f.experiment.test_split != "central" else ():
        if f.setting.num_exits - 1 not in f.method.serve(c, f.server, Round(0, (), f.setting)).members[0].part.exits:
            why = f"last_answers = True, but clients of budget {c.budget} are served a model without the last exit"
            allowed = "last_answers = False, a serve() of models that have it, or test_split = 'central'"
            raise ValueError(f"{f.experiment.method}: {why}; allowed: {allowed}")


def with_caches(f: Federation) -> Federation:
    """Return ``f`` with empty caches for the outputs of its frozen first units, where they pay."""
    units = f.model.frozen_units()
    return replace(f, train_cache=build_train_cache(f, units), test_cache=_cache(f, units, f.data.test_inputs))


def build_train_cache(f: Federation, units: int) -> FrozenCache | None:
    """Build the cache of the training examples' first ``units`` units.

    None with augmentation, or where it does not pay.
    """
    drops = any(isinstance(m, TokenDropout) and m.p for m in f.model.backbone.modules())
    return _cache(f, units if f.experiment.augment == "none" and not drops else 0, f.data.inputs)


def _cache(f: Federation, units: int, inputs: torch.Tensor) -> FrozenCache | None:
    view = partial(f.data.view, inputs, f.model.backbone.spec.input_shape)
    skips = check_type(f.method.skips(f.setting), Collection, f"{f.experiment.method}: skips()") if units else ()
    return build_frozen_cache(f.model, units, len(inputs), view, f.device, skips)


def budgets_of(e: Experiment, method: Method) -> np.ndarray:
    """Return each client's budget, the deepest exit it can hold: ``uniform`` i mod B, ``maximum`` B - 1 for all.

    ``contiguous``: the first N // B clients have the first, and so on; clients left over have the last. A tuple names
    each device class's, client i being of class i mod their number. ``ValueError`` for a budget that there is not.
    Where the method itself knows what clients have, as it says.
    """
    budgets = convert(method.num_budgets(e.num_exits), Count, f"{e.method}: num_budgets()")
    if (given := method.client_budgets(e.num_clients, e.num_exits)) is not None:
        if np.shape(given) != (e.num_clients,) or not np.isin(given, np.arange(budgets)).all():
            why = f"{e.method}: client_budgets() gave {shown(np.asarray(given).tolist())}"
            raise ValueError(f"{why}; allowed: {e.num_clients} numbers, one a client, 0..{budgets - 1}")
        return np.asarray(given, int)
    if isinstance(e.budgets, tuple):
        if not e.budgets or max(e.budgets) >= budgets:
            raise e.refused("budgets", f": {e.method} has {budgets}", f"0..{budgets - 1}")
        return np.resize(e.budgets, e.num_clients)
    i = np.arange(e.num_clients)
    blocks = np.minimum(i // max(1, e.num_clients // budgets), budgets - 1)
    return {"maximum": np.full_like(i, budgets - 1), "contiguous": blocks, "uniform": i % budgets}[e.budgets]
