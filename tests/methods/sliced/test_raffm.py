"""RaFFM: salience by hand, sub-models within their constraints, one round against a plain loop with index lists."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlib import Experiment, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.slices import Axis, ParamInfo, take_all
from fedlib.engine.batches import draw_batches
from fedlib.engine.evaluation import exit_logits
from fedlib.engine.executors import Execution
from fedlib.methods import Round, build_method
from fedlib.methods.sliced import raffm
from fedlib.methods.sliced.raffm import Space, salience, shrunk
from fedlib.methods.sums import MaskedMean, Update
from fedlib.models.bert import BertSpec
from fedlib.models.registry import OWN
from fedlib.models.vit import ViTSpec
from tests.helpers.draws import client_generators

ONE = Execution(workers=1)
ALL = ("qk", "vo", "ffn", "residual")


@pytest.fixture
def small(monkeypatch):
    """RaFFM on a tiny BERT without a large table, or on a tiny ViT."""
    monkeypatch.setitem(OWN, "bert_tiny", BertSpec(length=32, dim=24, depth=2, heads=3, ffn_dim=24, centred=False))
    monkeypatch.setitem(OWN, "vit_tiny", ViTSpec(dim=24, depth=2, heads=3, ffn_dim=24))
    return Experiment(
        method="raffm", options={"shares": [0.8, 0.9]}, backbone="bert_tiny", pretrained=False, dataset="docstrings",
        augment="none", partition="iid", finetune="full", num_exits=1, num_clients=4, clients_per_round=4, rounds=1,
        num_train=60, num_test=60, batch_size=8, lr=0.05, min_lr=0.0, schedule="constant", clip_value=None,
    )  # fmt: skip


def images(e):
    return e.replace(backbone="vit_tiny", dataset="mnist", num_train=200)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def setting_and_round(e, t=1):
    f = build_federation(e)
    r = Round(t, tuple(f.sample_clients(t)), f.setting)
    return f, replace(r, notes=f.method.prepare(f.server, r))


# --- salience


def test_salience_by_hand():
    """Eq. 1: rows of L1 norm; Eq. 5: the mean of query's and key's. Columns where the axis is the input's."""
    infos = {
        "q": ParamInfo(("0/qk", "residual"), "backbone", 0, (2, 3)),
        "k": ParamInfo(("0/qk", "residual"), "backbone", 0, (2, 3)),
        "bias": ParamInfo(("0/qk",), "backbone", 0, (2,)),
        "exit": ParamInfo(("classes", "residual"), "head", 0, (1, 3), 0),
        "a": ParamInfo((None, "residual"), "adapter", 0, (1, 3)),
    }
    tensors = {
        "q": torch.tensor([[1.0, -2, 3], [0, 1, 0]]),  # rows 6 and 1, columns 1, 3, 3
        "k": torch.tensor([[0.0, 0, -2], [5, 5, 5]]),  # rows 2 and 15, columns 5, 5, 7
        "bias": torch.tensor([100.0, 0]), "exit": torch.full((1, 3), 50.0), "a": torch.full((1, 3), 50.0),
    }  # fmt: skip
    axes = {"0/qk": Axis("0/qk", (1, 1)), "residual": Axis("residual", (3,))}
    found = salience(tensors, infos, axes, ("qk", "residual", "heads"))
    assert found["0/qk"].tolist() == [4, 8] and found["residual"].tolist() == [3, 4, 5]
    assert found["0/heads"].tolist() == [4, 8]  # heads of one feature
    assert set(salience(tensors, infos, axes, ("qk",))) == {"0/qk"} and salience(tensors, infos, axes, ()) == {}


