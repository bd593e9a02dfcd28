"""The pages of results: never stale, every link and figure there, and they adapt to what is stored."""

import json
import re
import shutil

import pytest

from fedlib.core.paths import params_dir
from fedlib_lab.report.claims import Stored, judge
from fedlib_lab.report.page import (
    facts,
    front_page,
    grid_names,
    index_page,
    main,
    pages_of,
    short_title,
    tables_page,
    title_of,
)
from fedlib_lab.runs.packed import listed
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.params_files import papers
from fedlib_lab.runs.store import shown_run
from tests.helpers.stored import laid_out
from tests.helpers.tracked import OUTPUTS


@pytest.mark.parametrize("paper", papers())
def test_the_committed_pages_are_what_the_stored_runs_say(paper):
    stored = Stored(paper, "small", OUTPUTS)
    for name, page in pages_of(stored, judge(stored)).items():
        path = OUTPUTS / paper / name
        assert (path.read_text(encoding="utf-8") if path.exists() else "") == page, "stale: run `make results`"


@pytest.mark.parametrize("path", sorted(OUTPUTS.glob("*/findings_*.md")), ids=lambda p: p.parent.name)
def test_what_is_written_by_hand_is_what_tables_and_claims_say(path):
    """A run's number or a claim's verdict that changed is noticed; three sentences, of at most six numbers."""
    said = path.read_text(encoding="utf-8")
    pages = {p.name: p.read_text(encoding="utf-8") for p in path.parent.glob("*.*")}
    points = re.findall(r"^\d\. (.*)", said, re.M)
    numbers = [n for text in points for n in re.findall(r"\d+\.\d\d\b", text)]
    there = set(re.findall(r"\d+\.\d+", pages["tables.md"] + pages.get("claims.csv", "") + pages.get("claims.md", "")))
    assert (
        len(points) in (0, 3)
        and len(numbers) <= 6
        and not {f"{float(n):g}" for n in numbers} - {f"{float(n):g}" for n in there}
    )
    for word, name in re.findall(r"\[\*\*([\w ]+)\*\*\]\(claims\.md#(\w+)\)", said):
        verdict = pages["claims.md"].split(f"\n## {name}\n")[1].split("): **")[1].split("**")[0]
        assert word == verdict, name


def test_the_index_is_what_the_pages_say():
    assert (OUTPUTS / "README.md").read_text(encoding="utf-8") == index_page(OUTPUTS), "stale: run `make results`"


@pytest.mark.parametrize(
    "path",
    sorted({OUTPUTS / "README.md", *OUTPUTS.glob("*/*.md")} - {*OUTPUTS.glob("*/findings_*")}),
    ids=lambda p: p.parent.name + "/" + p.name,
)
def test_every_link_and_figure_of_the_pages_exists(path):
    page = path.read_text(encoding="utf-8")
    links = [a or b for a, b in re.findall(r'\]\(([^)]+)\)|(?:src|href)="([^"]+)"', page)]
    assert links
    for link in links:
        if link.startswith("http"):  # a result of others
            continue
        target, _, place = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        assert not place or f"\n## {place}\n" in file.read_text(encoding="utf-8"), link


def test_first_pages_are_read_in_two_minutes():
    sizes = {p.parent.name: p.stat().st_size for p in [OUTPUTS / "README.md", *OUTPUTS.glob("*/README.md")]}
    assert max(sizes.values()) <= 4_096 and len(sizes) > 5, sizes
    for path in OUTPUTS.glob("*/README.md"):
        page = path.read_text(encoding="utf-8")
        assert page.count("\n| ") <= 2 + 12 and page.count("![") <= 1 and "{" not in page, path


def test_grids_are_in_the_papers_order_and_have_titles():
    names = grid_names("reefl")
    assert names[:11] == [f"table{i}" for i in range(1, 12)] and "claims" not in names and "base" not in names
    assert title_of("reefl", "table1").startswith("[Table 1")
    assert title_of("extensions", "compression") == "Compressed uploads"
    titles = {"table1": "Table 1", "why_rates": "Why, learning rates", "figure1b": "Figure 1b"}
    assert {name: short_title("reefl", name) for name in titles} == titles
    assert short_title("scalefl", "bert") == "BERT" and short_title("scalefl", "bert_local") == "BERT, local"


