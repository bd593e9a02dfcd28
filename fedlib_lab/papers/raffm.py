"""RaFFM: what clients of random sub-models hold, what that costs, how well it answers, and figures of that.

Sizes follow from shapes alone: every client's sub-model of a round is drawn as training draws it, without weights or
data. Costs do not depend on the seed nor on how long training takes: experiments alike in all else are counted once.
Answers need a trained model. Read next: ``methods/sliced/raffm.py``, ``runs/trained.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import seaborn
import torch

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.slices import Slice, scatter_add_, take
from fedlib.engine.cohort import Cohort
from fedlib.engine.evaluation import exit_logits
from fedlib.engine.federation import Federation, budgets_of
from fedlib.methods import Member, Round, Server

from ..report.plots import BARS, plot_series
from ..report.style import axes_of, color_of, finish, looks_of, name_points, named, share_legend, styled
from ..report.titles import leads
from ..runs.costs import Shapes, kind_of, load_shapes, step_seconds
from ..runs.params import Cell
from ..runs.store import Run, shown_run

BATCH = 32  # of training memory and of timed steps
PAPER = "raffm"
SOME = 20  # clients, of whom a mean is known well enough
NAMES = ("column", "variant", "method", "label")  # of a cell
SYSTEMS = ("#0072b2", "#d55e00")


def client_resources(e: Experiment, clients: int | None = SOME, macs: bool = True) -> pd.DataFrame:
    """Return what each of the first ``clients`` (None: all) would hold in round 1, and its budget.

    Columns: parameters, upload_mib, and with ``macs`` training_mib and macs.
    """
    shapes = load_shapes(e)
    measure, rows = shapes.setting.measure, []
    for client, part in client_parts(e, shapes, clients):
        row = {"client": client.id, "budget": client.budget, "parameters": measure.parameters(part)}
        row["upload_mib"] = shapes.upload_mib(part)
        if macs:
            row |= {"macs": measure.macs(part), "training_mib": measure.training_mib(part, BATCH)}
        rows.append(row)
    return pd.DataFrame(rows)


def client_parts(e: Experiment, shapes: Shapes, clients: int | None = SOME) -> list[tuple[Client, Slice]]:
    """Return clients with the slices they would hold in round 1; sizes only, as nothing is ranked."""
    drawn = tuple(Client(i, int(b), 0) for i, b in enumerate(budgets_of(e, shapes.method)[:clients]))
    r, server = Round(1, drawn, shapes.setting), Server(0, shapes.trainable, {})
    return [(c, shapes.method.slice_for(c, server, r)) for c in drawn]


def acceleration(e: Experiment, clients: int = 3, batch: int = BATCH) -> dict[str, float]:
    """Measure how much faster clients train than with the whole model: by MACs, and timed on ``clients`` of them."""
    shapes = load_shapes(e)
    full, parts = shapes.setting.full(), [part for _, part in client_parts(e, shapes)]
    macs = np.array([shapes.setting.measure.macs(p) for p in parts])
    seconds = step_seconds(e, [full, *parts[:clients]], batch)
    mean = np.mean([shapes.setting.measure.parameters(p) for p in parts]) / 1e6
    ratios = {"by MACs": shapes.setting.measure.macs(full) / macs.mean(), "by time": seconds[0] / seconds[1:].mean()}
    return ratios | {"mean parameters (M)": mean}


def traffic_to(run: Run, target: float, resources: pd.DataFrame) -> dict[str, float]:
    """Return rounds and GiB (down and up, all clients) until the accuracy first reaches ``target``; NaN if never."""
    e = run.experiment
    rounds = next((m["t"] for m in run.metrics if m.get("accuracy") is not None and m["accuracy"] >= target), np.nan)
    a_client = resources.upload_mib.mean()
    return {"rounds": rounds, "MiB a client": a_client, "total GiB": 2 * rounds * e.clients_per_round * a_client / 1024}


def local_scores(f: Federation, server: Server, clients: Sequence[int], train: bool = False) -> pd.DataFrame:
    """Score each client's sub-model on the central test set, as it is deployed or after local training."""
    r = Round(max(server.t, 1), tuple(f.clients(clients)), f.setting)
    r, rows = replace(r, notes=f.method.prepare(server, r)), []
    for client in r.clients:
        part = f.method.slice_for(client, server, r)
        params = _trained(f, server, r, Member(client, part)) if train else server.params
        outputs = exit_logits(f, replace(server, params=params), part)[-1]
        score = f.task.measure(outputs, f.data.test_labels)[f.task.metric]
        rows.append({"client": client.id, "parameters": f.setting.measure.parameters(part), "score": score})
    return pd.DataFrame(rows)