@pytest.mark.parametrize("backbone", ["bert_tiny", "vit_tiny"])
@pytest.mark.parametrize("group", [*ALL, "heads"])
def test_ranks_of_every_group_preserve_the_answers(small, backbone, group):
    cut = {"cut": "heads"} if group == "heads" else {}
    e = small if backbone == "bert_tiny" else images(small)
    f, r = setting_and_round(e.replace(options={**e.options, "rank": [group], **cut}))
    server = replace(
        f.server, params={n: p + 0.1 * torch.randn(p.shape, generator=generator(1)) for n, p in f.server.params.items()}
    )
    notes = f.method.prepare(server, r)
    index = {}
    for name, axis in f.setting.axes.items():
        if name in notes:
            index[name] = axis.ranked(notes[name], lambda n: n)
        elif group == "heads" and name.endswith(("/qk", "/vo")):
            order = notes[f"{name.split('/')[0]}/heads"].argsort(descending=True).tolist()
            index[name] = axis.whole(order)
    assert index and any(list(i) != sorted(i) for i in index.values())
    before = exit_logits(f, server, f.setting.full())
    after = exit_logits(f, server, replace(f.setting.full(), index=index))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


# --- sub-models


@pytest.mark.parametrize("constraint", ["parameters", "memory", "macs", "upload"])
def test_every_client_holds_what_it_may_and_no_more(small, constraint):
    options = {"shares": [0.75, 0.9, 1.0], "constraint": constraint, "rank": list(ALL)}
    f, r = setting_and_round(images(small).replace(options=options, num_clients=9, clients_per_round=9))
    whole = f.setting.measure.cost(constraint, f.setting.full())
    for client in r.clients:
        part = f.method.slice_for(client, f.server, r)
        share = options["shares"][client.id % 3]
        assert f.setting.measure.cost(constraint, part) <= share * whole
        assert bool(part.index) == (share < 1)
        assert part == f.method.slice_for(client, f.server, r)  # a function of (seed, t, client)
    (a, b) = (f.method.sub_model(0.8, r, c) for c in (0, 3))
    assert a != b


def test_widths_are_drawn_layer_by_layer_and_shared_where_they_must():
    axes = {n: Axis(n, (8, 8)) for n in ("0/qk", "0/vo", "1/qk", "1/vo")} | {n: Axis(n, (64,)) for n in ("0/ffn", "1/ffn", "residual")}  # fmt: skip
    space = Space(axes, {"attention": (0.25, 0.5), "ffn": (0.5, 0.75), "residual": (0.5,)})
    import numpy as np

    seen = [space.draw_until(lambda widths: True, np.random.Generator(np.random.Philox(i)), 1) for i in range(50)]
    assert {(w["0", "attention"], w["1", "attention"]) for w in seen} == {(a, b) for a in (0.25, 0.5) for b in (0.25, 0.5)}  # fmt: skip
    index = space.index(space.narrowest(), {"0/ffn": torch.arange(64.0)})
    assert index["0/qk"] == index["0/vo"] == (0, 1, 8, 9)  # the first of every head
    assert index["0/ffn"] == tuple(range(63, 31, -1)) and index["1/ffn"] == range(32) == index["residual"]
    heads = Space(axes, {"attention": (0.5,), "ffn": (1.0,), "residual": (1.0,)}, whole_heads=True)
    assert heads.index(heads.narrowest(), {"0/heads": torch.tensor([1.0, 2.0])}) == {
        "0/qk": range(8, 16), "0/vo": range(8, 16), "1/qk": range(8), "1/vo": range(8),
    }  # fmt: skip


def test_draws_in_vain_drop_the_widest():
    import numpy as np

    space = Space({f"{u}/ffn": Axis(f"{u}/ffn", (10,)) for u in range(12)}, {"ffn": (1.0, 0.5, 0.1)})
    tried = []

    def fits(widths):
        tried.append(max(widths.values()))
        return sum(widths.values()) <= 1.3

    assert sum(space.draw_until(fits, np.random.default_rng(0), 5).values()) == pytest.approx(1.2)
    assert tried == [1.0] * 5 + [0.5] * 5 + [0.1]
    with pytest.raises(ValueError, match="not even the narrowest"):
        space.draw_until(lambda widths: False, np.random.default_rng(0), 5)


def test_a_model_is_ranked_once_however_many_ask(small, monkeypatch):
    """The initial model for the round's clients, the trained one for all who answer, twice each, after it."""
    models, original = [], raffm.salience
    monkeypatch.setattr(raffm, "salience", lambda *args: models.append(args[0]) or original(*args))
    f = build_federation(images(small).replace(test_split="like_train", evaluate_every=1))
    (finished,) = run_rounds(f, ONE)
    assert len(models) == 2 and finished.metrics["personal"]["clients"] == 4
    assert torch.equal(models[1]["backbone.stem.pos_embed"], finished.server.params["backbone.stem.pos_embed"])


