"""Tables as papers print them: rows, columns, what is bold, what stood in, and the same in LaTeX."""

import pandas as pd

from fedlib_lab.report.printed import as_printed
from fedlib_lab.report.table import Table
from tests.helpers.tracked import OUTPUTS

COLUMNS = ["mode", "column", "data", "method", "obtained", "seeds", "reported"]
ROWS = [
    ("LoRA", "femnist", "omniglot", "DepthFL", "36.1 ± 5.3", 3, "82.4 ± 0.1"),
    ("LoRA", "femnist", "omniglot", "ReeFL", "32.8", 1, "84.7 ± 0.2"),
    ("LoRA", "cifar10", "cifar10", "ReeFL", "44.5 ± 0.4", 2, "–"),
]
LONG = pd.DataFrame(ROWS, columns=COLUMNS)


def test_a_row_a_method_and_a_column_a_data_set():
    table = as_printed(LONG)
    assert list(table) == ["method", "FEMNIST (here Omniglot)", "CIFAR-10", "seeds"]
    assert table.to_numpy().tolist() == [
        ["DepthFL", "**36.1 ± 5.3** (82.4)", "–", "3"],
        ["ReeFL", "32.8 (84.7)", "44.5 ± 0.4", "1–2"],
    ]
    without = as_printed(LONG.drop(columns="reported"))
    assert without.iloc[0, 1] == "**36.1 ± 5.3**"


def test_modes_stand_in_rows_and_each_has_its_best():
    """By hand: order as given, a dash where nothing ran; what is equal is marked twice, one alone is not."""
    full = LONG.assign(mode="Full", obtained=["10.5", "10.5", "3.0"], seeds=3)
    table = as_printed(pd.concat([LONG, full, LONG[:1].assign(mode="SSF", method="ReeFL")]))
    assert table[["mode", "method"]].to_numpy().tolist() == [
        ["LoRA", "DepthFL"], ["LoRA", "ReeFL"], ["Full", "DepthFL"], ["Full", "ReeFL"], ["SSF", "ReeFL"],
    ]  # fmt: skip
    assert table.iloc[:, 2].tolist() == [
        "**36.1 ± 5.3** (82.4)", "32.8 (84.7)", "**10.5** (82.4)", "**10.5** (84.7)", "36.1 ± 5.3 (82.4)"
    ]  # fmt: skip


def test_the_best_of_too_few_seeds_to_rank_is_not_bold():
    """Nor is then the best of the others, which it is above."""
    for seeds, highest in ((2, "36.1 ± 5.3 (82.4)"), (3, "**36.1 ± 5.3** (82.4)")):
        assert as_printed(LONG[:2].assign(seeds=[seeds, 3])).iloc[:, 1].tolist() == [highest, "32.8 (84.7)"]


def test_of_a_search_the_best_of_every_row_is_bold():
    rows = [("LoRA", "lr_0.2", "x", "a", "9.50", 1), ("LoRA", "lr_0.1", "x", "a", "12.00", 1),
            ("LoRA", "lr_0.1", "x", "b", "–", 1), ("LoRA", "lr_0.2", "x", "b", "7.00", 1)]  # fmt: skip
    table = as_printed(pd.DataFrame(rows, columns=COLUMNS[:-1]), "method")
    assert table.to_numpy().tolist() == [["a", "9.50", "**12.00**", "1"], ["b", "7.00", "–", "1"]]
    assert list(table) == ["method", "lr 0.2", "lr 0.1", "seeds"]


def test_a_column_that_is_no_data_set_says_it_only_beside_others():
    rates = LONG.assign(column=["lr_0.1, exit 2", "lr_0.1, exit 2", "lr_0.2"], data="cifar10")
    assert list(as_printed(rates))[1:-1] == ["lr 0.1, exit 2", "lr 0.2"]
    assert list(as_printed(rates.assign(data=["fsdd", "fsdd", "cifar10"])))[2] == "lr 0.2 (CIFAR-10)"
    assert list(as_printed(LONG.assign(column="cifar100_alpha1", data="cifar10")[:2]))[1] == (
        "CIFAR-100, Dirichlet 1 (here CIFAR-10)"
    )


def test_a_table_with_columns_of_its_own_or_a_name_twice_keeps_a_row_a_number():
    for name in ("obtained", "best run's ensemble"):
        table = as_printed(LONG.rename(columns={"obtained": name}).assign(more=[1, 2, 3]))
        assert table[name].tolist() == ["**36.1 ± 5.3**", "32.8", "44.5 ± 0.4"] and table.more.tolist() == [1, 2, 3]
        assert table.column.tolist() == ["FEMNIST (here Omniglot)"] * 2 + ["CIFAR-10"] and "data" not in table
    assert len(as_printed(LONG.assign(method="ReeFL"))) == 3


def test_a_table_without_runs_is_empty():
    assert as_printed(LONG[:0]).empty and as_printed(LONG[:0].astype({"obtained": float})).empty


def test_what_is_bold_is_bold_in_a_notebook_and_in_latex_and_nothing_is_cut():
    table = as_printed(LONG.assign(method=["A & B", "long " * 30, "long " * 30]))
    page, latex = table._repr_html_(), table.to_latex()
    assert (
        "<b>36.1 ± 5.3</b> (82.4)" in page
        and "A &amp; B" in page
        and ("long " * 30).strip() in page
        and "**" not in page
    )
    assert r"\textbf{36.1 ± 5.3} (82.4)" in latex and r"A \& B" in latex and r"\toprule" in latex and "**" not in latex


def test_every_table_of_the_papers_can_be_printed():
    """On stored runs of one table of each paper: every method that ran has a row, every column a heading."""
    for paper, name in (("reefl", "table1"), ("fedepth", "table2"), ("cafedistill", "table1"), ("raffm", "table1")):
        table = Table(paper, name, "small", folder=OUTPUTS / "runs")
        printed, long = table.printed(), table.obtained()
        columns = long.drop_duplicates(["column", "data"])
        assert len(long) and set(printed.method) == set(long.method)
        assert len(printed.columns) == (long["mode"].nunique() > 1) + 2 + len(columns)
