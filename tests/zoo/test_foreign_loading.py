"""Checkpoints of transformers in a folder or of the hub: what they hold is read off, and what they are not is refused."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedlib.models.exit_model import ExitModel
from fedlib.models.map_exits import classifiers
from fedlib.models.measure import Measure
from fedlib.models.registry import OWN, backbone_spec, build_backbone, fetch_weights
from fedlib_lab.zoo import foreign_loading as foreign_module
from fedlib_lab.zoo.foreign_loading import build_model, check_outputs, load_foreign
from fedlib_lab.zoo.foreign_specs import ForeignSpec
from tests.helpers.foreign import TINY, spread_

transformers = pytest.importorskip("transformers")


def sizes(name, classes=2):
    with torch.device("meta"):
        backbone = OWN[name].build()
        head = classifiers(backbone.spec, classes, (backbone.spec.depth - 1,))
    return Measure(ExitModel(backbone, head, (backbone.spec.depth - 1,)))


def test_weights_come_from_a_folder(tmp_path):
    spec = replace(TINY["bert"], source=str(tmp_path))
    model = spread_(build_model(spec))
    model.save_pretrained(tmp_path)
    loaded = load_foreign(spec)
    assert torch.equal(loaded.blocks[1].attention.self.query.weight, model.encoder.layer[1].attention.self.query.weight)
    assert torch.equal(loaded.stem.pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("content", [b"", b"\x80\x04}."])
def test_weights_that_are_a_pickle_are_refused_and_the_reason_is_true(tmp_path, content):
    spec = replace(TINY["bert"], source=str(tmp_path))
    build_model(spec).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read: ") as error:
        load_foreign(spec)
    assert str(tmp_path) in str(error.value) and "safetensors" in str(error.value)
    assert "downloaded" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["../elsewhere/x.safetensors", "absolute", "link", "inner/x.safetensors"])
def test_an_index_that_names_weights_outside_its_folder_is_refused(where, tmp_path):
    """But the hub's cache, whose snapshots are links to its blobs, is read."""
    folder, elsewhere = tmp_path / "cache" / "snapshots" / "mine", tmp_path / "elsewhere"
    spec = replace(TINY["bert"], source=str(folder))
    model = spread_(build_model(spec))
    model.save_pretrained(folder, max_shard_size="10KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    shards[0].rename(blobs / "a")
    shards[0].symlink_to("../../blobs/a")
    assert torch.equal(load_foreign(spec).stem.pooler.dense.weight, model.pooler.dense.weight)
    for other in (elsewhere, folder / "inner"):
        other.mkdir()
        (other / "x.safetensors").write_bytes(shards[1].read_bytes())
    if where == "link":
        shards[1].unlink()
        shards[1].symlink_to(elsewhere / "x.safetensors")
    name = {"absolute": str(elsewhere / "x.safetensors"), "link": shards[1].name}.get(where, where)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: name if v == shards[1].name else v for k, v in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load_foreign, foreign_module.fetch_foreign):
        with pytest.raises(ValueError, match="index.json names '.*x?.safetensors', which is not in this folder"):
            read(spec)


def stand_in(folder, family, **changes):
    """A checkpoint of a family's model in ``folder``, all of its weights told apart."""
    spec = replace(TINY[family], **changes)
    spread_(build_model(spec)).save_pretrained(folder)
    return replace(spec, source=str(folder))


@pytest.mark.parametrize("family", [f for f in TINY if f not in ("bert", "distilbert")])
def test_a_folder_says_what_it_holds(tmp_path, monkeypatch, family):
    """``ForeignSpec.of`` finds what ``save_pretrained`` wrote; loaded, it answers as the whole model does."""
    monkeypatch.setattr("fedlib_lab.zoo.foreign_specs.load_tokenizer", lambda *a, **k: SimpleNamespace(padding=0))
    spec = stand_in(tmp_path, family)
    (tmp_path / "tokenizer.json").write_text("{}")
    found = ForeignSpec.of(tmp_path)
    sizes = ("family", "source", "depth", "dim", "heads", "ffn_dim", "grouped", "padding", "input_shape")
    length = 128 if family == "t5" else spec.usable  # T5 has no table of positions
    expected = replace(spec, length=length, positions=512) if spec.reads == "tokens" else spec
    assert [getattr(found, k) for k in sizes] == [getattr(expected, k) for k in sizes]
    loaded, model = load_foreign(found), build_model(spec).from_pretrained(tmp_path).eval()
    check_outputs(loaded, model)
    with torch.no_grad():
        loaded.blocks[0].get_parameter(next(n for n, _ in loaded.blocks[0].named_parameters())).add_(0.5)
    with pytest.raises(ValueError, match="answers otherwise unit by unit than as a whole"):
        check_outputs(loaded, build_model(spec).from_pretrained(tmp_path).eval())


