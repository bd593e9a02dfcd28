"""timm's nets by name against timm itself, and names that were the kit's."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import fedlib
from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.engine.checks import check_experiment
from fedlib.engine.federation import build_model
from fedlib.models.measure import Measure
from fedlib.models.registry import backbone_spec, build_backbone
from fedlib.models.vit import ViTSpec
from fedlib_lab.runs.identity import OtherInputs
from fedlib_lab.runs.run_paths import run_path
from fedlib_lab.runs.store import find_run
from fedlib_lab.zoo.wrapped import Wrapped, WrappedSpec
from tests.helpers.measured import unit_macs

SWIN, BEIT = "swin_tiny_patch4_window7_224", "beit_base_patch16_224"


def small(backbone, **changes):
    values = dict(
        method="fedavg", backbone=backbone, pretrained=False, finetune="full", augment="none", num_train=12, num_test=4,
        num_clients=2, clients_per_round=2, rounds=1, batch_size=6, partition="iid", lr=0.01,
    )  # fmt: skip
    return Experiment(**(values | changes))


@pytest.mark.parametrize(
    "name, units",
    [
        ("resnet18", 4), ("mobilenetv3_small_050", 5), ("convnext_atto", 4), ("regnety_002", 5), ("vgg11_bn", 6),
        ("test_efficientnet", 5), (SWIN, 4),
    ],
)  # fmt: skip
def test_units_end_in_timms_own_features(name, units):
    """On the same weights; batch norm by the batch, as in training."""
    spec, model = backbone_spec(name), timm.create_model(name, pretrained=False)
    backbone, x = Wrapped(spec, copy.deepcopy(model)).try_vmap_(), torch.randn(2, *spec.input_shape)
    for m in model.modules():
        m.training = isinstance(m, nn.modules.batchnorm._BatchNorm)
    with torch.no_grad():
        wanted = model.forward_intermediates(x, output_fmt="NCHW", intermediates_only=True)[-units:]
        last, z, features = model.forward_features(x), backbone.stem(x[None]), []
        for unit in range(units):
            feature, z = backbone.advance(z, unit, 1)
            features.append(feature[0])
            assert feature.shape[2:] == spec.feature(unit)
    assert spec.depth == units
    wanted[-1] = last.movedim(-1, 1) if name == SWIN else last  # with the norm or convolution after the last stage
    for got, want in zip(features, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, macs", [("resnet18", 1.814e9), ("resnet50", 4.087e9), ("mobilenetv3_large_100", 0.215e9)]
)
def test_costs_are_the_published_ones(name, macs):
    """Of the convolutions; the last layers are the exits'."""
    e = small(name, num_exits=1)
    model = build_model(e, check_experiment(e), 10, meta=True)
    assert sum(unit_macs(Measure(model))) == pytest.approx(macs, rel=0.01)


def test_short_names_and_vits_of_other_forms():
    assert (
        backbone_spec("deit_small") == backbone_spec("deit_small_patch16_224")
        and backbone_spec("deit_small").dim == 384
    )
    assert backbone_spec("swin_tiny").features == backbone_spec(SWIN).features
    assert type(backbone_spec("vit_tiny_patch16_224")) is ViTSpec
    beit, siglip = backbone_spec(BEIT), backbone_spec("vit_base_patch16_siglip_224")
    assert type(beit) is type(siglip) is WrappedSpec and beit.depth == 12
    assert beit.feature(0) == (768,) and siglip.feature(0) == (768, 196, 1)  # a class token; none
    check_experiment(small(BEIT, method="reefl"))
    with pytest.raises(ValueError, match="reefl: backbone: Ree needs a class token"):
        check_experiment(small("vit_base_patch16_siglip_224", method="reefl"))


@pytest.mark.parametrize("name", ["test_resnet.40", "test_vit.64", SWIN + ".64"])
def test_a_net_reads_other_pixels_than_its_checkpoint(name, tmp_path, monkeypatch):
    """Equal to timm's own at that size; a ViT's positions are resampled by timm."""
    from timm.models import save_for_hf

    base, size = name.split(".")
    model = timm.create_model(base, pretrained=False)
    save_for_hf(model, tmp_path / "backbones" / "mine", safe_serialization=True)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    asks = {} if "resnet" in name else {"img_size": int(size)}
    model = timm.create_model(f"local-dir:{tmp_path}/backbones/mine", pretrained=True, **asks)
    spec, backbone = backbone_spec(f"mine.{size}"), build_backbone(f"mine.{size}")
    assert spec.input_shape == (3, int(size), int(size)) == backbone_spec(name).input_shape
    x = torch.randn(2, *spec.input_shape)
    for m in model.modules():
        m.training = isinstance(m, nn.modules.batchnorm._BatchNorm)
    z = backbone.stem(x[None])
    with torch.no_grad():
        for unit in range(spec.depth):
            feature, z = backbone.advance(z, unit, 1)
        want = model.forward_features(x) if type(spec) is WrappedSpec else model.get_intermediate_layers(x, 1)[0]
    got = z[0] if type(spec) is not WrappedSpec else feature[0]
    want = want.movedim(-1, 1) if "swin" in name else want
    torch.testing.assert_close(got if type(spec) is WrappedSpec else got[:, 1:], want, rtol=1e-4, atol=1e-5)


def test_a_vit_on_a_convnet_is_no_plain_one():
    """It was an error of PyTorch's, as its embedding has no norm."""
    assert type(backbone_spec("vit_tiny_r_s16_p8_224")) is WrappedSpec


