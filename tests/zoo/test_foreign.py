"""Models of transformers as backbones: equal to themselves, sliced against explicit index lists, stacked against one by one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run
from fedlib.core.slices import Slice, take_all
from fedlib.layers.dropout import TokenDropout
from fedlib.models.adapters import apply_finetune_
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.map_exits import classifiers
from fedlib.models.measure import Measure
from fedlib.models.parameter_info import axes_of
from fedlib.models.registry import OWN
from fedlib.models.route import Route
from fedlib_lab.runs import store
from fedlib_lab.runs.identity import inputs_of
from fedlib_lab.zoo.foreign import Foreign, attend_with_dropout, score_bias
from fedlib_lab.zoo.foreign_loading import build_model
from tests.helpers.foreign import TINY, generator, spread_

transformers = pytest.importorskip("transformers")


def inputs(spec, members=1):
    if spec.reads == "images":
        return torch.randn(members, 3, 3, 16, 16, generator=generator(1))
    ids = torch.randint(5, 40, (members, 3, 9), generator=generator(2))
    ids[:, 0, 6:], ids[:, 1, 4:] = spec.padding, spec.padding
    return ids


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
    attention = set() if spec.grouped else {"qk", "vo"}  # what a group of heads shares is never cut
    assert {a.rsplit("/", 1)[-1] for a in axes} == {"residual", "classes", "ffn"} | attention
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
        if name == "classes" or name.endswith(".rank") or (rotary and name.endswith(("/qk", "/vo"))):
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
    narrow = replace(spec, dim=16, heads=4, ffn_dim=len(index["0/ffn"]), head_dim=None)
    if spec.rotary or spec.family == "t5":
        narrow = replace(narrow, head_dim=(spec.head_dim or 6) if spec.rotary else len(index["0/qk"]) // 4)
    config = getattr(transformers, spec.kind.model).config_class(**spec.kind.config(narrow))
    small = getattr(transformers, spec.kind.model)(
        config, **({"add_pooling_layer": False} if family in ("roberta", "vit") else {})
    ).eval()
    if family == "gemma":  # its table is scaled as the whole one
        small.embed_tokens.embed_scale.fill_(spec.dim**0.5)
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
        a[1] == "residual" and a[0].endswith(".rank") if ".lora_A." in n else a[0] is not None for n, a in lora.items()
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


def experiment(folder, monkeypatch, tmp_path, name="little", **changes):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    spec = replace(TINY["distilbert"], vocab_size=30_522, positions=64, length=16)
    torch.manual_seed(0)  # transformers draws from it
    spread_(build_model(spec)).save_pretrained(folder)
    monkeypatch.setitem(OWN, name, replace(spec, source=str(folder)))
    monkeypatch.setitem(OWN, f"{name}.plain", replace(spec, source=str(folder), as_trained=False))
    return Experiment(**dict(
        method="fedavg", dataset="docstrings", backbone=name, finetune="full", augment="none", num_exits=1, rounds=3,
        num_clients=4, clients_per_round=2, num_train=40, num_test=20, lr=0.05, batch_size=4, evaluate_every=1,
    ) | changes)  # fmt: skip


def test_a_run_on_a_checkpoint_without_a_pooler_is_resumed_as_it_would_have_gone_on(tmp_path, monkeypatch):
    e = experiment(tmp_path / "little", monkeypatch, tmp_path)
    whole = run(e, folder=tmp_path / "whole")

    original = store.run_rounds

    def two(*args):
        for r in original(*args):
            if r.t > 2:
                raise KeyboardInterrupt
            yield r

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, "run_rounds", two)
        run(e, folder=tmp_path / "cut", checkpoint_seconds=0)
    torch.manual_seed(99)
    resumed = run(e, folder=tmp_path / "cut")
    assert [m["accuracy"] for m in resumed.metrics] == [m["accuracy"] for m in whole.metrics]
    assert [m["train_loss"] for m in resumed.metrics] == [m["train_loss"] for m in whole.metrics]
    digests = {inputs_of(build_federation(e.replace(seed=s)))["weights"] for s in (1, 2)}
    assert len(digests) == 1  # what was drawn is no part of the weights


@pytest.mark.parametrize("family, rates", [
    ("bert", {"pooler": 0.1, "attention": 0.1, "hidden": 0.1}), ("roberta", {"pooler": 0.1, "attention": 0.1, "hidden": 0.1}),
    ("distilbert", {"pooler": 0.2, "attention": 0.1, "hidden": 0.1}), ("t5", {"attention": 0.1, "hidden": 0.1}),
    ("llama", {"attention": 0.0}), ("vit", {"attention": 0.0, "hidden": 0.0}),
])  # fmt: skip
def test_layers_drop_what_the_checkpoints_config_says(family, rates):
    """BERT and RoBERTa a tenth, DistilBERT's pooler a fifth; ``*.plain`` nothing. Answers are never dropped."""
    spec = TINY[family]
    model, plain, x = built(spec), built(replace(spec, as_trained=False)), inputs(spec, 2)
    plain.load_state_dict(model.state_dict())
    attention = {m.drop for m in model.modules() if hasattr(m, spec.kind.query)}
    layers = {m for m in model.backbone.blocks.modules() if isinstance(m, TokenDropout)}
    found, hidden = {"attention": {m.p for m in attention}}, {m.p for m in layers - attention}
    found |= {"hidden": hidden} if hidden else {}
    found |= {"pooler": {model.backbone.stem.pooler.drop.p}} if spec.kind.pooler else {}
    assert found == {kind: {rate} for kind, rate in rates.items()}
    assert torch.equal(model(x), plain(x))
    model.context.generators = plain.context.generators = [generator(i) for i in range(2)]
    assert torch.equal(plain(x), model(x)) == (not any(rates.values()))


