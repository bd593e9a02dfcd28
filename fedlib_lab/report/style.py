"""How figures look: one colour and marker per method everywhere, variants by dash and tint, words safe to draw.

The palette keeps methods that share a figure apart also for readers who confuse red and green (measured by
``tests/report/test_plots.py``); where two methods are near in colour, their markers differ.

Read next: ``report/plots.py``.
"""

import functools
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import pandas as pd

from fedlib.data.tasks import task_of
from fedlib.methods import METHODS

from .figure_text import fonts, plain
from .tables import NAMES, label_of

MARKERS = "osD^vP*Xhd<>p8"
DASHES = ("", (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (12, 3), (7, 2, 1.5, 2, 1.5, 2))  # of a method's variants, in order
TINTS = (0, 0.3, 0.15, 0.4, 0.2, 0.45)  # how much white goes with each dash


def score_of(datasets: Iterable[str]) -> str:
    """Name what is scored on the test sets of ``datasets``, for an axis: their tasks' metric, if they share one."""
    metrics = {task_of(name).metric for name in datasets} or {"accuracy"}
    return f"test {NAMES['scores'].get(metrics.pop(), 'score (%)')}" if len(metrics) == 1 else "test score (%)"


@dataclass(frozen=True)
class Looks:
    """Colour, marker and dash of every line by its name, as seaborn takes them."""

    palette: Mapping[str, tuple]
    markers: Mapping[str, str]
    dashes: Mapping[str, tuple]

    def settings(self) -> dict:
        """Return the keywords of a seaborn plot of lines whose column ``series`` names them."""
        order = {"hue_order": list(self.palette), "style_order": list(self.palette)}
        return {"hue": "series", "style": "series", **vars(self), **order}


def color_of(method: str) -> str:
    """Return the method's colour: what its class says, or one that follows from its name."""
    return _look(method)[0]


def marker_of(method: str) -> str:
    """Return the method's marker, found as its colour is."""
    return _look(method)[1]


def _look(method: str) -> tuple[str, str]:
    import seaborn
    from matplotlib.colors import to_hex

    code, own = zlib.crc32(method.encode()), vars(METHODS.get(method, object))  # not what it inherits
    spare = to_hex(seaborn.husl_palette(24, l=0.5)[code % 24])  # one of 24 hues for a method that names none
    return own.get("color", spare), own.get("marker", MARKERS[code // 24 % len(MARKERS)])


def looks_of(frame: pd.DataFrame) -> Looks:
    """Return the look of every name in column ``series``: its ``method``'s, and a dash and a tint per variant of it.

    A method's own line, named as the method is, stays solid.
    """
    from matplotlib.colors import to_rgb

    names = frame[["series", "method"]].drop_duplicates("series")
    own = names.series == names.method.map(lambda m: plain(label_of(m)))
    names, looks = pd.concat([names[own], names[~own]]), {}
    for method, group in names.groupby("method", sort=False):
        for k, name in enumerate(group.series):
            white = TINTS[k % len(TINTS)]
            color = tuple((1 - white) * c + white for c in to_rgb(color_of(method)))
            looks[name] = (color, marker_of(method), DASHES[k % len(DASHES)])
    return Looks(*({name: looks[name][i] for name in frame.series.unique()} for i in range(3)))  # as in the table


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with a column ``series``: what a reader calls each row's line.

    That is its label, else its variant, else its method; where two variants of a panel share it, the variant follows.
    """
    series = frame[next(c for c in ("label", "variant", "method") if c in frame)].map(spelled)
    if "variant" in frame:
        panel = [frame[c] for c in ("finetune", "column") if c in frame]
        if frame.variant.groupby([*panel, series]).nunique().gt(1).any():
            series = series + " (" + frame.variant + ")"
    return frame.assign(series=series.map(plain))


def spelled(name: str) -> str:
    """Spell a line's name as figures do, part by part: ``depthfl, lora`` is ``DepthFL, LoRA``."""
    return ", ".join(map(label_of, name.split(", ")))


def model_of(backbone: str) -> str:
    """Name a backbone in a reader's words, however long its rows are: ``bert_base.384`` is ``BERT-base``."""
    return NAMES["backbones"].get(backbone.split(".")[0], backbone)


def title_of(column: str, stand_in: str | None = None) -> str:
    """Name a data column in a reader's words; ``stand_in`` is the data set that was really run.

    ``title_of("cifar100_alpha1", "cifar10")`` is ``CIFAR-10 standing in for CIFAR-100, Dirichlet 1``.
    """
    found = re.fullmatch(r"(\w+?)_(alpha|alpha_u|beta)([\d.]+)", column)
    how = {"alpha": "Dirichlet {}", "alpha_u": "unbalanced Dirichlet {}", "beta": "{} classes a client"}
    data, rest = (found[1], f", {how[found[2]].format(found[3])}") if found else (column, "")
    title = data_title(data) + rest
    return title if stand_in in (None, data) else f"{data_title(stand_in)} standing in for {title}"


def data_title(dataset: str) -> str:
    """Return a data set's proper name; of a path, its last part."""
    return plain(NAMES["data"].get(dataset) or PurePath(dataset).name.replace("_", " ").strip() or dataset)


def styled(plot: Callable) -> Callable:
    """Decorate ``plot`` so that it draws in one style; the caller's own settings stay as they were."""

    @functools.wraps(plot)
    def draw(*args, **settings):
        import matplotlib

        with matplotlib.rc_context({"font.family": list(fonts()), **NAMES["figures"]}):
            drawn, interactive = plot(*args, **settings), matplotlib.is_interactive()
        matplotlib.interactive(interactive)  # a notebook's first figure switches it on, without which none is shown
        return drawn

    return draw


def axes_of(ax, size=(6.4, 3.8)):
    import matplotlib.pyplot as plt

    return ax if ax is not None else plt.subplots(figsize=size, layout="constrained")[1]


def panels(titles: Sequence[str], title: str, size: tuple[float, float] = (4.0, 3.0), columns: int = 3,
           sharey: bool = True):  # fmt: skip
    """Return the Axes of a figure called ``title``, a panel for each of ``titles``, wrapped so that none is a strip."""
    import matplotlib.pyplot as plt

    rows = -(-len(titles) // columns)
    wide = -(-len(titles) // rows)
    full = (max(size[0] * wide, 4.8), size[1] * rows + 0.4)
    figure, axes = plt.subplots(rows, wide, figsize=full, sharey=sharey, squeeze=False, layout="constrained")
    figure.suptitle(wrapped(title, full[0]))
    for ax, name in zip(axes.flat, titles, strict=False):
        ax.set_title(wrapped(name, full[0] / wide))
    for ax in axes.flat[len(titles) :]:
        ax.remove()
    return list(axes.flat[: len(titles)])


def wrapped(title: str, width: float) -> str:
    """Break ``title`` into lines that fit ``width`` inches."""
    fit = textwrap.TextWrapper(int(11 * width), break_on_hyphens=False)
    return "\n".join(line for part in title.split("\n") for line in fit.wrap(part) or [""])


def share_legend(axes, least: int = 1) -> None:
    """Take the legends of ``axes`` away, and put what they said, if it is ``least`` names, below all panels."""
    figure, found = axes[0].figure, {}
    for ax in axes:
        if (legend := ax.get_legend()) is not None:
            found |= {t.get_text(): h for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}
            legend.remove()
    if (n := len(found)) >= least:
        rows = -(-n // int(np.clip(figure.get_figwidth() // (0.085 * max(map(len, found)) + 0.7), 1, n)))
        figure.set_figheight(figure.get_figheight() + 0.17 * rows)
        figure.legend(found.values(), found, loc="outside lower center", ncols=-(-n // rows))


def finish(ax, xlabel: str, ylabel: str, title: str | None = None) -> None:
    """Name the axes, the title in lines that fit; a legend has no heading."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if title is not None:
        ax.set_title(wrapped(title, ax.figure.get_figwidth() / ax.get_subplotspec().get_gridspec().ncols))
    ax.grid(alpha=0.3)
    if (legend := ax.get_legend()) is not None:
        legend.set_title(None)
        legend.set_frame_on(False)


def name_points(ax, points: Sequence[tuple[float, float, str]], colors: Sequence | None = None) -> None:
    """Write the name of every (x, y, name) beside it, where it meets nothing else if it can, in ``colors`` or black."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = ax.figure
    figure.draw_without_rendering()  # the layout is settled, so that pixels mean something
    pixels = ax.transData.transform([(x, y) for x, y, _ in points]) if points else []
    taken = [Bbox.from_bounds(px - 6, py - 6, 12, 12) for px, py in pixels]
    taken += [ax.get_legend().get_window_extent()] if ax.get_legend() else []
    for line in (line for line in ax.lines if line.get_linestyle() != "None" and line.get_linewidth()):
        path = line.get_path().transformed(line.get_transform()).interpolated(40)
        taken += [Bbox.from_bounds(px, py, 1, 1) for px, py in path.vertices]
    near = [(6, 4, "left"), (6, -11, "left"), (-6, 4, "right"), (-6, -11, "right"), (-10, 3, "right"), (9, -3, "left"),
            (0, 9, "center"), (0, -16, "center"), (10, 12, "left"), (10, -20, "left"), (-10, 12, "right"),
            (-10, -20, "right")]  # fmt: skip
    far = [(dx, sign * dy, side) for dy in (24, 36, 48) for sign in (1, -1)
           for dx, side in ((0, "center"), (14, "left"), (-14, "right"))]  # fmt: skip
    both = zip(points, colors or ["black"] * len(points), strict=True)
    for (x, y, name), color in sorted(both, key=lambda p: -p[0][0]):  # from the right: names stand there first
        tried = []
        for dx, dy, side in near + far:
            arrow = {"arrowstyle": "-", "color": "0.4", "linewidth": 0.6} if abs(dy) >= 20 else None
            where = {"textcoords": "offset points", "ha": side, "fontsize": 8, "color": color, "arrowprops": arrow}
            text = ax.annotate(name, (x, y), (dx, dy), **where)
            text.set_in_layout(False)
            text.update_positions(figure.canvas.get_renderer())
            box = Text.get_window_extent(text)  # without the arrow
            inside = all(figure.bbox.contains(*corner) for corner in (box.p0, box.p1)) and box.y1 <= ax.bbox.y1
            tried.append((sum(box.overlaps(t) for t in taken) + 10 * (not inside), len(tried), text, box))
            if tried[-1][0] == 0:
                break
        best = min(tried, key=lambda t: t[:2])
        for _, _, text, _ in tried:
            if text is not best[2]:
                text.remove()
        taken.append(best[3].padded(1))


def log_axis(ax, values: pd.Series) -> None:
    """Make the x axis logarithmic in plain numbers, with ticks at ``values`` if few, else at 1 and 3 of each decade."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    few = np.unique(values.round(12))
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(few) if 0 < len(few) <= 5 else LogLocator(subs=(1, 3)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{float(f'{value:.2g}'):,g}")
