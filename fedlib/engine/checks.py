"""Combinations that a field alone cannot tell: refused before any compute, with what is allowed."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

import torch

from ..core.annotations import Natural
from ..core.experiment import Experiment
from ..core.validation import check_all, check_conditions, check_type, convert, shown
from ..data.datasets import DATASETS, TEXTS, is_text
from ..data.federated import FederatedData
from ..data.tasks import Classification, NextToken, Regression, task_of
from ..data.tokenizer import load_tokenizer
from ..layers.norms import BatchNorm2d
from ..methods import METHODS, OLD_OPTIONS, Method, Setting, build_method, present_options
from ..models.adapters import check_finetune, default_options
from ..models.backbone import Spec
from ..models.exit_model import ExitModel
from ..models.registry import backbone_spec, check_pretrained
from .schedules import check_schedule


def check_experiment(e: Experiment) -> Method:
    """Return ``e``'s method, or raise ``ValueError`` naming the key, the bad value and the allowed ones.

    All that is refused is said at once, a line each. Nothing is downloaded and no weight is allocated. What only the
    data can tell is checked when they are loaded.
    """
    method, config = build_method(e.method, e.options), backbone_spec(e.backbone, e.exit_head)
    known = e.dataset in TEXTS if e.dataset in DATASETS else None
    check_all(
        lambda: check_conditions(e, "experiment"), lambda: check_schedule(e),
        lambda: check_pretrained(e.backbone, e.pretrained), lambda: check_input(e, config, known),
        lambda: check_labels(e, method), lambda: check_finetune(e.finetune, dict(e.finetune_options), config),
        lambda: method.check_backbone(config, e), lambda: exit_blocks_of(e, config, method),
    )  # fmt: skip
    method.check(Setting(config, exit_blocks_of(e, config, method), {}, e.num_clients, e.rounds), e)
    return method


def exit_blocks_of(e: Experiment, config: Spec, method: Method) -> tuple[int, ...]:
    """Return the units with an exit; ``ValueError`` if the backbone has no such, or an exit's head no effect."""
    blocks = e.exit_blocks or increasing(method.exit_units(config.depth, e.num_exits), f"{e.method}: exit_units()")
    if blocks[-1] >= config.depth:
        raise ValueError(f"experiment: exit_blocks = {list(blocks)}: {e.backbone} has blocks 0..{config.depth - 1}")
    if e.exit_head is not None and tuple(blocks) == (config.depth - 1,):
        raise e.refused("exit_head", "has no effect: no exit comes before the last unit")
    return blocks


def increasing(units: object, hook: str) -> tuple[int, ...]:
    """Return the ``units`` that ``hook`` gave an exit; ``ValueError`` unless they are numbers that increase."""
    given = convert([*check_type(units, Iterable, hook)], tuple[Natural, ...], hook)
    if not given or list(given) != sorted(set(given)):
        raise ValueError(f"{hook} = {list(given)}; allowed: numbers of units that increase")
    return given


def check_input(e: Experiment, config: Spec, text: bool | None) -> None:
    """Raise ``ValueError`` if the backbone cannot read the data or their task, or they cannot be augmented so.

    ``text``: whether they are sentences; None: not known yet.
    """
    reads_text, task = len(config.input_shape) == 1, task_of(e.dataset)
    if text is not None and text != reads_text:
        kind, allowed = ("sentences", "minilm, bert_micro") if text else ("images", "deit_micro, a timm ViT, vim_tiny")
        why = f"cannot read dataset = {e.dataset!r}, which holds {kind}"
        raise e.refused("backbone", why, f"{allowed}, or data of the other kind")
    if task.reads == "tokens" and len(config.state(0)) != 2:
        why, allowed = "asks for an answer at every token", "minilm, bert_micro or another transformer of text"
        raise e.refused("dataset", f"{why}, and backbone = {e.backbone!r} has none", allowed)
    if isinstance(task, NextToken) and not config.causal:
        why = f"asks for the next token, and backbone = {e.backbone!r} sees what follows"
        raise e.refused("dataset", why, "a causal one, such as llama_tiny")
    size = config.input_shape[-1]
    if reads_text and e.augment != "none":
        raise e.refused("augment", f"is for images; allowed with {e.backbone!r}: none")
    if e.augment.startswith("crop") and e.crop_pad >= size:
        why = f"leaves nothing of the {size} x {size} pixels that {e.backbone} reads"
        raise e.refused("crop_pad", why, f"0..{size - 1}")


def check_labels(e: Experiment, method: Method) -> None:
    """Raise ``ValueError`` if ``method`` works on classes, or softens them, and the labels are something else."""
    task = task_of(e.dataset)
    if e.test_mask and not isinstance(task, Classification):
        raise e.refused("test_mask", f"is for classes, which the labels of {e.dataset!r} are not")
    if method.needs_classes and not isinstance(task, Classification):
        why = f"{method.needs_classes} is for classes, and the labels of dataset = {e.dataset!r} are none"
        raise ValueError(f"{e.method}: {why}; allowed: data of classes, or without it")
    if isinstance(task, Regression) and (temperature := getattr(method, "temperature", 1)) != 1:
        raise ValueError(f"{e.method}: temperature = {temperature}: a regression has no classes to soften; allowed: 1")


