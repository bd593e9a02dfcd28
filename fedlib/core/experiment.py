"""An experiment is a value: every choice that can change a result, validated, and hashed to name its run.

How it is executed (device, workers, cohort size, where data lie on disk) is not part of it. Read next:
``engine/checks.py`` (what only the data and the model can tell), ``runs/params.py`` (experiments from layered YAML).
"""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from .annotations import Count, Natural, NotNegative, Part, Positive, Rounds, Scalar, Share, When
from .validation import NamedFields, check_fields, check_instance, check_names

BY_ALPHA = ("dirichlet", "class_dirichlet", "drawn", "weighted_dirichlet", "capped_dirichlet", "grouped_dirichlet")


@dataclass(frozen=True)
class Experiment(NamedFields):
    """Every choice that can change a result. Invalid values raise ``ValueError`` before any compute.

    What is not given has a bare default, which is no paper's: ``Experiment(method="depthfl")`` is DepthFL's algorithm
    at these settings. A paper's own are those of :func:`fedlib.recipe`.

    Algorithm
      method              a name of ``fedlib.methods.METHODS``, or a registered method of one's own
      options             fields of the method's dataclass, by name; what is not given has the method's default
    Data
      dataset             a name of ``data.datasets.DATASETS``, or the path of a local set (which then names the run)
      label_groups        label by what a class name says before its slash (Omniglot's alphabets)
      num_train, num_test use so many examples; None: all
      subset              which of them. proportional: classes as in the whole set; balanced: equally many of each, as
                          far as they go
      partition           who gets which training examples. dirichlet: clients of equal size, each with class
                          proportions of its own; class_dirichlet: every class divided in Dirichlet proportions;
                          pathological: few classes a client; natural: an owner (writer, speaker) is a client;
                          natural_split: an owner is several clients, each one's alone; iid; drawn: a population of any
                          size, whose clients overlap; weighted_dirichlet, capped_dirichlet, dealt: FeDepth's;
                          grouped_dirichlet: ScaleFL's (``data/label_partitions.py``)
      dirichlet_alpha     concentration of partition = drawn and of all *dirichlet: small is heterogeneous
      classes_per_client  of partition = pathological and dealt
      examples_per_client of partition = drawn
      test_split          what of the test set a client answers. central: all of it; like_train: rows in proportion to
                          its training labels; contiguous: an even piece in order; labels: all rows of its labels;
                          owner: those of its owner (writer, speaker), partition = natural*
      test_mask           outputs of classes that a client has no training example of are zero when it answers
                          (HeteroFL's "local" metric)
      validation_fraction of every class's training examples, held out before they are divided
      public_fraction     so many examples of every class that are nobody's, and without labels, for methods whose
                          server learns from them (FedDF), as a share of the training examples: of those that num_train
                          leaves out if these are enough, else held out before the others are divided
      evaluate_on         test, or validation: to choose learning rates without test data
      augment             crop: random shift; rrc: random resized crop; _flip: and a horizontal flip
      crop_pad            largest shift in pixels of the backbone's input, augment = crop*
      crop_scale          smallest area of a random resized crop, as a share of the image, augment = rrc*
    Model
      backbone            a name of ``models.registry.OWN``, what ``fedlib.wrap`` returned, or a net of timm's
      pretrained          start from published weights, or from random ones
      finetune            full, frozen, lora, pa, sa, ssf, or a peft tuner's name
      finetune_options    of that mode: r of pa and sa, the fields of peft's config
      batch_norm          of convnets. batch: the batch's statistics, when answering those of all that is asked (the
                          whole test set; a client's own); tracked: running ones, averaged by the server; static:
                          recomputed for every evaluation; local: running ones that stay with a client
      exit_head           of convnets, how exits before the last read a map; None: pooled, or as the method has them.
                          linear: pooled; norm, norm_relu: these first; convolutions: three first (ScaleFL);
                          flatten: all of it; strided: two convolutions of stride 2 first (MSDNet); towers: gated, then
                          down to the last map's shape by separable convolutions (DepthFL)
      num_exits           exits of the model, and of most methods the budgets that clients can have
      exit_blocks         0-based blocks with an exit; None: the method's own placement
    Federation
      num_clients         all clients
      clients_per_round   clients sampled in every round
      budgets             uniform: client i has budget i mod B, by default exits 0..budget; maximum: the largest;
                          contiguous: the first N // B clients have the first, …, and those left over the largest;
                          a list: of so many classes of devices, client i being of class i mod their number
      rounds              rounds of communication, at most a million
      local_epochs        passes over a client's own examples in a round
      batch_size          examples of a local step
      lr, min_lr          rate of local training; min_lr is the least of schedule = cosine
      schedule            the rate of round t = 1..rounds. cosine: max(min_lr, lr/2 (1 + cos(pi t / rounds))), so the
                          last round's, and that of rounds = 1, is min_lr; step: lr times decay after every milestone;
                          exponential: lr times decay after every decay_every rounds; constant: lr
      milestones          rounds, or below 1 shares of all rounds; schedule = step
      decay, decay_every  a factor; how many rounds it takes, schedule = exponential
      warmup_rounds       first rounds in which the rate rises linearly; below 1: a share of all rounds
      local_schedule      inside a local training; linear: to zero
      optimiser           sgd, adam or adamw, fresh in every local training
      momentum            of sgd
      weight_decay        of all optimisers
      clip_value          largest gradient entry; None: not clipped
      clip_norm           largest norm of a client's whole gradient, after clip_value; None: not clipped
      precision           of local training's products of float32 numbers: float32 is IEEE's, tf32 a GPU's shorter one,
                          bfloat16 autocast's; all else is float32
      nonfinite           a NaN or infinite update ends the run as diverged (record), is left out and counted (drop), or
                          is an error with client and tensor (fail)
      evaluate_every      rounds between two evaluations; 0: only after the last; None: a twentieth of all, but at least
                          5. Looking changes no result: it is part neither of the name nor of equality, and a stored
                          run keeps the curve that it has
      seed                of all randomness
    """

    # algorithm
    method: str = "reefl"
    options: Mapping[str, Scalar] = field(default_factory=dict)
    # data
    dataset: str = "mnist"
    label_groups: bool = False
    num_train: Count | None = None
    num_test: Count | None = None
    subset: typing.Literal["proportional", "balanced"] = "proportional"
    partition: typing.Literal[
        "dirichlet", "class_dirichlet", "pathological", "natural", "natural_split", "iid", "drawn",
        "weighted_dirichlet", "capped_dirichlet", "grouped_dirichlet", "dealt",
    ] = "dirichlet"  # fmt: skip
    dirichlet_alpha: Annotated[Positive, When(partition=BY_ALPHA)] = 1.0
    classes_per_client: Annotated[Count, When(partition=("pathological", "dealt"))] = 2
    examples_per_client: Annotated[Count, When(partition="drawn")] = 100
    test_split: typing.Literal["central", "like_train", "contiguous", "labels", "owner"] = "central"
    test_mask: Annotated[bool, When(test_split=("like_train", "contiguous", "labels", "owner"))] = False
    validation_fraction: Part = 0.0
    public_fraction: Part = 0.0
    evaluate_on: typing.Literal["test", "validation"] = "test"
    augment: typing.Literal["none", "crop", "crop_flip", "rrc", "rrc_flip"] = "crop"
    crop_pad: Natural = 2
    crop_scale: Share = 0.08
    # model
    backbone: str = "deit_micro"
    pretrained: bool = True
    finetune: str = "lora"
    finetune_options: Mapping[str, Scalar] = field(default_factory=dict)
    batch_norm: typing.Literal["batch", "tracked", "static", "local"] = "batch"
    exit_head: typing.Literal["linear", "norm", "norm_relu", "convolutions", "flatten", "strided", "towers"] | None = (
        None
    )
    num_exits: Count = 4
    exit_blocks: tuple[Natural, ...] | None = None
    # federation
    num_clients: Count = 100
    clients_per_round: Count = 10
    budgets: typing.Literal["uniform", "maximum", "contiguous"] | tuple[Natural, ...] = "uniform"
    rounds: Rounds = 100
    local_epochs: Count = 1
    batch_size: Count = 32
    lr: Positive = 0.05
    min_lr: NotNegative = 0.001
    momentum: Annotated[Part, When(optimiser="sgd")] = 0.0
    weight_decay: NotNegative = 0.0
    clip_value: Positive | None = 1.0
    clip_norm: Positive | None = None
    optimiser: typing.Literal["sgd", "adam", "adamw"] = "sgd"
    schedule: typing.Literal["cosine", "step", "exponential", "constant"] = "cosine"
    milestones: Annotated[tuple[float, ...] | None, When(schedule="step")] = None
    decay: Annotated[Share | None, When(schedule=("step", "exponential"))] = None
    decay_every: Annotated[Count, When(schedule="exponential")] = 1
    warmup_rounds: float = 0.0
    local_schedule: typing.Literal["constant", "linear"] = "constant"
    precision: typing.Literal["float32", "tf32", "bfloat16"] = "float32"
    nonfinite: typing.Literal["record", "drop", "fail"] = "record"
    evaluate_every: Natural | None = field(default=None, compare=False)
    seed: Natural = 1

    def __post_init__(self):
        check_instance(self, "experiment")
        if self.clients_per_round > self.num_clients:
            raise self.refused("clients_per_round", f"exceeds num_clients = {self.num_clients}")
        if self.schedule == "cosine" and self.min_lr > self.lr:
            raise self.refused("min_lr", f"exceeds lr = {self.lr}")
        if self.subset != "proportional" and self.num_train is self.num_test is None:
            raise self.refused("subset", "has no effect without num_train or num_test")
        if (blocks := self.exit_blocks) is not None:
            if len(blocks) != self.num_exits or list(blocks) != sorted(set(blocks)):
                raise self.refused("exit_blocks", f"must be {self.num_exits} increasing block indices >= 0")

    def refused(self, key: str, why: str, allowed: object = "") -> ValueError:
        """Return the error for a value that field ``key`` cannot have: ``experiment: key = value why; allowed: …``."""
        value = getattr(self, key)
        value, joint = list(value) if isinstance(value, tuple) else value, "" if why[0] in ":," else " "
        return ValueError(f"experiment: {key} = {value!r}{joint}{why}" + (f"; allowed: {allowed}" if allowed else ""))

    def identity(self) -> dict[str, object]:
        """Return the fields that differ from the defaults.

        A later field with a neutral default renames no stored run.
        """
        defaults = _defaults(type(self))
        return {k: v for k, v in self.to_dict().items() if v != defaults[k] and k != "evaluate_every"}

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON types."""
        return json.loads(json.dumps(vars(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, object], where: str = "experiment") -> "Experiment":
        """Invert :meth:`to_dict`; refuses unknown keys and wrong types."""
        return cls(**check_fields(cls, values, where))

    @property
    def hash(self) -> str:
        """Eight hex digits of the SHA-256 of :meth:`identity`."""
        return _hash(self.identity())

    @property
    def slug(self) -> str:
        """The run directory's name: readable, unique by the hash, safe on any file system."""
        return f"{self.title}-{self.hash}"

    @property
    def former_slug(self) -> str:
        """The name of runs that were stored while ``evaluate_every``, unless 0, was a part of it."""
        looked = {"evaluate_every": self.evaluate_every} if self.evaluate_every else {}
        return f"{self.title}-{_hash(self.identity() | looked)}"

    @property
    def looks_every(self) -> int:
        """Rounds between two evaluations, 0: there is one, after the last.

        By default a curve has twenty points, but no two of neighbouring rounds: a look may cost as much as a round.
        """
        return max(5, self.rounds // 20) if self.evaluate_every is None else self.evaluate_every

    @property
    def title(self) -> str:
        """The readable part of the name."""
        words = (self.method, self.dataset.rstrip("/").split("/")[-1], self.finetune, f"s{self.seed}")
        return "-".join("".join(c if c.isascii() and c.isalnum() or c in "_." else "_" for c in w) for w in words)[:80]

    def replace(self, **changes: object) -> "Experiment":
        """Return a copy with some fields changed, validated again."""
        check_names(type(self), changes, "experiment")
        return dataclasses.replace(self, **changes)

    def __hash__(self):
        """Return equal hashes for equal experiments: 1 is 1.0 here, unlike in :attr:`hash` (``store.as_stored``)."""
        values = ((k, v) for k, v in vars(self).items() if k != "evaluate_every")
        return hash(tuple((k, tuple(v.items()) if isinstance(v, Mapping) else v) for k, v in values))


def _hash(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@functools.cache
def _defaults(cls: type[Experiment]) -> dict[str, object]:
    """Return the fields of an experiment with nothing set."""
    return cls().to_dict()
