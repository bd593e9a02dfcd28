"""``docstrings``: real sentences from installed packages, for smoke runs and tests where no text set is at hand.

Its examples differ from one installation to the next, and no result on it is worth reporting.
"""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from fedlib.core.rng import numpy_generator
from fedlib.data.tokenizer import LENGTH, tokenise, tokenizer_key

LIBRARIES = ("numpy", "matplotlib", "pandas")  # the classes of ``docstrings``
DOCSTRINGS = 300  # of each library; a sixth is the test set
FILES = 6  # of each library, the largest


def docstrings_key(source: str | None = None) -> dict:
    key = {"docstrings": [f"{x} {version(x)}" for x in LIBRARIES], "per_library": DOCSTRINGS, "files": FILES}
    return key | tokenizer_key(source)


def read_docstrings(source: str | None = None, size: int | None = None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Read sentences labelled by library: 250 train and 50 test first sentences of docstrings a library.

    The sources are parsed, not imported. A sentence that several functions or libraries have counts once. Of a
    tokenizer of one's own (``source``) rows are of the network's ``size``.
    """
    length = LENGTH if source is None else size or LENGTH
    seen: set[str] = set()
    sentences, labels, test = [], [], []
    for label, library in enumerate(LIBRARIES):
        found = sorted(set(_summaries(library)) - seen)
        seen |= set(found)
        order = numpy_generator(0, "docstrings", client=label).permutation(len(found))[:DOCSTRINGS]
        sentences += [found[i] for i in order]
        labels += [label] * len(order)
        test += [rank < len(order) // 6 for rank in range(len(order))]
    ids, labels, test = torch.from_numpy(tokenise(sentences, source, length)), torch.tensor(labels), torch.tensor(test)
    tensors = {"train_images": ids[~test], "train_labels": labels[~test], "test_images": ids[test]}
    return tensors | {"test_labels": labels[test]}, list(LIBRARIES)


def _summaries(library: str) -> Iterator[str]:
    """Yield the first paragraphs of the docstrings in the library's largest files, without tests."""
    folder = Path(find_spec(library).submodule_search_locations[0])
    files = [p for p in folder.rglob("*.py") if not {"tests", "testing", "_vendored"} & set(p.parts)]
    for file in sorted(files, key=lambda p: (-p.stat().st_size, p.as_posix()))[:FILES]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                summary = " ".join(text.split("\n\n")[0].split())
                if len(summary.split()) >= 4:
                    yield summary
