"""Models of transformers as backbones: equal to themselves, sliced against explicit index lists, stacked against one by one."""

from dataclasses import replace

import pytest
import torch

from fedlib.core.slices import Slice, take_all
from fedlib.models.adapters import apply_finetune_
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.foreign import Foreign, build_model, load_foreign
from fedlib.models.foreign_specs import ForeignSpec
from fedlib.models.map_exits import classifiers
from fedlib.models.measure import Measure
from fedlib.models.places import axes_of
from fedlib.models.registry import OWN, build_backbone

transformers = pytest.importorskip("transformers")
SMALL = dict(vocab_size=40, dim=24, heads=4, ffn_dim=20, length=9, positions=16)
TINY = {
    "bert": ForeignSpec("bert", depth=2, **SMALL),
    "roberta": ForeignSpec("roberta", depth=2, padding=1, **SMALL),
    "distilbert": ForeignSpec("distilbert", depth=2, **SMALL),
    "t5": ForeignSpec("t5", depth=4, **SMALL | {"head_dim": 8}),
    "vit": ForeignSpec("vit", dim=24, heads=4, ffn_dim=20, depth=2, img_size=16, patch_size=8),
    "llama": ForeignSpec("llama", depth=2, **SMALL),
}  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(spec, members=1):
    if spec.reads == "images":
        return torch.randn(members, 3, 3, 16, 16, generator=generator(1))
    ids = torch.randint(5, 40, (members, 3, 9), generator=generator(2))
    ids[:, 0, 6:], ids[:, 1, 4:] = spec.padding, spec.padding
    return ids


def spread_(module):
    """Weights, biases and norms that are all different from their initial values."""
    for p in module.parameters():
        p.data = p.data + 0.2 * torch.randn(p.shape, generator=generator(p.numel()))
    return module.requires_grad_(False)


def built(spec, finetune="full"):
    foreign = Foreign(spec, build_model(spec).eval())
    last = spec.depth - 1
    head = classifiers(spec, 3, (last,)).init_(generator(3))
    apply_finetune_(foreign, head, finetune, {"r": 2} if finetune == "lora" else {}, 0)
    return spread_(ExitModel(foreign, head, (last,)).eval())


def plain_features(spec, foreign_model, x):
    """What transformers' own model makes of the inputs: (B, T, d) after its last norm."""
    if spec.reads == "images":
        return foreign_model(pixel_values=x).last_hidden_state
    mask = (x != spec.padding).long()
    if spec.family == "t5":
        shifted = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        return foreign_model(input_ids=x, attention_mask=mask, decoder_input_ids=shifted).last_hidden_state
    return foreign_model(input_ids=x, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("family", TINY)
def test_units_one_by_one_make_what_transformers_makes(family):
    spec = TINY[family]
    model = spread_(build_model(spec).eval())
    x = inputs(spec)
    expected = plain_features(spec, model, x[0])
    foreign = Foreign(spec, model).eval()
    ExitModel(foreign, Classifiers(24, 3, (spec.depth - 1,)), (spec.depth - 1,))
    foreign.reads_all = True
    z = foreign.stem(x)
    for unit in range(spec.depth):
        feature, z = foreign.advance(z, unit, 1)
    real = torch.ones(3, 5, dtype=bool) if spec.reads == "images" else x[0] != spec.padding
    real = real[:, : feature.shape[2]]
    torch.testing.assert_close(feature[0][real], expected[:, : feature.shape[2]][real], rtol=1e-4, atol=1e-5)
    assert not feature[0][~real].any()


@pytest.mark.parametrize("family", TINY)
def test_permuting_any_axis_leaves_the_answers_unchanged(family):
    spec, model = TINY[family], built(TINY[family])
    infos, x = model.infos(), inputs(TINY[family])
    axes, before = axes_of(model, infos), model(inputs(TINY[family]))
    assert {a.rsplit("/", 1)[-1] for a in axes} == {"residual", "classes", "qk", "vo", "ffn"}
    params = {n: p.detach() for n, p in model.named_parameters()}
    for axis in axes.values():
        if not axis.permutable:
            assert axis.name == "classes" or spec.rotary
            continue
        order = axis.ranked(torch.randn(axis.size, generator=generator(5)), lambda n: n)
        model.put_(take_all(params, infos, Slice.prefix(spec.depth, (0,), index={axis.name: order})))
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4, msg=lambda m, a=axis.name: a + m)


