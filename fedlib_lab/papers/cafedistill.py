"""CAFEDistill: who teaches whom while it trains, its figures, and its claims on MACs, exits over rounds and thresholds.

Read next: ``methods/personal/cafedistill.py``, ``report/clients.py``, ``report/sources.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import seaborn

from fedlib.core.experiment import Experiment
from fedlib.core.paths import params_dir
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation, build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.methods import Round, Server

from ..report.clients import leaving_curve, macs_of
from ..report.plots import ACCURACY, COSTS, plot_learning_curves, plot_series
from ..report.sources import Stored
from ..report.style import axes_of, finish, panels, share_legend, spelled, styled
from ..report.tables import label_of
from ..report.titles import figure_title
from ..report.verdicts import Difference, Measured, differences
from ..runs.costs import load_shapes
from ..runs.params import load_grid
from ..runs.store import Run, shown_run

PAPER = "cafedistill"
Rows = list[tuple[dict, Difference]]
SHOWN = ("0.4", "0.6", "0.8", "0.9")  # thresholds whose cost figure 10 follows


# --- who teaches whom ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinated:
    """What the server decided before a round: ``students`` (|C|, m), ``shares`` (|C|, seen) of the clients seen."""

    clients: tuple[int, ...]
    students: np.ndarray
    shares: np.ndarray


def coordination(e: Experiment, execution: Execution = Execution()) -> tuple[Federation, list[Coordinated]]:
    """Train ``e``, a CAFEDistill, and tell of every round; last, of a round with all clients that were seen.

    ``ValueError`` for another method.
    """
    if e.method != PAPER:
        raise ValueError(f"coordination: method = {e.method!r} selects no students; allowed: {PAPER}")
    f, mirrors = build_federation(e.replace(evaluate_every=0, test_split="central"), execution.home), {}
    decided, server = [], f.server
    rounds = run_rounds(f, execution, mirrors=mirrors)
    for t in range(1, e.rounds + 1):
        decided.append(decision(f, replace(server, mirrors=dict(mirrors)), t, [c.id for c in f.sample_clients(t)]))
        server = next(rounds).server
    rounds.close()
    return f, [*decided, decision(f, replace(server, mirrors=mirrors), e.rounds, sorted(mirrors))]


def decision(f: Federation, server: Server, t: int, ids: list[int]) -> Coordinated:
    """Return what ``server`` decides for the clients ``ids`` in round ``t``."""
    notes = f.method.prepare(server, Round(t, tuple(f.clients(ids)), f.setting))
    return Coordinated(tuple(ids), *(notes[k].cpu().numpy() for k in ("students", "shares")))


def students_by_round(decided: list[Coordinated]) -> np.ndarray:
    """Return (exits, rounds): the share of a round's clients, in percent, of whom each exit is a student."""
    return np.stack([100 * d.students.mean(0) for d in decided], 1)


def by_main_label(f: Federation, ids: tuple[int, ...]) -> list[int]:
    """Order the places of clients ``ids`` by the label that each has most of, so that like ones stand together."""
    counts = np.stack([f.setting.label_counts(i) for i in ids])
    share = counts / counts.sum(1, keepdims=True)
    return sorted(range(len(ids)), key=lambda k: (int(share[k].argmax()), -share[k].max()))


# --- figures ---------------------------------------------------------------------------------------------------------


def plot_exit_rounds(runs: Mapping[str, Sequence[Mapping]], subject: str):
    """Plot Figure 8: clients' accuracy at every exit by round.

    ``runs`` maps a label to a run's metrics, a panel each.
    """
    last = {label: told[-1]["personal"]["exits"] for label, told in runs.items()}
    said = " and ".join(f"{x[-1] - x[0]:.1f}" for x in last.values())
    title = f"The last exit ends {said} points above the first\n{subject}" if said else "No run is stored yet"
    axes = panels([spelled(n) for n in runs] or [""], title, (4.2, 3.2), 2)
    for ax, (label, told) in zip(axes, runs.items(), strict=False):
        curve = lambda j, told=told: [{"t": m["t"], "accuracy": m["personal"]["exits"][j]} for m in told]  # noqa: E731
        curves = {f"exit {j + 1}": curve(j) for j in range(len(last[label]))}
        plot_learning_curves(curves, dict.fromkeys(curves, PAPER), ax, ax.get_title())
    share_legend(axes)
    return axes


