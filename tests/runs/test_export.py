"""A budget's sub-model runs without the kit, and answers as it did in the evaluation."""

import importlib.util
import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

import fedlib
from fedlib import Experiment, run, save_model
from fedlib.core.storage import write_tensors
from fedlib.engine.evaluation import exit_logits
from fedlib.methods import Round
from fedlib.models import registry
from fedlib.models.vit import ViTSpec
from fedlib_lab.runs.export import FORMATS
from fedlib_lab.runs.record import Run
from fedlib_lab.runs.trained import load_trained
from tests.helpers.stored import ONE, short

ALONE = """
import sys, torch
sys.modules["fedlib"] = None  # whoever asks for it fails
from safetensors.torch import load_file, save_file
folder, kind = sys.argv[1:]
if kind == "torch":
    sys.path.insert(0, folder)
    from model import load
    model = load()
elif kind == "torch_export":
    model = torch.export.load(folder + "/model.pt2").module()
else:
    from onnx.reference import ReferenceEvaluator
    session = ReferenceEvaluator(folder + "/model.onnx")
    model = lambda x: torch.tensor(session.run(None, {session.input_names[0]: x.numpy()})[0])
x = load_file(folder + "/x.safetensors")["x"]
with torch.no_grad():
    save_file({"all": model(x).contiguous(), "few": model(x[:3]).contiguous()}, folder + "/y.safetensors")
"""
CONVNET = dict(backbone="resnet20", finetune="full", finetune_options={}, num_exits=3)


def answered(done, budget, folder, kind):
    """What the model in ``folder`` answers on the test set in a process of its own, and what the evaluation says."""
    f, server = load_trained(done.experiment, ONE, done.path.parent)
    client = next(c for c in f.clients(range(f.data.num_clients)) if c.budget == budget)
    part = f.method.serve(client, server, Round(server.t, (), f.setting)).members[0].part
    x = f.data.view(f.data.test_inputs, f.model.backbone.spec.input_shape, torch.arange(len(f.data.test_labels)))
    write_tensors(folder / "x.safetensors", {"x": x}, {})
    subprocess.run([sys.executable, "-c", ALONE, str(folder), kind], check=True, cwd=folder)
    from safetensors.torch import load_file

    return load_file(folder / "y.safetensors"), exit_logits(f, server, part)[list(part.exits)]


