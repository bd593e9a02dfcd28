"""The splits that `datasets` loads, as arrays: inputs, labels, owners, and a test set where none comes with them.

What a cell cannot mean (no label, NaN, -1 as a class, a list) is refused with its file and row, counted from 0. What
lies in a set of one's own and is not read is said once, when it is decoded.
"""

import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedlib.core.rng import numpy_generator
from fedlib.core.tables import read_table
from fedlib.core.validation import shown
from fedlib.data.cache import Decoded
from fedlib.data.metrics import IGNORED
from fedlib.data.questions import SPAN_LENGTH, answer_key, read_spans
from fedlib.data.tokenizer import LENGTH, LONGER, OWN_WORDS, PAIR_LENGTH, tokenise, warn_cut

from .equations import read_equations
from .images import decode_images, image_column

Kind = Literal["images", "sentences", "pairs", "spans", "equations"]
SETS = read_table(Path(__file__).with_name("sets.yaml"))
# What splits and columns are called, in any case; the first that is there, and has labels, is taken.
TRAIN = ("train", "training")
TESTS = ("test", "testing", "eval", "evaluation", "validation", "validation_matched", "valid", "val", "dev")
LABELS = ("label", "fine_label", "character", "coarse_label")
OWNERS = ("writer_id", "speaker_id", "client_id")
TEXTS = frozenset(column for said in SETS["columns"] for column in said["reads"])

FEW = 100  # test inputs: copies among fewer are not told
ABOUT = re.compile("(?i)readme|licen[cs]e|citation|dataset_infos?|dataset_dict")  # files about a set, not of it


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
    tests: tuple[str, ...] | None = None  # of a set of one's own: splits that may test, of which ``test`` will be one
    unread: tuple[str, ...] = ()  # files beside those that are read

    def row(self, split: str, i: int) -> str:
        """Return file and row of the i-th example of a split."""
        from pyarrow.parquet import read_metadata

        for file in self.files.get(split, ()):
            if i < (rows := read_metadata(file).num_rows):
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
    """Decode ``splits`` to tensors and class names; also return whether they depend on ``size`` (pixels or tokens)."""
    layout = choose_test_split(splits, layout)
    tables = {n: splits[n] for n in (layout.train, layout.test) if n is not None}
    for name, table in tables.items():
        check_columns(table, name, layout)
    inputs, fitted, targets, key = read_inputs(tables, layout, size)
    read = {n: (targets[n], []) if n in targets else read_labels(t, n, layout) for n, t in tables.items()}
    parts = [Part(inputs[n], labels, read_owners(tables[n], n, layout), names) for n, (labels, names) in read.items()]
    if len({p.owners.dtype.kind == "U" for p in parts if p.owners is not None}) > 1:  # numbers are not found as words
        why = f"{layout.where}: {layout.owner} is text in one of the splits {[*tables]}"
        raise ValueError(f"{why} and numbers in the other")
    together = read_column(tables[layout.train], layout.together, layout.train, layout) if layout.together else None
    tensors, classes = train_and_test(parts, layout, together)
    return (tensors | key, classes), fitted


def choose_test_split(splits, layout: Layout) -> Layout:
    """Set the test split of ``layout`` to the first of its ``tests`` with labels. Warn once of what is not read."""
    if layout.tests is None:
        return layout
    test = next((s for s in layout.tests if has_labels(splits[s], layout.label)), next(iter(layout.tests), None))
    tested = "examples held out of it" if test is None else f"split {test!r}"
    told = f"{layout.where}: trained on split {layout.train!r} by {layout.label!r}, tested on {tested}"
    beside = [*unread_parts(splits, layout.train, test, layout), *layout.unread]
    if unread := [u for u in beside if not ABOUT.fullmatch(Path(u).stem)]:
        more = f" and {len(unread) - 6} more" if len(unread) > 6 else ""
        warnings.warn(f"{told}; not used: {', '.join(unread[:6])}{more}", stacklevel=2)
    return replace(layout, test=test)