def plot_option(frame: pd.DataFrame, option: str):
    """Plot what clients get by the value of an ``option``; None, and say so, where fewer than two are stored."""
    if len(means := frame.groupby(option).clients.mean().dropna()) < 2:
        print(f"values of {option} that are stored: {', '.join(f'{x:g}' for x in means.index) or 'none'}")
        return None
    ends = [f"{means[x]:.1f} % at {option} = {x:g}" for x in (means.idxmax(), means.idxmin())]
    title = figure_title(f"Most {ends[0]}, least {ends[1]}", frame)
    return plot_series(frame, option, "clients", option, ACCURACY, title)


def plot_thresholds(records: Sequence[Mapping], subject: str):
    """Plot accuracy against mean MACs, a point per threshold; ``records`` from ``clients.leaving_curve``."""
    frame = pd.DataFrame(records).assign(macs=lambda f: f.macs / 1e6).sort_values("threshold")
    best, some = frame.iloc[-1], frame[frame.threshold == 0.6].iloc[0]
    lost, saved = best.accuracy - some.accuracy, 100 * (1 - some.macs / best.macs)
    title = f"Threshold 0.6 costs {lost:.1f} points and saves {saved:.0f} % of the MACs\n{subject}"
    points = frame.drop_duplicates(["macs", "accuracy"]).assign(method=PAPER, series=label_of(PAPER))
    return plot_series(points, "macs", "accuracy", f"mean {COSTS['macs'][0]}", ACCURACY, title, names="threshold")


@styled
def plot_spent(frame: pd.DataFrame, whole: float, subject: str):
    """Plot MACs by round in percent of the ``whole`` model's, a line a threshold; columns t, macs, threshold."""
    rows = frame.assign(share=100 * frame.macs / whole, series=frame.threshold.map("threshold {}".format), method=PAPER)
    first, last = (rows[rows.t == t].set_index("threshold").share for t in (rows.t.min(), rows.t.max()))
    t = first.index[0]
    title = f"At threshold {t} an answer takes {first[t]:.0f} % of the MACs after {rows.t.min()} rounds, "
    title += f"{last[t]:.0f} % after {rows.t.max()}\n{subject}"
    return plot_series(rows, "t", "share", "round", "mean MACs (% of the whole model's)", title)


