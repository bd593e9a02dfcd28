"""The page of results: never stale, every link and figure there, and it adapts to what is stored."""

import re
import shutil

from fedlib.core.paths import params_dir
from fedlib.report.claims import Stored
from fedlib.report.page import facts, grid_names, main, results_page, title_of
from fedlib.report.tables import markdown_table

OUTPUTS = params_dir().parent / "outputs"


def test_the_committed_page_is_what_the_stored_runs_say():
    page = results_page(Stored("reefl", "small", OUTPUTS))
    assert (OUTPUTS / "README.md").read_text(encoding="utf-8") == page, "stale: run `make results`"


def test_every_link_and_figure_of_the_page_exists():
    page = (OUTPUTS / "README.md").read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)]+)\)|(?:src|href)="([^"]+)"', page)
    assert len(links) > 10 and all((OUTPUTS / (a or b)).exists() for a, b in links)


def test_grids_are_in_the_papers_order_and_have_titles():
    names = grid_names("reefl")
    assert names[:11] == [f"table{i}" for i in range(1, 12)] and "claims" not in names and "base" not in names
    assert title_of("table1").startswith("[Table 1") and title_of("compression") == "Compressed uploads"


def test_the_page_follows_the_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    shutil.copytree(OUTPUTS / "tables", tmp_path / "tables")
    main([])
    empty = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path / "README.md") in capsys.readouterr().out
    assert "0 runs" in empty and "| obtained |" not in empty and "[Table 1: " in empty.split("## Not run")[1]

    shutil.copytree(OUTPUTS / "runs", tmp_path / "runs", ignore=lambda _, names: [n for n in names if "-s3-" in n])
    (tmp_path / "figures").mkdir()
    shutil.copy(OUTPUTS / "figures/table1_small_exits_femnist.png", tmp_path / "figures/figure7_small_4exits.png")
    page = results_page(Stored("reefl", "small"))
    table1 = page.split("## [Table 1: ")[1].split("\n## ")[0]
    assert "80 of 120 runs" in table1 and "seeds: 1, 2;" in table1 and "AMD EPYC, 2 cores" in table1 and "<img" not in table1  # fmt: skip
    assert "## [Figure 7: " in page and 'src="figures/figure7_small_4exits.png"' in page


def test_facts_add_up():
    stored = Stored("reefl", "small", OUTPUTS)
    cells = [c for c in stored.read("table1")[0] if c.variant == "reefl" and c.finetune == "lora" and c.column == "cifar100_alpha1"]  # fmt: skip
    frame = stored.read("table1")[1]
    seconds = frame[frame.run.isin([c.experiment.slug for c in cells])].seconds.sum()
    assert facts(stored, [*cells, *cells]).startswith("3 runs;") and f"training: {seconds / 60:.0f} minutes" in facts(stored, cells)  # fmt: skip


def test_markdown_tables():
    import pandas as pd

    assert (
        markdown_table(pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"
    )