@pytest.mark.parametrize("changes, message", [
    ({"heads": 2}, "num_attention_heads = 4, and heads = 2"), ({"ffn_dim": 24}, "intermediate_size = 20, and ffn_dim = 24"),
    ({"padding": 0}, "pad_token_id = 1, and padding = 0"), ({"family": "bert"}, "model_type = 'roberta', and family = 'bert'"),
    ({"depth": 1}, "num_hidden_layers = 2, and depth = 1"), ({"vocab_size": 60}, "vocab_size = 40, and vocab_size = 60"),
])  # fmt: skip
def test_a_shape_that_is_not_its_checkpoints_is_refused(tmp_path, changes, message):
    """Each was loaded before, and computed other numbers."""
    spec = stand_in(tmp_path, "roberta")
    load_foreign(spec)
    with pytest.raises(ValueError) as error:
        load_foreign(replace(spec, **changes))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_what_a_config_lacks_and_other_kinds_are_refused(tmp_path):
    stand_in(tmp_path, "roberta")
    config = json.loads((tmp_path / "config.json").read_text())
    for gone, message in (
        ({"hidden_size"}, "config.json of a roberta lacks hidden_size"),
        ({"model_type"}, "model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in gone}))
        with pytest.raises(ValueError, match=message):
            ForeignSpec.of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type = 'gpt2' is unknown; allowed: bert, distilbert"):
        ForeignSpec.of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds no tokenizer, and its 40 words are not BERT's"):
        ForeignSpec.of(tmp_path)
    with pytest.raises(ValueError, match="sliding_window = 8, which length = 9 exceeds"):
        TINY["mistral"].check_config({
            "model_type": "mistral", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
            "num_key_value_heads": 2, "intermediate_size": 20, "max_position_embeddings": 16, "sliding_window": 8,
        })  # fmt: skip


def test_a_checkpoint_that_lacks_layers_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    spec = stand_in(tmp_path, "bert")
    kept = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "layer.1.output.dense" not in k}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match="lacks encoder.layer.1.output.dense.bias, encoder.layer.1.output.dense.weight"
    ):
        load_foreign(spec)


def test_backbones_are_found_by_their_folders_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    folder = tmp_path / "backbones" / "little"
    transformers.BertModel(transformers.BertConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=20)).save_pretrained(folder)  # fmt: skip
    spec = backbone_spec("little")
    assert (spec.dim, spec.length, spec.as_trained, spec.tokenizer) == (24, 128, True, None)
    assert backbone_spec("little.384.plain") == replace(spec, length=384, as_trained=False)
    assert build_backbone("little").spec == spec and build_backbone("little", pretrained=False).spec == spec
    with pytest.raises(ValueError, match="allowed after little: .<tokens>, .plain"):
        backbone_spec("little.fast")
    with pytest.raises(ValueError, match="backbone = 'other' is unknown"):
        backbone_spec("other")
    folder.rename(folder.with_name("bert_base"))  # a published name: the copy must be what the name says
    with pytest.raises(ValueError, match="hidden_size = 24, and dim = 768"):
        build_backbone("bert_base")


# --- what a checkpoint lacks, and what its config drops --------------------------------------------------------------