def has_labels(table, label: str) -> bool:
    """Return whether any example has a label. The public tests of GLUE say -1 or nothing."""
    values = table.select_columns([label])[:][label] if label in table.column_names else ()
    return any(v not in (None, -1, -100) and v == v for v in values)


def unread_parts(splits, train: str, test: str | None, layout: Layout) -> list[str]:
    """List the unused splits and columns; columns of no public set."""
    read = {*(layout.reads or [image_column(splits[train])]), layout.label, layout.owner, layout.together}
    columns = () if Path(layout.where).name in SETS["public"] else splits[train].column_names
    unused = [s for s in splits if s not in (train, test)]
    return [f"split {s!r}" for s in unused] + [f"column {c!r}" for c in columns if c not in read]


def train_and_test(parts: Sequence[Part], layout: Layout, together: Sequence | None = None) -> Decoded:
    """Return the arrays of a training and a test split, which is held out of the first where there is none."""
    warn_alike((c for p in parts for c in p.classes), "classes", layout.where)
    warn_alike((o for p in parts if p.owners is not None for o in np.unique(p.owners)), "owners", layout.where)
    if layout.test is None:
        train, test = hold_out_tenth(parts[0], together)
        if 20 * (held := len(test.labels)) < (n := len(parts[0].labels)):
            of, more = ("the", "") if layout.owner is None else ("each owner's", " of an owner")
            why = f"{layout.where}: a tenth of {of} examples, rounded down, would leave {held} of {n} to test on"
            raise ValueError(f"{why}; allowed: a split named 'test', or ten examples and more{more}")
        if classes := [train.classes[i] for i in np.setxor1d(train.labels, test.labels)] if train.classes else []:
            told = f"a tenth is held out to test on, whatever the class, and of {len(classes)} of {len(train.classes)}"
            all_of = f"classes ({', '.join(classes)[:200]}) all examples are on one side"
            warnings.warn(f"{layout.where}: {told} {all_of}", stacklevel=2)
    else:
        train, test = parts[0], _renumbered(*parts, [layout.train, layout.test], layout.where)
    there = np.union1d(train.labels, test.labels)
    if (lost := [name for i, name in enumerate(train.classes) if i not in there]) or len(train.classes) == 1:
        told = f"{len(lost)} of {len(train.classes)} classes ({', '.join(lost)[:200]}) have no example"
        warnings.warn(f"{layout.where}: {told if lost else 'all examples are of one class'}", stacklevel=2)
    told = len(test.inputs) >= FEW and Path(layout.where).name not in SETS["public"]
    known = {hash(x.tobytes()) for x in train.inputs} if told else set()
    if n := sum(hash(x.tobytes()) in known for x in test.inputs if told):
        warnings.warn(f"{layout.where}: {n} of {len(test.inputs)} test inputs are training inputs too", stacklevel=2)
    if train.owners is not None and test.owners is not None and (n := (~np.isin(test.owners, train.owners)).sum()):
        warnings.warn(f"{layout.where}: {n} of {len(test.owners)} test examples' owners train on none", stacklevel=2)
    return to_tensors(train, test), train.classes


def warn_alike(names: Iterable[object], what: str, where: str) -> None:
    """Warn of names that differ by spaces, case (words of classes), or how an accent is written."""
    alike: dict[str, list[str]] = {}
    for name in sorted(set(map(str, names))):
        plain = " ".join(unicodedata.normalize("NFC", name).split())
        alike.setdefault(plain.casefold() if what == "classes" and len(plain) > 1 else plain, []).append(ascii(name))
    if told := [" and ".join(same) for same in alike.values() if len(same) > 1]:
        warnings.warn(f"{where}: {what} {', '.join(told)[:300]} look alike and are not the same", stacklevel=2)


def check_columns(table, split: str, layout: Layout) -> None:
    """Raise ``ValueError`` if a column is missing or no example is there."""
    found = ", ".join(table.column_names)
    if lost := [c for c in (*layout.reads, layout.label) if c not in table.column_names]:
        raise ValueError(f"{layout.where}: split {split!r} has no column named {lost[0]!r}; found {found}")
    if layout.kind == "images" and image_column(table) is None:
        why = f"{layout.where}: no image column among {found}; allowed: pictures as datasets.Image writes them,"
        raise ValueError(f"{why} as of cast_column('image', datasets.Image()).to_parquet(...)")
    if len(table) == 0:
        raise ValueError(f"{layout.where}: split {split!r} holds no example")


