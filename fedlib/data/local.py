"""A data set on this machine: a folder of parquet files, of images or of LEAF's json, or one parquet file.

Parquet files are named after their split (``train.parquet``, ``test-00000-of-00001.parquet``); a single file is all
training data. What they mean is told by their columns (``sets.yaml``).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from .cache import Decoded, files_digest
from .decode import SETS, Kind, Layout, decode
from .images import SCALED
from .leaf import is_leaf, read_leaf
from .questions import KEYED
from .quiet import quietly
from .speech import decode_speech
from .tokenizer import tokenizer_key

IMAGE_LABELS, OWNERS = ("label", "fine_label", "character"), ("writer_id", "speaker_id", "client_id")
TESTED_FIRST = ("test", "valid", "validation")
VALIDATED_FIRST = ("validation", "validation_matched", "valid", "test")  # GLUE's test sentences have no labels


def local_set(
    path: Path, format: int, tokenizer: str | None = None
) -> tuple[dict, Callable[[int | None], tuple[Decoded, bool]]]:
    """The cache key of a local set, and what reads it for a network of some input size (see ``decode.decode``).

    ``ValueError`` names the file that is damaged and what a set lacks.
    """
    files = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    parquet: dict[str, list[str]] = {}
    for p in files:
        if p.suffix == ".parquet":
            parquet.setdefault(p.stem.split("-")[0] if len(files) > 1 else "train", []).append(str(p))
    meant = [p for p in files if p.suffix == ".parquet"] or files
    if path.is_dir():
        check_pieces(meant)
    digest = files_digest(meant, path if path.is_dir() else path.parent)
    kind, reads, label = text_layout(digest, tuple((split, *found) for split, found in parquet.items()))

    def read(size: int | None) -> tuple[Decoded, bool]:
        if is_leaf(path):
            return read_leaf(path), False
        splits = load_splits(path, parquet)
        layout = layout_of(path, splits, kind, reads, label, parquet, tokenizer)
        if kind == "images" and layout.owner is not None and "audio" in splits["train"].column_names:
            return decode_speech(splits["train"], layout.label, layout.owner), False
        return decode(splits, layout, size)

    key = {"files": digest, "format": format} | (KEYED if kind == "spans" else SCALED if kind == "images" else {})
    key |= {"matched": True} if "validation_matched" in parquet else {}  # once read without it
    return key | (tokenizer_key(tokenizer) if reads else {}), read


def check_pieces(files: Sequence[Path]) -> None:
    """Raise ``ValueError`` if of a split in several files (``train-00000-of-00002``) one is missing."""
    pieces: dict[tuple[str, str], dict[int, Path]] = {}
    for p in files:
        if found := re.fullmatch(r"(.*)-(\d+)-of-(\d+)(-.*)?", p.stem):
            pieces.setdefault((found[1], found[3]), {})[int(found[2])] = p
    for (split, of), there in pieces.items():
        missing = next((i for i in range(int(of)) if i not in there), None)
        if missing is not None:
            other = f"{split}-{missing:0{len(of)}}-of-{of}"
            raise ValueError(f"{min(there.values())} is one of {int(of)} pieces, and {other} is not there")


@lru_cache(maxsize=64)
def text_layout(digest: str, parquet: tuple[tuple[str, ...], ...]) -> tuple[Kind, tuple[str, ...], str | None]:
    """Kind, columns that are read and label of parquet files, each split's behind its name; images where none is known.

    ``digest`` is the files', so that their headers are read once.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    names: list[str] = []
    for split, file in ((s, f) for s, *files in parquet for f in files):
        try:
            metadata = read_metadata(file)
        except (ArrowException, OSError) as error:
            raise ValueError(f"{file} is damaged or no parquet file: {_line(error)}") from error
        if metadata.num_rows == 0:
            raise ValueError(f"{file} holds no example")
        names = metadata.schema.to_arrow_schema().names if split == "train" or not names else names
    return layout_among(names)


def layout_among(columns: Sequence[str]) -> tuple[Kind, tuple[str, ...], str | None]:
    """Kind, columns that are read and label of a set with these ``columns``."""
    found = [(s["kind"], s["reads"], s["label"]) for s in SETS["columns"] if set(s["reads"]) <= set(columns)]
    return next((t for t in found if t[2] in columns), found[0] if found else ("images", (), None))


def load_splits(path: Path, parquet: Mapping[str, Sequence[str]]):
    """What `datasets` makes of the files; ``ValueError`` if there is no split to train on."""
    with quietly():
        from datasets import load_dataset

        try:
            if parquet:
                load = lambda split: load_dataset("parquet", data_files={split: list(parquet[split])}, split=split)  # noqa: E731
                splits = {s: load(s) for s in parquet}  # one by one: their columns may differ
            else:
                splits = load_dataset("imagefolder", data_dir=str(path))
        except Exception as error:  # datasets raises many classes
            file = next((f for files in parquet.values() for f in files if not _readable(f)), None)
            if file is not None:
                raise ValueError(f"{file} is damaged: its rows cannot be read") from error
            raise ValueError(
                f"experiment: dataset {str(path)!r} is unknown as parquet or image folder: {_line(error)}"
            ) from error
    if "train" not in splits:
        raise ValueError(f"{path}: no split named 'train'; found {', '.join(splits)}")
    return splits


def layout_of(
    path: Path, splits, kind: Kind, reads: tuple[str, ...], label: str | None, files, tokenizer: str | None = None
) -> Layout:
    """The layout of a local set; an image set's label and owner are found by name."""
    columns = splits["train"].column_names
    if not reads:
        label = next((c for c in IMAGE_LABELS if c in columns), "label")
    owner = next((c for c in OWNERS if c in columns), None)
    test = next((s for s in (VALIDATED_FIRST if reads else TESTED_FIRST) if s in splits), None)
    return Layout(str(path), kind, label, reads, test=test, owner=owner, files=files, tokenizer=tokenizer)


def _readable(file: str) -> bool:
    """Can every row of a parquet file be read?"""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        for _ in ParquetFile(file).iter_batches():
            pass
    except (ArrowException, OSError):
        return False
    return True


def _line(error: Exception) -> str:
    """The first line of a library's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
