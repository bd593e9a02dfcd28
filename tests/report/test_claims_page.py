"""The page of claims."""

from fedlib_lab.report.claims_page import added, tally_of
from fedlib_lab.report.page import write_results


def test_the_tally_over_all_papers_is_the_sum():
    one, other = tally_of({"holds": 2, "contradicted": 1, "not testable": 3}), tally_of({"holds": 1, "tie": 2})
    assert one == "Of 6 claims 2 hold, 1 is contradicted, 3 are not testable here."
    assert added([one, other]) == "Of 9 claims 3 hold, 1 is contradicted, 2 are ties, 3 are not testable here."


def test_a_page_without_comparisons_any_more_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    (tmp_path / "scalefl").mkdir()
    (tmp_path / "scalefl/claims.md").write_text("of runs that were deleted")
    write_results("small", ["scalefl"])
    assert not (tmp_path / "scalefl/claims.md").exists()
    index = (tmp_path / "README.md").read_text()
    assert "Over all papers: of 12 claims 12 are not testable here." in index