@pytest.mark.parametrize(
    "method, budget, kind, changes",
    [
        ("reefl", 2, "torch", {}),
        ("depthfl", 2, "torch", {}),  # LoRA inside
        ("depthfl", 0, "torch_export", {"options": {"distill": "none"}}),
        ("heterofl", 1, "torch", CONVNET | {"batch_norm": "static"}),  # cut in width
        ("depthfl", 1, "torch", CONVNET | {"batch_norm": "tracked"}),
        ("fedavg", 3, "onnx", {}),
    ],
)
def test_the_exported_model_answers_as_in_the_evaluation(method, budget, kind, changes, tmp_path):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    done = run(short(method, rounds=1, **changes), ONE, tmp_path / "runs", progress=False)
    folder = save_model(done, budget, tmp_path / "model", kind)
    found, expected = answered(done, budget, folder, kind)
    torch.testing.assert_close(found["all"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["few"], expected[:, :3], atol=1e-4, rtol=1e-4)
    about = json.loads((folder / "model.json").read_text())
    assert len(about["exits"]) == len(expected) and len(about["mean"]) in (1, 3) and len(about["classes"]) == 10
    assert Experiment.from_dict(about["experiment"]) == done.experiment


class Twice(torch.nn.Module):
    """A layer that runs under two names, and a tensor that is none of its parameters and buffers."""

    def __init__(self):
        super().__init__()
        same = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.first, self.scale = torch.nn.Sequential(same, same, torch.nn.Conv2d(3, 8, 4, 4)), torch.tensor([1.0, 3.0])

    def forward(self, x):
        return self.first(x) * self.scale[1] + torch.tensor(2.0)


def test_what_a_net_calls_twice_and_its_plain_tensors_are_exported(tmp_path, monkeypatch):
    name = fedlib.wrap(Twice(), [""], (3, 32, 32), name="twice")
    monkeypatch.setitem(registry.OWN, name, registry.OWN.pop(name))  # gone after the test
    e = short("fedavg", rounds=1, **CONVNET | {"backbone": name, "num_exits": 1, "pretrained": True})
    done = run(e, ONE, tmp_path / "runs", progress=False)
    folder = save_model(done, 0, tmp_path / "model")
    found, expected = answered(done, 0, folder, "torch")
    torch.testing.assert_close(found["all"], expected, atol=1e-4, rtol=1e-4)


FULL = dict(
    backbone="bert_micro", finetune="full", partition="iid", augment="none", num_exits=3, lr=0.05, momentum=0.9
)  # fmt: skip


def loaded(folder, kind):
    """The model of ``folder`` and what makes its inputs of pictures (N, C, H, W), as each library's own pages say."""
    about = json.loads((folder / "model.json").read_text())
    if kind == "torch":
        spec = importlib.util.spec_from_file_location("model", folder / "model.py")
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        assert hasattr(module, "prepare") == ("mean" in about)
        return module.load(), lambda pictures: module.prepare(torch.from_numpy(pictures))
    if kind == "onnx":
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(folder / "model.onnx")
        answer = lambda x: torch.tensor(session.run(None, {session.input_names[0]: x.numpy()})[0])  # noqa: E731
    else:
        answer = torch.export.load(folder / "model.pt2").module()

    def by_hand(pictures):
        channels, *size = about["input_shape"]
        x = torch.from_numpy(pictures).float() / 255
        smaller = max(x.shape[2:]) > max(size)
        x = F.interpolate(x, size, mode="bilinear", antialias=smaller).expand(-1, channels, -1, -1)
        mean, std = (torch.tensor(about[k]).view(-1, 1, 1) for k in ("mean", "std"))
        assert len(mean) == len(std) == channels and about["resize"].startswith("bilinear")
        return (x - mean) / std

    return answer, by_hand


@pytest.mark.parametrize(
    "channels, sees, shape",
    [(1, 3, (16, 16)), (1, 1, (16, 16)), (1, 3, (20, 20)), (3, 3, (24, 24)), (3, 3, (12, 12)), (1, 1, (10, 18))],
)
def test_every_format_is_as_accurate_by_its_own_library_s_lines_on_pictures(
    channels, sees, shape, tmp_path, monkeypatch
):
    """What tells the classes lies at the border, which no crop may cut."""
    monkeypatch.setitem(
        registry.OWN, "vit_tiny_one",
        ViTSpec(img_size=16, patch_size=4, channels=sees, dim=24, depth=2, heads=2, ffn_dim=48),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 4
    pictures = rng.integers(0, 120, (400, channels, *shape), dtype=np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        side = picture.swapaxes(1, 2) if label % 2 else picture
        side[:, : 1 if label < 2 else None][:, -1:] += np.uint8(130)
    fedlib.register_data("borders", (pictures[:300], labels[:300]), (pictures[300:], labels[300:]))
    e = Experiment(
        method="fedavg", dataset="borders", backbone="vit_tiny_one", pretrained=False, finetune="full", augment="none",
        partition="iid", num_clients=3, clients_per_round=3, rounds=12, num_exits=1, lr=0.1, momentum=0.9, batch_size=16,
    )  # fmt: skip
    done = run(e, ONE, tmp_path / "runs", progress=False)
    assert done.accuracy > 40  # it has learned something
    kinds = [k for k in ("torch", "torch_export", "onnx") if k != "onnx" or find_spec("onnxscript")]
    for kind in kinds:
        model, prepare = loaded(save_model(done, 0, tmp_path / kind, kind), kind)
        with torch.no_grad():
            out = model(prepare(pictures[300:]))
        right = (out.reshape(-1, *out.shape[-2:])[-1].argmax(1).numpy() == labels[300:]).mean()
        assert abs(100 * right - done.accuracy) < 1e-3, kind


def test_every_format_is_as_accurate_by_its_own_library_s_lines_on_text(tmp_path):
    """Short and long texts."""
    tokenizers = pytest.importorskip("tokenizers")
    rng, words = np.random.default_rng(0), (["good", "fine", "nice"], ["bad", "poor", "awful"])
    labels = np.arange(240) % 2
    texts = [" ".join(["The", *rng.choice(words[k], rng.integers(1, 40)), "film!"]) for k in labels]
    texts = [t if rng.random() < 0.8 else " ".join(t.split()[::-1]) + " bad" for t in texts]
    sets = (Dataset.from_dict({"sentence": texts[a:b], "label": labels[a:b]}) for a, b in ((0, 160), (160, 240)))
    fedlib.register_data("films", *sets)
    e = Experiment(
        method="fedavg", dataset="films", pretrained=False, num_clients=4, clients_per_round=4, rounds=2, **FULL,
    )  # fmt: skip
    done = run(e, ONE, tmp_path / "runs", progress=False)
    for kind in ("torch", "torch_export"):
        folder = save_model(done, 2, tmp_path / kind, kind)
        reads = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        model, _ = loaded(folder, kind)
        out = model(torch.tensor([r.ids for r in reads.encode_batch(texts[160:])], dtype=torch.int32))[-1]
        right = (out.argmax(1).numpy() == labels[160:]).mean()
        assert 100 * right == pytest.approx(done.summary["exits"][-1], abs=1e-3), kind


def test_an_export_takes_the_place_of_an_export_alone_and_is_whole_or_not_there(tmp_path, monkeypatch):
    done, mine, linked = run(short("fedavg", rounds=1), ONE, tmp_path / "runs"), tmp_path / "mine", tmp_path / "linked"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    linked.symlink_to(mine)
    for path, what in (
        (mine, "mine' holds thesis.tex"),
        (linked, "linked' holds thesis.tex"),
        ("", "'' holds [^;]*"),
        (mine / "thesis.tex", "tex'"),
    ):
        with pytest.raises(ValueError, match=f"save_model: path = .*{what}; allowed: a new or empty folder, or an"):
            save_model(done, 0, path)
    with pytest.raises(ValueError, match="save_model: path = 5: expected str, got int"):
        save_model(done, 0, 5)
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = save_model(done, 0, "~/model")
    assert folder == tmp_path / "model" and save_model(done, 0, folder) == folder  # the same once more
    for other in ((1, folder), (0, folder, "torch_export")):
        with pytest.raises(ValueError, match=f"{folder} holds an export of another .*; give another path, .*overwrite"):
            save_model(done, *other)
    assert {p.name for p in folder.iterdir()} == {"model.json", "model.py", "model.safetensors"}
    assert loaded(folder, "torch")[0](torch.zeros(2, 3, 32, 32)).shape[:2] == (1, 2)  # the first one still answers
    assert save_model(done, 1, folder, "torch_export", overwrite=True) == folder
    assert {p.name for p in folder.iterdir()} == {"model.json", "model.pt2"}  # nothing of the first
    before = (folder / "model.json").read_text()
    monkeypatch.setitem(FORMATS, "torch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(done, 0, folder, overwrite=True)
    assert (folder / "model.json").read_text() == before
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "mine", "linked", "model"}  # nothing half written
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds notes.txt"):
        save_model(done, 0, folder, overwrite=True)


def test_formats_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    done = run(short("fedavg", rounds=1), ONE, tmp_path / "runs")
    kept = {save_model(done, 0, format=kind) for kind in ("torch", "torch_export")}
    assert len(kept) == 2 and all((p / "model.json").is_file() for p in kept)
    (note := kept.pop() / "notes.txt").write_text(
        "mine"
    )  # also the default folder is not replaced with what is not its
    with pytest.raises(ValueError, match="holds notes.txt"):
        save_model(done, 0, format="torch" if note.parent.name.endswith("torch") else "torch_export")


def test_a_smaller_budget_s_model_is_smaller(tmp_path):
    done = run(short("depthfl", rounds=1), ONE, tmp_path / "runs", progress=False)
    sizes = [(save_model(done, b, tmp_path / str(b)) / "model.safetensors").stat().st_size for b in (0, 3)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] / 2


@pytest.mark.parametrize(
    "method, changes, sentence",
    [
        ("ditto", {"test_split": "like_train"}, "what ditto answers is a client's own"),
        ("fedper", {"test_split": "like_train"}, "what fedper answers is a client's own"),
        ("fedavg", CONVNET, "what fedavg answers depends on who is asked beside"),
        ("fedavg", {}, "budget = 9 is no client's; allowed: 0, 1, 2, 3"),
    ],
)
def test_what_is_no_model_of_a_budget_is_refused(method, changes, sentence, tmp_path):
    done = run(short(method, rounds=1, **changes), ONE, tmp_path / "runs", progress=False)
    with pytest.raises(ValueError, match=sentence):
        save_model(done, 9 if "budget" in sentence else 0, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_torch_cannot_trace_is_refused_in_a_sentence(tmp_path, monkeypatch):
    def raises(*_, **__):
        raise RuntimeError("it goes by values\n\na trace")

    done = run(short("fedavg", rounds=1), ONE, tmp_path / "runs", progress=False)
    monkeypatch.setattr("torch.export.export", raises)
    with pytest.raises(ValueError, match="cannot be exported: torch.export says: it goes by values$"):
        save_model(done, 0, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_format_is_refused_before_any_compute(tmp_path, monkeypatch):
    done = Run(short("fedavg"), tmp_path / "runs" / "none", {}, [])
    with pytest.raises(ValueError, match="format = 'onyx' is not possible; did you mean 'onnx'"):
        save_model(done, 0, tmp_path, "onyx")
    monkeypatch.setattr("fedlib_lab.runs.export.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs packages: pip install onnx onnxscript"):
        save_model(done, 0, tmp_path, "onnx")
    for gone in ("timm", "hf"):
        with pytest.raises(ValueError, match=f"format = '{gone}' is not possible; allowed: onnx, torch, torch_export"):
            save_model(done, 0, tmp_path, gone)
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_run_is_no_code_of_its_export(tmp_path, monkeypatch):
    """A folder may be called anything; what it is called stands in ``model.py``, which is run."""
    import ast

    from fedlib_lab.runs import export

    name = 'a"""\nraise SystemExit("run")\n"""\'b\\{code}'
    monkeypatch.setattr(export, "save_file", lambda *_: None)
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    export._as_source(program, tmp_path, {"run": name, "budget": 1, "input_shape": [2]})
    tree = ast.parse((tmp_path / "model.py").read_text())
    assert ast.get_docstring(tree, clean=False) == f"A model exported from {name}: clients of budget 1; see model.json."
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(tree))
