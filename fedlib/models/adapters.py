"""Fine-tuning modes: which parameters are trained and communicated, and the adapters inserted for it.

``full`` | ``frozen`` (the head only) | ``pa`` parallel adapter | ``sa`` serial adapter | ``ssf`` scale and shift |
``lora`` and any other tuner by peft's name. LoRA without further options is built here, the same to the bit as peft's,
which takes seconds to import and injects all others. The head (classifiers or Ree) is always trained.

Deviations: as released, the up-projections of PA and SA start at N(0, 0.02), not at zero; SSF also scales the
classifiers' norm but nothing inside Ree. Frozen parameters never get gradients (the release computes and drops them).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache

import torch
from torch import nn

from ..core.rng import numpy_generator, torch_generator
from ..core.slices import RANK
from ..core.validation import check_known, did_you_mean
from ..layers.dropout import TokenDropout
from ..layers.linear import Linear, init_normal_, per_client
from ..layers.members import PerClient
from ..layers.norms import LayerNorm
from .backbone import Backbone, Spec
from .exits import Classifier
from .vit import ViT, ViTSpec

OWN_MODES = ("full", "frozen", "pa", "sa", "ssf")
ADAPTER_DEFAULTS = {"r": 32}  # of pa and sa
LORA_DEFAULTS = {"r": 32, "lora_alpha": 64, "lora_dropout": 0.0}
PEFT_DEFAULTS = {"lora": LORA_DEFAULTS, "ia3": {"feedforward_modules": []}}
WITHOUT_INJECTION = {"prompt_tuning", "p_tuning", "prefix_tuning", "multitask_prompt_tuning", "adaption_prompt",
                     "cpt", "xlora", "poly", "trainable_tokens", "cartridge", "adalora"}  # fmt: skip


@cache
def peft_configs() -> dict[str, type]:
    """The class of options of each of peft's tuners, by its name."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(getattr(k, "value", k)).lower(): c for k, c in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


@cache
def finetune_modes() -> tuple[str, ...]:
    """All accepted values of ``Experiment.finetune``."""
    return (*OWN_MODES, *sorted(peft_configs().keys() - WITHOUT_INJECTION))


def default_options(mode: str) -> dict[str, object]:
    """The options of a fine-tuning mode that this kit sets where an experiment does not."""
    return ADAPTER_DEFAULTS if mode in ("pa", "sa") else PEFT_DEFAULTS.get(mode, {})


def check_finetune(mode: str, options: dict, config: Spec) -> None:
    """Raise ``ValueError`` for an unknown mode, an option it does not have, or a tuner that peft cannot inject."""
    adaptable = bool(config.peft_targets)
    plain = adaptable and _is_plain_lora(mode, options)
    if not plain and mode not in config.own_modes:
        if mode not in OWN_MODES and mode not in finetune_modes():
            raise ValueError(f"experiment: finetune = {mode!r} is unknown{did_you_mean(mode, finetune_modes())}")
        tuners = [m for m in finetune_modes() if m not in OWN_MODES] if adaptable else []
        tuners = [m for m in tuners if config.tuners is None or m in config.tuners]
        if mode not in tuners:
            known = did_you_mean(mode, (*config.own_modes, *tuners))
            raise ValueError(f"experiment: finetune = {mode!r} is not defined on this backbone{known}")
    of_peft = not plain and mode not in OWN_MODES
    allowed = {f.name for f in fields(peft_configs()[mode])} if of_peft else default_options(mode)
    check_known(options, allowed, f"experiment: finetune_options: unknown key {{}} for {mode}")
    for key, value in options.items():
        _check_option(key, value, _width(config), plain)
    if of_peft:
        try:
            by_number = {"layers_to_transform", "target_modules", "layers_pattern"} & options.keys()
            with torch.device("meta"):  # as what a model takes and costs is told before it is built
                rehearsal = (config if by_number else replace(config, depth=2)).build()
                _inject_peft_(rehearsal, mode, options, seed=0)
            if len(list(rehearsal.parameters())) < len(list(rehearsal.named_parameters(remove_duplicate=False))):
                raise ValueError("it shares tensors between blocks, which sub-models of unequal depth cannot")
        except Exception as error:  # peft raises many classes
            raise ValueError(f"experiment: finetune = {mode!r} with {options}: peft says: {error}") from error


