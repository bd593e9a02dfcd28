"""A budget's sub-model runs without the kit, and answers as it did in the evaluation."""

import json
import subprocess
import sys

import pytest
import torch

import fedlib
from fedlib import Experiment, run, save_model
from fedlib.core.storage import write_tensors
from fedlib.engine.evaluation import exit_logits
from fedlib.methods import Round
from fedlib.runs.trained import load_trained
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
elif kind == "timm":
    import timm
    model = timm.create_model("local-dir:" + folder, pretrained=True).eval()
elif kind == "hf":
    from transformers import BertForSequenceClassification
    net = BertForSequenceClassification.from_pretrained(folder).eval()
    model = lambda x: net(x.long(), (x != 0).long()).logits
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


TEXT = dict(dataset="docstrings", backbone="bert_micro", partition="iid", augment="none", num_exits=3)


@pytest.mark.parametrize(
    "method, budget, kind, changes",
    [
        ("depthfl", 2, "timm", {}),  # LoRA inside
        ("fedavg", 3, "timm", {}),
        ("depthfl", 1, "hf", TEXT | {"finetune": "full", "finetune_options": {}}),
    ],
)
def test_a_library_s_net_answers_as_the_last_exit(method, budget, kind, changes, tmp_path):
    if kind == "hf":
        pytest.importorskip("transformers")
    done = run(short(method, rounds=1, **changes), ONE, tmp_path / "runs", progress=False)
    folder = save_model(done, budget, tmp_path / "model", kind)
    found, expected = answered(done, budget, folder, kind)
    torch.testing.assert_close(found["all"], expected[-1], atol=1e-3, rtol=1e-3)
    assert len(json.loads((folder / "model.json").read_text())["exits"]) == len(expected)


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


@pytest.mark.parametrize(
    "method, changes, kind, sentence",
    [
        ("reefl", {}, "timm", "its weights are not such a net's"),
        ("heterofl", CONVNET | {"batch_norm": "static"}, "timm", "its backbone is no ViT of the kit's"),
        ("scalefl_vit", {}, "timm", "its weights are not such a net's"),
        ("fedavg", {}, "hf", "its backbone is no BERT of the kit's"),
    ],
)
def test_what_is_no_library_s_net_is_refused(method, changes, kind, sentence, tmp_path):
    done = run(short(method, rounds=1, **changes), ONE, tmp_path / "runs", progress=False)
    with pytest.raises(ValueError, match=f"format = '{kind}' is not possible for .*{sentence}.*; allowed: torch, "):
        save_model(done, 0, tmp_path / "model", kind)
    assert not (tmp_path / "model").exists()


def test_a_format_is_refused_before_any_compute(tmp_path, monkeypatch):
    done = fedlib.runs.store.Run(short("fedavg"), tmp_path / "runs" / "none", {}, [])
    with pytest.raises(ValueError, match="format = 'onyx' is not possible; did you mean 'onnx'"):
        save_model(done, 0, tmp_path, "onyx")
    monkeypatch.setattr("fedlib.runs.export.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs packages: pip install onnx onnxscript"):
        save_model(done, 0, tmp_path, "onnx")
    assert not list(tmp_path.iterdir())
