"""Figures that a reader can play with, of stored runs: what accuracy costs, curves by round, claims, the atlas.

Written by the site's build, as Vega-Lite with its libraries beside: nothing is fetched. Each has a PNG of how it looks
at first. Read next: ``docs/play.md``, the page; ``report/frames.py``, the data.
"""

import json
import re
from functools import cache
from pathlib import Path

import altair as alt
import pandas as pd
import vl_convert

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.methods import METHODS
from fedlib_lab.atlas.scores import BINDS
from fedlib_lab.report.claims_page import COLORS
from fedlib_lab.report.frames import runs_frame
from fedlib_lab.report.style import color_of, data_title, model_of
from fedlib_lab.report.tables import label_of
from fedlib_lab.runs.costs import load_shapes
from fedlib_lab.runs.params_files import papers
from fedlib_lab.runs.store import stored_runs

GROUP = ["setting", "method", "rounds"]  # runs that differ in nothing else but seeds, options and clients
COSTS = {"macs": "MACs per example (millions)", "training_memory_mib": "training memory, batch 32 (MiB)",
         "upload_mib": "upload per round (MiB)"}  # fmt: skip
CAPPED = {caps + of: f"{binds} capped, {rates}" for caps, binds in BINDS.items()
          for of, rates in (("", "papers' rates"), ("_tuned", "rates searched"))}  # fmt: skip
LIMITS = {"macs": "training of a round (10⁹ MACs)", "peak MiB": "peak of training (MiB)",
          "upload MiB": "upload of a round (MiB)", "seconds a round": "seconds a round, slowest board"}  # fmt: skip
NOT_COSTS = ("seed", "num_train", "num_test", "subset", "dirichlet_alpha", "rounds", "lr", "min_lr", "evaluate_every")
CLAIM = re.compile(r"^## (\w+)\n\n(.+?\.) \((.+?)\): \*\*(.+?)\*\*", re.M)  # a section of claims.md
BATCH = 32  # of training memory
COMPARED = 5  # methods that a setting must have, to be drawn against costs
SIZE = {"width": 520, "height": 340}


@cache
def _costs(known: str) -> dict[str, float]:
    """What the model of an experiment's largest budget costs, from shapes."""
    e = Experiment.from_dict(json.loads(known))
    shapes = load_shapes(e)
    part, measure = shapes.slices[-1], shapes.setting.measure
    return {"macs": measure.macs(part) / 1e6, "training_memory_mib": measure.training_mib(part, BATCH),
            "upload_mib": shapes.upload_mib(part)}  # fmt: skip


def runs(rounds: bool = False) -> pd.DataFrame:
    """Stored runs in a reader's words; of personal methods the mean over clients, else the mean over exits."""
    frame = runs_frame(rounds=rounds)
    if frame.empty:
        return pd.DataFrame(columns=[*GROUP, "key", "accuracy", "run", "t"])
    own = frame["personal.accuracy"] if "personal.accuracy" in frame else pd.Series(index=frame.index, dtype=float)
    setting = frame.dataset.map(data_title) + ", " + frame.backbone.map(model_of) + ", " + frame.finetune.map(label_of)
    setting += own.notna().map({True: ", clients' own tests", False: ""})
    words = {"setting": setting, "method": frame.method.map(label_of), "key": frame.method}
    return frame.assign(**words, accuracy=own.fillna(frame.accuracy)).dropna(subset=["accuracy"])