@pytest.mark.parametrize("family", ["roberta", "distilbert", "bert"])
def test_a_pooler_that_a_checkpoint_lacks_comes_from_the_seed(tmp_path, family):
    """It came from the global generator: no two builds were equal, and no run could be resumed."""
    spec = stand_in(tmp_path, family)
    if family == "bert":
        transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False).save_pretrained(tmp_path)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = load_foreign(spec, 3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = load_foreign(spec, 3), load_foreign(spec, 4).state_dict()
    assert again.drawn == ("stem.pooler.dense.weight", "stem.pooler.dense.bias")
    assert all(torch.equal(p, first[n]) for n, p in again.state_dict().items())
    assert [n for n, p in other.items() if not torch.equal(p, first[n])] == ["stem.pooler.dense.weight"]
    assert 0.01 < first["stem.pooler.dense.weight"].std() < 0.03 and not first["stem.pooler.dense.bias"].any()


def test_weights_are_fetched_without_building_a_model(tmp_path, monkeypatch):
    """One file or shards; where one is missing, whoever loads them says so."""
    spec = replace(TINY["bert"], source=str(tmp_path))
    asked = []
    monkeypatch.setattr(foreign_module, "load_foreign", lambda spec: asked.append(spec))
    build_model(spec).save_pretrained(tmp_path)
    foreign_module.fetch_foreign(spec)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert asked == []
    foreign_module.fetch_foreign(spec)
    assert asked == [spec]
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ConnectionError, match="the checkpoint of .google/flan-t5-small. is not cached and could not be"
    ):
        fetch_weights("flan_t5_small")


def test_offline_it_says_so_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ConnectionError, match="the checkpoint of 'google/flan-t5-small' is not cached and could not be"
    ):
        build_backbone("flan_t5_small")
    assert "\n" not in str(pytest.raises(ConnectionError, build_backbone, "flan_t5_small").value)


@pytest.mark.parametrize("family, key, value, allowed", [
    ("bert", "num_hidden_layers", "2", "1 to 1000"), ("bert", "num_hidden_layers", 2.0, "1 to 1000"),
    ("vit", "num_hidden_layers", 0, "1 to 1000"), ("vit", "num_hidden_layers", -1, "1 to 1000"),
    ("bert", "num_hidden_layers", 10**6, "1 to 1000"), ("t5", "num_decoder_layers", True, "1 to 1000"),
    ("bert", "num_attention_heads", 0, "1 to"), ("bert", "num_attention_heads", [4], "1 to"),
    ("vit", "hidden_size", "24", "1 to"), ("bert", "vocab_size", 10**12, "1 to 2147483647"),
    ("bert", "max_position_embeddings", "16", "1 to"), ("bert", "pad_token_id", -1, "0 to"), ("vit", "image_size", [16, 16], "1 to"),
])  # fmt: skip
def test_a_size_that_is_no_whole_number_is_refused_by_its_key(tmp_path, family, key, value, allowed):
    stand_in(tmp_path, family)
    (tmp_path / "tokenizer.json").write_text("{}")
    config = json.loads((tmp_path / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = f"config.json of a {family} says {key} = {value!r}; allowed: a whole number from {allowed}"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ForeignSpec.of(tmp_path)


@pytest.mark.parametrize("family", ["bert", "vit", "t5", "qwen2"])
def test_a_file_with_more_layers_than_its_config_says_is_not_cut_silently(tmp_path, family):
    spec = stand_in(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {key: 1 for key in ("num_hidden_layers", "num_layers", "num_decoder_layers") if key in config}
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": None} if family == "qwen2" else config))
    with pytest.raises(ValueError, match=f"has more layers than the {spec.depth // 2} that its config.json says"):
        load_foreign(replace(spec, depth=spec.depth // 2))


def test_a_config_that_is_nested_without_end_is_damaged(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ValueError, match="config.json cannot be read: maximum recursion depth"):
        ForeignSpec.of(tmp_path)


@pytest.mark.parametrize(
    "said", [{"image_mean": 0.5}, {"image_mean": [0.5]}, {"image_std": [0, 0, 0]}, {"image_mean": ["a"] * 3}]
)
def test_what_is_no_mean_or_sd_of_three_channels_is_refused(tmp_path, said):
    stand_in(tmp_path, "vit")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    ((key, value),) = said.items()
    with pytest.raises(
        ValueError, match=re.escape(f"preprocessor_config.json says {key} = {value}; allowed: three numbers")
    ):
        ForeignSpec.of(tmp_path)
