"""Claims on a page: the rule in words, every claim with its verdict, and every comparison behind it.

Read next: ``report/verdicts.py``, the rule; ``report/page.py``.
"""

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from .claims import Judged, Stored
from .style import axes_of, finish, share_legend, spelled, styled
from .tables import markdown_table
from .verdicts import COLUMNS

RULE = (
    "A comparison is a difference paired by seed, with a 95 % interval over seeds (Student's t) and test examples "
    "(added in quadrature: MOVER, Zou and Donner 2008). It holds above zero and is contradicted below -0.5 points; "
    'within ±0.5 it is a tie. A claim about "most" or "often" needs more than half of its comparisons, any other all. '
    "Their number is corrected for (partial conjunction, Benjamini and Heller 2008): where nothing differs, at most "
    "5 % of the claims get a verdict. With fewer than five seeds a verdict is indicative. Flagged comparisons (did not "
    "train, still rising, over budget, of an older rule of the kit) are told and not counted. `in print`: how many of "
    "the paper's own comparisons of printed means agree. `others`: independent results, compared by order alone."
)
GRADES = (  # verdict, one, many
    ("holds", "holds", "hold"),
    ("contradicted", "is contradicted", "are contradicted"),
    ("tie", "is a tie", "are ties"),
    ("undecided", "is undecided", "are undecided"),
    ("not testable", "is not testable here", "are not testable here"),
)

COLORS = dict(zip((v for v, _, _ in GRADES), ("#56b4e9", "#e69f00", "#009e73", "#d0d4d8", "#eff1f3"), strict=True))


def claims_section(verdicts: Sequence[Judged]) -> str:
    """How many claims hold, and all of them as one table; a verdict leads to its comparisons."""
    table = pd.DataFrame(
        [{"claim": v.says, "where": v.where, "verdict": linked_verdict(v), "here": v.numbers, "in print": v.printed,
          "others": "; ".join(v.others) or "–"} for v in verdicts]
    )  # fmt: skip
    table = table if (table.others != "–").any() else table.drop(columns="others")
    title = "## What the paper says, and whether it holds here"
    tally = tally_of({v: [j.verdict for j in verdicts].count(v) for v, _, _ in GRADES})
    indicative = sum(v.grade.indicative for v in verdicts if v.verdict in ("holds", "contradicted", "tie"))
    few = f" {indicative} of the verdicts are indicative (fewer than five seeds)." if indicative else ""
    return "\n\n".join([title, tally + few, RULE, markdown_table(table)])


def tally_of(counts: Mapping[str, int]) -> str:
    """How many claims got which grade, in words."""
    words = [f"{n} {one if n == 1 else many}" for v, one, many in GRADES if (n := counts.get(v, 0))]
    return f"Of {sum(counts.values())} claims {', '.join(words)}."


def linked_verdict(v: Judged) -> str:
    """The verdict, linked to its comparisons if there are any, and whether it is of few seeds."""
    word = f"[**{v.verdict}**](claims.md#{v.name})" if compared(v) else f"**{v.verdict}**"
    return f"{word}, indicative" if v.grade.indicative and v.verdict in ("holds", "contradicted", "tie") else word


def compared(v: Judged) -> bool:
    """Does any comparison of the claim have runs?"""
    return bool((v.comparisons.seeds > 0).any())


def claims_page(stored: Stored, verdicts: Sequence[Judged]) -> str:
    """Every comparison behind the claims, with its interval in points; empty where there is none."""
    parts = [comparisons(v) for v in verdicts if compared(v)]
    title = f"# Claims of {spelled(stored.paper)} at profile `{stored.profile}`, comparison by comparison"
    lead = "Written by `make results`; do not edit. Differences in points. [Back to the results](README.md)."
    return "\n\n".join([title, lead, RULE, *parts]) + "\n" if parts else ""


def comparisons(v: Judged) -> str:
    """The comparisons of a claim that have runs, under the claim's name."""
    rows = v.comparisons[v.comparisons.seeds > 0][COLUMNS].copy()
    interval = [f"{a:+.2f} to {b:+.2f}" if pd.notna(a) else "–" for a, b in zip(rows.low, rows.high, strict=True)]
    rows["mean"] = [f"{m:+.2f}" for m in rows["mean"]]
    rows.insert(6, "95 % interval", interval)
    rows = rows if (rows["flags"] != "").any() else rows.drop(columns="flags")
    rows = markdown_table(rows.drop(columns=["low", "high"]))
    return f"## {v.name}\n\n{v.says} ({v.where}): **{v.verdict}**, {v.numbers}.\n\n{rows}"


def counts_of(tally: str) -> dict[str, int]:
    """How many claims got which grade, of :func:`tally_of`'s words."""
    found = {v: re.search(rf"(\d+) (?:{one}|{many})\b", tally) for v, one, many in GRADES}
    return {v: int(m[1]) if m else 0 for v, m in found.items()}


def added(tallies: Sequence[str]) -> str:
    """The tally over all papers, of those of each."""
    return tally_of(pd.DataFrame(map(counts_of, tallies)).sum().to_dict())


@styled
def plot_tallies(tallies: Mapping[str, str], subject: str):
    """A bar per paper of its claims by grade, from the words of its page."""
    counts = pd.DataFrame({spelled(paper): counts_of(tally) for paper, tally in tallies.items()}).T
    counts = counts.loc[:, counts.sum() > 0]
    ax, colors = axes_of(None, (7, 1.6 + 0.36 * len(counts))), [COLORS[v] for v in counts]
    counts[::-1].plot.barh(ax=ax, stacked=True, color=colors, width=0.75, edgecolor="white")
    for bars in ax.containers:
        ax.bar_label(bars, [f"{n:.0f}" if n else "" for n in bars.datavalues], label_type="center", fontsize=9)
    finish(ax, "claims", "", f"{added(list(tallies.values()))}\n{subject}")
    ax.grid(False, axis="y")
    share_legend([ax])
    return ax
