"""Combinations that a field alone cannot tell: refused before any compute, with what is allowed."""

from .experiment import Experiment
from .methods import Method, Setting, build_method
from .models.adapters import check_finetune
from .models.weights import backbone_config, check_pretrained


def check_experiment(e: Experiment) -> Method:
    """Return ``e``'s method, or raise ``ValueError`` naming the key, the bad value and the allowed ones.

    Nothing is downloaded and no weight is allocated. What only the data can tell is checked when they are loaded.
    """
    method = build_method(e.method, e.options)
    config = backbone_config(e.backbone)
    check_pretrained(e.backbone, e.pretrained)
    check_finetune(e.finetune, dict(e.finetune_options), config)
    blocks = e.exit_blocks if e.exit_blocks is not None else method.exit_blocks(config.depth, e.num_exits)
    if blocks[-1] >= config.depth:
        raise ValueError(f"experiment: exit_blocks = {list(blocks)}: {e.backbone} has blocks 0..{config.depth - 1}")
    if e.backbone != "deit_micro" and e.augment.startswith("crop") and e.crop_pad >= config.img_size:
        raise ValueError(f"experiment: crop_pad = {e.crop_pad} must be below the image size {config.img_size}")
    method.check(Setting(config, tuple(blocks), {}, e.num_clients, e.rounds), e.finetune)
    return method
