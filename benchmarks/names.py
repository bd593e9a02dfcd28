"""The same tensors under two names: the benchmark's plain model and fedlib's ExitModel with one classifier.

fedlib keeps q, k and v apart, and peft names LoRA's parts; convnets differ by prefixes.
"""

import torch

from benchmarks.rivals.workload import Workload

Tensors = dict[str, torch.Tensor]
HEAD = "head.exits.0."
STEM = ("patch_embed.weight", "patch_embed.bias", "prefix", "pos_embed")


def to_fedlib(plain: Tensors, w: Workload) -> Tensors:
    """Plain names to fedlib's."""
    if w.architecture != "vit":
        out = {(HEAD if n.startswith("linear.") else "backbone.") + n: p for n, p in plain.items()}
        if w.architecture == "convnet3_slim":  # fedlib's exit is a matrix for each place of the map
            out[HEAD + "linear.weight"] = plain["linear.weight"].unflatten(1, (-1, 2, 2))
        return out
    out = {}
    for name, value in plain.items():
        place, _, leaf = name.rpartition(".")
        if name in STEM:
            out[f"backbone.stem.{name}"] = value
        elif place in ("norm", "linear"):
            out[HEAD + name] = value
        elif leaf == "weight" and ".lora_" in name:
            attention, _, part = place.rpartition(".")
            if part == "lora_a":
                for j, a in zip("qv", value.split(w.lora_rank), strict=True):
                    out[f"backbone.{attention}.{j}.lora_A.default.weight"] = a
            else:  # lora_bq, lora_bv
                out[f"backbone.{attention}.{part[-1]}.lora_B.default.weight"] = value
        elif place.endswith("qkv"):
            lora = int(name.split(".")[1]) in w.lora_blocks
            for j, rows in zip("qkv", value.chunk(3), strict=True):
                wrapped = ".base_layer" if lora and j in "qv" else ""
                out[f"backbone.{place.removesuffix('qkv')}{j}{wrapped}.{leaf}"] = rows
        else:
            out[f"backbone.{name.replace('.fc', '.mlp.fc')}"] = value
    return out


def to_plain(tensors: Tensors, w: Workload) -> Tensors:
    """Inverse of :func:`to_fedlib`, of any complete subset (all, or only what is trained)."""
    if w.architecture != "vit":
        out = {n.removeprefix("backbone.").removeprefix(HEAD): p for n, p in tensors.items()}
        return {n: p.flatten(1) if n == "linear.weight" else p for n, p in out.items()}
    out = {}
    for name, value in tensors.items():
        short = name.removeprefix("backbone.").removeprefix("stem.").removeprefix(HEAD)
        attention, _, rest = short.partition(".attn.")
        part = rest.replace(".base_layer", "").partition(".")
        if ".lora_A." in rest:
            if part[0] == "q":
                both = (value, tensors[name.replace(".q.lora_A", ".v.lora_A")])
                out[f"{attention}.attn.lora_a.weight"] = torch.cat(both)
        elif ".lora_B." in rest:
            out[f"{attention}.attn.lora_b{part[0]}.weight"] = value
        elif part[0] == "q":
            others = (name.replace(".q.", f".{j}.") for j in "kv")
            k, v = (tensors[n if n in tensors else n.replace(".base_layer", "")] for n in others)
            out[f"{attention}.attn.qkv.{part[2]}"] = torch.cat((value, k, v))
        elif part[0] not in ("k", "v"):
            out[short.replace(".mlp.fc", ".fc")] = value
    return out