@pytest.mark.parametrize(
    ("name", "words"), [("hrnet_w18", "wrap: up to cut 'stage2'"), ("mvitv2_tiny", "wrap: cut 'block.0' is no module")]
)
def test_a_net_whose_features_are_no_modules_of_it_is_refused_in_a_sentence(name, words):
    """It was PyTorch's ``AttributeError: HighResolutionNet has no attribute `stem` ``."""
    with pytest.raises(ValueError, match=words):
        backbone_spec(name)


@pytest.mark.parametrize("name", ["resnet18.7", "resnet18.96.97", "no_such_net.64"])
def test_pixels_that_no_net_reads_are_refused(name):
    with pytest.raises(ValueError, match=f"experiment: backbone = '{name}'.*allowed"):
        backbone_spec(name)


def test_lora_and_the_exits_alone_train_a_convnet_of_timms(repeatable_convolutions):
    for finetune, options in (("lora", {"r": 2}), ("frozen", {})):
        e = small("test_resnet.32", method="depthfl", num_exits=4, finetune=finetune, finetune_options=options)
        runs = [
            list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1].server.params for k in (1, 2)
        ]
        assert any("lora_A" in n for n in runs[0]) is (finetune == "lora")
        assert {n.split(".")[0] for n in runs[0] if "lora" not in n} == {"head"}
        for name, p in runs[0].items():
            torch.testing.assert_close(runs[1][name], p, rtol=1e-3, atol=1e-4)


def test_a_federation_of_timms_convnets(repeatable_convolutions):
    e = small("test_resnet", method="depthfl", batch_norm="tracked", num_exits=4)
    runs = [
        list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1].server.params for k in (1, 2)
    ]
    for name, p in runs[0].items():
        torch.testing.assert_close(runs[1][name], p, rtol=1e-3, atol=1e-4)
    first, same, other = (build_backbone("test_resnet", False, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[n], same[n]) for n in first) and not all(
        torch.equal(first[n], other[n]) for n in first
    )


def test_weights_come_from_a_folder_or_a_sentence_says_that_there_are_none(tmp_path, monkeypatch):
    from huggingface_hub import constants
    from timm.models import save_for_hf

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConnectionError, match="the weights of 'test_resnet' are not cached .* put a folder of timm's there"
    ):
        build_backbone("test_resnet")
    model = timm.create_model("test_resnet", pretrained=False)
    save_for_hf(model, tmp_path / "backbones" / "mine", safe_serialization=True)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    backbone = build_backbone("mine")
    own = {n: p for n, p in model.named_parameters() if not n.startswith("fc.")}
    found = {n.split(".base_layer.")[1]: p for n, p in backbone.named_parameters()}
    assert found.keys() == own.keys() and all(torch.equal(found[n], own[n]) for n in own)


class Evil:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "other.safetensors"])
def test_of_a_local_folder_safetensors_alone_are_read(name, tmp_path, monkeypatch):
    from timm.models import save_for_hf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    folder = tmp_path / "backbones" / "mine"
    save_for_hf(timm.create_model("test_resnet", pretrained=False), folder, safe_serialization=True)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(ValueError, match="model.safetensors is missing, and no other file is read"):
        build_backbone("mine")
    assert not Path("executed").exists()


def test_no_timm_is_allowed_that_unpickles():
    """timm 1.0.27 is the first whose loading from a folder asks for weights alone."""
    root = Path(fedlib.__file__).parents[1]
    for file in ("pyproject.toml", "environment.yml"):
        least = re.search(r"timm>=(\d+)\.(\d+)\.(\d+)", (root / file).read_text())
        assert least is not None and tuple(map(int, least.groups())) >= (1, 0, 27), file


def test_a_stored_run_on_the_kits_resnet18_is_not_taken_for_timms(tmp_path):
    """Its name was the kit's net for small images; runs of that time say of their backbone nothing."""
    from fedlib.core.storage import read_json, write_json

    e = small("resnet18_slim", num_exits=1)
    stored = run(e, folder=tmp_path, progress=False)
    former = e.replace(backbone="resnet18")
    stored.path.rename(run_path(former, tmp_path))
    file = run_path(former, tmp_path) / "experiment.json"
    write_json(file, read_json(file) | {"experiment": former.to_dict()})
    with pytest.raises(OtherInputs, match="the backbone 'resnet18', its shape or its code"):
        find_run(former, tmp_path)


def test_every_backbone_has_defaults_that_fit_it():
    """Also of a net of one's own, and of text."""
    from fedlib.models.registry import OWN

    name = fedlib.wrap(
        nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 2)),
        ["0", "1", "2"],
        (3, 32, 32),
        name="own3",
    )
    found = {}
    try:
        for backbone in (*OWN, "resnet50", "convnext_atto", "swin_tiny.64"):
            text = backbone_spec(backbone).reads == "tokens"
            found[backbone] = fedlib.defaults_of(backbone)
            check_experiment(Experiment(method="depthfl", dataset="sst2" if text else "cifar10", **found[backbone]))
    finally:
        del OWN[name]
    assert found["deit_micro"] == {"backbone": "deit_micro", "pretrained": True, "finetune": "lora", "num_exits": 4}
    assert found["resnet20"]["finetune"] == "full" and not found["resnet20"]["pretrained"]
    assert found["own3"] == {
        "backbone": "own3", "pretrained": True, "finetune": "lora", "num_exits": 3, "batch_norm": "tracked",
    }  # fmt: skip
    assert found["minilm"]["augment"] == "none"
