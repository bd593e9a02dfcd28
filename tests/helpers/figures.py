"""Numbers to draw, and whether what was drawn lies on the canvas and is read."""

import itertools

import pandas as pd
from matplotlib.text import Text


def frame(variants, columns=("cifar100_alpha1",), seeds=(1, 2), exits=4, dataset="cifar10", modes=("frozen", "lora")):
    """As ``tables.collect`` gives: ``variants`` are (variant, method, label)."""
    rows = [
        {"finetune": mode, "variant": v, "method": m, "label": label, "column": c, "seed": s, "dataset": dataset,
         "accuracy": 40.0 + s + i, "ensemble": 42.0 + 2 * s + i, "exits": [40.0 + s + i + e for e in range(exits)]}
        for mode in modes for c in columns for i, (v, m, label) in enumerate(variants) for s in seeds
    ]  # fmt: skip
    return pd.DataFrame(rows)


def inside(figure):
    """Every legend, title and text that is drawn lies on the canvas."""
    figure.draw_without_rendering()
    canvas = figure.bbox
    shown = [*figure.legends, *(ax.get_legend() for ax in figure.axes), *figure.texts]
    shown += [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)]
    for part in (p for p in shown if p is not None):
        box = part.get_window_extent()
        if not box.width:
            continue
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= canvas.x1 + 1 and box.y1 <= canvas.y1 + 1, part
    return True


def boxed(text):
    """The box of a text as it is drawn last, without its arrow."""
    text.get_window_extent()  # an annotation finds its place
    return Text.get_window_extent(text)


def words(figure):
    """Every text that is drawn, with its box: titles, axes' names and ticks, legends, names of points."""
    texts = [*figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]
    texts += [figure._suptitle] if figure._suptitle is not None else []
    for ax in figure.axes:
        texts += [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *(ax.get_legend().get_texts() if ax.get_legend() else [])]  # fmt: skip
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
    return [(t, boxed(t)) for t in dict.fromkeys(texts) if t.get_text().strip()]


def legible(figure, seeds=None):
    """All is on the canvas, no word lies on another, each is read at 700 pixels, and the title says the seeds."""
    assert inside(figure)
    said = words(figure)
    for (a, one), (b, other) in itertools.combinations(said, 2):
        assert not one.padded(-1).overlaps(other.padded(-1)), (a.get_text(), b.get_text())
    for text, _ in said:
        pixels = text.get_fontsize() / 72 * 700 / figure.get_figwidth()
        assert pixels >= 8, (text.get_text(), round(pixels, 1))
    titles = [figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)]
    assert seeds is None or any(f"{seeds} seed" in t.replace("\n", " ") for t in titles), titles
    return True
