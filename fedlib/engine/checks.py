"""Combinations that a field alone cannot tell: refused before any compute, with what is allowed."""

from ..core.experiment import Experiment
from ..data.datasets import DATASETS, TEXTS
from ..methods import Method, Setting, build_method
from ..models.adapters import check_finetune
from ..models.registry import backbone_spec, check_pretrained
from .optimisers import check_optimiser
from .schedules import check_schedule


def check_experiment(e: Experiment) -> Method:
    """Return ``e``'s method, or raise ``ValueError`` naming the key, the bad value and the allowed ones.

    Nothing is downloaded and no weight is allocated. What only the data can tell is checked when they are loaded.
    """
    check_optimiser(e)
    check_schedule(e)
    method = build_method(e.method, e.options)
    config = backbone_spec(e.backbone)
    check_pretrained(e.backbone, e.pretrained)
    if e.dataset in DATASETS:
        check_input(e, config, e.dataset in TEXTS)
    reads_text = len(config.input_shape) == 1
    if reads_text and e.augment != "none":
        raise ValueError(f"experiment: augment = {e.augment!r} is for images; allowed with {e.backbone!r}: none")
    check_finetune(e.finetune, dict(e.finetune_options), config)
    blocks = e.exit_blocks if e.exit_blocks is not None else method.exit_units(config.depth, e.num_exits)
    if blocks[-1] >= config.depth:
        raise ValueError(f"experiment: exit_blocks = {list(blocks)}: {e.backbone} has blocks 0..{config.depth - 1}")
    if e.backbone != "deit_micro" and e.augment.startswith("crop") and e.crop_pad >= config.img_size:
        raise ValueError(f"experiment: crop_pad = {e.crop_pad} must be below the image size {config.img_size}")
    method.check(Setting(config, tuple(blocks), {}, e.num_clients, e.rounds), e)
    return method


def check_input(e: Experiment, config, text: bool) -> None:
    """Raise ``ValueError`` if the backbone reads images and the data are sentences, or the reverse."""
    if text == (len(config.input_shape) == 1):
        return
    kind, allowed = ("sentences", "minilm, bert_micro") if text else ("images", "deit_micro, a timm ViT, vim_tiny")
    raise ValueError(
        f"experiment: backbone = {e.backbone!r} cannot read dataset = {e.dataset!r}, which holds {kind}; "
        f"allowed: {allowed}, or data of the other kind"
    )