def read_inputs(tables: Mapping[str, object], layout: Layout, size: int | None) -> tuple[dict, bool, dict, dict]:
    """Read by split inputs, labels that come with text, the questions' key, and whether inputs depend on ``size``."""
    if layout.kind == "images":
        return *decode_images(tables, image_column(next(iter(tables.values()))), size, layout), {}, {}
    if layout.kind == "spans":
        return read_questions(tables, layout, size or SPAN_LENGTH)
    inputs, targets, source, cut = {}, {}, layout.tokenizer, []
    fitted = layout.kind != "sentences" or source is not None
    length = (size or (LENGTH if layout.kind == "sentences" else PAIR_LENGTH)) if fitted else LENGTH
    for name, table in tables.items():
        columns = [read_column(table, c, name, layout, (str,)) for c in layout.reads]
        if layout.kind == "equations":
            answers, where = read_column(table, layout.label, name, layout, (str,)), partial(layout.row, name)
            inputs[name], targets[name] = read_equations(columns, answers, length, where, source, cut)
        else:
            texts = list(zip(*columns, strict=True)) if layout.kind == "pairs" else columns[0]
            inputs[name] = tokenise(texts, source, length, cut)
    warn_cut(layout.where, cut, length, LONGER if fitted else OWN_WORDS)
    return inputs, fitted, targets, {}


def read_questions(tables: Mapping[str, object], layout: Layout, length: int) -> tuple[dict, bool, dict, dict]:
    """Read as :func:`read_inputs`.

    A label is (first token, last token, row of the answer key), the key of all splits.
    """
    inputs, targets, contexts, answers, offsets, cut = {}, {}, [], [], [], []
    for name, table in tables.items():
        columns = [read_column(table, c, name, layout, (str,)) for c in layout.reads]
        given, where = read_column(table, layout.label, name, layout, (object,)), partial(layout.row, name)
        inputs[name], spans, places = read_spans(columns, given, length, where, layout.tokenizer, cut)
        targets[name] = np.column_stack((spans, len(answers) + np.arange(len(spans))))
        contexts, answers, offsets = contexts + columns[1], answers + given, [*offsets, places]
    lost = sum(int((t[:, 0] == IGNORED).sum()) for t in targets.values())
    warn_cut(layout.where, cut, length, f"{lost} answers are in what is cut off, and {LONGER}")
    return inputs, True, targets, answer_key(contexts, answers, np.concatenate(offsets)).pack()


PLAIN = (str, int, float)  # bool is an int


def read_column(table, column: str, split: str, layout: Layout, kinds: tuple[type, ...] = PLAIN) -> list:
    """Read a column's values; ``ValueError`` names the row of one that is null, NaN, infinite or of a wrong kind."""
    values = table.select_columns([column])[:][column]
    for i, v in enumerate(values):
        if v is None or v != v or v in (math.inf, -math.inf):
            raise ValueError(f"{layout.row(split, i)}: {column} = {v} is no value")
        if not isinstance(v, kinds):
            allowed = "text" if kinds == (str,) else "one number or word"
            why = f"{layout.row(split, i)}: {column} = {shown(v)} is a {type(v).__name__}"
            raise ValueError(f"{why}; allowed: {allowed}")
    return values


