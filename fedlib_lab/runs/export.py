"""What clients of a budget hold at the end of a run, as a model that runs without the kit.

The sub-model is traced by ``torch.export`` for batches of any size: weights cut to size, adapters inside, units and
exits that the budget does not hold gone. Files hold graphs and tensors, no objects. Read next: ``trained.py``.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

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
from fedlib.models.registry import tokenizer_of

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

    By default in ``outputs/models``, a folder a run, budget and format. It appears whole or not at all. ``ValueError``
    before any compute where ``path`` holds what no export wrote, or the export of another run, budget or format: only
    with ``overwrite`` does this one take its place. The model reads inputs (B, *shape) as the net sees them and answers
    with the outputs (exits, B, *out) of every exit that the budget holds; ``model.json`` says how images are resized
    and by what mean and SD they are normalised, which exits these are, and what the classes are called. ``prepare`` of
    ``model.py`` makes inputs of images, and ``tokenizer.json`` of texts (``tokenizers.Tokenizer.from_file``).
    ``ValueError`` where what a client answers is not one model's, or depends on who is asked beside; ``ImportError``
    names a missing package.
    """
    check_type(run, Run, "save_model: run")
    budget = convert(budget, Natural, "save_model: budget")
    check_known([format], [*FORMATS], "format = {} is not possible")
    if missing := [p for p in PACKAGES.get(format, ()) if find_spec(p) is None]:
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
        try:
            program = torch.export.export(traced, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
        except Exception as error:  # whatever a net's code raises where values are not known
            why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ValueError(f"{run.experiment.slug} cannot be exported: torch.export says: {why}") from error
    with replaced(path) as new:
        if not x.is_floating_point():
            load_tokenizer(tokenizer_of(run.experiment.backbone)).encoder(shape[0]).save(str(new / "tokenizer.json"))
        FORMATS[format](program, new, about)
        about["files"] = sorted(p.name for p in new.iterdir())
        (new / "model.json").write_text(json.dumps(about, indent=1) + "\n")
    return path


def check_folder(path: Path | str, this: dict[str, object]) -> Path:
    """Return ``path`` as a folder that may be written.

    ``ValueError`` where other files than an export's lie, or those of an export that is not ``this``, as ``model.json``
    says it.
    """
    where = Path(convert(path, str, "save_model: path")).expanduser().absolute()
    there = {p.name for p in where.iterdir()} if where.is_dir() else set()
    try:
        about = json.loads((where / "model.json").read_text()) if there else {"files": ()}
        ours = {"model.json", *about["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        about, ours = {}, set()
    if not str(path).strip() or where.is_symlink() or (where.exists() and not where.is_dir()) or not there <= ours:
        what = f" holds {', '.join(sorted(there - ours)[:3])}" if there - ours else ""
        why = f"save_model: path = {str(path)!r}{what}"
        raise ValueError(f"{why}; allowed: a new or empty folder, or an earlier export's")
    if other := there and [f"{k} {about.get(k, 'not said')}" for k, v in this.items() if about.get(k) != v]:
        what = f"{where} holds an export of another kind ({', '.join(other)})"
        raise ValueError(f"save_model: {what}; give another path, or overwrite=True to put this one in its place")
    return where


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path`` that takes its place when all is written; until then the old one is there."""
    new = path.with_name(f".{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        shutil.rmtree(path, ignore_errors=True)
        new.rename(path)
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
    title = f"A model exported from {about['run']}: clients of budget {about['budget']}; see model.json."
    text = SOURCE.format(code=code, shape=", ".join(map(str, about["input_shape"])), title=title)
    (path / "model.py").write_text(text + (PREPARE.format(**about) if "mean" in about else ""))
    weights = {n.target: attrgetter(n.target)(module) for n in module.graph.nodes if n.op == "get_attr"}  # all it reads
    save_file({n: t.detach().clone().contiguous() for n, t in weights.items()}, path / "model.safetensors")


def _as_program(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.export.save(program, path / "model.pt2")


def _as_onnx(program: torch.export.ExportedProgram, path: Path, about: dict) -> None:
    torch.onnx.export(program, f=path / "model.onnx", dynamo=True, verbose=False, external_data=False)


FORMATS = {"torch": _as_source, "torch_export": _as_program, "onnx": _as_onnx}
PACKAGES = {"onnx": ("onnx", "onnxscript")}
