"""Backbones beyond the core's: Vim, MSDNet, EfficientNet, transformers', timm's, and any module by :func:`wrap`.

``vim_tiny`` is Vision Mamba's published Vim-T, ``vim_micro`` a CPU stand-in without weights (``*.stream``: ``vim.py``).
``bert_base``, ``roberta_base``, ``llama2_7b`` and others are Hugging Face's (``foreign.py``; ``*.384``: 384 tokens),
and so is a checkpoint in a folder ``$FEDLIB_DATA/backbones/<name>``, whose ``config.json`` says what it is.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from fedlib.core.hub import fail_fast, offline_error, unreadable_error
from fedlib.core.validation import check_type
from fedlib.models.backbone import OWN, Backbone, Family, Spec, folder_of
from fedlib.models.maps import MapSpec
from fedlib.models.vit import ViTSpec

from .efficientnet import EFFICIENTNETS
from .faithful import check_faithful, check_plain, own_generators
from .foreign_loading import fetch_foreign, load_foreign
from .foreign_specs import FOREIGN, ForeignSpec
from .msdnet import MSDNETS
from .timm_nets import create_timm, load_timm, timm_spec
from .vim import VIMS, load_vim
from .wrapped import Feature, Wrapped, WrappedSpec, in_eval, line_of

VIM_TINY_WEIGHTS = ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth")  # repository and file, Hugging Face


class Convnets(Family):
    """MSDNet and EfficientNet, which have no weights."""

    specs = MSDNETS | EFFICIENTNETS


class Vims(Family):
    """Vision Mamba."""

    specs = VIMS

    def load(self, name: str, spec: Spec, seed: int) -> Backbone | None:
        return load_vim(_download_vim_tiny(), VIMS[name]) if name in VIMS else None

    def check(self, name: str, spec: Spec, pretrained: bool) -> bool:
        return name.startswith("vim_tiny")


class Foreign(Family):
    """Models of transformers'.

    A folder's name may go on: ``.384`` reads so many tokens, ``.plain`` is ``ForeignSpec.as_trained = False``.
    """

    specs = FOREIGN

    def find(self, name: str, known: Spec | None, folder: Path | None) -> Spec | None:
        if folder is None or not isinstance(known, ForeignSpec | None):
            return None
        if '"architecture"' in (folder / "config.json").read_text(encoding="utf-8", errors="replace"):
            return None  # timm wrote it: ``timm_nets.py`` reads it
        if known is not None:
            return replace(known, source=str(folder)) if known.source else known
        words = name.split(".")[1:]
        tokens = [int(w) for w in words if w.isdecimal()]
        if len(tokens) > 1 or set(words) - {"plain", *map(str, tokens)}:
            raise ValueError(f"experiment: backbone = {name!r}: allowed after {folder.name}: .<tokens>, .plain")
        return replace(ForeignSpec.of(folder, *tokens), as_trained="plain" not in words)

    def load(self, name: str, spec: Spec, seed: int) -> Backbone | None:
        return load_foreign(spec, seed) if isinstance(spec, ForeignSpec) else None

    def fetch(self, name: str, spec: Spec) -> bool:
        if mine := isinstance(spec, ForeignSpec):
            fetch_foreign(spec)
        return mine


class Modules(Family):
    """Nets of one's own by :func:`wrap`, and timm's by name; asked last, as timm says what no name can mean."""

    def find(self, name: str, known: Spec | None, folder: Path | None) -> Spec | None:
        return timm_spec(name, folder, tuple(OWN)) if known is None else None

    def load(self, name: str, spec: Spec, seed: int) -> Backbone | None:
        if isinstance(spec, WrappedSpec):
            made = spec.build() if name in OWN else Wrapped(spec, create_timm(name, True, folder_of(name)))
            return made.try_vmap_()
        return load_timm(create_timm(name, True, folder_of(name))) if isinstance(spec, ViTSpec) else None

    def draw(self, spec: Spec, generator: torch.Generator) -> Backbone | None:
        return spec.drawn(generator.initial_seed()).try_vmap_() if isinstance(spec, WrappedSpec) else None

    def check(self, name: str, spec: Spec, pretrained: bool) -> bool:
        if isinstance(spec, WrappedSpec) and pretrained != (spec.make is None):
            what = "a net with its weights" if spec.make is None else "a function that makes a net"
            why = f"experiment: pretrained = {pretrained} is not possible with backbone = {name!r},"
            raise ValueError(f"{why} which was wrapped as {what}; allowed: {not pretrained}")
        return isinstance(spec, WrappedSpec)


FAMILIES = (Convnets(), Vims(), Foreign(), Modules())


def wrap(
    net: nn.Module | Callable[[], nn.Module], cuts: Sequence[str], input_shape: Sequence[int],
    feature: Feature = "map", name: str | None = None, weights: Path | str | None = None,
) -> str:  # fmt: skip
    """Make ``net`` a backbone and return its name, by default that of its class, for ``Experiment(backbone=...)``.

    Its units are the pieces between ``cuts``, names of its modules in the order in which they run (the last may be "",
    the net's own output); what follows the last cut is left away. ``input_shape``: one image's. ``feature``: what exits
    read (``WrappedSpec``). A net begins with the weights that it has (``pretrained=True``); a function that makes one
    is called anew for every seed (``pretrained=False``). ``weights``: a file to begin with
    (:func:`load_weights_`). What is frozen, or in eval mode while other modules train,
    stays so. ``ValueError`` says in a sentence what cannot be cut, or cannot be trained as it is: its pieces are
    compared with it (``faithful.py``).
    """
    from fedlib.models.registry import SHIPPED  # which reads this file

    make = net if callable(net) and not isinstance(net, nn.Module) else None
    if make is not None:
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(0)
            net = make()
    check_type(net, nn.Module, "wrap: net")
    if weights is not None:
        net, make = load_weights_(copy.deepcopy(net), Path(weights)), None
    name = name or type(net).__name__.lower()
    if not isinstance(name, str) or name in SHIPPED:
        raise ValueError(f"wrap: name = {name!r} is a backbone of the kit's, or no word; choose another")
    check_plain(net)
    try:
        mine = copy.deepcopy(net)
    except Exception as error:  # whatever a module's code raises; torch's on tensors that were computed
        raise ValueError(f"wrap: {type(net).__name__} cannot be copied: {str(error).partition('.')[0]}") from error
    try:
        with own_generators():
            spec = WrappedSpec.of(mine, cuts, input_shape, feature, make)
            check_faithful(mine, spec)
    except RuntimeError as error:  # torch's, of a net that no optimiser can train
        raise ValueError(f"wrap: {type(net).__name__} cannot be trained as it is: {line_of(error)}") from error
    OWN[name] = spec
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in net.modules()):
        warnings.warn(f"the dropout of {name!r} is off: it would draw from the global generator", stacklevel=2)
    still = in_eval(net)
    if fixed := [repr(path) for path, m in net.named_modules() if m in still and hasattr(m, "running_mean")]:
        why = "is in eval mode while others train, and stays so: its statistics stand still"
        warnings.warn(f"{', '.join(fixed)} of {name!r} {why}", stacklevel=2)
    return name


def defaults_of(backbone: str) -> dict[str, object]:
    """Return the fields of an experiment that fit ``backbone``, where ``Experiment``'s own defaults fit DeiT-micro.

    ``Experiment(method="depthfl", **defaults_of("resnet20"))``. Published weights if there are any; LoRA where it is
    defined, else all parameters; up to four exits, as many as divide its units; of maps running statistics of batch
    norm; crops of images only.
    """
    from fedlib.models.registry import backbone_spec, check_pretrained  # which reads this file

    spec, pretrained = backbone_spec(backbone), False
    with suppress(ValueError):
        check_pretrained(backbone, True)
        pretrained = True
    exits = max(n for n in range(1, 5) if spec.depth % n == 0)
    fits = {"finetune": "lora" if spec.peft_targets else "full", "num_exits": exits}
    fits |= {"batch_norm": "tracked"} if isinstance(spec, MapSpec) else {}
    fits |= {"augment": "none"} if spec.reads == "tokens" else {}
    return {"backbone": backbone, "pretrained": pretrained, **fits}


def load_weights_(net: nn.Module, file: Path) -> nn.Module:
    """Load a checkpoint's tensors into ``net``: a safetensors file, or one of PyTorch's that holds tensors alone.

    By name; where names differ and all shapes agree, in the order of both, which a warning says; safetensors keep none.
    ``ValueError`` names what does not fit; nothing is unpickled.
    """
    of = f"wrap: weights = {str(file)!r}"
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        state = next((state[key] for key in ("state_dict", "model") if key in state), state)
        found = {n.removeprefix("module."): t for n, t in state.items() if not n.endswith("num_batches_tracked")}
        theirs = {n: tuple(t.shape) for n, t in found.items()}
    except Exception as error:  # whatever a damaged file, or one of other objects, raises
        why = f"{line_of(error)}; allowed: a file of the net's state_dict(), by safetensors or torch.save"
        raise ValueError(f"{of} cannot be read: {why}") from error
    mine = {n: tuple(t.shape) for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    ordered = mine.keys() != theirs.keys()
    if ordered and file.suffix == ".safetensors":
        why = f"{min(mine.keys() ^ theirs.keys())} is not in both, and such a file keeps no order to go by"
        raise ValueError(f"{of}: {why}; allowed: the net's own names")
    pairs = [*zip_longest(mine, theirs, fillvalue="nothing")] if ordered else [(n, n) for n in mine]
    for own, other in pairs:
        if (a := mine.get(own)) != (b := theirs.get(other)):
            raise ValueError(f"{of}: {other} {b or ()} does not fit {own} {a or ()} of the net")
    if ordered:
        own, other = next(pair for pair in pairs if pair[0] != pair[1])
        warnings.warn(f"{file.name} has other names: its tensors go in by their order, {other} as {own}", stacklevel=3)
    net.load_state_dict({own: found[other] for own, other in pairs}, strict=False)
    return net


def _download_vim_tiny() -> dict[str, torch.Tensor]:
    """Load Vim-T's published state dict from the local cache or Hugging Face."""
    from argparse import Namespace

    from huggingface_hub import hf_hub_download

    try:
        with fail_fast():
            file = hf_hub_download(*VIM_TINY_WEIGHTS)
    except Exception as error:  # huggingface_hub raises many classes
        raise offline_error("the weights of 'vim_tiny' are", error, "connect once, or use pretrained=False") from error
    try:
        with torch.serialization.safe_globals([Namespace]):  # training arguments lie beside the weights: plain values
            stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # it holds objects of any other kind, or is damaged
        raise unreadable_error("the weights of 'vim_tiny'", file, error, "") from error
    return stored.get("model", stored)
