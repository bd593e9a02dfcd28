"""What a grid costs before it runs: runs, training MACs, GPU hours. From shapes and published sizes; nothing is loaded.

A forward and a backward pass are counted as three forward passes; evaluation is left out (about a hundredth).
Read next: ``models/measure.py``, which counts the MACs; ``durations.py`` (how long that is on this machine).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.data.datasets import load_dataset
from fedlib.data.tokenizer import has_words
from fedlib.engine.federation import budgets_of
from fedlib.methods import build_method
from fedlib.models.registry import backbone_spec, tokenizer_of

from .costs import Shapes, load_shapes

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
TRAINING_EXAMPLES, EXAMPLES_PER_CLIENT, CLASSES, GROUPS, DOWNLOAD_MB = (
    {name: said[what] for name, said in TABLES["data"].items() if what in said}
    for what in ("examples", "a_client", "classes", "groups", "mb")
)


@dataclass(frozen=True)
class Card:
    """A GPU: dense products in 10^12 operations a second, float32 without TensorFloat-32, and its memory."""

    float32: float
    tf32: float
    bfloat16: float
    gib: int

    def macs_per_second(self, precision: str) -> float:
        """What training is taken to sustain, one MAC being two operations."""
        return UTILISATION * getattr(self, precision) * 1e12 / 2


CARDS = {name: Card(**said) for name, said in TABLES["cards"].items()}
UTILISATION = 0.4  # of the peak, assumed of nets that fill a card; small nets and small batches reach less


def num_classes(e: Experiment) -> int:
    """Classes of ``e``'s data set, which is read only if it is not a known one."""
    known = GROUPS if e.label_groups else CLASSES
    if e.dataset in known:
        return known[e.dataset]
    size = backbone_spec(e.backbone).input_shape[-1]
    return load_dataset(e.dataset, e.label_groups, size, _words(e)).num_classes


def examples_per_client(e: Experiment) -> float:
    """Mean number of training examples of a client."""
    if e.num_train is not None:
        return e.num_train / e.num_clients
    if e.dataset in EXAMPLES_PER_CLIENT:
        return EXAMPLES_PER_CLIENT[e.dataset]
    if e.dataset in TRAINING_EXAMPLES:
        return TRAINING_EXAMPLES[e.dataset] / e.num_clients
    size = backbone_spec(e.backbone).input_shape[-1]
    return len(load_dataset(e.dataset, size=size, tokenizer=_words(e)).train_labels) / e.num_clients


def _words(e: Experiment) -> str | None:
    """The backbone's own tokenizer, or for an estimate any where that is not at hand."""
    own = tokenizer_of(e.backbone)
    return own if has_words(own) else None


def num_parameters(e: Experiment) -> int:
    """Parameters of the whole model."""
    return sum(p.numel() for p in _shapes(_shape_of(e), num_classes(e)).model.parameters())


def training_macs(e: Experiment) -> float:
    """3 x rounds x clients x local epochs x examples x MACs, the MACs being the mean over the eligible budgets.

    Those of a budget are one sub-model's, times what its local training really takes (``Method.effort``).
    """
    method, setting = build_method(e.method, e.options), _shapes(_shape_of(e), num_classes(e)).setting
    setting = replace(setting, num_clients=e.num_clients, rounds=e.rounds, batch_size=e.batch_size)
    clients = [Client(-1, b, round(examples_per_client(e))) for b in range(method.num_budgets(e.num_exits))]
    efforts = [method.effort(client, setting, e) for client in clients]
    macs = _macs(_shape_of(e), num_classes(e)) * np.array(efforts)
    budgets = budgets_of(e, method)
    eligible = method.eligible(budgets, setting)
    trained = e.rounds * min(e.clients_per_round, len(eligible)) * e.local_epochs * examples_per_client(e)
    return 3 * trained * macs[budgets[eligible]].mean()


def _shape_of(e: Experiment) -> Experiment:
    """An experiment of the same model, equal for all that share it."""
    return Experiment(
        method=e.method, options=e.options, backbone=e.backbone, pretrained=e.pretrained, finetune=e.finetune,
        finetune_options=e.finetune_options, num_exits=e.num_exits, exit_blocks=e.exit_blocks,
        public_fraction=e.public_fraction, num_clients=e.num_clients, clients_per_round=e.clients_per_round,
    )  # fmt: skip


@cache
def _shapes(e: Experiment, classes: int) -> Shapes:
    return load_shapes(e, classes)


@cache
def _macs(e: Experiment, classes: int) -> np.ndarray:
    """MACs per budget; where sub-models differ in depth only, four are measured and the rest interpolated."""
    shapes = _shapes(e, classes)
    slices, every = shapes.slices, np.arange(shapes.budgets)
    by_width = any(part.index for part in slices)
    measured = every if by_width else np.unique(np.linspace(0, len(every) - 1, 4).round().astype(int))
    return np.interp(every, measured, [shapes.setting.measure.macs(slices[j]) for j in measured])


def gpu_hours(experiments: Sequence[Experiment], card: str = "A100") -> float:
    """Hours of training on one ``card`` of ``CARDS``."""
    return sum(training_macs(e) / CARDS[card].macs_per_second(e.precision) for e in experiments) / 3600
