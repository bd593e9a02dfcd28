"""The pages of results: never stale, every link and figure there, and they adapt to what is stored."""

import json
import re
import shutil

import pytest

from fedlib import Experiment
from fedlib.core.paths import params_dir
from fedlib_lab.report.claims import Stored, judge
from fedlib_lab.report.page import (
    claims_page,
    facts,
    grid_names,
    index_page,
    main,
    missing,
    results_page,
    short_title,
    title_of,
)
from fedlib_lab.runs.packed import listed
from fedlib_lab.runs.params import Cell, load_grid
from fedlib_lab.runs.params_files import papers
from fedlib_lab.runs.store import shown_run
from tests.helpers.stored import laid_out
from tests.helpers.tracked import OUTPUTS


@pytest.mark.parametrize("paper", papers())
def test_the_committed_pages_are_what_the_stored_runs_say(paper):
    stored = Stored(paper, "small", OUTPUTS)
    verdicts = judge(stored)
    for name, page in {"README.md": results_page(stored, verdicts), "claims.md": claims_page(stored, verdicts)}.items():
        path = OUTPUTS / paper / name
        assert (path.read_text(encoding="utf-8") if path.exists() else "") == page, "stale: run `make results`"


@pytest.mark.parametrize("path", sorted(OUTPUTS.glob("*/findings_*.md")), ids=lambda p: p.parent.name)
def test_numbers_of_the_findings_are_those_of_the_page(path):
    """The one paragraph that is written by hand: a number of a run that changed is noticed."""
    said = path.read_text(encoding="utf-8").strip()
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    assert said in page and len(said) < 1_500
    numbers = re.findall(r"\d+\.\d+", said)
    rest = re.findall(r"\d+\.\d+", page.replace(said, ""))
    assert numbers and not {n for n in numbers if n not in rest}


def test_the_index_is_what_the_pages_say():
    assert (OUTPUTS / "README.md").read_text(encoding="utf-8") == index_page(OUTPUTS), "stale: run `make results`"


@pytest.mark.parametrize(
    "path", sorted([OUTPUTS / "README.md", *OUTPUTS.glob("*/*.md")]), ids=lambda p: p.parent.name + "/" + p.name
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


def test_pages_are_short_enough_to_read():
    sizes = {p: p.stat().st_size for p in [OUTPUTS / "README.md", *OUTPUTS.glob("*/README.md")]}
    assert sizes[OUTPUTS / "README.md"] < 4_000 and max(sizes.values()) < 40_000, sizes


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
    page = results_page(stored, judge(stored))
    assert "[Of other](../../notebooks/other/table1_x.ipynb)" in page and "reefl.png" not in page
    assert title_of("reefl", "table1") == "[Of reefl](../../notebooks/reefl/table1_x.ipynb)"


def test_the_pages_follow_the_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    shutil.copytree(OUTPUTS / "reefl/tables", tmp_path / "reefl/tables")
    main(["--paper", "reefl"])
    empty = (tmp_path / "reefl/README.md").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert str(tmp_path / "reefl/README.md") in said and str(tmp_path / "README.md") in said
    assert "0 runs" in empty and "| obtained |" not in empty and "[Table 1: " in empty.split("## Not run")[1]
    assert not (tmp_path / "extensions").exists()

    for path in listed(OUTPUTS / "runs", "*", "summary.json"):
        if "-s3-" not in path.name:
            laid_out(path, tmp_path / "runs")
    (tmp_path / "reefl/figures").mkdir()
    shutil.copy(
        OUTPUTS / "reefl/figures/figure2_small_femnist.png", tmp_path / "reefl/figures/figure7_small_4exits.png"
    )
    stored = Stored("reefl", "small")
    page = results_page(stored, judge(stored))
    table1 = page.split("## [Table 1: ")[1].split("\n## ")[0]
    done = [c for c in load_grid("reefl", "table1", "small") if shown_run(c.experiment)]
    assert len(done) >= 80 and f"{len(done)} of 210 runs" in table1
    assert "seeds: 1, 2;" in table1 and "AMD EPYC, 2 cores" in table1 and "<img" not in table1
    assert "## [Figure 7: " in page and 'src="figures/figure7_small_4exits.png"' in page


def test_accuracies_of_a_validation_split_are_called_so(tmp_path):
    from tests.report.test_claims import store

    store(tmp_path, {("frozen", m): [[40.5]] for m in ("reefl", "depthfl")}, "why_rates")
    page = results_page(Stored("reefl", "small", tmp_path), [])
    assert page.count("Accuracy on held-out training examples") == 1 and "| ReeFL | **40.50** | **40.50** |" in page
    store(tmp_path, {("frozen", m): [[40.0], [41.0]] for m in ("reefl", "depthfl")}, "why", columns=["rounds_400"])
    assert results_page(Stored("reefl", "small", tmp_path), []).count("held-out training examples") == 1


def test_facts_add_up():
    stored = Stored("reefl", "small", OUTPUTS)
    cells = [c for c in stored.read("table1")[0] if c.variant == "reefl" and c.finetune == "lora" and c.column == "cifar10_alpha1"]  # fmt: skip
    frame = stored.read("table1")[1]
    of_them = "variant == 'reefl' and finetune == 'lora' and column == 'cifar10_alpha1'"
    seconds = frame.query(of_them).seconds.sum()
    assert facts(stored, [*cells, *cells]).startswith("3 runs;") and f"training: {seconds / 60:.0f} minutes" in facts(stored, cells)  # fmt: skip


def test_a_grid_that_was_begun_says_what_is_missing():
    cells = [
        Cell("full", v, v, v, column, seed, Experiment(method="fedavg", dataset=d, seed=seed, lr=lr))
        for column, d in (("sst2", "sst2"), ("cifar10_alpha1", "cifar10"))
        for v, lr in (("fedavg", 0.1), ("raffm", 0.2))
        for seed in (1, 2)
    ]
    assert missing(cells, {c.experiment.hash: c for c in cells}) == ""
    done = {c.experiment.hash: c for c in cells if c.column == "sst2" and (c.variant, c.seed) != ("raffm", 2)}
    assert missing(cells, done) == "Not run yet: SST-2, seed 2 of *RaFFM*; all of *CIFAR-10, Dirichlet 1*."
    done = {cells[0].experiment.hash: cells[0], cells[4].experiment.hash: cells[4], cells[6].experiment.hash: cells[6]}
    assert missing(cells, done) == (
        "Not run yet: SST-2, seed 2 of *FedAvg*; SST-2, seeds 1, 2 of *RaFFM*; "
        "CIFAR-10, Dirichlet 1, seed 2 of *FedAvg*, *RaFFM*."
    )
