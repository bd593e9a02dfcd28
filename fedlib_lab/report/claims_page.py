"""Claims on pages: those that stand or fall on the first one, all of them with the rule on their own.

Read next: ``report/verdicts.py``, the rule; ``report/page.py``.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedlib.core.tables import read_table

from .claims import KINDS, Judged, Stored
from .printed import heading
from .style import axes_of, finish, plain, share_legend, spelled, styled, wrapped
from .verdicts import COLUMNS

WORDS = read_table(Path(__file__).with_suffix(".yaml"))
GRADES, OPEN, NOT = WORDS["grades"], "undecided", "not testable"
COLORS = dict(zip(GRADES, ("#0072b2", "#d55e00", "#009e73", "#9a9a9a", "#9a9a9a"), strict=True))
Counts = Mapping[str, Mapping[str, int]]  # by kind of evidence, by verdict


def claims_boxes(verdicts: Sequence[Judged]) -> str:
    """Return the claims that stand or fall, in a box for each kind of evidence; the others are counted, with a link."""
    parts = [f"{tally_of({k: Counter(v.verdict for v in verdicts if v.kind == k) for k in KINDS})} {WORDS['all']}"]
    for kind in KINDS:
        shown = (v for v in verdicts if v.kind == kind and v.verdict not in (NOT, OPEN))
        lines = [f"- {v.says.rstrip('.')} ({v.where}): {linked_verdict(v)}." for v in shown]
        parts += [f"*By {kind}*\n\n" + "\n".join(lines)] * bool(lines)
    return "\n\n".join(parts)


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
    """Return the verdict, linked to what stands behind it, with its data and whether it is of few seeds."""
    few = v.indicative and v.verdict in ("holds", "contradicted", "tie")
    return ", ".join([f"[**{v.verdict}**](claims.md#{v.name})", *filter(None, [v.on]), *["indicative"] * few])


def claims_page(stored: Stored, verdicts: Sequence[Judged]) -> str:
    """Return the page of all claims, each with its verdict, what is in print and what others found; empty without."""
    if not verdicts:
        return ""
    bounds = [x for v in verdicts for x in v.comparisons[v.comparisons.seeds > 1].bound]
    bound = " " + WORDS["bound"].format(bound=sum(bounds), all=len(bounds)) if any(bounds) else ""
    title = f"# Claims of {spelled(stored.paper)} at profile `{stored.profile}`"
    return "\n\n".join([title, WORDS["lead"], WORDS["rule"] + bound, *map(claim_section, verdicts)]) + "\n"


def claim_section(v: Judged) -> str:
    """Return a claim under its name: what it says, its verdict, and what it is judged by."""
    told = ", ".join(filter(None, [f"**{v.verdict}**", v.on, v.numbers]))
    beside = [f"In print: {v.printed}."] * (v.printed != "–") + [f"Others: {'; '.join(v.others)}."] * bool(v.others)
    return "\n\n".join([f"## {v.name}", " ".join([f"{v.says} ({v.where}): {told}.", *beside])])


def span(numbers: set[int]) -> str:
    """Return ``5 to 1,000`` for the least and the greatest of ``numbers``, or the one that all are."""
    return " to ".join(f"{n:,}" for n in sorted({min(numbers), max(numbers)}))


def comparisons(verdicts: Sequence[Judged]) -> pd.DataFrame:
    """Return a row per comparison that has runs, of all claims: the means and 95 % intervals in points."""
    rows = [v.comparisons[v.comparisons.seeds > 0].assign(claim=v.name) for v in verdicts]
    return pd.concat(rows)[["claim", *COLUMNS]] if rows else pd.DataFrame()


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
def plot_claim(v: Judged):
    """Draw every comparison of a claim as a point with its 95 % interval, coloured by verdict, and return the Axes.

    Those that a flag keeps from counting are hollow.
    """
    rows = v.comparisons[v.comparisons.seeds > 1][::-1].reset_index(drop=True)
    ax = axes_of(None, (8, 1.5 + 0.32 * len(rows)))
    ax.axvline(0, color="black", linewidth=1)
    for (verdict, flagged), some in rows.groupby([rows.verdict, rows["flags"] != ""], sort=False):
        color, words = COLORS[verdict], f"{verdict}, {'flagged: does not count' if flagged else 'counts'}"
        ax.hlines(some.index, some.low, some.high, color=color)
        ax.plot(some["mean"], some.index, "o", color=color, fillstyle="none" if flagged else "full", label=words)
    modes = ", " + rows["mode"] if rows["mode"].nunique() > 1 else ""
    where = [heading(*names) for names in zip(rows.column, rows.data, strict=True)]
    ax.set_yticks(range(len(rows)), rows.comparison.map(plain) + "\n" + where + modes, fontsize=8)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.figure.suptitle(wrapped(f"{v.says} {v.verdict.capitalize()}.\n{span({*rows.seeds})} seeds", 8))
    finish(ax, "difference in points, with its 95 % interval", "")
    ax.legend()
    share_legend([ax])
    return ax