def check_channels(e: Experiment, config: Spec, data: FederatedData) -> None:
    """Raise ``ValueError`` if images have other channels than the backbone reads, or token ids exceed its vocabulary.

    Grey images are repeated.
    """
    words = getattr(config, "vocab_size", None)
    if is_text(data.inputs) and words is not None:
        read = [x[:, : config.input_shape[0]] for x in (data.inputs, data.test_inputs)]
        low, high = min(int(x.min()) for x in read), max(int(x.max()) for x in read)
        if low < 0 or high >= words:
            why = f"has token ids from {low} to {high}, and backbone = {e.backbone!r} knows {words} words"
            raise e.refused("dataset", why, f"ids from 0 to {words - 1}")
    reads, found = config.input_shape[0], max(x.shape[1] for x in (data.inputs, data.test_inputs))
    if is_text(data.inputs) or found in (1, reads):
        return
    why = f"reads images of {reads} channel{'s'[: reads != 1]}, and those of dataset = {e.dataset!r} have {found}"
    raise e.refused("backbone", why, f"a backbone of {found} channels")


def check_norms(e: Experiment, model: ExitModel) -> None:
    """Raise ``ValueError`` if ``batch_norm`` asks for statistics that ``model``, perhaps of shapes alone, has not.

    ``tracked`` asks for none where nothing is to be tracked: grids say it of nets with batch norm and without.
    """
    if e.batch_norm in ("static", "local") and not any(isinstance(m, BatchNorm2d) for m in model.modules()):
        why = f": backbone = {e.backbone!r} and its exits have no batch norm"
        raise e.refused("batch_norm", why, "batch, tracked")


def check_tokenizer(e: Experiment, config: Spec) -> None:
    """Raise ``ValueError`` if the backbone and its tokenizer do not go together; ``ConnectionError`` if it has none."""
    if (source := config.tokenizer) is None:
        return
    words, of = load_tokenizer(source), f"experiment: backbone = {e.backbone!r}: the tokenizer of {source!r}"
    if words.rows > config.vocab_size:
        raise ValueError(f"{of} has token ids up to {words.rows - 1}; allowed: below the model's {config.vocab_size}")
    if words.padding != config.padding:
        raise ValueError(f"{of} pads with {words.padding}, and padding = {config.padding} is what the model masks")


def check_device(device: str) -> None:
    """Raise ``ValueError`` if this machine cannot train on ``device``. MPS cannot: updates are summed in float64."""
    if device == "cpu":
        return
    if not isinstance(device, str) or not re.fullmatch(r"cuda(:\d{1,3})?", device):
        raise ValueError(f"execution: device = {shown(device)} is not possible; allowed: cpu, cuda, cuda:<number>")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= found:
        gpus = "".join(f", cuda:{i}" for i in range(found))
        raise ValueError(f"execution: device = {device!r}, but PyTorch finds {found} GPUs here; allowed: cpu{gpus}")


def without_defaults(e: Experiment) -> Experiment:
    """Drop the options of ``e`` that equal the defaults of its method and fine-tuning mode: one spelling of a meaning.

    Its name is that of a new run; runs that are stored under another spelling keep theirs (``store.as_stored``).
    """
    if e.method not in METHODS:
        return e
    method = build_method(e.method, e.options)
    plain = {f.name: f.default for f in dataclasses.fields(method)}
    options = {k: getattr(method, k) for k in present_options(e.method, e.options) if getattr(method, k) != plain[k]}
    defaults = default_options(e.finetune)
    finetune_options = {k: v for k, v in e.finetune_options.items() if k not in defaults or v != defaults[k]}
    whole = {k: _as(int, v) for k, v in finetune_options.items() if not isinstance(defaults.get(k), float)}
    return e.replace(options=options, finetune_options=finetune_options | whole)


def equivalent_experiments(e: Experiment) -> Iterator[Experiment]:
    """Yield ``e``, then all that mean the same: without defaults, and with whole numbers as 1.0 or as 1."""
    yield from _old_spellings(e)
    plain = without_defaults(e)
    kinds = {"options": (plain.options, int), "finetune_options": (plain.finetune_options, float)}
    spellings = lambda v, to: {repr(x): x for x in (v, _as(to, v))}.values()  # noqa: E731
    pairs = [[(kind, k, x) for x in spellings(v, to)] for kind, (own, to) in kinds.items() for k, v in own.items()]
    for chosen in itertools.islice(itertools.product(*pairs), 256):
        fields = {kind: {k: x for of, k, x in chosen if of == kind} for kind in kinds}
        yield from _old_spellings(plain.replace(**fields))


def _old_spellings(e: Experiment) -> Iterator[Experiment]:
    """Yield ``e``, then ``e`` with the former names of its options, if any were renamed."""
    yield e
    if OLD_OPTIONS.keys() & e.options.keys():
        yield e.replace(options={OLD_OPTIONS.get(k, k): v for k, v in e.options.items()})


def _as(kind: type, value: object) -> object:
    """Convert a whole number to ``kind``, int or float, also inside a list; return anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_as(kind, v) for v in value)
    whole = value.is_integer() if isinstance(value, float) else type(value) is int
    return kind(value) if whole else value
