"""Pre-train a backbone of the kit from a terminal: ``python -m pretraining deit_mini``.

Stopped at any moment, also by ``--minutes``, it goes on where it was. When all epochs are done it writes the weights in
half precision to ``outputs/pretraining/<name>/<name>.safetensors`` and prints what their features are worth; the loader
finds the file in ``$FEDLIB_DATA/backbones`` or beside ``fedlib/models/pretrained/README.md``.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from fedlib.core.paths import outputs_dir
from fedlib.data.datasets import load_dataset
from fedlib.models.registry import OWN, build_backbone, load_weights_
from fedlib_lab.kernels.products import choose_products

from .training import RECIPES, export_backbone, linear_probe, load_upstream, train_upstream


def pretrain(name: str, source: str, folder: Path, minutes: float | None = None, device: str = "cpu") -> Path | None:
    """Train ``name`` on the data set ``source`` and return the exported file; None if ``minutes`` ended before.

    After each epoch the time is looked at, so it ends up to one epoch later. Prints a line an epoch.
    """
    if name not in RECIPES:
        raise ValueError(f"backbone = {name!r} has no recipe; allowed: {', '.join(RECIPES)}")
    choose_products()
    data, begun, finished = load_dataset(source), time.monotonic(), 0
    for record in train_upstream(OWN[name], data, RECIPES[name], folder, device):
        print(record, flush=True)
        finished = record["epoch"]
        if minutes is not None and time.monotonic() - begun > 60 * minutes:
            break
    if finished < RECIPES[name].epochs:
        return None
    file = folder / f"{name}.safetensors"
    export_backbone(load_upstream(OWN[name], data.num_classes, folder)["vit"], file)
    return file


def probes(name: str, file: Path, on: Sequence[str]) -> dict[str, float]:
    """Linear probe (percent) on each data set of ``on``: the weights in ``file``, and random ones."""
    vits = {name: load_weights_(OWN[name].build(), file), f"random {name}": build_backbone(name, pretrained=False)}
    return {f"{title} on {data}": linear_probe(vit, load_dataset(data)) for data in on for title, vit in vits.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pretraining", description=__doc__.split("\n")[0])
    parser.add_argument("name", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--source", default="tiny_imagenet", help="data set: a name, or the path of a local copy")
    parser.add_argument("--folder", type=Path, help="where the state is kept; default: outputs/pretraining/<name>")
    parser.add_argument("--minutes", type=float, help="stop after so many; called again, it goes on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--probe", nargs="*", default=["cifar10", "cifar100"], help="data sets of the linear probe")
    a = parser.parse_args(arguments)
    file = pretrain(a.name, a.source, a.folder or outputs_dir() / "pretraining" / a.name, a.minutes, a.device)
    if file is None:
        print("not finished: the same command goes on")
        return
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    for title, accuracy in probes(a.name, file, a.probe).items():
        print(f"linear probe, {title}: {accuracy:.1f} %")


if __name__ == "__main__":
    main()
