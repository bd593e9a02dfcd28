"""Numbers to draw, and whether what was drawn lies on the canvas."""

import pandas as pd


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