@styled
def plot_students(shares: np.ndarray, ax=None, title: str = "Exits become students from the shallowest on"):
    """Plot ``shares`` (exits, rounds): of how many of a round's clients, in percent, each exit is a student."""
    ax = axes_of(ax, (7.2, 2.6))
    exits, rounds = shares.shape
    frame = pd.DataFrame(shares, index=range(1, exits + 1), columns=range(1, rounds + 1))
    seaborn.heatmap(frame.iloc[::-1], vmin=0, vmax=100, cmap="Reds", ax=ax, xticklabels=max(1, rounds // 10),
                    cbar_kws={"label": "clients (%)"})  # fmt: skip
    finish(ax, "round", "exit", title)
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    return ax


@styled
def plot_shares(shares: np.ndarray, labels: Sequence[int], title: str = "Clients of like data teach one another"):
    """Plot who teaches whom: ``shares`` (students, teachers) in percent, clients in order of their main ``labels``.

    Two panels: with what a client teaches itself, and without. Ticks name the labels, lines part them.
    """
    axes = panels(["all teachers", "without oneself"], title, (4.8, 4.0), columns=2, sharey=False)
    starts = [k for k in range(1, len(labels)) if labels[k] != labels[k - 1]]
    edges = [0, *starts, len(labels)]
    middles = [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]
    names = [labels[k] for k in edges[:-1]]
    for ax, own in zip(axes, (True, False), strict=True):
        shown = shares.copy()
        if not own:
            np.fill_diagonal(shown, 0)
        top = np.quantile(shown[shown > 0], 0.98) if shown.any() else 1  # not of a few pairs alone
        seaborn.heatmap(shown, cmap="mako_r", ax=ax, xticklabels=False, yticklabels=False, square=True, vmin=0,
                        vmax=top, cbar_kws={"label": "weight (%)", "extend": "max"})  # fmt: skip
        ax.hlines(starts, 0, len(labels), color="white", linewidth=0.6)
        ax.vlines(starts, 0, len(labels), color="white", linewidth=0.6)
        ax.set_xticks(middles, names, rotation=0)
        ax.set_yticks(middles, names, rotation=0)
        finish(ax, "teacher, by main label", "student, by main label" if own else "", ax.get_title())
        ax.grid(False)
    return axes


# --- claims ----------------------------------------------------------------------------------------------------------


def equal_macs(claim: dict, stored: Stored) -> Rows:
    """Compare the accuracies of a pair, first less second, averaged over the MACs that both can spend."""
    rows = []
    for column, runs in _by_column(claim, stored).items():
        for pair in claim["pairs"]:
            one, other = (runs.get(variant, {}) for variant in pair)
            found = [_curve_difference(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]
            text = " – ".join(stored.label(claim["table"], v) for v in pair) + ", at equal MACs"
            rows.append(_row(claim, stored, column, text, found))
    return rows


def _curve_difference(one: Run, other: Run) -> Measured:
    """Return the mean difference of two runs' curves, where both are defined."""
    told = [leaving_curve(run.experiment, run.metrics[-1]["personal"]["leaving"]) for run in (one, other)]
    curves = [np.array(sorted((p["macs"], p["accuracy"]) for p in points)).T for points in told]  # (2, thresholds)
    at = np.linspace(max(c[0].min() for c in curves), min(c[0].max() for c in curves), 50)
    means = [np.array([np.interp(at, *c).mean()]) for c in curves]
    first, second = (Measured.of(run, "clients", mean) for run, mean in zip((one, other), means, strict=True))
    return first - second


def exits_over_rounds(claim: dict, stored: Stored) -> Rows:
    """Compare the last exit with each other at its worst round, and the first with middle ones at first and at last."""
    return _of_runs(claim, stored, _exits_of)


def _exits_of(run: Run) -> dict[str, Measured]:
    told = np.array([m["personal"]["exits"] for m in run.metrics])  # (rounds, exits)
    found, last = {}, told.shape[1]
    for j in range(last - 1):
        worst = int((told[:, -1] - told[:, j]).argmin())
        found[f"exit {last} – exit {j + 1}, at its worst round"] = _between(run, told[worst], last - 1, j)
        if j:
            found[f"exit 1 – exit {j + 1}, at the first evaluated round"] = _between(run, told[0], 0, j)
        if j < last - 2:
            found[f"exit {last - 1} – exit {j + 1}, at the last round"] = _between(run, told[-1], last - 2, j)
    return found


def _between(run: Run, exits: np.ndarray, i: int, j: int) -> Measured:
    """Return exit ``i`` less exit ``j`` of one run."""
    return Measured.of(run, "client_exits", exits[[i]]) - Measured.of(run, "client_exits", exits[[j]])


def thresholds(claim: dict, stored: Stored) -> Rows:
    """Compare thresholds: what the highest adds to the lowest, what 0.6 costs and saves, how answers get cheaper."""
    return _of_runs(claim, stored, _thresholds_of)


def _thresholds_of(run: Run) -> dict[str, Measured]:
    macs, (first, last) = np.array(macs_of(run.experiment)), (run.metrics[i]["personal"] for i in (0, -1))
    accuracy = [at["accuracy"] for at in last["leaving"].values()]  # by rising threshold
    cost = {t: [100 * (macs @ x["leaving"][t]["share"]) / macs[-1] for x in (first, last)] for t in SHOWN}
    numbers = {
        "accuracy at the highest threshold – at the lowest": accuracy[-1] - accuracy[0],
        "2.01 points – what threshold 0.6 costs": 2.01 - last["exits"][-1] + last["leaving"]["0.6"]["accuracy"],
        "% of MACs that threshold 0.6 saves – 37.15": 100 - cost["0.6"][1] - 37.15,
    }
    numbers |= {f"% of MACs at threshold {t}: first evaluated round – last": a - b for t, (a, b) in cost.items()}
    flags = Measured.of(run, "clients", np.zeros(1)).flags
    return {text: Measured(np.array([x]), np.zeros(1), None, flags) for text, x in numbers.items()}


def _of_runs(claim: dict, stored: Stored, numbers_of: Callable[[Run], Mapping[str, Measured]]) -> Rows:
    """Return the rows that ``numbers_of`` gives for every run, paired by seed."""
    rows = []
    for column, runs in _by_column(claim, stored).items():
        for variant, by_seed in runs.items():
            told, label = [numbers_of(by_seed[seed]) for seed in sorted(by_seed)], stored.label(claim["table"], variant)
            rows += [_row(claim, stored, column, f"{label}: {text}", [x[text] for x in told]) for text in told[0]]
    return rows


def _by_column(claim: dict, stored: Stored) -> dict[str, dict[str, dict[int, Run]]]:
    """Return column -> variant -> seed -> stored run for the claim's variants, of runs with early leaving only."""
    wanted = {v for pair in claim["pairs"] for v in pair}
    out: dict[str, dict[str, dict[int, Run]]] = {c: {} for c in claim["columns"]}
    for cell in stored.read(claim["table"])[0]:
        if cell.variant in wanted and cell.column in out:
            run = shown_run(cell.experiment, stored.outputs / "runs")
            if run is not None and run.metrics and run.metrics[-1].get("personal", {}).get("leaving"):
                out[cell.column].setdefault(cell.variant, {})[cell.seed] = run
    return out


def _row(claim: dict, stored: Stored, column: str, text: str, found: Sequence[Measured]) -> tuple[dict, Difference]:
    where = {"table": claim["table"], "mode": label_of("full"), "column": column, "comparison": text}
    difference = differences(list(found))[0] if found else Difference(np.array([]))
    return where | {"data": stored.data(claim["table"], column)}, difference


def printed_savings(stored: Stored) -> tuple[bool, str]:
    """Compare CAFEDistill's savings in the text with those of its printed MACs."""
    macs = load_costs(stored.paper)
    saved = 100 * (1 - macs.cafedistill_millions / macs.single_exit_millions)
    agree = (saved - macs.saved_percent_in_text).abs() < 0.02
    return bool(agree.all()), "the printed MACs give " + ", ".join(f"{x:.2f}" for x in saved) + " %"


def last_exit_share(stored: Stored) -> tuple[bool, str]:
    """Compare the share of ResNet-18's last exit, 100 classes, in the backbone's parameters with the paper's 0.45 %."""
    setting = model_setting(stored.paper, "cifar100_alpha0.3")
    backbone = setting.measure.parameters(setting.full().only(exits=()))
    last = setting.measure.parameters(setting.full().only(exits=(setting.num_exits - 1,))) - backbone
    share = 100 * last / backbone
    return abs(share - 0.45) < 0.015, f"{last:,} of {backbone:,} parameters: {share:.2f} %"


def single_exit_macs(stored: Stored) -> tuple[bool, str]:
    """Compare the whole model's MACs with its last exit alone to the paper's, whose tool counts norms too (0.4 %)."""
    found, agree = [], []
    for row in load_costs(stored.paper).itertuples():
        setting = model_setting(stored.paper, row.column)
        macs = setting.measure.macs(setting.full().only(exits=(setting.num_exits - 1,))) / 1e6
        found.append(f"{macs:.2f}")
        agree.append(abs(macs / row.single_exit_millions - 1) < 0.006)
    return all(agree), f"{', '.join(found)} million; {sum(agree)} of {len(agree)} agree"


def load_costs(paper: str) -> pd.DataFrame:
    """Load the MACs that a paper prints, by data column."""
    return pd.read_csv(params_dir() / paper / "reported" / "macs.csv")


def model_setting(paper: str, column: str):
    """Return the setting of the paper's own method at paper size on a data column, from shapes alone."""
    (cell, *_) = load_grid(paper, "table1", "paper", {"method": paper, "columns": [column]})
    return load_shapes(cell.experiment).setting


EXACT = {"printed_savings": printed_savings, "last_exit_share": last_exit_share, "single_exit_macs": single_exit_macs}
COMPARED = {"equal_macs": equal_macs, "exits_over_rounds": exits_over_rounds, "thresholds": thresholds}
