"""Text as token ids: sentences cut by MiniLM's WordPiece tokenizer into int32 rows of one length, padded with zeros.

SST-2 and AG News are read by ``decode.py`` like any other set, with token ids in the place of pixels. More than one
text a row: ``pairs.py``, ``spans.py``, ``equations.py``. ``docstrings`` is for smoke runs and tests where none of them
is at hand: real sentences from installed packages, so its examples differ from one installation to the next, and no
result on it is worth reporting.
"""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ..core.paths import minilm_file
from ..core.rng import numpy_generator

LENGTH = 64  # tokens, [CLS] and [SEP] included; longer sentences are cut (SST-2: 1 in 13,000, AG News: 1 in 15)
LIBRARIES = ("numpy", "matplotlib", "pandas")  # the classes of ``docstrings``
DOCSTRINGS = 300  # of each library; a sixth is the test set
FILES = 6  # of each library, the largest


def wordpiece(length: int | None):
    """MiniLM's tokenizer; what it encodes is cut and padded to ``length`` tokens, or neither."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm_file("tokenizer.json")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if length is not None:
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
    return tokenizer


def tokenise(sentences: Sequence[str]) -> np.ndarray:
    """Token ids int32 (N, LENGTH): [CLS], word pieces, [SEP], zeros."""
    encoded = wordpiece(LENGTH).encode_batch(list(sentences))
    return np.array([e.ids for e in encoded], np.int32).reshape(-1, LENGTH)


def tokenizer_key() -> dict:
    """What token ids depend on besides the sentences, for the cache."""
    digest = hashlib.sha256(minilm_file("tokenizer.json").read_bytes()).hexdigest()[:16]
    return {"tokenizer": digest, "length": LENGTH}


def docstrings_key() -> dict:
    return {
        "docstrings": [f"{x} {version(x)}" for x in LIBRARIES],
        "per_library": DOCSTRINGS,
        "files": FILES,
    } | tokenizer_key()


def read_docstrings() -> tuple[dict[str, torch.Tensor], list[str]]:
    """Which library does the first sentence of a function's docstring come from? 250 train and 50 test a library.

    The sources are parsed, not imported. A sentence that several functions or libraries have counts once.
    """
    seen: set[str] = set()
    sentences, labels, test = [], [], []
    for label, library in enumerate(LIBRARIES):
        found = sorted(set(_summaries(library)) - seen)
        seen |= set(found)
        order = numpy_generator(0, "docstrings", client=label).permutation(len(found))[:DOCSTRINGS]
        sentences += [found[i] for i in order]
        labels += [label] * len(order)
        test += [rank < len(order) // 6 for rank in range(len(order))]
    ids, labels, test = torch.from_numpy(tokenise(sentences)), torch.tensor(labels), torch.tensor(test)
    tensors = {"train_images": ids[~test], "train_labels": labels[~test], "test_images": ids[test]}
    return tensors | {"test_labels": labels[test]}, list(LIBRARIES)


def _summaries(library: str) -> Iterator[str]:
    """First paragraphs of the docstrings in the library's largest files, without tests."""
    folder = Path(find_spec(library).submodule_search_locations[0])
    files = [p for p in folder.rglob("*.py") if not {"tests", "testing", "_vendored"} & set(p.parts)]
    for file in sorted(files, key=lambda p: (-p.stat().st_size, p.as_posix()))[:FILES]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                summary = " ".join(text.split("\n\n")[0].split())
                if len(summary.split()) >= 4:
                    yield summary