def _trained(f: Federation, server: Server, r: Round, member: Member) -> dict[str, torch.Tensor]:
    """Train ``member`` locally; return the server's parameters with its trained ones in place."""
    cohort, infos = Cohort(f, f.model, server, r, [member], {}), f.setting.infos
    f.method.local_update(cohort)
    params = {n: p.clone() for n, p in server.params.items()}
    for name, own in cohort.params.items():
        moved = own[0].detach() - take(params[name], infos[name], member.part)
        scatter_add_(params[name], moved, infos[name], member.part)
    return params


# --- of a grid's cells -----------------------------------------------------------------------------------------------


def by_variant(cells: Sequence[Cell], of: Callable[[Experiment], Mapping[str, float]]) -> pd.DataFrame:
    """Return one row per data column and variant: its names, its backbone, and ``of`` its experiment."""
    return pd.DataFrame([_names(c) | dict(found) for c, found in _each(cells, of)])


def all_clients(cells: Sequence[Cell], of: Callable[[Experiment], pd.DataFrame]) -> pd.DataFrame:
    """Return the clients' rows (``of``) of every data column and variant, one below the other."""
    return pd.concat([found.assign(**_names(c)) for c, found in _each(cells, of)], ignore_index=True)


def _each(cells: Sequence[Cell], of: Callable) -> list[tuple[Cell, object]]:
    """Return the first cell of every data column and variant, and ``of`` its experiment."""
    first, seen = {(c.column, c.variant): c for c in reversed(cells)}, cache(of)
    return [(c, seen(kind_of(c.experiment))) for c in reversed(first.values())]


def runs_of(cells: Sequence[Cell], folder=None) -> Iterator[tuple[str, list[tuple[Cell, Run]]]]:
    """Yield (data column, its cells with their stored runs); columns without any are left out."""
    for column in dict.fromkeys(c.column for c in cells):
        found = [(c, run) for c in cells if c.column == column and (run := shown_run(c.experiment, folder)) is not None]
        if found:
            yield column, found


def dose_of(frame: pd.DataFrame, shares: pd.DataFrame, whole: str = "fl") -> pd.DataFrame:
    """Return what a cut costs: a row per variant but ``whole``, in order of what clients hold of it (``share``).

    ``lost``: points of accuracy below ``whole``, paired by seed, mean and ``sd`` over ``seeds``. ``frame`` is a
    table's, ``shares`` has the mean ``parameters`` of a client by variant.
    """
    parameters = shares.set_index("variant").parameters
    wide = frame.pivot(index="seed", columns="variant", values="accuracy")
    lost = (-wide.sub(wide[whole], axis=0)).drop(columns=whole).agg(["mean", "std", "count"]).T
    lost.columns = ["lost", "sd", "seeds"]
    names = frame.drop_duplicates("variant").set_index("variant")[["method", "label"]]
    return (names.join(lost, how="inner").assign(share=parameters / parameters[whole]).dropna(subset="lost")
            .sort_values("share", ascending=False).round({"lost": 2, "sd": 2, "share": 3})
            .reset_index()[["variant", "method", "label", "share", "lost", "sd", "seeds"]])  # fmt: skip


def traffic_curves(cells: Sequence[Cell], of: Callable[[Experiment], pd.DataFrame], folder=None) -> pd.DataFrame:
    """Return a row per run and evaluated round: ``accuracy``, and ``gib`` that all clients sent and received so far."""
    rows, seen = [], cache(lambda e: of(e).upload_mib.mean())
    for _, runs in runs_of(cells, folder):
        for cell, run in runs:
            a_round = 2 * run.experiment.clients_per_round * seen(kind_of(run.experiment)) / 1024
            named = _names(cell) | {"seed": cell.seed}
            measured = [(m["t"], m["accuracy"]) for m in run.metrics if m.get("accuracy") is not None]
            rows += [named | {"gib": t * a_round, "accuracy": accuracy} for t, accuracy in measured]
    return pd.DataFrame(rows, columns=[*NAMES, "backbone", "seed", "gib", "accuracy"])


def _names(cell: Cell) -> dict[str, str]:
    return {k: getattr(cell, k) for k in NAMES} | {"backbone": cell.experiment.backbone}


# --- figures ---------------------------------------------------------------------------------------------------------


@styled
def plot_boxes(
    frame: pd.DataFrame, x: str, y: str, ylabel: str, title: str, lines: Mapping[str, float] | None = None, ax=None
):
    """Plot boxes of ``y`` for every ``x``, the clients as points; ``lines`` are full-size models, dashed, by name."""
    ax, color = axes_of(ax), color_of(PAPER)
    # boxes are pale, so that the points on them show
    seaborn.boxplot(frame, x=x, y=y, ax=ax, color=color, width=0.5, fliersize=0, boxprops={"alpha": 0.6})
    seaborn.swarmplot(frame, x=x, y=y, ax=ax, color="black", size=2, alpha=0.4)  # no chance in it
    for name, value in (lines or {}).items():
        ax.axhline(value, color=color_of("fedavg"), linestyle="--", linewidth=1, label=name)
    if lines:
        ax.legend()
    finish(ax, "", ylabel, title)
    return ax


