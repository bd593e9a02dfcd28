"""What clients of a budget hold at the end of a run, as a model that runs without the kit.

The sub-model is traced by ``torch.export`` for batches of any size: weights cut to size, adapters inside, units and
exits that the budget does not hold gone. Files hold graphs and tensors, no objects. Read next: ``trained.py``.
"""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.fx.graph import CodeGen

from ..core.paths import outputs_dir
from ..core.slices import Slice
from ..core.validation import check_known
from ..engine.evaluation import BATCH, central
from ..engine.executors import Execution
from ..engine.federation import Federation
from ..engine.forward import Forward, by_example
from ..methods import Round, Server
from .export_nets import NETS, net_of, save_net
from .record import Run
from .trained import load_trained

SOURCE = Path(__file__).with_name("export_model.txt").read_text()  # of what runs without the kit


def save_model(run: Run, budget: int, path: Path | str | None = None, format: str = "torch") -> Path:
    """Write what clients of ``budget`` (0, 1, …) hold after the last round to the folder ``path``, and return that.

      torch         ``model.py``, PyTorch and nothing else, with ``model.safetensors``: ``from model import load``
      torch_export  ``model.pt2``: ``torch.export.load(path).module()``
      onnx          ``model.onnx``; needs onnx and onnxscript
      timm          of a ViT, by its last exit: ``timm.create_model(f"local-dir:{path}", pretrained=True)``
      hf            of a BERT, by its last exit: ``BertForSequenceClassification.from_pretrained(path)``

    By default in ``outputs/models``. The model reads inputs (B, *shape) as the net sees them and answers with the
    outputs (exits, B, *out) of every exit that the budget holds, timm's and transformers' with (B, *out);
    ``model.json`` says by what mean and SD images are normalised, which exits these are, and what the classes are
    called. ``ValueError`` where what a client answers is not one model's, or depends on who is asked beside, or is no
    such net's; ``ImportError`` names a missing package.
    """
    check_known([format], [*FORMATS, *NETS], "format = {} is not possible")
    missing = [p for p in PACKAGES.get(format, ()) if find_spec(p) is None]
    if missing:
        raise ImportError(f"format = {format!r} needs packages: pip install {' '.join(missing)}")
    f, server = load_trained(run.experiment, Execution(workers=1), run.path.parent)
    part = _part(f, server, budget)
    traced, x = _Answers(central(f, server, part), f, part), _examples(f)
    shape = list(x.shape[1:])
    about = {"run": run.path.name, "budget": budget, "input_shape": shape, "exits": list(part.exits)}
    about |= {"mean": f.data.mean.tolist(), "std": f.data.std.tolist()} if x.is_floating_point() else {}
    about |= {"classes": list(f.data.classes), "experiment": run.experiment.to_dict()}
    with torch.no_grad():
        if format in NETS:
            unit = f.setting.exit_units[part.exits[-1]]
            net = net_of(format, traced.model, part.exits[-1], unit, x, traced(x)[-1], about)
        else:
            program = torch.export.export(traced, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    path = Path(path) if path is not None else outputs_dir() / "models" / f"{run.path.name}-budget{budget}"
    path.mkdir(parents=True, exist_ok=True)
    if format in NETS:
        save_net(format, net, path, about)
    else:
        FORMATS[format](program, path, about)
    (path / "model.json").write_text(json.dumps(about, indent=1) + "\n")
    return path


def _part(f: Federation, server: Server, budget: int) -> Slice:
    """The sub-model that a client of ``budget`` answers with."""
    client = next((c for c in f.clients(range(f.data.num_clients)) if c.budget == budget), None)
    if client is None:
        raise ValueError(f"budget = {budget} is no client's; allowed: {', '.join(map(str, sorted(set(f.budgets))))}")
    e, serving = f.experiment, f.method.serve(client, server, Round(server.t, (), f.setting))
    (member, *more), why = serving.members, ""
    if any(f.method.personal(info) for info in f.setting.infos.values()) or member.keeps == "all":
        why = "is a client's own"
    elif more or serving.tune is not None:
        why = "is more than one model's"
    elif not by_example(f.model, e.batch_norm, training=False):
        why = f"depends on who is asked beside (batch_norm = {e.batch_norm!r})"
    if why:
        raise ValueError(f"{e.slug} cannot be exported: what {e.method} answers {why}")
    return member.part


def _examples(f: Federation) -> torch.Tensor:
    """Two inputs as the net sees them."""
    rows = torch.arange(2, device=f.device)
    return f.data.view(f.data.test_inputs, f.model.backbone.spec.input_shape, rows)


class _Answers(nn.Module):
    """The sub-model ``part`` alone: (B, *shape) -> (exits, B, *out)."""

    def __init__(self, forward: Forward, f: Federation, part: Slice):
        super().__init__()
        forward.place_()
        if f.experiment.batch_norm == "static":
            rows = torch.arange(len(f.data.inputs), device=f.device)
            forward.recompute_((some[None], None) for some in rows.split(BATCH))
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
    (path / "model.py").write_text(SOURCE.format(code=code, shape=shape, **{k: about[k] for k in ("run", "budget")}))
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    save_file({n: t.detach().clone().contiguous() for n, t in weights.items()}, path / "model.safetensors")


def _as_program(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.export.save(program, path / "model.pt2")


def _as_onnx(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.onnx.export(program, f=path / "model.onnx", dynamo=True, verbose=False, external_data=False)


Format = Callable[[torch.export.ExportedProgram, Path, dict], None]
FORMATS: dict[str, Format] = {"torch": _as_source, "torch_export": _as_program, "onnx": _as_onnx}
PACKAGES = {"onnx": ("onnx", "onnxscript"), "hf": ("transformers",)}