def with_costs(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per method of a setting: mean accuracy, how many runs, what the first one's largest model costs.

    Methods of a reader's own are left out: what they cost only their own file knows.
    """
    frame = frame[frame.key.isin(METHODS)]
    compared = frame.groupby("setting").method.transform("nunique") >= COMPARED
    rows = frame[compared].groupby([*GROUP, "key"], sort=False)
    rows = rows.agg(accuracy=("accuracy", "mean"), runs=("run", "size"), run=("run", "first")).reset_index()
    asked = {r.path.name: r.experiment.to_dict() for r in stored_runs()}
    same = [{k: v for k, v in asked[name].items() if k not in NOT_COSTS} for name in rows.run]
    found = pd.DataFrame([_costs(json.dumps(s, sort_keys=True)) for s in same], rows.index, columns=list(COSTS))
    return rows.assign(**found).round(3)


def colours(frame: pd.DataFrame) -> alt.Scale:
    """Every method's own colour."""
    keys = dict(zip(frame.method, frame.get("key", frame.method), strict=True))
    return alt.Scale(domain=sorted(keys), range=[color_of(keys[m]) for m in sorted(keys)])


def chooser(name: str, options: list[str], said: str) -> alt.Parameter:
    """A list to choose from, below the figure."""
    return alt.param(
        name=name, value=options[0] if options else "", bind=alt.binding_select(options=options, name=said)
    )


def costs_chart(rows: pd.DataFrame) -> alt.Chart:
    """Accuracy against one of three costs, a dot per method and setting; a click on a method leaves it alone."""
    chosen = chooser("where", list(rows.setting.value_counts().index), "setting ")
    cost = chooser("cost", list(COSTS.values()), "cost ")
    which = {said: alt.datum[name] for name, said in COSTS.items()}
    named = alt.selection_point(fields=["method"], bind="legend")
    picked = alt.expr.if_(cost == COSTS["macs"], which[COSTS["macs"]],
                          alt.expr.if_(cost == COSTS["upload_mib"], which[COSTS["upload_mib"]],
                                       which[COSTS["training_memory_mib"]]))  # fmt: skip
    return (
        alt.Chart(rows, title="What accuracy costs", **SIZE)
        .transform_calculate(x=picked).transform_filter(alt.datum.setting == chosen)
        .mark_circle(size=90)
        .encode(
            alt.X("x:Q", title="the chosen cost", scale=alt.Scale(type="log")),
            alt.Y("accuracy:Q", title="accuracy (%)", scale=alt.Scale(zero=False)),
            alt.Color("method:N", scale=colours(rows), legend=alt.Legend(orient="bottom", columns=4, symbolLimit=60)),
            opacity=alt.condition(named, alt.value(0.9), alt.value(0.05)),
            tooltip=["method", "rounds", "runs", "accuracy", *COSTS],
        )
        .add_params(chosen, cost, named).interactive()
    )  # fmt: skip


def curves_chart(frame: pd.DataFrame) -> alt.Chart:
    """Accuracy by round of every method in a setting (data, net, mode), mean over its runs of one length."""
    rows = frame.groupby([*GROUP, "key", "t"], sort=False).accuracy.agg(["mean", "size"]).round(3).reset_index()
    rows["line"] = rows.method + rows.rounds.astype(str)
    chosen = chooser("of", list(rows.setting.value_counts().index), "setting ")
    named = alt.selection_point(fields=["method"], bind="legend", name="curve")
    return (
        alt.Chart(rows, title="Round by round", **SIZE)
        .transform_filter(alt.datum.setting == chosen)
        .mark_line(point=True)
        .encode(
            alt.X("t:Q", title="round"),
            alt.Y("mean:Q", title="accuracy (%)", scale=alt.Scale(zero=False)),
            alt.Color("method:N", scale=colours(rows), legend=alt.Legend(orient="bottom", columns=4, symbolLimit=60)),
            detail="line:N",
            opacity=alt.condition(named, alt.value(0.9), alt.value(0.04)),
            tooltip=["method", "rounds", "t", "mean", "size"],
        )
        .add_params(chosen, named).interactive()
    )  # fmt: skip


def claims(outputs: Path) -> pd.DataFrame:
    """Every claim of the papers' pages: what it says, its verdict, where its rows are."""
    rows = []
    for paper in papers():
        page = outputs / paper / "claims.md"
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        for name, says, where, verdict in CLAIM.findall(text):
            link = f"../outputs/{paper}/claims.html#{name}"
            rows.append([label_of(paper), says, where, verdict, list(COLORS).index(verdict), link])
    frame = pd.DataFrame(rows, columns=["paper", "claim", "where", "verdict", "grade", "link"])
    frame = frame.sort_values(["paper", "grade"], kind="stable")
    return frame.assign(place=frame.groupby("paper").cumcount())


def claims_chart(frame: pd.DataFrame) -> alt.Chart:
    """A tile per claim, coloured by its verdict; a click leads to its comparisons."""
    scale = alt.Scale(domain=list(COLORS), range=list(COLORS.values()))
    return (
        alt.Chart(frame, title="Claims by verdict: click a tile for its rows", width=520, height=alt.Step(34))
        .mark_rect(stroke="white", strokeWidth=2, cursor="pointer")
        .encode(
            alt.X("place:O", axis=None), alt.Y("paper:N", title=""),
            alt.Color("verdict:N", scale=scale, legend=alt.Legend(orient="bottom")),
            tooltip=["claim", "where", "verdict"], href="link:N",
        )
    )  # fmt: skip


def atlas(outputs: Path) -> pd.DataFrame:
    """A row per task, what was capped there and method of the atlas: mean score over seeds, what its devices take."""
    path = outputs / "atlas" / "tables" / "atlas_small.parquet"
    columns = ["where", "label", "method", "score", "seeds", *LIMITS]
    if not path.is_file():
        return pd.DataFrame(columns=columns)
    frame = pd.read_parquet(path).assign(seeds=1)
    frame = frame.assign(where=frame.task.map(label_of) + ", " + frame.caps.map(CAPPED), macs=frame.macs / 1e9)
    rows = frame.groupby(["where", "label", "method"], sort=False)
    how = {"score": "mean", "seeds": "sum", **dict.fromkeys(LIMITS, "mean")}
    rows = rows.agg(how).round(3).reset_index()
    return rows.assign(label=rows.label.map(label_of))[columns]


def atlas_chart(rows: pd.DataFrame) -> alt.Chart:
    """The methods of a task that fit under four caps, best first; a slider a cap, at first the costliest."""
    task = chooser("task", list(rows["where"].value_counts().index), "task ")
    sliders, under = [], alt.datum.where == task
    for k, (column, said) in enumerate(LIMITS.items()):
        top = float(rows[column].max()) if len(rows) else 1.0
        bound = alt.binding_range(min=0, max=round(1.01 * top, 3), step=round(top / 100, 4), name=f"{said} ")
        sliders.append(alt.param(name=f"cap{k}", value=round(1.01 * top, 3), bind=bound))
        under = under & (alt.datum[column] <= sliders[-1])
    return (
        alt.Chart(rows, title="Who fits under your caps, and what clients get", width=520, height=alt.Step(22))
        .transform_filter(under)
        .mark_bar()
        .encode(
            alt.X("score:Q", title="mean over clients of their accuracy (%)"),
            alt.Y("label:N", title="", sort="-x"),
            alt.Color("label:N", scale=colours(rows.rename(columns={"label": "method", "method": "key"})), legend=None),
            tooltip=["label", "score", "seeds", *LIMITS],
        )
        .add_params(task, *sliders)
    )  # fmt: skip


def write(folder: Path) -> None:
    """The libraries, and of every figure its data as a script and a PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = vl_convert.javascript_bundle()  # in a function of its own: its names are those of the site's scripts
    (folder / "vega.js").write_text(f"(function () {{\n{bundle}\n}})();\n", encoding="utf-8")
    charts = {
        "costs": costs_chart(with_costs(runs())),
        "curves": curves_chart(runs(rounds=True)),
        "claims": claims_chart(claims(outputs_dir())),
        "atlas": atlas_chart(atlas(outputs_dir())),
    }
    for name, chart in charts.items():
        spec = chart.to_json(indent=None)
        options = '{actions: false, renderer: "svg"}'
        (folder / f"{name}.js").write_text(f'vegaEmbed("#{name}", {spec}, {options});', encoding="utf-8")
        (folder / f"{name}.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=1.5))


def build_finished(app, failed) -> None:
    if not failed and app.builder.format == "html":
        write(Path(app.outdir) / "_static" / "play")


def setup(app) -> dict:
    app.connect("build-finished", build_finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
