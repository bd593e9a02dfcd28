"""The splits that `datasets` loads, as arrays: inputs, labels, owners, and a test set where none comes with them.

What a cell cannot mean (no label, NaN, -1 where classes have names) is refused with its file and row, counted from 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..core.rng import numpy_generator
from ..core.tables import read_table
from .cache import Decoded
from .equations import read_equations
from .images import decode_images, image_column
from .questions import SPAN_LENGTH, answer_key, read_spans
from .tokenizer import LENGTH, PAIR_LENGTH, tokenise

Kind = Literal["images", "sentences", "pairs", "spans", "equations"]
SETS = read_table(Path(__file__).with_name("sets.yaml"))


@dataclass(frozen=True)
class Layout:
    """Which splits and columns of a set matter; ``where`` and ``files`` say where a row came from."""

    where: str  # a folder, or a repository of the hub
    kind: Kind
    label: str
    reads: tuple[str, ...] = ()  # columns of text; none: the first column of images
    train: str = "train"
    test: str | None = None  # None: a tenth of each owner's examples is held out
    owner: str | None = None
    together: str | None = None  # the column whose equal values are held out together (a paragraph's questions)
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the parquet files of each split
    tokenizer: str | None = None  # of its text; None: MiniLM's
    config: str | None = None  # which of a repository's sets

    def row(self, split: str, i: int) -> str:
        """File and row of the i-th example of a split."""
        from pyarrow.parquet import read_metadata

        for file in self.files.get(split, ()):
            rows = read_metadata(file).num_rows
            if i < rows:
                return f"{file}, row {i}"
            i -= rows
        return f"{self.where}, split {split!r}, row {i}"


@dataclass(frozen=True)
class Part:
    """One split as arrays."""

    inputs: np.ndarray
    labels: np.ndarray
    owners: np.ndarray | None
    classes: list[str]

    def take(self, kept: np.ndarray) -> "Part":
        owners = self.owners[kept] if self.owners is not None else None
        return Part(self.inputs[kept], self.labels[kept], owners, self.classes)


def decode(splits, layout: Layout, size: int | None = None) -> tuple[Decoded, bool]:
    """Tensors and class names of ``splits``, and whether they depend on ``size`` (the network's pixels or tokens)."""
    names = [n for n in (layout.train, layout.test) if n is not None]
    tables = {n: splits[n] for n in names}
    for name, table in tables.items():
        check_columns(table, name, layout)
    inputs, fitted, targets, key = read_inputs(tables, layout, size)
    parts = []
    for name, table in tables.items():
        labels, classes = (targets[name], []) if name in targets else read_labels(table, name, layout)
        owners = read_column(table, layout.owner, name, layout) if layout.owner in table.column_names else None
        parts.append(Part(inputs[name], labels, np.asarray(owners) if owners is not None else None, classes))
    together = read_column(tables[layout.train], layout.together, layout.train, layout) if layout.together else None
    tensors, classes = divide(parts, layout, together)
    return (tensors | key, classes), fitted


def divide(parts: Sequence[Part], layout: Layout, together: Sequence | None = None) -> Decoded:
    """The arrays of a training and a test split, which is held out of the first where there is none."""
    if layout.test is None:
        train, test = hold_out(parts[0], together)
        check_held_out(len(test.labels), len(parts[0].labels), layout)
    else:
        train, test = parts[0], _renumbered(*parts, [layout.train, layout.test])
    return _tensors(train, test), train.classes


def check_held_out(held: int, examples: int, layout: Layout) -> None:
    """Raise ``ValueError`` if rounding leaves less than half of a tenth to test on."""
    if 20 * held < examples:
        of = "the" if layout.owner is None else "each owner's"
        raise ValueError(
            f"{layout.where}: a tenth of {of} examples, rounded down, would leave {held} of {examples} to test on; "
            f"allowed: a split named 'test', or ten examples and more{'' if layout.owner is None else ' of an owner'}"
        )


def check_columns(table, split: str, layout: Layout) -> None:
    """Raise ``ValueError`` if a column is missing or no example is there."""
    found = ", ".join(table.column_names)
    for column in (*layout.reads, layout.label):
        if column not in table.column_names:
            raise ValueError(f"{layout.where}: split {split!r} has no column named {column!r}; found {found}")
    if layout.kind == "images" and image_column(table) is None:
        raise ValueError(f"{layout.where}: no image column among {found}")
    if len(table) == 0:
        raise ValueError(f"{layout.where}: split {split!r} holds no example")


def read_inputs(tables: Mapping[str, object], layout: Layout, size: int | None) -> tuple[dict, bool, dict, dict]:
    """Inputs by split, whether they depend on ``size``, labels that are read with text by split, questions' key."""
    if layout.kind == "images":
        return *decode_images(tables, image_column(next(iter(tables.values()))), size, layout), {}, {}
    if layout.kind == "spans":
        return read_questions(tables, layout, size or SPAN_LENGTH)
    inputs, targets, source = {}, {}, layout.tokenizer
    fitted = layout.kind != "sentences" or source is not None
    for name, table in tables.items():
        columns = [read_column(table, c, name, layout) for c in layout.reads]
        if layout.kind == "equations":
            answers, where = read_column(table, layout.label, name, layout), partial(layout.row, name)
            inputs[name], targets[name] = read_equations(columns, answers, size or PAIR_LENGTH, where, source)
        elif layout.kind == "pairs":
            inputs[name] = tokenise(list(zip(*columns, strict=True)), source, size or PAIR_LENGTH)
        else:
            inputs[name] = tokenise(columns[0], source, size or LENGTH if fitted else LENGTH)
    return inputs, fitted, targets, {}


def read_questions(tables: Mapping[str, object], layout: Layout, length: int) -> tuple[dict, bool, dict, dict]:
    """As :func:`read_inputs`; a label is (first token, last token, row of the answer key), the key of all splits."""
    inputs, targets, contexts, answers, offsets = {}, {}, [], [], []
    for name, table in tables.items():
        columns = [read_column(table, c, name, layout) for c in layout.reads]
        given = read_column(table, layout.label, name, layout)
        where = partial(layout.row, name)
        inputs[name], spans, places = read_spans(columns, given, length, where, layout.tokenizer)
        targets[name] = np.column_stack((spans, len(answers) + np.arange(len(spans))))
        contexts, answers, offsets = contexts + columns[1], answers + given, [*offsets, places]
    return inputs, True, targets, answer_key(contexts, answers, np.concatenate(offsets)).pack()


def read_column(table, column: str, split: str, layout: Layout) -> list:
    """The values of a column; ``ValueError`` names the row of one that is null, NaN or infinite."""
    values = table.select_columns([column])[:][column]
    bad = next((i for i, v in enumerate(values) if v is None or v != v or v in (math.inf, -math.inf)), None)
    if bad is not None:
        raise ValueError(f"{layout.row(split, bad)}: {column} = {values[bad]} is no value")
    return values


def read_labels(table, split: str, layout: Layout) -> tuple[np.ndarray, list[str]]:
    """Class numbers int64 (N,) and names, or for a column of floats beside text numbers float32 (N,) and no names."""
    values = read_column(table, layout.label, split, layout)
    feature = table.features[layout.label]
    names = getattr(feature, "names", None)
    if names is not None:
        bad = next((i for i, v in enumerate(values) if not 0 <= v < len(names)), None)
        if bad is not None:
            raise ValueError(
                f"{layout.row(split, bad)}: {layout.label} = {values[bad]} is none of the {len(names)} classes"
            )
        return np.asarray(values, np.int64), list(names)
    if layout.reads and str(feature.dtype).startswith("float"):
        return np.asarray(values, np.float32), []
    names, labels = np.unique(np.asarray(values), return_inverse=True)
    return labels.astype(np.int64), [str(n) for n in names]


def _renumbered(train: Part, test: Part, names: Sequence[str]) -> Part:
    """``test`` with the class numbers of ``train``: it may lack classes, and may not have more."""
    if unknown := sorted(set(test.classes) - set(train.classes)):
        raise ValueError(f"split {names[1]!r} has labels that {names[0]!r} has not: {', '.join(unknown)[:200]}")
    if train.classes:
        number = np.array([train.classes.index(n) for n in test.classes])
        return Part(test.inputs, number[test.labels], test.owners, train.classes)
    return test


def hold_out(part: Part, together: Sequence | None = None) -> tuple[Part, Part]:
    """(train, test): a tenth of each owner's examples tests, or of all where none is named.

    Examples of equal values ``together`` stay on one side: then it is a tenth of the values.
    """
    if together is not None:
        values, of = np.unique(together, return_inverse=True)
        held = numpy_generator(0, "held-out split").permutation(len(values))[of] < len(values) // 10
        return part.take(~held), part.take(held)
    n = len(part.labels)
    groups = np.unique(part.owners, return_inverse=True)[1] if part.owners is not None else np.zeros(n, np.int64)
    held = np.zeros(n, bool)
    for g in np.unique(groups):
        rows = np.where(groups == g)[0]
        held[numpy_generator(0, "held-out split", client=int(g)).permutation(rows)[: len(rows) // 10]] = True
    return part.take(~held), part.take(held)


def _tensors(train: Part, test: Part) -> dict[str, torch.Tensor]:
    out = {"train_images": train.inputs, "train_labels": train.labels}
    out |= {"test_images": test.inputs, "test_labels": test.labels}
    if train.owners is not None:
        ids = {name: i for i, name in enumerate(np.unique(train.owners))}  # sorted by name
        out["owners"] = np.array([ids[o] for o in train.owners], np.int64)
        if test.owners is not None:  # -1: nobody's training example is of this owner
            out["test_owners"] = np.array([ids.get(o, -1) for o in test.owners], np.int64)
    return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in out.items()}
