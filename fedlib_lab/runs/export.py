"""What clients of a budget hold at the end of a run, as a model that runs without the kit.

The sub-model is traced by ``torch.export`` for batches of any size: weights cut to size, adapters inside, units and
exits that the budget does not hold gone. Files hold graphs and tensors, no objects. Read next: ``trained.py``.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.fx.graph import CodeGen

from fedlib.core.annotations import Natural
from fedlib.core.paths import outputs_dir
from fedlib.core.slices import Slice
from fedlib.core.validation import check_known, check_type, convert
from fedlib.data.tokenizer import load_tokenizer
from fedlib.engine.batches import shuffled_rows
from fedlib.engine.evaluation import BATCH, central_forward
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation
from fedlib.engine.forward import Forward, by_example
from fedlib.methods import Round, Server
from fedlib.models.bert import TYPES, BertSpec, published_name
from fedlib.models.exit_model import ExitModel
from fedlib.models.registry import tokenizer_of
from fedlib.models.vit import ViTSpec

from .record import Run
from .trained import load_trained

SOURCE, PREPARE = Path(__file__).with_name("export_model.txt").read_text().split("# images\n")  # run without the kit


def save_model(
    run: Run, budget: int, path: Path | str | None = None, format: str = "torch", overwrite: bool = False
) -> Path:
    """Write what clients of ``budget`` (0, 1, …) hold after the last round to the folder ``path``, and return that.

      torch         ``model.py``, PyTorch and nothing else, with ``model.safetensors``: ``from model import load``
      torch_export  ``model.pt2``: ``torch.export.load(path).module()``
      onnx          ``model.onnx``; needs onnx and onnxscript
      timm          of a ViT, by its last exit: ``timm.create_model(f"local-dir:{path}", pretrained=True)``
      hf            of a BERT, by its last exit: ``BertForSequenceClassification.from_pretrained(path)``

    By default in ``outputs/models``, a folder a run, budget and format. It appears whole or not at all. ``ValueError``
    before any compute where ``path`` holds what no export wrote, or the export of another run, budget or format: only
    with ``overwrite`` does this one take its place. The model reads inputs
    (B, *shape) as the net sees them and answers with the outputs (exits, B, *out) of every exit that the budget holds,
    timm's and transformers' with (B, *out); ``model.json`` says how images are resized and by what mean and SD they
    are normalised, which exits these are, and what the classes are called. ``prepare`` of ``model.py``, or timm's own
    transform, makes inputs of images, and ``tokenizer.json`` of texts (``tokenizers.Tokenizer.from_file``; of hf
    transformers' ``AutoTokenizer``).
    ``ValueError`` where what a client answers is not one model's, or depends on who is asked beside, or is no such
    net's; ``ImportError`` names a missing package.
    """
    check_type(run, Run, "save_model: run")
    budget = convert(budget, Natural, "save_model: budget")
    check_known([format], [*FORMATS, *NETS], "format = {} is not possible")
    missing = [p for p in PACKAGES.get(format, ()) if find_spec(p) is None]
    if missing:
        raise ImportError(f"format = {format!r} needs packages: pip install {' '.join(missing)}")
    this = {"run": run.path.name, "budget": budget, "format": format}
    name = f"{run.path.name}-budget{budget}-{format}"
    path = check_folder(outputs_dir() / "models" / name if path is None else path, {} if overwrite else this)
    f, server = load_trained(run.experiment, Execution(workers=1), run.path.parent)
    part = _part(f, server, budget)
    rows, seen = torch.arange(2, device=f.device), f.model.backbone.spec.input_shape
    traced, x = _Answers(central_forward(f, server, part), f, part), f.data.view(f.data.test_inputs, seen, rows)
    shape = list(x.shape[1:])
    about = this | {"input_shape": shape, "exits": list(part.exits)}
    if x.is_floating_point():
        said = {k: getattr(f.data, k)[: shape[0]].tolist() for k in ("mean", "std")}  # of each channel
        about |= {"resize": "bilinear, both sides; with antialias where one is larger"} | said
    about |= {"classes": list(f.data.classes), "experiment": run.experiment.to_dict()}
    with torch.no_grad():
        if format in NETS:
            unit = f.setting.exit_units[part.exits[-1]]
            net = net_of(format, traced.model, part.exits[-1], unit, x, traced(x)[-1], about)
        else:
            try:
                program = torch.export.export(traced, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
            except Exception as error:  # whatever a net's code raises where values are not known
                why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                raise ValueError(f"{run.experiment.slug} cannot be exported: torch.export says: {why}") from error
    with replaced(path) as new:
        if not x.is_floating_point():
            load_tokenizer(tokenizer_of(run.experiment.backbone)).encoder(shape[0]).save(str(new / "tokenizer.json"))
        if format in NETS:
            save_net(format, net, new, about)
        else:
            FORMATS[format](program, new, about)
        about["files"] = sorted(p.name for p in new.iterdir())
        (new / "model.json").write_text(json.dumps(about, indent=1) + "\n")
    return path


def check_folder(path: Path | str, this: dict[str, Any]) -> Path:
    """Return ``path`` as a folder that may be written.

    ``ValueError`` where other files than an export's lie, or those of an export that is not ``this``, as ``model.json``
    says it.
    """
    where = Path(path).expanduser().absolute()
    there = {p.name for p in where.iterdir()} if where.is_dir() else set()
    try:
        about = json.loads((where / "model.json").read_text()) if there else {"files": ()}
        ours = {"model.json", *about["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        about, ours = {}, set()
    if not str(path).strip() or where.is_symlink() or (where.exists() and not where.is_dir()) or not there <= ours:
        what = f" holds {', '.join(sorted(there - ours)[:3])}" if there - ours else ""
        raise ValueError(
            f"save_model: path = {str(path)!r}{what}; allowed: a new or empty folder, or an earlier export's"
        )
    if other := there and [f"{k} {about.get(k, 'not said')}" for k, v in this.items() if about.get(k) != v]:
        what = f"{where} holds an export of another kind ({', '.join(other)})"
        raise ValueError(f"save_model: {what}; give another path, or overwrite=True to put this one in its place")
    return where


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path`` that takes its place when all is written; until then the old one is there."""
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _part(f: Federation, server: Server, budget: int) -> Slice:
    """Return the sub-model that a client of ``budget`` answers with."""
    clients = [c for c in f.clients(range(f.data.num_clients)) if c.budget == budget]
    if not clients:
        raise ValueError(f"budget = {budget!r} is no client's; allowed: {', '.join(map(str, sorted(set(f.budgets))))}")
    e, (serving, *others) = f.experiment, [f.method.serve(c, server, Round(server.t, (), f.setting)) for c in clients]
    (member, *more), why = serving.members, ""
    own = member.keeps == "all" or "start" in member.payload or any(s.members[0].part != member.part for s in others)
    if own or any(f.method.personal(info) for info in f.setting.infos.values()):
        why = "is a client's own"
    elif more or serving.tune is not None:
        why = "is more than one model's"
    elif not by_example(f.model, e.batch_norm, training=False):
        why = f"depends on who is asked beside (batch_norm = {e.batch_norm!r})"
    if why:
        raise ValueError(f"{e.slug} cannot be exported: what {e.method} answers {why}")
    return member.part


class _Answers(nn.Module):
    """The sub-model ``part`` alone: (B, *shape) -> (exits, B, *out)."""

    def __init__(self, forward: Forward, f: Federation, part: Slice):
        super().__init__()
        forward.place_()
        if f.experiment.batch_norm == "static":
            forward.recompute_((some[None], None) for some in shuffled_rows(f.data).split(BATCH))
        self.model, self.route, self.exits = forward.model, forward.route, part.exits
        for name, (own, leaf) in self.model._slots.items():
            if (info := f.setting.infos.get(name)) is None:
                continue
            if not part.holds(info):
                del own[leaf]
            elif info.kind != "statistic":
                own[leaf] = nn.Parameter(own[leaf].detach().clone(), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.model(x[None], self.route)
        return torch.stack([outputs[j, 0] for j in self.exits])


def _as_source(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    module = program.module(check_guards=False)
    module.graph.set_codegen(CodeGen())
    source = re.sub(r"return \((\w+),\)", r"return \1", module.graph.python_code("self").src)
    code = "\n".join(f"    {line}".rstrip() for line in source.strip().splitlines())
    shape = ", ".join(map(str, about["input_shape"]))
    title = f"A model exported from {about['run']}: clients of budget {about['budget']}; see model.json."
    text = SOURCE.format(code=code, shape=shape, title=title)
    (path / "model.py").write_text(text + (PREPARE.format(**about) if "mean" in about else ""))
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    save_file({n: t.detach().clone().contiguous() for n, t in weights.items()}, path / "model.safetensors")


def _as_program(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.export.save(program, path / "model.pt2")


def _as_onnx(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.onnx.export(program, f=path / "model.onnx", dynamo=True, verbose=False, external_data=False)


Format = Callable[[torch.export.ExportedProgram, Path, dict], None]
FORMATS: dict[str, Format] = {"torch": _as_source, "torch_export": _as_program, "onnx": _as_onnx}
PACKAGES = {"onnx": ("onnx", "onnxscript"), "hf": ("transformers",)}


# --- a budget's sub-model, answered by its last exit, as a net of timm's or of transformers' with fewer blocks --------
# Adapters are added to the weights. A BERT ends with one more layer, whose only work is the exit's norm.

NEARLY_LINEAR = 1e-3  # how much of a number transformers' tanh sees
State = dict[str, torch.Tensor]


def as_timm(state: State, spec: ViTSpec, depth: int, about: dict) -> nn.Module:
    """Build timm's VisionTransformer with ``state`` (see :func:`plain_state`); ``about`` gets what timm reads of it."""
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
    """Build transformers' BertForSequenceClassification with ``state``."""
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
    """Return a sub-model's weights by the kit's names, adapters added to them; its last exit's begin with ``exit.``."""
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
    """Return the net of ``format`` that answers ``x`` with ``logits``; ``ValueError`` where none does.

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
    """Save ``net`` in the folder layout of its own library."""
    if format == "hf":
        net.config.id2label = dict(enumerate(map(str, about["classes"])))  # pyright: ignore
        net.save_pretrained(path)  # pyright: ignore
        from transformers import PreTrainedTokenizerFast

        marks = {f"{x}_token": f"[{x.upper()}]" for x in ("pad", "cls", "sep", "unk", "mask")}
        names = ["input_ids", "attention_mask"]  # a second text is of no other type
        file, length = str(path / "tokenizer.json"), about["input_shape"][0]
        words = PreTrainedTokenizerFast(tokenizer_file=file, model_max_length=length, model_input_names=names, **marks)
        words.save_pretrained(path)
        return
    said, size = about.pop("timm"), about["input_shape"]
    inputs = {"input_size": size, "mean": about["mean"], "std": about["std"], "num_classes": len(about["classes"])}
    inputs |= {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}  # the whole picture, both its sides
    said |= {"num_classes": inputs["num_classes"], "label_names": list(map(str, about["classes"]))}
    said["pretrained_cfg"] = {**inputs, "first_conv": "patch_embed.proj", "classifier": "head"}
    (path / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    save_file({n: t.contiguous() for n, t in net.state_dict().items()}, path / "model.safetensors")
