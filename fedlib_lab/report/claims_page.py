"""Claims on a page: the rule in words, every claim with its verdict, and every comparison behind it.

Read next: ``report/verdicts.py``, the rule; ``report/page.py``.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedlib.core.tables import read_table

from .claims import KINDS, Judged, Stored
from .style import axes_of, finish, share_legend, spelled, styled
from .tables import markdown_table
from .verdicts import COLUMNS

WORDS = read_table(Path(__file__).with_suffix(".yaml"))
GRADES, NOT = WORDS["grades"], "not testable"
COLORS = dict(zip(GRADES, ("#56b4e9", "#e69f00", "#009e73", "#d0d4d8", "#eff1f3"), strict=True))
Counts = Mapping[str, Mapping[str, int]]  # by kind of evidence, by verdict


def claims_section(verdicts: Sequence[Judged]) -> str:
    """Return how many claims hold, and a table of them all; a verdict links to its comparisons."""
    table = pd.DataFrame(
        [{"claim": v.says, "where": v.where, "verdict": linked_verdict(v), "here": v.numbers, "in print": v.printed,
          "others": "; ".join(v.others) or "–"} for v in verdicts]
    )  # fmt: skip
    table = table if (table.others != "–").any() else table.drop(columns="others")
    title = "## What the paper says, and whether it holds here"
    tally = tally_of({k: Counter(v.verdict for v in verdicts if v.kind == k) for k in KINDS})
    return "\n\n".join([title, tally, WORDS["short"], markdown_table(table)])


def tally_of(counts: Counts) -> str:
    """Say in words how many claims got which grade: by arithmetic, by runs at paper scale and at small scale."""
    judged = {k: {v: n for v, n in counts.get(k, {}).items() if v != NOT} for k in KINDS}
    parts = [f"{sum(by.values())} by {k}" + f" ({_graded(by)})" * any(by.values()) for k, by in judged.items()]
    done, left = sum(sum(by.values()) for by in judged.values()), sum(by.get(NOT, 0) for by in counts.values())
    rest = f"; {_graded({NOT: left})}" if left else ""
    return f"Of {done + left} claims {done} {'is' if done == 1 else 'are'} judged: {', '.join(parts)}{rest}."


def _graded(by: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {words[n > 1]}" for verdict, words in GRADES.items() if (n := by.get(verdict, 0)))


def linked_verdict(v: Judged) -> str:
    """Return the verdict, linked to its comparisons if it has any, with its data and whether it is of few seeds."""
    word = f"[**{v.verdict}**](claims.md#{v.name})" if compared(v) else f"**{v.verdict}**"
    few = v.grade.indicative and v.verdict in ("holds", "contradicted", "tie")
    return ", ".join([word, *filter(None, [v.on]), *["indicative"] * few])


def compared(v: Judged) -> bool:
    """Return whether any comparison of the claim has runs."""
    return bool((v.comparisons.seeds > 0).any())


def claims_page(stored: Stored, verdicts: Sequence[Judged]) -> str:
    """Return the page of every comparison behind the claims, its interval in points; empty where there is none."""
    parts = [comparisons(v) for v in verdicts if compared(v)]
    title = f"# Claims of {spelled(stored.paper)} at profile `{stored.profile}`, comparison by comparison"
    lead = "Written by `make results`; do not edit. Differences in points. [Back to the results](README.md)."
    bounds = [x for v in verdicts for x in v.comparisons[v.comparisons.seeds > 1].bound]
    bound = " " + WORDS["bound"].format(bound=sum(bounds), all=len(bounds)) if any(bounds) else ""
    return "\n\n".join([title, lead, WORDS["rule"] + bound, *parts]) + "\n" if parts else ""


def comparisons(v: Judged) -> str:
    """Return the comparisons of a claim that have runs, under the claim's name."""
    rows = v.comparisons[v.comparisons.seeds > 0][COLUMNS].copy()
    interval = [f"{a:+.2f} to {b:+.2f}" if pd.notna(a) else "–" for a, b in zip(rows.low, rows.high, strict=True)]
    rows["mean"] = [f"{m:+.2f}" for m in rows["mean"]]
    rows.insert(6, "95 % interval", interval)
    rows = rows if (rows["flags"] != "").any() else rows.drop(columns="flags")
    rows = markdown_table(rows.drop(columns=["low", "high"]))
    told = ", ".join(filter(None, [f"**{v.verdict}**", v.on, v.numbers]))
    return f"## {v.name}\n\n{v.says} ({v.where}): {told}.\n\n{rows}"


def counts_of(tally: str) -> dict[str, int]:
    """Count, from :func:`tally_of`'s words, how many claims got which grade, whatever settled them."""
    return {v: sum(map(int, re.findall(rf"(\d+) (?:{'|'.join(words)})\b", tally))) for v, words in GRADES.items()}


def groups_of(tally: str) -> Counts:
    """Return the counts behind :func:`tally_of`'s words, which do not say the kind of those that are not testable."""
    told = {k: re.search(rf"{k} \((.*?)\)", tally) for k in KINDS}
    return {k: counts_of(m[1]) if m else {} for k, m in told.items()} | {"": {NOT: counts_of(tally)[NOT]}}


def added(tallies: Sequence[str]) -> str:
    """Add up the tallies of all papers into one."""
    groups = [groups_of(tally) for tally in tallies]
    return tally_of({k: sum((Counter(g[k]) for g in groups), Counter()) for k in (*KINDS, "")})


@styled
def plot_tallies(tallies: Mapping[str, str], subject: str):
    """Draw a bar per paper of its claims by grade, from its page's words; those settled by arithmetic share a bar."""
    groups = {spelled(paper): groups_of(tally) for paper, tally in tallies.items()}
    rows = {paper: sum((Counter(g[k]) for k in (*KINDS[1:], "")), Counter()) for paper, g in groups.items()}
    rows["all, by arithmetic"] = sum((Counter(g[KINDS[0]]) for g in groups.values()), Counter())
    counts = pd.DataFrame(rows).T.reindex(columns=list(GRADES)).fillna(0)
    counts = counts.loc[:, counts.sum() > 0]
    ax, colors = axes_of(None, (7, 1.6 + 0.36 * len(counts))), [COLORS[v] for v in counts]
    counts[::-1].plot.barh(ax=ax, stacked=True, color=colors, width=0.75, edgecolor="white")
    for bars in ax.containers:
        ax.bar_label(bars, [f"{n:.0f}" if n else "" for n in bars.datavalues], label_type="center", fontsize=9)
    finish(ax, "claims", "", f"{added(list(tallies.values()))}\n{subject}")
    ax.grid(False, axis="y")
    share_legend([ax])
    return ax
