"""Fine-tuning modes: which parameters are trained and communicated, and the adapters inserted for it.

``full`` | ``frozen`` (the head only) | ``pa`` parallel adapter | ``sa`` serial adapter | ``ssf`` scale and shift |
``lora``, the same to the bit as peft's | what comes in by the door ``doors.TUNERS``: peft's others, by their names.
The head (classifiers or Ree) is always trained.

Deviations: as released, the up-projections of PA and SA start at N(0, 0.02), not at zero; SSF also scales the
classifiers' norm but nothing inside Ree. Frozen parameters never get gradients (the release computes and drops them).
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import nn

from ..core import doors
from ..core.rng import numpy_generator, torch_generator
from ..core.slices import RANK
from ..core.validation import check_known, did_you_mean
from ..layers.dropout import TokenDropout
from ..layers.linear import Linear, init_normal_, per_client
from ..layers.norms import LayerNorm
from .backbone import Backbone, Spec
from .exits import Classifier

OWN_MODES = ("full", "frozen", "pa", "sa", "ssf")
ADAPTER_DEFAULTS = {"r": 32}  # of pa and sa
LORA_DEFAULTS = {"r": 32, "lora_alpha": 64, "lora_dropout": 0.0}


def tuners() -> list[ModuleType]:
    """Load the modules that add tuners, each with ``modes()``, ``DEFAULTS``, ``check`` and ``inject_``."""
    return [doors.load(place) for place in doors.TUNERS]


@cache
def finetune_modes() -> tuple[str, ...]:
    """Return all accepted values of ``Experiment.finetune``."""
    return (*OWN_MODES, *sorted({"lora", *(mode for t in tuners() for mode in t.modes())}))


def default_options(mode: str) -> dict[str, object]:
    """Return the options of a fine-tuning mode that this kit sets where an experiment does not."""
    own = {"pa": ADAPTER_DEFAULTS, "sa": ADAPTER_DEFAULTS, "lora": LORA_DEFAULTS}
    return own[mode] if mode in own else next((t.DEFAULTS[mode] for t in tuners() if mode in t.DEFAULTS), {})


def check_finetune(mode: str, options: dict, config: Spec) -> None:
    """Raise ``ValueError`` for an unknown mode, an option it does not have, or a tuner that does not fit."""
    plain = _is_plain_lora(mode, options, config)
    if not plain and mode not in config.own_modes:
        if mode not in OWN_MODES and mode not in finetune_modes():
            known = did_you_mean(mode, finetune_modes())
            raise ValueError(f"experiment: finetune = {mode!r} is unknown{known}{doors.install_hint()}")
        fit = [m for m in finetune_modes() if m not in OWN_MODES] if config.peft_targets else []
        fit = [m for m in fit if config.tuners is None or m in config.tuners]
        if mode not in fit:
            known = did_you_mean(mode, (*config.own_modes, *fit))
            raise ValueError(f"experiment: finetune = {mode!r} is not defined on this backbone{known}")
    if not plain and mode not in OWN_MODES:
        _tuner_of(mode).check(mode, options, config)
        return
    check_options(mode, options, default_options(mode))
    for key, value in options.items():
        number = type(value) in (int, float)
        if key == "r":
            check_rank(value, config)
        elif key == "lora_alpha" and not (number and value > 0):
            raise option_error(key, value, "a number above 0")
        elif key.endswith("dropout") and not (number and 0 <= value < 1):
            raise option_error(key, value, "0 up to 1, without it")


def _tuner_of(mode: str) -> ModuleType:
    """Return the tuner that has ``mode``; ``ValueError`` if none has: LoRA with options that are peft's."""
    for tuner in tuners():
        if mode in tuner.modes():
            return tuner
    allowed = f"lora with no options but {', '.join(LORA_DEFAULTS)}{doors.install_hint()}"
    raise ValueError(f"experiment: finetune = {mode!r} with these options is not known; allowed: {allowed}")


def check_options(mode: str, options: Mapping, allowed: Collection[str]) -> None:
    """Raise ``ValueError`` for an option that ``mode`` does not have."""
    check_known(options, allowed, f"experiment: finetune_options: unknown key {{}} for {mode}")


def check_rank(r: object, config: Spec) -> None:
    """Raise ``ValueError`` for a rank above the narrowest unit's width: channels of maps, else features of tokens."""
    width = min(s[0] if len(s) == 3 else s[-1] for s in map(config.feature, range(config.depth)))
    if type(r) is not int or not 1 <= r <= width:
        raise option_error("r", r, f"1..{width}, the width of the layers it adapts")


def option_error(key: str, value: object, allowed: str) -> ValueError:
    """Return the error for an impossible option of a fine-tuning mode."""
    return ValueError(f"experiment: finetune_options: {key} = {value!r} is not possible; allowed: {allowed}")


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
    elif _is_plain_lora(mode, options, vit.spec):
        with global_seed(seed):
            for block in vit.blocks:
                for path, layer in list(block.named_modules()):
                    if path.endswith(tuple(f".{target}" for target in vit.spec.peft_targets)):
                        parent, name = path.rsplit(".", 1)
                        adapted = LoRA(layer, f"/{path}{RANK}", **LORA_DEFAULTS | options)
                        setattr(block.get_submodule(parent), name, adapted)
    elif mode not in OWN_MODES:
        _tuner_of(mode).inject_(vit, mode, options, seed)
    head.requires_grad_(True)


def _is_plain_lora(mode: str, options: dict, spec: Spec) -> bool:
    return mode == "lora" and options.keys() <= LORA_DEFAULTS.keys() and spec.own_layers and bool(spec.peft_targets)


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generator inside the block, as peft draws from it, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(numpy_generator(seed, "peft init").integers(2**62)))
        yield
