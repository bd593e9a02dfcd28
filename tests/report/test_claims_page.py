"""The page of claims."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from fedlib_lab.report.claims import KINDS, Judged
from fedlib_lab.report.claims_page import added, claims_page, claims_section, counts_of, groups_of, tally_of
from fedlib_lab.report.page import write_results
from fedlib_lab.report.verdicts import Difference, Grade, as_rows


def test_the_tally_over_all_papers_is_the_sum():
    """Arithmetic, runs at paper scale and runs at small scale are counted apart, whatever came out."""
    arithmetic, paper, small = KINDS
    one = tally_of({arithmetic: {"holds": 1}, small: {"holds": 2, "contradicted": 1, "not testable": 3}})
    other = tally_of({arithmetic: {"contradicted": 2}, paper: {"holds": 1, "tie": 2}})
    assert one == (
        "Of 7 claims 4 are judged: 1 by arithmetic (1 holds), 0 by runs at paper scale, "
        "3 by runs at small scale (2 hold, 1 is contradicted); 3 are not testable here."
    )
    assert groups_of(other) == {arithmetic: counts_of("2 are contradicted"), paper: counts_of("1 holds, 2 are ties"),
                                small: {}, "": {"not testable": 0}}  # fmt: skip
    assert added([one, other]) == (
        "Of 12 claims 9 are judged: 3 by arithmetic (1 holds, 2 are contradicted), 3 by runs at paper scale "
        "(1 holds, 2 are ties), 3 by runs at small scale (2 hold, 1 is contradicted); 3 are not testable here."
    )
    assert counts_of(added([one, other])) == {
        "holds": 4,
        "contradicted": 3,
        "tie": 2,
        "undecided": 0,
        "not testable": 3,
    }


def test_the_page_says_what_its_bound_is_and_of_how_many_comparisons_it_does_not_know_the_examples():
    rows = as_rows([{"comparison": "A – B"}] * 2, [Difference(np.array([1.0, 1.1, 0.9]), 0.1, (), b) for b in (True, False)], {})  # fmt: skip
    v = Judged("c", "x", "y", Grade("holds", "2 comparisons: 2 hold", True), rows, "–", on="on A in place of B")
    stored = SimpleNamespace(paper="reefl", profile="small")
    page, results = claims_page(stored, [v]), claims_section([v])
    assert "In 1 of the 2 comparisons runs do not say which test examples they got right" in page
    assert "a bound for each claim, not for all of them together, and none for claims with a margin" in page
    assert "a bound for each claim, not for all together, and none for claims with a margin" in results
    assert "| [**holds**](claims.md#c), on A in place of B, indicative |" in results
    assert "runs do not say" not in claims_page(stored, [replace(v, comparisons=rows.assign(bound=False))])


def test_a_page_without_comparisons_any_more_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    (tmp_path / "scalefl").mkdir()
    (tmp_path / "scalefl/claims.md").write_text("of runs that were deleted")
    write_results("small", ["scalefl"])
    assert not (tmp_path / "scalefl/claims.md").exists()
    index = (tmp_path / "README.md").read_text()
    assert (
        "Over all papers: of 12 claims 0 are judged: 0 by arithmetic, 0 by runs at paper scale, 0 by runs at small scale; 12 are not "
        "testable here." in index
    )
