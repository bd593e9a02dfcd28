"""timm's nets by name: a plain ViT becomes the kit's own, any other is cut where timm says that its features are.

``resnet18.96`` reads 96 x 96 pixels: a convnet as it is, a ViT or Swin with positions that timm resamples.
A folder ``$FEDLIB_DATA/backbones/<name>`` as timm's ``save_for_hf`` writes it, as safetensors, comes before the hub.
Read next: ``vit.py``, ``wrapped.py``.
"""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from fedlib.core.hub import fail_fast, offline_error
from fedlib.core.validation import did_you_mean
from fedlib.models.backbone import Spec
from fedlib.models.vit import ViT, ViTSpec

from .wrapped import WrappedSpec, line_of

SHORT = {f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
SHORT["mobilenetv3"] = "mobilenetv3_large_100"
SHORT |= {f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")}


@cache
def timm_spec(name: str, folder: Path | None = None, others: Iterable[str] = ()) -> Spec:
    """Return the shape of timm's net ``name``: the kit's ViT where it is one, else the net cut at timm's features.

    ``ValueError`` for a name that neither timm nor ``others`` know, and for a net that cannot be cut so.
    """
    with torch.device("meta"):
        model = create_timm(name, False, folder, others)
    if (spec := plain_vit(model)) is not None:
        return spec
    cuts = [said["module"] for said in model.feature_info]
    owns = [cut and any(n.startswith(f"{cut}.") for n, _ in model.named_parameters()) for cut in cuts]
    first = owns.index(True) if any(owns) else 0  # an activation in a stem is no unit
    read = "tokens" if getattr(model, "cls_token", None) is not None else "map"
    channels_first = partial(torch.movedim, source=-1, destination=1)  # (B, H, W, C) -> (B, C, H, W)
    read = channels_first if getattr(model, "output_fmt", "") == "NHWC" else read
    make, (channels, size, _) = partial(create_timm, name, False, folder), model.pretrained_cfg["input_size"]
    size = size_in(name) or size
    return WrappedSpec.of(model, [*cuts[first:-1], ""], (channels, size, size), read, make)


def size_in(name: str) -> int | None:
    """Return the pixels of ``name.<pixels>``, None where it says none; ``ValueError`` if no net reads so few."""
    said = [int(word) for word in name.split(".")[1:] if word.isdecimal()]
    if said and not 16 <= said[0] <= 4096 or len(said) > 1:
        raise ValueError(f"experiment: backbone = {name!r}: allowed after the net's name: .<pixels>, 16 to 4096")
    return said[0] if said else None


def create_timm(name: str, pretrained: bool, folder: Path | None = None, others: Iterable[str] = ()) -> nn.Module:
    """Create timm's net ``name`` from ``folder`` or the hub; ``ConnectionError`` where its weights cannot be had."""
    import timm

    base, *words = name.split(".")
    base, tag, size = SHORT.get(base, base), ".".join(w for w in words if not w.isdecimal()), size_in(name)
    if folder is None and not timm.is_model(base):
        near = did_you_mean(base, [*others, *SHORT, *timm.list_models()]).partition(" allowed:")[0]
        allowed = "the kit's (fedlib/models/shapes.yaml), timm's, or a name of fedlib.wrap in this process"
        raise ValueError(f"experiment: backbone = {name!r} is unknown{near} allowed: {allowed}")
    if pretrained and folder and not (folder / "model.safetensors").is_file():  # timm reads more kinds
        raise ValueError(f"the weights in {folder}: model.safetensors is missing, and no other file is read")
    try:
        with fail_fast() if pretrained else nullcontext():
            whole = f"local-dir:{folder}" if folder else f"{base}.{tag}".rstrip(".")
            with suppress(TypeError):  # of a net that reads any size as it is
                if size is not None:
                    return timm.create_model(whole, pretrained, img_size=size)
            return timm.create_model(whole, pretrained)
    except Exception as error:
        refused = (RuntimeError, AssertionError, ValueError) if size is not None else RuntimeError
        if isinstance(error, refused):  # a tag that the model does not have, or a size
            raise ValueError(f"experiment: backbone = {name!r}: timm says: {line_of(error)}") from error
        if not pretrained:
            raise
        otherwise = "connect once, put a folder of timm's there, or use pretrained=False"
        raise offline_error(f"the weights of {name!r} are", error, otherwise) from error


def plain_vit(model: nn.Module) -> ViTSpec | None:
    """Return the shape of a timm VisionTransformer that :class:`ViT` can run and slice; None of any other net."""
    from timm.layers import Mlp
    from timm.models.vision_transformer import Attention, VisionTransformer

    if not isinstance(model, VisionTransformer) or not getattr(model, "has_class_token", model.cls_token is not None):
        return None
    block, embed = model.blocks[0], model.patch_embed
    size, patch, extra = embed.img_size, embed.patch_size, model.num_prefix_tokens
    rows, patches = model.pos_embed.shape[1], (size[0] // patch[0]) ** 2
    idle = [block.attn.q_norm, getattr(block.attn, "norm", nn.Identity()), block.mlp.norm, getattr(embed, "norm", None)]
    plain = type(block.attn) is Attention and type(block.mlp) is Mlp and isinstance(block.norm1, nn.LayerNorm)
    plain = plain and hasattr(block, "ls1") and all(isinstance(m, nn.Identity) for m in idle)
    exact = plain and isinstance(block.mlp.act, nn.GELU) and block.mlp.act.approximate == "none"
    square = size[0] == size[1] and patch[0] == patch[1] and size[0] % patch[0] == 0
    if not (exact and square and rows in (patches, patches + extra)):  # parallel and post-norm blocks have no ls1
        return None
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
    spec = plain_vit(model)
    source, out = model.state_dict(), {}
    patch = source["patch_embed.proj.weight"]
    out["stem.patch_embed.weight"] = patch.reshape(len(patch), -1)
    out["stem.patch_embed.bias"] = source.get("patch_embed.proj.bias", torch.zeros(len(patch)))
    extra = [source[k][0] for k in ("cls_token", "dist_token", "reg_token") if k in source]
    out["stem.prefix"], out["stem.pos_embed"] = torch.cat(extra), source["pos_embed"][0]
    for key, value in source.items():
        if key.startswith("norm_pre."):
            out[f"stem.{key}"] = value
        elif ".attn.qkv." in key:
            out |= {key.replace("qkv", part): rows for part, rows in zip("qkv", value.chunk(3), strict=True)}
        elif key.startswith("blocks."):
            out[key] = value
    vit = ViT(spec)
    vit.load_state_dict(out)
    return vit