def test_the_released_draw_knows_no_client(small):
    f, r = setting_and_round(images(small).replace(options={"draw": "released"}))
    parts = [f.method.slice_for(c, f.server, r) for c in r.clients]
    sizes = [f.setting.measure.parameters(p) for p in parts]
    assert parts[0] == f.setting.full() and sizes[1] == min(sizes)
    narrowest = f.method.space(f.setting).narrowest()
    assert sizes[1] == f.setting.measure.parameters(f.method.part(narrowest, f.setting, {}))


# --- aggregation


def ones_of(setting, parts):
    """A cohort's update of models that are all one."""
    full = {n: torch.zeros(i.shape) for n, i in setting.infos.items()}
    for i, part in enumerate(parts):
        params = {n: torch.ones_like(x)[None] for n, x in take_all(full, setting.infos, part).items()}
        yield Update((Client(i, 0, 3 + i),), (part,), params, {n: [0] for n in params})


def test_all_ones_of_any_coverage_give_all_ones(small):
    f, r = setting_and_round(images(small).replace(options={"shares": [0.7, 0.8, 0.9], "rank": list(ALL)}, num_clients=6, clients_per_round=6))  # fmt: skip
    mean = MaskedMean(f.setting.infos)
    for update in ones_of(f.setting, [f.method.slice_for(c, f.server, r) for c in r.clients]):
        mean.add(update, [float(c.num_examples) for c in update.clients])
    old = {n: torch.full(i.shape, 7.0) for n, i in f.setting.infos.items()}
    held = {n: mean.weight[n] > 0 for n in old}
    for n, x in mean.result(old).items():
        assert torch.equal(x, torch.where(held[n], 1.0, 7.0).expand(x.shape)), n


def test_the_released_sum_shrinks_what_few_hold(small):
    """One client holds all, nine hold 60 % of the feed-forward layers: 0.1 is left in the tail (facts 4.5)."""
    f, _ = setting_and_round(images(small))
    part = replace(f.setting.full(), index={"0/ffn": range(14)})  # of 24
    mean = MaskedMean(f.setting.infos)
    for update in ones_of(f.setting, [f.setting.full(), *[part] * 9]):
        mean.add(update, [1.0])
    old = {n: torch.zeros(i.shape) for n, i in f.setting.infos.items()}
    bias = shrunk(mean, old)["backbone.blocks.0.mlp.fc1.bias"]
    assert bias[:14].tolist() == [1.0] * 14 and torch.allclose(bias[14:], torch.tensor(0.1))
    assert mean.result(old)["backbone.blocks.0.mlp.fc1.bias"].eq(1).all()


# --- one round


