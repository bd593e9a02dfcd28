"""An experiment is a value: every choice that can change a result, validated, and hashed to name its run.

How it is executed (device, workers, cohort size, where data lie on disk) is not part of it. Read next:
``engine/checks.py`` (what only the data and the model can tell), ``runs/params.py`` (experiments from layered YAML).
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from .validation import Scalar, check_fields


@dataclass(frozen=True)
class Experiment:
    """Every choice that can change a result. Invalid values raise ``ValueError`` before any compute."""

    # algorithm
    method: str = "reefl"
    options: Mapping[str, Scalar] = field(default_factory=dict)  # fields of the method's dataclass
    # data
    dataset: str = "mnist"  # a name of data.datasets.DATASETS, or the path of a local set (which then names the run)
    label_groups: bool = False  # label by what a class name says before its slash (Omniglot's alphabets)
    num_train: int | None = None  # use so many training examples, classes in proportion; None: all
    num_test: int | None = None
    # natural: an owner (writer, speaker) is a client; natural_split: an owner is several clients, each one's alone
    partition: typing.Literal[
        "dirichlet", "class_dirichlet", "pathological", "natural", "natural_split", "iid", "drawn"
    ] = "dirichlet"
    dirichlet_alpha: float = 1.0
    classes_per_client: int = 2  # partition = pathological
    examples_per_client: int = 100  # partition = drawn: a population of any size, clients overlap
    augment: typing.Literal["none", "crop", "crop_flip", "rrc", "rrc_flip"] = "crop"
    crop_pad: int = 2  # pixels, augment = crop*
    crop_scale: float = 0.08  # smallest area, augment = rrc*
    # model
    backbone: str = "deit_micro"  # or any timm ViT with a class token
    pretrained: bool = True
    finetune: str = "lora"  # full, frozen, lora, pa, sa, ssf, or a peft tuner's name
    finetune_options: Mapping[str, Scalar] = field(default_factory=dict)
    num_exits: int = 4
    exit_blocks: tuple[int, ...] | None = None  # 0-based; None: the method's own placement
    # federation
    num_clients: int = 100
    clients_per_round: int = 10
    budgets: typing.Literal["uniform", "maximum"] = "uniform"  # uniform: client i can hold exits 0..(i mod E)
    rounds: int = 100
    local_epochs: int = 1
    batch_size: int = 32
    lr: float = 0.05
    min_lr: float = 0.001
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_value: float | None = 1.0  # element-wise
    clip_norm: float | None = None  # of a client's whole gradient, after clip_value
    optimiser: typing.Literal["sgd", "adam", "adamw"] = "sgd"  # fresh in every local training; momentum is of sgd
    # the rate of a round: cosine falls from lr to min_lr, step by ``decay`` after every milestone, exponential by
    # ``decay`` after every ``decay_every`` rounds
    schedule: typing.Literal["cosine", "step", "exponential", "constant"] = "cosine"
    milestones: tuple[float, ...] | None = None  # rounds; below 1: shares of all rounds; schedule = step
    decay: float | None = None  # factor; schedule = step, exponential
    decay_every: int = 1  # rounds, schedule = exponential
    warmup_rounds: float = 0.0  # the rate rises linearly in so many first rounds; below 1: a share of all rounds
    local_schedule: typing.Literal["constant", "linear"] = "constant"  # linear: to zero inside a local training
    precision: typing.Literal["float32", "bfloat16"] = "float32"  # of local training's matmuls (autocast)
    # A NaN or infinite update ends the run as diverged, is left out and counted, or is an error with client and tensor.
    nonfinite: typing.Literal["record", "drop", "fail"] = "record"
    evaluate_every: int = 0  # rounds; 0: only after the last
    seed: int = 1

    def __post_init__(self):
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for key, value in check_fields(type(self), own, "experiment").items():
            object.__setattr__(self, key, value)
        sizes = (
            "num_train num_test classes_per_client examples_per_client num_exits num_clients clients_per_round rounds"
        )
        for key in f"{sizes} local_epochs batch_size dirichlet_alpha lr clip_value crop_scale".split():
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise ValueError(f"experiment: {key} = {getattr(self, key)!r} must be positive")
        for key in "min_lr momentum weight_decay evaluate_every seed crop_pad".split():
            if getattr(self, key) < 0:
                raise ValueError(f"experiment: {key} = {getattr(self, key)!r} must not be negative")
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"experiment: clients_per_round = {self.clients_per_round} exceeds num_clients = {self.num_clients}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"experiment: min_lr = {self.min_lr} exceeds lr = {self.lr}")
        if self.momentum >= 1 or self.crop_scale > 1:
            raise ValueError(f"experiment: momentum = {self.momentum} must be < 1, crop_scale = {self.crop_scale} <= 1")
        if self.exit_blocks is not None:
            blocks = self.exit_blocks
            if len(blocks) != self.num_exits or list(blocks) != sorted(set(blocks)) or blocks[0] < 0:
                raise ValueError(
                    f"experiment: exit_blocks = {list(blocks)} must be {self.num_exits} increasing block indices >= 0"
                )

    def identity(self) -> dict[str, object]:
        """The fields that differ from the defaults (so a later field with a neutral default renames no stored run)."""
        defaults = type(self)().to_dict()
        return {k: v for k, v in self.to_dict().items() if v != defaults[k]}

    def to_dict(self) -> dict[str, object]:
        """All fields as JSON types."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, object], where: str = "experiment") -> "Experiment":
        """Inverse of :meth:`to_dict`; refuses unknown keys and wrong types."""
        return cls(**check_fields(cls, values, where))

    @property
    def hash(self) -> str:
        """Eight hex digits of the SHA-256 of :meth:`identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def slug(self) -> str:
        """The run directory's name: readable, unique by the hash, safe on any file system."""
        words = (self.method, self.dataset.rstrip("/").split("/")[-1], self.finetune, f"s{self.seed}")
        text = "-".join("".join(c if c.isascii() and c.isalnum() or c in "_." else "_" for c in w) for w in words)
        return f"{text[:80]}-{self.hash}"

    def replace(self, **changes: object) -> "Experiment":
        """A copy with some fields changed (and validated again)."""
        check_fields(type(self), changes, "experiment")
        return dataclasses.replace(self, **changes)

    def __hash__(self):
        return hash(self.hash)
