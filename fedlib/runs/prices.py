"""What a grid costs before it runs: runs, training MACs, GPU hours. From shapes and published sizes; nothing is loaded.

A forward and a backward pass are counted as three forward passes; evaluation is left out (about a hundredth).
Read next: ``models/measure.py``, which counts the MACs; ``durations.py`` (how long that is on this machine).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..core.clients import Client
from ..core.experiment import Experiment
from ..data.datasets import load_dataset
from ..data.tokenizer import has_words
from ..engine.federation import budgets_of
from ..methods import build_method
from ..models.registry import backbone_spec, tokenizer_of
from .costs import Shapes, load_shapes

# Training examples and classes, so that a grid can be priced without its data. FEMNIST: nine tenths of 226 a writer;
# SpeechCommands: the most active speakers, about 100 clips each.
TRAINING_EXAMPLES = {"mnist": 4_000, "cifar10": 50_000, "cifar100": 50_000, "tiny_imagenet": 100_000,
                     "sst2": 67_349, "ag_news": 120_000, "cola": 8_551, "mrpc": 3_668, "stsb": 5_749,
                     "rte": 2_490, "qqp": 363_846, "qnli": 104_743, "mnli": 392_702, "squad": 87_599,
                     "squad_v2": 130_319, "flowers102": 7_169, "docstrings": 750}  # fmt: skip
EXAMPLES_PER_CLIENT = {"femnist": 204, "speech_commands": 100}
CLASSES = {"mnist": 10, "cifar10": 10, "cifar100": 100, "tiny_imagenet": 200, "femnist": 62, "speech_commands": 35,
           "sst2": 2, "ag_news": 4, "cola": 2, "mrpc": 2, "stsb": 0, "rte": 2, "qqp": 2, "qnli": 2,
           "mnli": 3, "squad": 0, "squad_v2": 0, "xquad_en": 0, "flowers102": 102, "docstrings": 3}  # fmt: skip
DOWNLOAD_MB = {"cifar10": 144, "cifar100": 142, "tiny_imagenet": 154, "femnist": 210, "speech_commands": 2_400,
               "sst2": 3.3, "ag_news": 20, "cola": 0.4, "mrpc": 1.1, "stsb": 0.8, "rte": 1.3, "qqp": 74, "qnli": 19,
               "mnli": 57, "squad": 16, "squad_v2": 18, "xquad_en": 1, "svamp": 0.2, "flowers102": 346}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """A GPU: dense products in 10^12 operations a second, float32 without TensorFloat-32, and its memory."""

    float32: float
    bfloat16: float
    gib: int

    def macs_per_second(self, precision: str) -> float:
        """What training is taken to sustain, one MAC being two operations."""
        return UTILISATION * getattr(self, precision) * 1e12 / 2


CARDS = {  # NVIDIA's data sheets; of the RTX 4090 the white paper on its architecture (Ada), appendix A
    "A100": Card(19.5, 312, 80),
    "H100": Card(66.9, 989, 80),
    "RTX 4090": Card(82.6, 165, 24),
    "L4": Card(30.3, 121, 24),
}
UTILISATION = 0.4  # of the peak, assumed of nets that fill a card; small nets and small batches reach less


def num_classes(e: Experiment) -> int:
    """Classes of ``e``'s data set, which is read only if it is not a known one."""
    if e.dataset in CLASSES and not e.label_groups:
        return CLASSES[e.dataset]
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
