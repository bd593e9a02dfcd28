"""Fine-tuning by any of peft's tuners, on the layers that a backbone names for it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache

import torch
from torch import nn

from fedlib.core.slices import RANK
from fedlib.layers.dropout import TokenDropout
from fedlib.layers.linear import Linear
from fedlib.models.adapters import LORA_DEFAULTS, check_options, check_rank, default_options, global_seed, option_error
from fedlib.models.backbone import Backbone, Spec

from .members import PerClient
from .wrapped import adaptable

DEFAULTS: Mapping[str, dict] = {"ia3": {"feedforward_modules": []}}
# ln_tuning would train whole linear layers
WITHOUT_INJECTION = {"prompt_tuning", "p_tuning", "prefix_tuning", "multitask_prompt_tuning", "adaption_prompt",
                     "cpt", "xlora", "poly", "trainable_tokens", "cartridge", "adalora", "ln_tuning"}  # fmt: skip
WITHOUT_EFFECT = ("inference_mode", "use_qalora", "target_parameters")  # here, or none that trains anything
TYPES = {"bool": (bool, "true, false"), "int": (int, "an integer"), "float": ((int, float), "a number")}


@cache
def peft_configs() -> dict[str, type]:
    """Return the class of options of each of peft's tuners, by its name."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(getattr(k, "value", k)).lower(): c for k, c in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def modes() -> set[str]:
    """Return the tuners that peft can inject."""
    return peft_configs().keys() - WITHOUT_INJECTION


def check(mode: str, options: dict, config: Spec) -> None:
    """Raise ``ValueError`` for an option that peft's tuner does not have, or one that it cannot inject."""
    kinds = {f.name: getattr(f.type, "__name__", f.type) for f in fields(peft_configs()[mode])}
    check_options(mode, options, kinds.keys() - WITHOUT_EFFECT)
    for key, value in options.items():
        kind, allowed = TYPES.get(kinds[key], (object, ""))
        if not isinstance(value, kind) or isinstance(value, bool) and kind not in (bool, object):
            raise option_error(key, value, allowed)
        if key == "r":
            check_rank(value, config)
        elif key.endswith("dropout") and value:  # peft's own would draw from the global generator
            plain = f", or lora with no options but {', '.join(LORA_DEFAULTS)}"
            raise option_error(key, value, "0.0" + plain * config.own_layers)
        elif key == "init_lora_weights" and value in ("eva", "lora_ga", "corda"):
            raise option_error(key, value, "what reads no data")
    try:
        by_number = {"layers_to_transform", "target_modules", "layers_pattern"} & options.keys()
        with torch.device("meta"):  # as what a model takes and costs is told before it is built
            rehearsal = (replace(config, depth=2) if config.own_layers and not by_number else config).build()
            inject_(rehearsal, mode, options, seed=0)
        if len(list(rehearsal.parameters())) < len(list(rehearsal.named_parameters(remove_duplicate=False))):
            raise ValueError("it shares tensors between blocks, which sub-models of unequal depth cannot")
        learn = [p for p in rehearsal.parameters() if p.requires_grad]
        if not learn or any(p._backward_hooks for p in learn):
            raise ValueError("it trains nothing, or by hooks of parameters, which would not run for each client")
    except Exception as error:  # peft raises many classes
        raise ValueError(f"experiment: finetune = {mode!r} with {options}: peft says: {error}") from error


def inject_(vit: Backbone, mode: str, options: dict, seed: int) -> None:
    """Let peft insert its tuner on the backbone's layers for it, q and v on a ViT (or ``target_modules``).

    ``ValueError`` for a layer outside the units, or one that is not called: there it would not be a client's own.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Conv2d as LoraConv2d
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings = {"target_modules": list(vit.spec.peft_targets)} | default_options(mode) | options
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    rate = settings.pop("lora_dropout", 0.0)  # peft's own would draw from the global generator
    with global_seed(seed):  # peft finds a block's number only behind a dot
        inject_adapter_in_model(peft_configs()[mode](**settings), nn.ModuleDict({"vit": vit}))
    for full, layer in [(n, m) for n, m in vit.named_modules() if isinstance(m, BaseTunerLayer)]:
        path = full.split(".", 2)[-1]  # in its unit
        if not full.startswith("blocks.") or not vit.spec.own_layers and full not in adaptable(vit.spec):
            raise ValueError(f"{full} is no linear layer or convolution that is called as a module in a unit")
        whole = getattr(layer.base_layer, "groups", 1) == 1  # else every group has a rank of its own
        if type(layer) in (LoraLinear, LoraConv2d) and not layer.lora_variant and whole:
            unknown = {"weight": (None,) * layer.base_layer.weight.dim()}
            out_axis, in_axis, *kernel = getattr(layer.base_layer, "axes", unknown)["weight"]
            rank = f"/{path}{RANK}"
            for of, axes in ((layer.lora_A, (rank, in_axis, *kernel)), (layer.lora_B, (out_axis, rank, *kernel))):
                factor = of["default"]
                factor.axes = {"weight": axes, "bias": axes[:1]}
                factor.__class__ = Linear if vit.spec.own_layers else type(factor)
            layer.lora_dropout["default"] = TokenDropout(rate) if rate else nn.Identity()
        elif vit.spec.own_layers:
            vit.set_submodule(full, PerClient(layer))
    for block in (b for b in vit.blocks if isinstance(b, PerClient)):
        block.count_dims_()