def plain_bert(p, ids, depth, heads):
    """A post-norm BERT of any widths, in functions: class token after the last block, then norm and classifier."""
    x = p["backbone.stem.words.weight"][ids] + p["backbone.stem.pos_embed"][: ids.shape[1]]
    real = ids != 0
    norm = lambda x, n: F.layer_norm(x, x.shape[-1:], p[f"{n}.weight"], p[f"{n}.bias"], 1e-12)  # noqa: E731
    linear = lambda x, n: F.linear(x, p[f"{n}.weight"], p[f"{n}.bias"])  # noqa: E731
    x = norm(x, "backbone.stem.norm")
    for u in range(depth):
        at = f"backbone.blocks.{u}"
        q, k, v = (linear(x, f"{at}.attn.{n}").unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~real[:, None, None], -torch.inf)
        a = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = norm(x + linear(a, f"{at}.attn.proj"), f"{at}.norm1")
        x = norm(x + linear(F.gelu(linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2"), f"{at}.norm2")
    z = F.layer_norm(x[:, 0], x.shape[-1:], p["head.exits.0.norm.weight"], p["head.exits.0.norm.bias"], 1e-5)
    return F.linear(z, p["head.exits.0.linear.weight"], p["head.exits.0.linear.bias"])


def lists_by_hand(params, part, depth, heads):
    """The kept indices of every axis, from the weights: queries and keys by salience within a head, others first."""
    kept = {}
    for u in range(depth):
        q, k = (params[f"backbone.blocks.{u}.attn.{n}.weight"] for n in "qk")
        scores, width = (q.abs().sum(1) + k.abs().sum(1)) / 2, len(q) // heads
        each = len(part.index.get(f"{u}/qk", range(len(q)))) // heads
        best = [h * width + i for h in range(heads) for i in sorted(range(width), key=lambda i: -scores[h * width + i])[:each]]  # fmt: skip
        kept[f"{u}/qk"] = best if f"{u}/qk" in part.index else list(range(len(q)))
        kept[f"{u}/vo"] = [h * width + i for h in range(heads) for i in range(each)]
        kept[f"{u}/ffn"] = list(range(len(part.index.get(f"{u}/ffn", range(24)))))
    kept["residual"] = list(range(len(part.index.get("residual", range(24)))))
    return kept


def test_one_round_is_a_plain_loop_with_index_lists(small):
    f, r = setting_and_round(small)
    infos, total, weight = f.setting.infos, {}, {}
    for client in r.clients:
        part = f.method.slice_for(client, f.server, r)
        kept = lists_by_hand(f.server.params, part, 2, 3)
        own = {}
        for n, p in f.server.params.items():
            for dim, axis in enumerate(infos[n].axes):
                p = p[(slice(None),) * dim + (kept[axis],)] if axis in kept else p
            own[n] = p.clone().requires_grad_()
        batches = draw_batches(f.experiment, f.data, [client], client_generators(f.experiment.seed, 1))
        for step in range(len(batches.width)):
            rows = batches.rows[step, 0][batches.weights[step, 0] > 0]
            loss = F.cross_entropy(plain_bert(own, f.data.inputs[rows, :32].long(), 2, 3), f.data.labels[rows])
            grads = torch.autograd.grad(loss, list(own.values()))
            own = {n: (p - 0.05 * g).detach().requires_grad_() for (n, p), g in zip(own.items(), grads, strict=True)}
        for n, p in own.items():
            at = torch.meshgrid(*(torch.tensor(kept.get(a, list(range(s)))) for a, s in zip(infos[n].axes, infos[n].shape, strict=True)), indexing="ij")  # fmt: skip
            total.setdefault(n, torch.zeros(infos[n].shape))[at] += client.num_examples * p.detach()
            weight.setdefault(n, torch.zeros(infos[n].shape))[at] += client.num_examples
    (done,) = run_rounds(f, ONE)
    cut = 0
    for n, p in done.server.params.items():
        expected = torch.where(weight[n] > 0, total[n] / weight[n].clamp(min=1e-9), f.server.params[n])
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=2e-6, msg=lambda m, n=n: f"{n}: {m}")
        cut += int((weight[n] == 0).sum()) + int(weight[n].unique().numel() > 1)
    assert cut > 10  # entries were held by some and not by others


def test_trained_models_are_served_narrow_without_training_again(small):
    e = images(small).replace(test_split="contiguous", options={"shares": [0.7, 1.0], "rank": list(ALL)})
    f = build_federation(e)
    *_, last = run_rounds(f, ONE)
    assert last.metrics["personal"]["clients"] == 4
    r = Round(1, (), f.setting)
    (member,) = f.method.serve(Client(0, 0, 50), last.server, r).members
    assert f.setting.measure.parameters(member.part) <= 0.7 * f.setting.measure.parameters(f.setting.full())
    assert any(not isinstance(i, range) for i in member.part.index.values())  # ranked by the trained model


def test_lora_is_cut_with_its_layers(small):
    e = images(small).replace(
        finetune="lora", finetune_options={"r": 2}, options={"shares": [0.7, 0.8], "rank": list(ALL)}
    )
    f, r = setting_and_round(e)
    assert all(torch.isfinite(p).all() for p in r.notes.values()) and "0/qk" in r.notes  # of frozen weights
    part = f.method.slice_for(r.clients[0], f.server, r)
    held = take_all(f.server.params, f.setting.infos, part)
    a, b = (next(p for n, p in held.items() if f".0.attn.q.lora_{x}." in n) for x in "AB")
    assert a.shape == (2, len(part.index["residual"])) and b.shape == (len(part.index.get("0/qk", range(24))), 2)
    *_, last = run_rounds(f, ONE)
    assert any(not torch.equal(p, f.server.params[n]) for n, p in last.server.params.items())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"options": {"shares": [0.01]}}, "no sub-model has 0.01 of the parameters of the whole; the smallest that attention, ffn and residual allow has 0."),
        ({"options": {"shares": []}}, "shares = [] leaves nothing to choose"),
        ({"options": {"rank": ["heads"]}}, "rank = ['heads'] has no effect with cut = 'features'"),
        ({"options": {"rank": ["qk"], "cut": "heads"}}, "rank = ['qk'] has no effect with cut = 'heads'"),
        ({"options": {"ffn": [1.5]}}, "ffn"),
        ({"options": {"draw": "released", "shares": [0.5]}}, "shares"),
        ({"options": {"aggregation": "feddyn"}}, "aggregation = feddyn needs clients that send one model, of the same slice"),
        ({"options": {"compress": "topk", "error_feedback": True}}, "error_feedback = True needs clients that send one model"),
        ({"backbone": "resnet8", "dataset": "mnist"}, "has no attention heads to cut"),
        ({"finetune": "ia3"}, "finetune = 'ia3' cannot be cut in width"),
        ({"backbone": "bert_micro"}, "allowed: residual = [1.0], or backbone = 'bert_micro.stream'"),
        ({"backbone": "llama_tiny", "dataset": "svamp"}, "are rotated in pairs by position"),
        ({"backbone": "llama_tiny", "dataset": "svamp", "options": {"rank": []}}, "allowed: [1.0], or cut = 'heads'"),
        ({"backbone": "flan_t5_small", "options": {"cut": "heads", "rank": []}}, "share positions per head"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_words(small, changes, message):
    with pytest.raises(ValueError) as error:
        build_federation(small.replace(**changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_options_have_the_releases_space():
    method = build_method("raffm", {})
    assert [round(768 * s) for s in method.attention] == [768 - 24 * i for i in range(10)] == [round(768 * s) for s in method.residual]  # fmt: skip
    assert [round(3072 * s) for s in method.ffn] == [3072 - 128 * i for i in range(24)]


def test_a_lone_cut_travels_cut_and_adds_up_to_the_same_bits(small):
    """What a worker sends is no larger than what its client holds; merged in any way the sums are those of whole ones."""
    f, r = setting_and_round(images(small).replace(options={"shares": [0.7, 0.8, 1.0], "rank": list(ALL)}))
    parts = [f.method.slice_for(c, f.server, r) for c in r.clients]
    means, by_hand = [], {n: torch.zeros(i.shape, dtype=torch.float64) for n, i in f.setting.infos.items()}
    for k, part in enumerate(parts):
        held = take_all({n: torch.randn(i.shape, generator=generator(k)) for n, i in f.setting.infos.items()}, f.setting.infos, part)  # fmt: skip
        update = Update((Client(k, 0, k + 1),), (part,), {n: p[None] for n, p in held.items()}, {n: [0] for n in held})
        means.append(MaskedMean(f.setting.infos))
        means[-1].add(update, [k + 1.0])
        assert sum(x.numel() for x in means[-1]._stores[0].values()) == f.setting.measure.parameters(part)
        for n, p in held.items():
            at = torch.meshgrid(*(torch.tensor(list(part.index.get(a, range(s)))) for a, s in zip(f.setting.infos[n].axes, f.setting.infos[n].shape, strict=True)), indexing="ij")  # fmt: skip
            by_hand[n][at] += (k + 1.0) * p.double()
    whole = MaskedMean(f.setting.infos)
    for mean in means:
        whole.merge(mean)
    for n, total in whole.total.items():
        assert torch.equal(total, by_hand[n]), n
    bias = "head.exits.0.linear.bias"
    assert whole.count[bias].item() == len(parts) and means[0].total[bias].shape == (10,)