@pytest.mark.parametrize("family", ["bert", "t5", "qwen2"])
def test_what_a_client_drops_depends_on_nobody_beside_it(family):
    spec, drops = replace(TINY[family], length=16), {"attention_dropout": 0.1}
    foreign = build_model(spec).eval()
    for m in foreign.modules():
        for name in drops.keys() & vars(m).keys():
            setattr(m, name, 0.3)
    foreign = Foreign(spec, foreign)
    model = spread_(ExitModel(foreign, classifiers(spec, 3, (spec.depth - 1,)).init_(generator(3)), (spec.depth - 1,)))
    short = torch.randint(5, 40, (1, 3, 16), generator=generator(2))
    short[..., 6:] = 0
    long = torch.randint(5, 40, (1, 3, 16), generator=generator(4))

    def answers(*rows, seeds):
        model.context.generators = [generator(i) for i in seeds]
        return model(torch.cat(rows))[0]

    alone, again = answers(short, seeds=[7])[0], answers(short, seeds=[8])[0]
    assert (alone - again).abs().max() > 1e-3  # it is dropped by chance
    beside = answers(long, short, seeds=[6, 7])[1]  # shared tensors, one pass, as many tokens as the longest has
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-5)
    params = {n: p.detach() for n, p in model.named_parameters()}
    model.put_({n: torch.stack([p, p]) for n, p in params.items()})
    torch.testing.assert_close(answers(long, short, seeds=[6, 7])[1], alone, rtol=1e-4, atol=1e-5)
    model.put_(params)
    model.context.training = False
    assert torch.equal(answers(short, seeds=[7]), answers(short, seeds=[8]))


def test_entries_are_dropped_at_their_rate_and_independently():
    drop, x = TokenDropout(0.1), torch.ones(2, 40, 50, 64)
    drop.context.generators = [generator(1), generator(2)]
    gone = (drop(x) == 0).double()
    assert drop(x).max() == pytest.approx(1 / 0.9) and gone.mean() == pytest.approx(0.1, abs=0.002)
    for dim in range(1, 4):  # a neighbour says nothing: variance of a mean over n entries is 0.09 / n
        both = (gone.narrow(dim, 1, gone.shape[dim] - 1) * gone.narrow(dim, 0, gone.shape[dim] - 1)).mean()
        assert both == pytest.approx(0.01, abs=0.002)
        means = gone.mean([d for d in range(1, 4) if d != dim])
        assert means.var() == pytest.approx(0.09 / (128_000 / gone.shape[dim]), rel=0.6)
    assert (gone[0] * gone[1]).mean() == pytest.approx(0.01, abs=0.002)
    drop.context.generators = [generator(2)]
    assert torch.equal((drop(x[1:, :, :20]) == 0).double()[0], gone[1][:, :20])  # of longer rows the first tokens


def test_attention_is_transformers_own_but_for_what_is_dropped():
    module = SimpleNamespace(drop=TokenDropout(1e-9), num_key_value_groups=2, is_causal=True)  # drops nothing
    draw = lambda *shape: torch.randn(shape, generator=generator(sum(shape)))  # noqa: E731
    query, key, value, bias = draw(3, 4, 5, 6), draw(3, 2, 5, 6), draw(3, 2, 5, 6), draw(1, 4, 5, 5)
    mask = score_bias(
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=bool), True, torch.float32
    )
    for kept in (None, bias):
        module.drop.context.generators = None
        expected, _ = attend_with_dropout(module, query, key, value, mask, scaling=0.3, position_bias=kept)
        module.drop.context.generators, module.drop.context.members = [generator()], range(1)
        torch.testing.assert_close(attend_with_dropout(module, query, key, value, mask, 0.3, kept)[0], expected)


