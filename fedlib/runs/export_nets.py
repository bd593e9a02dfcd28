"""A budget's sub-model, answered by its last exit, as a net of timm's or of transformers' with fewer blocks.

Adapters are added to the weights. A BERT ends with one more layer, whose only work is the exit's norm. Read next:
``export.py``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..models.bert import TYPES, BertSpec, published_name
from ..models.exit_model import ExitModel
from ..models.vit import ViTSpec

NEARLY_LINEAR = 1e-3  # how much of a number transformers' tanh sees
State = dict[str, torch.Tensor]


def as_timm(state: State, spec: ViTSpec, depth: int, about: dict) -> nn.Module:
    """The timm VisionTransformer with ``state`` (see :func:`plain_state`); ``about`` gets what timm reads of it."""
    from timm.models.vision_transformer import VisionTransformer

    arguments = dict(
        img_size=spec.img_size, patch_size=spec.patch_size, in_chans=spec.channels, num_classes=len(about["classes"]),
        embed_dim=spec.dim, depth=depth, num_heads=spec.heads, mlp_ratio=spec.ffn_dim / spec.dim,
        qkv_bias=spec.qkv_bias, reg_tokens=spec.extra_tokens - 1, no_embed_class=not spec.extra_positions,
        pre_norm=spec.norm_pre, init_values=1e-5 if spec.layer_scale else None,
    )  # fmt: skip
    about["timm"] = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    prefix, patches = state.pop("stem.prefix"), state.pop("stem.patch_embed.weight")
    out = {"cls_token": prefix[None, :1], "reg_token": prefix[None, 1:], "pos_embed": state.pop("stem.pos_embed")[None]}
    if spec.extra_tokens == 1:
        del out["reg_token"]
    out["patch_embed.proj.weight"] = patches.reshape(-1, spec.channels, spec.patch_size, spec.patch_size)
    for name in [n for n in state if ".attn.q." in n]:
        out[name.replace(".q.", ".qkv.")] = torch.cat([state.pop(name.replace(".q.", f".{x}.")) for x in "qkv"])
    names = {"stem.patch_embed": "patch_embed.proj", "stem.norm_pre": "norm_pre", "exit.linear": "head"}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        out[f"{names.get(module, module.removeprefix('exit.'))}.{leaf}"] = tensor
    net = VisionTransformer(**arguments).eval()  # pyright: ignore
    net.load_state_dict(out)
    return net


def as_hf(state: State, spec: BertSpec, depth: int, about: dict) -> nn.Module:
    """The transformers BertForSequenceClassification with ``state``."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.dim, num_hidden_layers=depth + 1,
        num_labels=len(about["classes"]),  # pyright: ignore[reportCallIssue]
        num_attention_heads=spec.heads, intermediate_size=spec.ffn_dim, max_position_embeddings=spec.length,
        type_vocab_size=1, layer_norm_eps=spec.eps, pad_token_id=spec.padding,
    )  # fmt: skip
    origin = state.pop("origin", torch.zeros(spec.dim))
    exits = {n: state.pop(n) for n in list(state) if n.startswith("exit.")}
    out = {f"bert.{published_name(n)}": x for n, x in state.items()} | {f"bert.{TYPES}": torch.zeros(1, spec.dim)}
    net = BertForSequenceClassification(config).eval()
    last = f"bert.encoder.layer.{depth}."
    out |= {n: torch.zeros_like(x) for n, x in net.state_dict().items() if n.startswith((last, "bert.pooler"))}
    out[f"{last}attention.output.dense.bias"] = -origin
    out[f"{last}attention.output.LayerNorm.weight"] = torch.ones(spec.dim)
    out |= {f"{last}output.LayerNorm.{x}": exits[f"exit.norm.{x}"] for x in ("weight", "bias")}
    out["bert.pooler.dense.weight"] = NEARLY_LINEAR * torch.eye(spec.dim)
    out |= {
        "classifier.weight": exits["exit.linear.weight"] / NEARLY_LINEAR,
        "classifier.bias": exits["exit.linear.bias"],
    }
    net.load_state_dict(out)
    return net


def plain_state(model: ExitModel, exit: int, unit: int) -> State:
    """A sub-model's weights by the kit's names, adapters added to them; its last exit's begin with ``exit.``."""
    state = {n.removeprefix("backbone."): x.detach().float() for n, x in model.state_dict().items()}
    for base in [n for n in state if n.endswith(".base_layer.weight")]:
        layer = base.removesuffix(".base_layer.weight")
        a, b = (state.pop(f"{layer}.lora_{x}.default.weight") for x in "AB")
        scaling = model.get_submodule(f"backbone.{layer}").scaling["default"]  # pyright: ignore
        state[f"{layer}.weight"] = state.pop(base) + scaling * b @ a
    state = {n.replace(".base_layer.", "."): x for n, x in state.items()}
    own = {n: x for n, x in state.items() if not n.startswith("head.")}
    if (origins := getattr(model.backbone, "origins", None)) is not None:
        own["origin"] = origins[unit]
    here = f"head.exits.{exit}."
    return own | {f"exit.{n.removeprefix(here)}": x for n, x in state.items() if n.startswith(here)}


NETS = {"timm": (ViTSpec, as_timm), "hf": (BertSpec, as_hf)}


def net_of(
    format: str, model: ExitModel, exit: int, unit: int, x: torch.Tensor, logits: torch.Tensor, about: dict
) -> nn.Module:
    """The net of ``format`` that answers ``x`` with ``logits``; ``ValueError`` where none does.

    timm's last norm adds 1e-6 to a variance where the kit's adds 1e-5: hence the tolerance of a thousandth.
    """
    kind, made = NETS[format]
    spec: Any = model.backbone.spec
    if not isinstance(spec, kind):
        why = f"its backbone is no {'ViT' if format == 'timm' else 'BERT'} of the kit's"
    else:
        try:
            net = made(plain_state(model, exit, unit), spec, unit + 1, about)
            told = net(x) if format == "timm" else net(x.long(), (x != spec.padding).long()).logits
            if torch.allclose(told, logits, rtol=1e-3, atol=1e-3):
                return net
            why = f"such a net answers otherwise, by up to {float((told - logits).abs().max()):.2g}"
        except (KeyError, RuntimeError) as error:
            why = f"its weights are not such a net's ({str(error).splitlines()[-1].strip()})"
    raise ValueError(
        f"format = {format!r} is not possible for {about['run']}: {why}; allowed: torch, torch_export, onnx"
    )


def save_net(format: str, net: nn.Module, path: Path, about: dict) -> None:
    """In the folder layout of the net's own library."""
    if format == "hf":
        net.config.id2label = dict(enumerate(map(str, about["classes"])))  # pyright: ignore
        net.save_pretrained(path)  # pyright: ignore
        return
    said, size = about.pop("timm"), about["input_shape"]
    inputs = {"input_size": size, "mean": about["mean"], "std": about["std"], "num_classes": len(about["classes"])}
    said |= {"num_classes": inputs["num_classes"], "label_names": list(map(str, about["classes"]))}
    said["pretrained_cfg"] = {**inputs, "first_conv": "patch_embed.proj", "classifier": "head"}
    (path / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    save_file({n: t.contiguous() for n, t in net.state_dict().items()}, path / "model.safetensors")