@styled
def plot_dose(dose: pd.DataFrame, subject: str, ax=None):
    """Plot points lost against what clients hold, of ``dose_of``'s rows; bars are standard deviations over seeds."""
    ax = axes_of(ax, (5.6, 3.8))
    ax.axhline(0, color=color_of("fedavg"), linestyle="--", linewidth=1, label="full-size FL")
    label = "± SD over seeds" if dose.sd.notna().any() else None
    ax.errorbar(dose.share, dose.lost, dose.sd.fillna(0), fmt="o", color=color_of(PAPER), capsize=3, label=label)
    ax.invert_xaxis()
    ax.margins(x=0.15, y=0.15)
    ax.legend()
    names = list(dose.label.map(lambda label: label.removeprefix("RaFFM, ").removesuffix(" cut")))
    ends = [f"{names[i]} {dose.lost.iloc[i]:.1f} points at {100 * dose.share.iloc[i]:.0f} %" for i in (-1, 0) if names]
    alone = " (one seed: not ranked)" * bool(dose.sd.isna().all())
    said = "; ".join(dict.fromkeys(ends)) + alone if ends else "no cut is stored yet"
    finish(ax, "share of the whole that clients hold", "points below full-size FL", f"Lost: {said}\n{subject}")
    name_points(ax, list(zip(dose.share, dose.lost, names, strict=True)))
    return ax


@styled
def plot_bars(frame: pd.DataFrame, x: str, y: str, ylabel: str, subject: str, ax=None):
    """Plot a bar of ``y`` per ``x`` and method, SD over seeds; the title says RaFFM's share of full-size FL's."""
    ax, rows = axes_of(ax), named(frame)
    palette, means = looks_of(rows).palette, frame.groupby([x, "method"])[y].mean().unstack()
    share = 100 * means[PAPER] / means.drop(columns=PAPER).max(axis=1)
    low, high = share.min(), share.max()
    title = f"RaFFM: {f'{low:.0f}–' if low < high else ''}{high:.0f} % of full-size FL's {ylabel}\n{subject}"
    seaborn.barplot(rows, x=x, y=y, hue="series", hue_order=list(palette), palette=palette, saturation=1, ax=ax,
                    errorbar="sd" if "seed" in rows else None, capsize=0.15, err_kws={"linewidth": 1.2})  # fmt: skip
    finish(ax, BARS[2:] if "seed" in rows else "", ylabel, title)
    share_legend([ax])
    return ax


@styled
def plot_held(systems: Mapping[str, Sequence[float]], subject: str, ax=None):
    """Plot a histogram per system: how many clients hold which share of the whole model."""
    ax = axes_of(ax)
    rows = pd.DataFrame([(name, x) for name, shares in systems.items() for x in shares], columns=["system", "share"])
    seaborn.histplot(rows, x="share", hue="system", binwidth=0.05, binrange=(0, 1), palette=SYSTEMS, ax=ax)
    said = ", ".join(f"{name} {100 * part.share.median():.0f} %" for name, part in rows.groupby("system", sort=False))
    title = f"Held by the median client: {said}\n{subject}"
    finish(ax, "share of the whole model that a client holds", "clients", title)
    return ax


@styled
def plot_size_and_score(frame: pd.DataFrame, score: str, subject: str, ax=None):
    """Plot a dot per client: its model's size (``share`` of the whole) and ``score``, by ``system``."""
    ax, whole = axes_of(ax), frame.share > 0.99
    seaborn.scatterplot(frame, x="share", y="score", hue="system", style="system", palette=SYSTEMS, s=50, ax=ax)
    least = frame.iloc[frame.share.argmin()]  # by place: runs share the numbers of clients
    more = f", whole models {frame[whole].score.mean():.1f}" if whole.any() else ""
    title = f"The smallest model ({100 * least.share:.0f} % of the whole) answers {least.score:.1f}{more}\n{subject}"
    finish(ax, "model size (share of the whole)", score, title)
    return ax


def plot_traffic(frame: pd.DataFrame, runs: pd.DataFrame, ylabel: str, subject: str):
    """Plot score against traffic so far (columns ``gib``, ``accuracy``, ``label``, ``method``), a line a variant.

    ``runs``: of the same table (``Table.frame``); of these the title says what the rule says.
    """
    last, title = frame.groupby(["variant", "seed"]).gib.max(), "Not both are stored yet"
    if {"fl", PAPER} <= set(last.index.levels[0]):
        sent = 100 * last[PAPER].mean() / last["fl"].mean()
        said = leads(runs[runs.variant.isin(["fl", PAPER])], PAPER)
        title = f"RaFFM sends {sent:.0f} % of full-size FL's traffic; {said}"
    sent = "traffic so far, all clients, down and up (GiB)"
    return plot_series(frame, "gib", "accuracy", sent, ylabel, f"{title}\n{subject}", hero=PAPER)