def _check_option(key: str, value: object, width: int, plain: bool) -> None:
    """Raise ``ValueError`` for a value that layers of ``width`` cannot have; ``plain``: LoRA without other options."""
    number = type(value) in (int, float)
    fits, words = True, ""
    if key == "r":
        fits, words = type(value) is int and 1 <= value <= width, f"1..{width}, the width of the layers it adapts"
    elif key == "lora_alpha" and plain:
        fits, words = number and value > 0, "a number above 0"
    elif key.endswith("dropout") and plain:
        fits, words = number and 0 <= value < 1, "0 up to 1, without it"
    elif key.endswith("dropout"):  # peft's own would draw from the global generator
        fits, words = not value, "0.0, or lora with no options but " + ", ".join(LORA_DEFAULTS)
    if not fits:
        raise ValueError(f"experiment: finetune_options: {key} = {value!r} is not possible; allowed: {words}")


def _width(config: ViTSpec) -> int:
    """Features of the narrowest unit: channels of maps, else of tokens."""
    shapes = [config.feature(unit) for unit in range(config.depth)]
    return min(s[0] if len(s) == 3 else s[-1] for s in shapes)


class Bottleneck(nn.Module):
    """up(relu(down(x))), d -> r -> d with biases."""

    def __init__(self, dim: int, r: int):
        super().__init__()
        self.down = Linear(dim, r, axes=(None, "residual"))
        self.up = Linear(r, dim, axes=("residual", None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.relu(self.down(x)))


class ParallelAdapter(nn.Module):
    """sublayer(h) + adapter(h), h the norm's output."""

    def __init__(self, base_layer: nn.Module, dim: int, r: int):
        super().__init__()
        self.base_layer, self.adapter = base_layer, Bottleneck(dim, r)

    def forward(self, h: torch.Tensor, first: int | None = None) -> torch.Tensor:
        return self._base(h, first) + self.adapter(h[..., :first, :])

    def _base(self, h: torch.Tensor, first: int | None) -> torch.Tensor:
        return self.base_layer(h) if first is None else self.base_layer(h, first)


class SerialAdapter(ParallelAdapter):
    """s + adapter(s), s the sublayer's output."""

    def forward(self, h: torch.Tensor, first: int | None = None) -> torch.Tensor:
        s = self._base(h, first)
        return s + self.adapter(s)


class ScaleShift(nn.Module):
    """SSF: base(x) * scale + shift, per feature."""

    def __init__(self, base_layer: Linear | LayerNorm, generator: torch.Generator):
        super().__init__()
        axis, size = base_layer.axes["bias"], base_layer.weight.shape[0]
        self.base_layer, self.axes = base_layer, {"scale": axis, "shift": axis}
        self.scale = nn.Parameter(torch.empty(size).normal_(1, 0.02, generator=generator))
        self.shift = nn.Parameter(torch.empty(size).normal_(0, 0.02, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return torch.addcmul(per_client(self.shift, y), y, per_client(self.scale, y))


class LoRA(nn.Module):
    """Hu et al. 2022: base(x) + alpha / r B A dropout(x), with peft's names and first numbers."""

    def __init__(self, base_layer: Linear, rank: str, r: int, lora_alpha: float, lora_dropout: float):
        super().__init__()
        (rows, columns), (out_axis, in_axis) = base_layer.weight.shape, base_layer.axes["weight"]
        down, up = Linear(columns, r, False, (rank, in_axis)), Linear(r, rows, False, (out_axis, rank))
        drop = TokenDropout(lora_dropout) if lora_dropout else nn.Identity()
        self.base_layer, self.scaling = base_layer, {"default": lora_alpha / r}
        self.lora_dropout, self.lora_A, self.lora_B = (nn.ModuleDict({"default": m}) for m in (drop, down, up))
        for weight in (down.weight, up.weight, down.weight):  # peft draws A, then B, and A again
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own: foreign nets read its shape."""
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low_rank = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + low_rank * self.scaling["default"]


def apply_finetune_(vit: Backbone, head: nn.Module, mode: str, options: dict, seed: int) -> None:
    """Insert the adapters of ``mode`` and set ``requires_grad`` on exactly what is trained and communicated.

    What the owner of a net froze stays frozen in ``full``.
    """
    if mode != "full":
        vit.requires_grad_(False)
    generator = torch_generator(seed, "adapter init")
    if mode in ("pa", "sa"):
        wrap = ParallelAdapter if mode == "pa" else SerialAdapter
        for block in vit.blocks:
            for name in ("attn", "mlp"):
                wrapper = wrap(getattr(block, name), vit.spec.dim, (ADAPTER_DEFAULTS | options)["r"])
                init_normal_(wrapper.adapter, generator)
                setattr(block, name, wrapper)
    elif mode == "ssf":
        stem = vit.spec.ssf_stem
        setattr(vit.stem, stem, ScaleShift(getattr(vit.stem, stem), generator))
        for block in vit.blocks:
            for parent, names in (
                (block, ("norm1", "norm2")), (block.attn, ("q", "k", "v", "proj")), (block.mlp, ("fc1", "fc2")),
            ):  # fmt: skip
                for name in names:
                    setattr(parent, name, ScaleShift(getattr(parent, name), generator))
        for classifier in [m for m in head.modules() if isinstance(m, Classifier)]:
            classifier.norm = ScaleShift(classifier.norm, generator)
    elif _is_plain_lora(mode, options):
        with _lent_generator(seed):
            for block in vit.blocks:
                for path, layer in list(block.named_modules()):
                    if path.endswith(tuple(f".{target}" for target in vit.spec.peft_targets)):
                        parent, name = path.rsplit(".", 1)
                        adapted = LoRA(layer, f"/{path}{RANK}", **LORA_DEFAULTS | options)
                        setattr(block.get_submodule(parent), name, adapted)
    elif mode not in OWN_MODES:
        _inject_peft_(vit, mode, options, seed)
    head.requires_grad_(True)


def _is_plain_lora(mode: str, options: dict) -> bool:
    return mode == "lora" and options.keys() <= LORA_DEFAULTS.keys()


@contextmanager
def _lent_generator(seed: int) -> Iterator[None]:
    """peft draws from the global generator: inside, that is one of ours."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(numpy_generator(seed, "peft init").integers(2**62)))
        yield


def _inject_peft_(vit: ViT, mode: str, options: dict, seed: int) -> None:
    """Let peft insert its tuner on the backbone's layers for it, q and v on a ViT (or ``target_modules``)."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear as LoraLinear

    settings = {"target_modules": list(vit.spec.peft_targets)} | PEFT_DEFAULTS.get(mode, {}) | options
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    rate = settings.pop("lora_dropout", 0.0)  # peft's own would draw from the global generator
    with _lent_generator(seed):
        within = nn.ModuleDict({"vit": vit})  # peft finds a block's number only behind a dot
        inject_adapter_in_model(peft_configs()[mode](**settings), within)
    for block in vit.blocks:
        layers = [(n, m) for n, m in block.named_modules() if hasattr(m, "base_layer")]
        for path, layer in layers:
            if type(layer) is LoraLinear and not layer.lora_variant:
                out_axis, in_axis = layer.base_layer.axes["weight"]
                rank = f"/{path}{RANK}"
                for linear, axes in (
                    (layer.lora_A["default"], (rank, in_axis)),
                    (layer.lora_B["default"], (out_axis, rank)),
                ):
                    linear.__class__, linear.axes = Linear, {"weight": axes, "bias": axes[:1]}
                layer.lora_dropout["default"] = TokenDropout(rate) if rate else nn.Identity()
            else:
                parent, name = path.rsplit(".", 1)
                setattr(block.get_submodule(parent), name, PerClient(layer))
