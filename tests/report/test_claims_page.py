"""The page of claims."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from fedlib_lab.report.claims import KINDS, Judged
from fedlib_lab.report.claims_page import (
    added,
    claims_boxes,
    claims_page,
    comparisons,
    counts_of,
    groups_of,
    plot_claim,
    tally_of,
)
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


def claim(name, kind, grade, rows, **more):
    said = {"name": name, "where": "Table 1", "says": f"What {name} says."}
    return Judged(**vars(grade), **said, comparisons=rows, printed="–", kind=kind, **more)


def test_the_page_says_what_its_bound_is_and_of_how_many_comparisons_it_does_not_know_the_examples():
    rows = as_rows([{"comparison": "A – B"}] * 2, [Difference(np.array([1.0, 1.1, 0.9]), 0.1, (), b) for b in (True, False)], {})  # fmt: skip
    v = claim(
        "c",
        KINDS[2],
        Grade("holds", "2 comparisons: 2 hold", True),
        rows,
        on="on A in place of B",
        others=("X agrees",),
    )
    stored = SimpleNamespace(paper="reefl", profile="small")
    page = claims_page(stored, [v])
    assert "In 1 of the 2 comparisons no runs say which test examples they got right" in page
    assert "a bound for each claim, not for all of them together, and none for claims with a margin" in page
    assert (
        "## c\n\nWhat c says. (Table 1): **holds**, on A in place of B, 2 comparisons: 2 hold. Others: X agrees.\n"
        in page
    )
    assert "runs do not say" not in claims_page(stored, [replace(v, comparisons=rows.assign(bound=False))])
    assert claims_page(stored, []) == ""
    assert comparisons([v, v]).claim.tolist() == ["c"] * 4 and comparisons([v])["mean"].tolist() == [1.0, 1.0]


def test_claims_that_stand_or_fall_are_in_boxes_and_the_others_are_counted():
    rows = as_rows([{"comparison": "A – B"}], [Difference(np.array([1.0, 1.1]))], {})
    verdicts = [
        claim("a", KINDS[0], Grade("contradicted", "3 of 4 agree"), rows[:0]),
        claim("b", KINDS[2], Grade("holds", "", True), rows, on="on A in place of B"),
        claim("c", KINDS[2], Grade("undecided", ""), rows),
        claim("d", KINDS[2], Grade("not testable", ""), rows[:0]),
    ]
    tally, *boxes = claims_boxes(verdicts).split("\n\n")
    assert tally.startswith(
        "Of 4 claims 3 are judged: 1 by arithmetic (1 is contradicted), 0 by runs at paper scale, 2 by"
    )
    assert "(claims.md)" in tally and "(claims.csv)" in tally
    assert boxes == [
        "*By arithmetic*", "- What a says (Table 1): [**contradicted**](claims.md#a).",
        "*By runs at small scale*", "- What b says (Table 1): [**holds**](claims.md#b), on A in place of B, indicative.",
    ]  # fmt: skip


def test_a_claims_figure_shows_every_comparison_with_its_interval():
    """Each point and interval is where the row says, and what a flag keeps from counting is hollow."""
    found = [
        Difference(np.array([1.0, 1.1, 0.9])),
        Difference(np.array([-4.0, -4.2, -3.9]), 0.0, ("rising",)),
        Difference(np.array([5.0])),
    ]
    where = [
        {"table": "t", "mode": "Full", "column": c, "data": "cifar10", "comparison": f"A – {c}"}
        for c in ("cifar10_alpha1", "b", "c")
    ]
    rows = as_rows(where, found, {})
    ax = plot_claim(claim("c", KINDS[2], Grade("undecided", ""), rows))
    points = {line.get_label(): line for line in ax.lines if "count" in str(line.get_label())}
    assert set(points) == {"holds, counts", "contradicted, flagged: does not count"}  # one seed has no interval
    full, hollow = points["holds, counts"], points["contradicted, flagged: does not count"]
    assert (full.get_xdata()[0], full.get_ydata()[0], full.get_fillstyle()) == (1.0, 1, "full")
    assert (hollow.get_xdata()[0], hollow.get_ydata()[0], hollow.get_fillstyle()) == (-4.03, 0, "none")
    ends = sorted(tuple(segment[:, 0]) for c in ax.collections for segment in c.get_segments())
    assert ends == sorted(zip(rows.low[:2], rows.high[:2], strict=True))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A – b\nb", "A – cifar10_alpha1\nCIFAR-10, Dirichlet 1"]


def test_a_page_without_comparisons_any_more_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    (tmp_path / "scalefl").mkdir()
    (tmp_path / "scalefl/claims.csv").write_text("of runs that were deleted")
    write_results("small", ["scalefl"])
    assert not (tmp_path / "scalefl/claims.csv").exists()
    assert "**not testable**" in (tmp_path / "scalefl/claims.md").read_text()
    index = (tmp_path / "README.md").read_text()
    assert (
        "Over all papers: of 12 claims 0 are judged: 0 by arithmetic, 0 by runs at paper scale, 0 by runs at small scale; 12 are not "
        "testable here." in index
    )