def test_cohorts_with_dropout_train_as_each_alone(tmp_path, monkeypatch):
    e = experiment(tmp_path / "little", monkeypatch, tmp_path, clients_per_round=3, rounds=4, lr=0.5, local_epochs=2)
    one, three = (run(e, Execution(cohort_size=k), tmp_path / str(k)) for k in (1, 3))
    losses = [[m["train_loss"] for m in r.metrics] for r in (one, three)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    plain = run(e.replace(backbone="little.plain"), Execution(cohort_size=3), tmp_path / "plain")
    without = [m["train_loss"] for m in plain.metrics]
    assert max(abs(a - b) for a, b in zip(without, losses[0], strict=True)) > 1e-3


def test_frozen_layers_drop_too_and_nothing_of_them_is_kept(tmp_path, monkeypatch):
    e = experiment(tmp_path / "little", monkeypatch, tmp_path, finetune="frozen", rounds=1)
    f = build_federation(e)
    assert f.train_cache is None and f.test_cache is not None
    assert build_federation(e.replace(backbone="little.plain")).train_cache is not None


def test_images_are_normalised_as_the_checkpoints_were(monkeypatch):
    spec = replace(TINY["vit"], pixels=((0.5, 0.4, 0.3), (0.2, 0.25, 0.5)))
    monkeypatch.setitem(OWN, "tiny_vit", spec)
    monkeypatch.setitem(OWN, "tiny_vit.plain", replace(spec, as_trained=False))
    e = Experiment(
        method="fedavg",
        backbone="tiny_vit",
        pretrained=False,
        finetune="full",
        num_clients=4,
        clients_per_round=2,
        num_exits=1,
    )
    own, data = build_federation(e).data, build_federation(e.replace(backbone="tiny_vit.plain")).data
    assert own.mean.tolist() == pytest.approx([0.5, 0.4, 0.3]) and own.std.tolist() == pytest.approx([0.2, 0.25, 0.5])
    assert data.mean.tolist() == pytest.approx([data.mean[0].item()] * 3) and data.mean[0] < 0.2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 5}, "dim = 24 does not divide among heads = 5"),
        ({"padding": None}, "bert has no pad token, so rows of unequal length cannot be read together"),
        ({"length": 17}, "length = 17 exceeds the 16 positions of the model"),
        ({"family": "gpt"}, "family = 'gpt' is unknown; allowed: bert, distilbert"),
    ],
)
def test_bad_shapes_are_refused_in_words(changes, message):
    with pytest.raises(ValueError) as error:
        replace(TINY["bert"], **changes)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="length = 15 exceeds the 14 positions"):
        replace(TINY["roberta"], length=15)


# --- what a part costs -----------------------------------------------------------------------------------------------


def watched_mib(measure, part, batch):
    """The memory of training ``part``, of the outputs that its layers are seen to put out when it runs."""
    model, full = measure.model, {n: p.detach() for n, p in measure.model.named_parameters()}
    seen_outputs = []
    hook = lambda m, args, out: seen_outputs.append(out.numel())  # noqa: E731
    layers = [m for m in model.modules() if list(m.parameters(recurse=False))]
    model.put_(take_all(full, measure.infos, part))
    hooks = [m.register_forward_hook(hook) for m in layers]
    with torch.no_grad():
        model(torch.empty(1, 1, *measure.spec.input_shape, device="meta"), Route.of([part], model.depth))
    for h in hooks:
        h.remove()
    model.put_(full)
    trained = measure.cost("upload", part)
    return 4 * (measure.parameters(part) + 3 * trained + 2 * batch * sum(seen_outputs)) / 2**20


@pytest.mark.parametrize("finetune", ["full", "lora"])
@pytest.mark.parametrize("name", [*TINY, "deit_micro", "minilm.32.stream"])
def test_the_memory_of_a_part_follows_from_widths_as_if_it_had_run(name, finetune):
    """A client of BERT-base took 49 s to find a part that fits, as every draw ran; now none does."""
    if name in TINY:
        model, rotary = built(TINY[name], finetune), TINY[name].rotary
    else:
        backbone, rotary = OWN[name].build(), False
        head = classifiers(backbone.spec, 3, (backbone.spec.depth - 1,)).init_(generator(3))
        apply_finetune_(backbone, head, finetune, {"r": 2} if finetune == "lora" else {}, 0)
        model = ExitModel(backbone, head, (backbone.spec.depth - 1,)).eval()
    axes, measure, depth = axes_of(model, model.infos()), Measure(model), model.backbone.spec.depth
    for index in ({}, cut_index(axes, rotary)):
        part = Slice.prefix(depth, (0,), index=index)
        assert measure.training_mib(part, 8) == pytest.approx(watched_mib(measure, part, 8), rel=1e-12)


def test_a_thousand_parts_of_bert_base_are_priced_without_one_being_run(monkeypatch):
    measure = sizes("bert_base")
    parts = [Slice.prefix(12, (0,), index={f"{u}/ffn": range(64 + n) for u in range(12)}) for n in range(1000)]
    first = measure.training_mib(parts[0])
    monkeypatch.setattr(measure, "_run", lambda part: pytest.fail("ran"))
    prices = [measure.cost("memory", part) for part in parts]
    assert prices[0] == first and prices == sorted(prices)