def cut_index(axes, rotary):
    """Every axis cut to a random part; of heads the same number of features each."""
    index = {}
    for name, axis in axes.items():
        if name == "classes" or (rotary and name.endswith(("/qk", "/vo"))):
            continue
        scores = torch.randn(axis.size, generator=generator(len(name)))
        index[name] = axis.ranked(scores, lambda n: max(1, 2 * n // 3))
    return index


@pytest.mark.parametrize("family", TINY)
def test_a_sliced_model_is_a_small_model_of_transformers(family):
    """A BERT, T5, ... built narrow by transformers itself, filled by explicit index lists, answers the same."""
    spec, model = TINY[family], built(TINY[family])
    infos, x = model.infos(), inputs(TINY[family])
    axes = axes_of(model, infos)
    index = cut_index(axes, spec.rotary)
    params = {n: p.detach() for n, p in model.named_parameters()}
    held = take_all(params, infos, Slice.prefix(spec.depth, (0,), index=index))
    for name, p in params.items():  # by hand
        for dim, axis in enumerate(infos[name].axes):
            p = p[(slice(None),) * dim + (list(index[axis]),)] if axis in index else p
        assert torch.equal(p, held[name]), name
    model.put_(held)
    answers = model(x)
    width = 16 if not spec.rotary else 24
    narrow = replace(spec, dim=16, heads=4, ffn_dim=len(index["0/ffn"]), head_dim=None)
    if spec.rotary or spec.family == "t5":
        narrow = replace(narrow, head_dim=width // 4 if spec.rotary else len(index["0/qk"]) // 4)
    config = getattr(transformers, spec.kind.model).config_class(
        **spec.kind.config(narrow), **({"head_dim": 6} if spec.rotary else {})
    )
    small = getattr(transformers, spec.kind.model)(
        config, **({"add_pooling_layer": False} if family in ("roberta", "vit") else {})
    ).eval()
    foreign = Foreign(narrow, small)
    twin = ExitModel(foreign, classifiers(narrow, 3, (spec.depth - 1,)), (spec.depth - 1,)).eval()
    own = dict(twin.named_parameters())
    assert set(own) == set(held)
    for name, p in own.items():
        p.data.copy_(held[name])
    torch.testing.assert_close(twin(x), answers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", TINY)
def test_members_of_a_cohort_answer_as_each_alone(family):
    spec, model = TINY[family], built(TINY[family])
    x = inputs(spec, 3)
    params = {n: p.detach() for n, p in model.named_parameters()}
    each = [{n: p + 0.05 * torch.randn(p.shape, generator=generator(i)) for n, p in params.items()} for i in range(3)]
    alone = []
    for i, own in enumerate(each):
        model.put_(own)
        alone.append(model(x[i : i + 1])[:, 0])
    model.put_({n: torch.stack([own[n] for own in each]) for n in params})
    torch.testing.assert_close(model(x), torch.stack(alone, 1), rtol=1e-4, atol=1e-5)
    model.put_(params)
    torch.testing.assert_close(model(x)[:, :1], model(x[:1]), rtol=1e-4, atol=1e-5)  # shared tensors: one pass


@pytest.mark.parametrize("family", ["bert", "vit", "llama", "t5"])
def test_lora_follows_the_axes_of_its_layer(family):
    """A's columns follow the input axis, B's rows the output axis: permuting all of an axis changes no answer."""
    spec, model = TINY[family], built(TINY[family], "lora")
    infos, x = model.infos(), inputs(spec)
    axes, before = axes_of(model, infos), model(x)
    lora = {n: i.axes for n, i in infos.items() if "lora_" in n}
    assert lora and all(
        a[1] == "residual" and a[0] is None if ".lora_A." in n else a[0] is not None for n, a in lora.items()
    )
    params = {n: p.detach() for n, p in model.named_parameters()}
    for axis in (a for a in axes.values() if a.permutable):
        order = axis.ranked(torch.randn(axis.size, generator=generator(5)), lambda n: n)
        model.put_(take_all(params, infos, Slice.prefix(spec.depth, (0,), index={axis.name: order})))
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    model.put_(take_all(params, infos, Slice.prefix(spec.depth, (0,), index=cut_index(axes, spec.rotary))))
    assert model(x).shape == before.shape


def sizes(name, classes=2):
    with torch.device("meta"):
        backbone = OWN[name].build()
        head = classifiers(backbone.spec, classes, (backbone.spec.depth - 1,))
    return Measure(ExitModel(backbone, head, (backbone.spec.depth - 1,)))


def test_bert_bases_sub_models_have_the_published_sizes():
    measure = sizes("bert_base")

    def parameters(ffn):
        return measure.parameters(Slice.prefix(12, (0,), index={f"{u}/ffn": range(ffn) for u in range(12)}))

    assert [parameters(n) for n in (3072, 1920, 1280)] == [109_483_778, 88_236_290, 76_432_130]


@pytest.mark.parametrize(
    "name, parameters",
    [("roberta_base", 124_647_170), ("distilbert", 66_955_010), ("vit_b16", 85_800_194), ("bert_large", 335_143_938)],
)
def test_whole_models_have_the_sizes_that_transformers_gives_them(name, parameters):
    measure = sizes(name)
    assert measure.parameters(Slice.prefix(measure.spec.depth, (0,))) == parameters


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


def test_offline_it_says_so_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="the checkpoint of 'google/flan-t5-small' is not cached and could not be"):
        build_backbone("flan_t5_small")
    assert "\n" not in str(pytest.raises(ConnectionError, build_backbone, "flan_t5_small").value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 5}, "dim = 24 does not divide among heads = 5"),
        ({"padding": None}, "bert has no pad token, so rows of unequal length cannot be read together"),
        ({"length": 17}, "length = 17 exceeds the 16 positions of the model"),
        ({"family": "gpt"}, "family = 'gpt' is unknown; allowed: bert, roberta"),
    ],
)
def test_bad_shapes_are_refused_in_words(changes, message):
    with pytest.raises(ValueError) as error:
        replace(TINY["bert"], **changes)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="length = 15 exceeds the 14 positions"):
        replace(TINY["roberta"], length=15)