def test_no_table_or_figure_of_another_paper_is_shown(tmp_path, monkeypatch):
    """Two papers with a Table 1 each: the one's page does not know the other's notebook and figures."""
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    for name, text in {"base.yaml": "extends: reefl", "table1.yaml": "# The other paper's.\naxes: {finetune: [lora], method: [fedavg]}"}.items():  # fmt: skip
        (tmp_path / "params/other").mkdir(exist_ok=True)
        (tmp_path / "params/other" / name).write_text(text + "\n")
    for paper in ("reefl", "other"):
        (tmp_path / "notebooks" / paper).mkdir(parents=True)
        (tmp_path / "notebooks" / paper / "table1_x.ipynb").write_text(
            json.dumps({"cells": [{"source": [f"# Of {paper}"]}]})
        )
        (tmp_path / "outputs" / paper / "figures").mkdir(parents=True)
        (tmp_path / "outputs" / paper / f"figures/table1_small_{paper}.png").touch()
    stored = Stored("other", "small", tmp_path / "outputs")
    page, _ = tables_page(stored)
    assert "[Of other](../../notebooks/other/table1_x.ipynb)" in page and "reefl.png" not in page
    assert title_of("reefl", "table1") == "[Of reefl](../../notebooks/reefl/table1_x.ipynb)"


def test_the_pages_follow_the_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    shutil.copytree(OUTPUTS / "reefl/tables", tmp_path / "reefl/tables")
    main(["--paper", "reefl"])
    empty = (tmp_path / "reefl/README.md").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert str(tmp_path / "reefl/README.md") in said and str(tmp_path / "README.md") in said
    assert "0 runs are stored" in empty and "## [Table 1" not in (tmp_path / "reefl/tables.md").read_text(
        encoding="utf-8"
    )
    assert not (tmp_path / "extensions").exists()

    for path in listed(OUTPUTS / "runs", "*", "summary.json"):
        if "-s3-" not in path.name:
            laid_out(path, tmp_path / "runs")
    (tmp_path / "reefl/figures").mkdir()
    shutil.copy(
        OUTPUTS / "reefl/figures/figure2_small_femnist.png", tmp_path / "reefl/figures/figure7_small_4exits.png"
    )
    stored = Stored("reefl", "small")
    page, _ = tables_page(stored)
    table1 = page.split("## [Table 1: ")[1].split("\n## ")[0]
    done = [c for c in load_grid("reefl", "table1", "small") if shown_run(c.experiment)]
    assert len(done) >= 80 and f"{len(done)} of 210 runs" in table1
    assert "seeds: 1, 2;" in table1 and "AMD EPYC, 2 cores" in table1 and "<img" not in table1
    assert "## [Figure 7: " in page and 'src="figures/figure7_small_4exits.png"' in page


def test_accuracies_of_a_validation_split_are_called_so(tmp_path):
    from tests.report.test_claims import store

    store(tmp_path, {("frozen", m): [[40.5]] for m in ("reefl", "depthfl")}, "why_rates")
    page, _ = tables_page(Stored("reefl", "small", tmp_path))
    assert page.count("Accuracy on held-out training examples") == 1 and "| ReeFL | **40.50** | **40.50** |" in page
    store(tmp_path, {("frozen", m): [[40.0], [41.0]] for m in ("reefl", "depthfl")}, "why", columns=["rounds_400"])
    assert tables_page(Stored("reefl", "small", tmp_path))[0].count("held-out training examples") == 1


def test_facts_add_up():
    stored = Stored("reefl", "small", OUTPUTS)
    cells = [c for c in stored.read("table1")[0] if c.variant == "reefl" and c.finetune == "lora" and c.column == "cifar10_alpha1"]  # fmt: skip
    frame = stored.read("table1")[1]
    of_them = "variant == 'reefl' and finetune == 'lora' and column == 'cifar10_alpha1'"
    seconds = frame.query(of_them).seconds.sum()
    assert facts(stored, [*cells, *cells])[0] == "3 runs" and f"training: {seconds / 60:.0f} minutes" in facts(stored, cells)  # fmt: skip


def test_a_first_page_shows_the_card_the_claims_and_the_rows_that_it_names(tmp_path):
    """Braces are filled in; without a text by hand there are the card and the claims."""
    from tests.report.test_claims import store

    store(
        tmp_path,
        {("frozen", "reefl"): [[40.0], [42.0], [41.0]], ("frozen", "depthfl"): [[30.0], [31.0]], ("lora", "reefl"): [[50.0]]},
        "table1",
        columns=["cifar10_alpha1"],
    )
    stored = Stored("reefl", "small", tmp_path)
    verdicts, (_, runs) = judge(stored), tables_page(stored)
    plain = front_page(stored, verdicts, runs)
    assert "- 6 runs\n- data: CIFAR-10\n" in plain and "- seeds: 1, 2, 3\n" in plain
    assert re.search(r"^Of 38 claims \d+ are judged", plain, re.M) and "| ReeFL |" not in plain
    (tmp_path / "reefl").mkdir(exist_ok=True)
    (tmp_path / "reefl/findings_small.md").write_text("Why?\n\n{table1: frozen}\n\n{table1: reefl, lora}\n\nSo.")
    first, second = front_page(stored, verdicts, runs).split("Why?\n\n")[1].split("\n\nSo.")[0].split("\n\n")
    assert "| ReeFL | **41.00 ± 1.00**" in first and "DepthFL" in first and "50.00" not in first
    assert "50.00" in second and "DepthFL" not in second and "41.00" not in second