def read_labels(table, split: str, layout: Layout) -> tuple[np.ndarray, list[str]]:
    """Read class numbers int64 (N,) and names, or, for floats beside text, numbers float32 (N,) and no names."""
    values, feature = read_column(table, layout.label, split, layout), table.features[layout.label]
    names = getattr(feature, "names", None)
    if names is None and layout.reads and str(feature.dtype).startswith("float"):
        if all(v == int(v) for v in values) and split == layout.train:
            told = f"{layout.label} = {values[0]} and the like are numbers to predict, not classes, as their type is"
            warnings.warn(f"{layout.where}: {told} {feature.dtype}; classes are integers or words", stacklevel=2)
        return np.asarray(values, np.float32), []
    most = math.inf if names is None else len(names)
    wrong = (i for i, v in enumerate(values) if not isinstance(v, str) and not (0 <= v < most and v == int(v)))
    if (bad := next(wrong, None)) is not None:
        which = "no class; allowed: 0 and above, or names" if names is None else f"none of the {most} classes"
        raise ValueError(f"{layout.row(split, bad)}: {layout.label} = {values[bad]} is {which}")
    if names is not None:
        return np.asarray(values, np.int64), list(names)
    names, labels = np.unique(np.asarray(values), return_inverse=True)
    return labels.astype(np.int64), [str(n) for n in names]


def read_owners(table, split: str, layout: Layout) -> np.ndarray | None:
    """Read whose each example is, by name where numbers have names; None where no column says it."""
    if layout.owner not in table.column_names:
        return None
    if not hasattr(table.features[layout.owner], "names"):
        return np.asarray(read_column(table, layout.owner, split, layout))
    numbers, names = read_labels(table, split, replace(layout, label=layout.owner))
    return np.asarray(names)[numbers]


def _renumbered(train: Part, test: Part, names: Sequence[str], where: str) -> Part:
    """Give ``test`` the class numbers of ``train``.

    ``ValueError`` if a class has test examples and none to train on, or two classes have one name.
    """
    if bool(train.classes) != bool(test.classes):
        told = f"{where}: labels are classes in one of the splits {names[0]!r} and {names[1]!r},"
        raise ValueError(f"{told} numbers in the other")
    for part, name in zip((train, test), names, strict=True) if test.classes != train.classes else ():
        if twice := next((c for c in part.classes if part.classes.count(c) > 1), None):
            why = "and the other split has another list; allowed: one name a class"
            raise ValueError(f"{where}: two classes of split {name!r} are called {twice!r}, {why}")
    trained, tested = ([p.classes[i] for i in np.unique(p.labels)] if p.classes else [] for p in (train, test))
    if unknown := sorted(set(tested) - set(trained)):
        told = f"{where}: split {names[1]!r} has labels that {names[0]!r} has not:"
        raise ValueError(f"{told} {', '.join(unknown)[:200]}; allowed: classes with an example to train on")
    if test.classes == train.classes:
        return test
    number = {name: i for i, name in enumerate(train.classes)}
    return replace(test, labels=np.array([number[test.classes[i]] for i in test.labels]), classes=train.classes)


def hold_out_tenth(part: Part, together: Sequence | None = None) -> tuple[Part, Part]:
    """Split into (train, test): a tenth of each owner's examples tests, or of all where no owner is named.

    Examples of equal values ``together`` stay on one side: then it is a tenth of the values. Classes do not matter, so
    of a small one all examples may be on one side.
    """
    if together is not None:
        values, of = np.unique(together, return_inverse=True)
        held = numpy_generator(0, "held-out split").permutation(len(values))[of] < len(values) // 10
        return part.take(~held), part.take(held)
    held = np.zeros(len(part.labels), bool)
    groups = np.unique(part.owners, return_inverse=True)[1] if part.owners is not None else np.zeros(len(held))
    for g in np.unique(groups):
        rows = np.where(groups == g)[0]
        held[numpy_generator(0, "held-out split", client=int(g)).permutation(rows)[: len(rows) // 10]] = True
    return part.take(~held), part.take(held)


def to_tensors(train: Part, test: Part) -> dict[str, torch.Tensor]:
    """Return the arrays of both splits by name, owners numbered in the order of their names."""
    out = {"train_images": train.inputs, "train_labels": train.labels}
    out |= {"test_images": test.inputs, "test_labels": test.labels}
    ids = {name: i for i, name in enumerate(np.unique(train.owners))} if train.owners is not None else {}  # by name
    for key, part in (("owners", train), ("test_owners", test)):
        if ids and part.owners is not None:  # -1: nobody's training example is of this owner
            out[key] = np.array([ids.get(o, -1) for o in part.owners], np.int64)
    return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in out.items()}
