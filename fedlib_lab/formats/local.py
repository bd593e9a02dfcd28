"""A data set on this machine: a folder of parquet files or of images, or one parquet file.

Parquet files are named after their split (``train.parquet``, ``test-00000-of-00001.parquet``); a single file is all
training data. What they mean is told by their columns (``sets.yaml``). Of pictures, folders at the top that are
called as splits are (``decode.TRAIN``, ``decode.TESTS``) and hold folders are the splits; without them all pictures are
training data. A picture's own folder is its class, whatever it is called.
"""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from fedlib.data.cache import FORMAT, Decoded, Read, files_digest
from fedlib.data.questions import KEYED
from fedlib.data.silence import silence_libraries
from fedlib.data.tokenizer import tokenizer_key

from .decode import LABELS, OWNERS, SETS, TESTS, TEXTS, TRAIN, Kind, Layout, choose_test_split, decode, read_labels
from .images import SCALED, encoded_images, image_column
from .speech import decode_speech

UNKNOWN = "experiment: dataset {!r} is unknown as parquet or image folder: {}"
DESCRIBED = ("metadata.csv", "metadata.jsonl")  # where `datasets` finds the columns of pictures


def local_set(path: Path, tokenizer: str | None = None) -> tuple[dict, Read]:
    """Return the cache key of a local set, and its reader for a network of some input size (``decode.decode``).

    ``ValueError`` names the file that is damaged and what a set lacks.
    """
    files = visible_files(path)
    if odd := next((p for p in files if re.search("[\ud800-\udfff]", str(p))), None):
        raise ValueError(f"{str(odd)!r}: a file's name is no UTF-8 text; allowed: another name")
    found = [p for p in files if p.suffix == ".parquet"]
    parquet: dict[str, list[str]] = {}
    for p in found:
        of = p.stem.split("-")[0]
        parquet.setdefault(of if len(found) > 1 or path != p and of.lower() in TESTS else "train", []).append(str(p))
    for split, pieces in parquet.items():
        if len(folders := sorted({str(Path(f).parent) for f in pieces})) > 1:
            raise ValueError(f"{path}: split {split!r} lies in {' and '.join(folders[:3])}; allowed: one set a folder")
    meant = found or files
    check_pieces(meant if path.is_dir() else ())
    digest = files_digest(meant, path if path.is_dir() else path.parent)
    columns = columns_of(digest, tuple((split, *found) for split, found in parquet.items()))
    kind, reads, _ = guess_layout(columns)
    layout = layout_of(path, list(parquet), columns, parquet, tokenizer) if parquet else None

    def read(size: int | None) -> tuple[Decoded, bool]:
        if layout is None and any((path / "train").glob("*.json")):
            how = "ten lines turn them into parquet, under 'LEAF' in docs/guide/data.md"
            raise ValueError(f"{path} holds json files, as LEAF writes them, which are not read; {how}")
        for split, names in ((s, [Path(f).stem for f in found]) for s, found in parquet.items()):
            if len({re.sub(r"-[0-9a-f]{16}$|\d+", "", name) for name in names}) > 1:
                warnings.warn(f"{path}: split {split!r} is all of {', '.join(names)[:200]}", stacklevel=2)
        pictures = {} if parquet or any(p.name in DESCRIBED for p in files) else picture_splits(path, files)
        splits = table_of(path, pictures) if pictures else load_splits(path, parquet, digest)
        train = splits[layout.train if layout else train_of(path, splits)]
        named = [c for c in train.column_names if c not in TEXTS]  # beside pictures
        whole = layout or layout_of(path, list(splits), named, {}, tokenizer)
        whole = replace(whole, unread=unread_files(path, files, splits.values(), pictures))
        if kind == "images" and whole.owner is not None and "audio" in train.column_names:
            choose_test_split(splits, replace(whole, tests=(), reads=("audio",)))  # says what is not read
            read_labels(train, whole.train, whole)  # refuses what is no class
            return decode_speech(train, whole.label, whole.owner, where=partial(whole.row, whole.train)), False
        return decode(splits, whole, size)

    key = {"files": digest, "format": FORMAT} | (KEYED if kind == "spans" else SCALED if kind == "images" else {})
    key |= {"matched": True} if "validation_matched" in parquet else {}  # once read without it
    return key | (tokenizer_key(tokenizer) if reads else {}), read


def visible_files(path: Path, within: tuple[Path, ...] = ()) -> list[Path]:
    """List the files of a folder, or the file; none whose name or folder within ``path`` begins with a dot.

    A link counts as what it leads to, but for one to a folder that it lies in (``within``: real folders around).
    ``ValueError`` names one that leads nowhere.
    """
    if within and path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to what is not there; allowed: files and folders, or links to them")
    if not path.is_dir():
        return [path] if path.is_file() or not within else []
    inside = () if (real := path.resolve()) in within else sorted(path.iterdir())
    return [f for p in inside if p.name[0] != "." for f in visible_files(p, (*within, real))]


def check_pieces(files: Sequence[Path]) -> None:
    """Raise ``ValueError`` if of a split in several files (``train-00000-of-00002``) one is missing."""
    pieces: dict[tuple[str, str], dict[int, Path]] = {}
    for p in files:
        if found := re.fullmatch(r"(.*)-(\d+)-of-(\d+)(-.*)?", p.stem):
            pieces.setdefault((found[1], found[3]), {})[int(found[2])] = p
    for (split, of), there in pieces.items():
        if missing := [i for i in range(int(of)) if i not in there]:
            other = f"{split}-{missing[0]:0{len(of)}}-of-{of}"
            raise ValueError(f"{min(there.values())} is one of {int(of)} pieces, and {other} is not there")


@lru_cache(maxsize=64)
def columns_of(digest: str, parquet: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return the columns of parquet files' training split, each split's behind its name; none without files.

    ``digest`` is the files', so that their headers are read once.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    names: list[str] = []
    for split, file in ((s, f) for s, *files in parquet for f in files):
        try:
            metadata = read_metadata(file)
        except (ArrowException, OSError) as error:
            raise ValueError(f"{file} is damaged or no parquet file: {_first_line(error)}") from error
        if metadata.num_rows == 0:
            raise ValueError(f"{file} holds no example")
        names = metadata.schema.to_arrow_schema().names if split.lower() in TRAIN or not names else names
    return names


def guess_layout(columns: Sequence[str]) -> tuple[Kind, tuple[str, ...], str | None]:
    """Guess kind, columns that are read, and label of a set with these ``columns``."""
    found = [(s["kind"], s["reads"], s["label"]) for s in SETS["columns"] if set(s["reads"]) <= set(columns)]
    return next((t for t in found if t[2] in columns), found[0] if found else ("images", (), None))


def picture_splits(path: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the pictures of each split within a folder; ``ValueError`` where a picture's class is not clear."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    pictures = [p.relative_to(path) for p in files if p.suffix.lower() in ImageFolder.EXTENSIONS and p != path]
    pictures.sort(key=Path.as_posix)
    if not pictures:
        other = "; other files: fedlib.register_data(name, datasets.load_dataset(...))"
        raise ValueError(UNKNOWN.format(str(path), f"it holds no picture, but {[p.name for p in files[:3]]}{other}"))
    names = sorted({p.parts[0] for p in pictures if len(p.parts) > 2 and p.parts[0].lower() in (*TRAIN, *TESTS)})
    splits = {n: [p for p in pictures if p.parts[0] == n] for n in names} or {"train": pictures}
    used = [p for found in splits.values() for p in found]
    if all(p.parent.as_posix().lower() in (".", *TRAIN, *TESTS) for p in used):
        raise ValueError(f"{path}: {used[0]} lies in no class's folder; allowed: <class>/ or <split>/<class>/")
    if other := next((p for p in used if len(p.parts) != len(used[0].parts)), None):
        raise ValueError(f"{path}: {used[0]} and {other} lie at unequal depths, so their classes are not clear")
    of: dict[tuple[str, str], Path] = {}
    for split, p in ((s, p) for s, found in splits.items() for p in found):
        if (first := of.setdefault((split, p.parent.name), p.parent)) != p.parent:
            raise ValueError(f"{path}: {first} and {p.parent} are two folders of one split for one class")
    return splits


def unread_files(path: Path, files: Sequence[Path], tables: Iterable, pictures: Mapping[str, list]) -> tuple[str, ...]:
    """List the files within ``path`` that are not read: no parquet, no ``pictures`` of a split, not named by a cell.

    Where a file of metadata says the labels, warn of folders whose names could be classes.
    """
    read = {p for found in pictures.values() for p in found}
    for table in () if pictures else (t for t in tables if image_column(t)):
        for _, cell in encoded_images(table, image_column(table)):
            if not cell or cell["bytes"] is not None:  # so are all of the table
                break
            read.add(Path(os.path.relpath(cell["path"], path)))
    others = [f.relative_to(path) for f in files if f != path]
    known = [p.name for p in others if p.name in DESCRIBED]
    folders = sorted({n for p in read if (n := p.parent.name).lower() not in ("", *TRAIN, *TESTS)} if known else ())
    if len(folders) > 1:
        told = f"{path}: labels are those of {known[0]}; not used: the folders' names"
        warnings.warn(f"{told} ({', '.join(folders)[:100]}) as classes", stacklevel=2)
    return tuple(str(p) for p in others if p not in read and p.suffix != ".parquet" and p.name not in DESCRIBED)


def table_of(path: Path, pictures: Mapping[str, Sequence[Path]]) -> dict:
    """Build the splits of a folder of pictures as `datasets` keeps them: a picture's own folder is its class."""
    from datasets import ClassLabel, Dataset, Features, Image

    names = sorted({p.parent.name for found in pictures.values() for p in found})
    number, features = {n: i for i, n in enumerate(names)}, Features(image=Image(), label=ClassLabel(names=names))
    row = lambda p: {"image": str(path / p), "label": number[p.parent.name]}  # noqa: E731
    return {s: Dataset.from_list([*map(row, found)], features) for s, found in pictures.items()}


def load_splits(path: Path, parquet: Mapping[str, Sequence[str]], digest: str):
    """Load files by `datasets`, cached by the ``digest`` of their bytes, not as it does by path and time."""
    with silence_libraries():
        from datasets import config, load_dataset
        from pyarrow.parquet import read_schema

        kept = str(Path(config.HF_DATASETS_CACHE) / digest)

        try:
            if parquet:
                load = partial(load_dataset, "parquet", split="train", cache_dir=kept)
                return {s: load(data_files=list(files)) for s, files in parquet.items()}  # their columns may differ
            return load_dataset("imagefolder", data_dir=str(path), cache_dir=kept)
        except Exception as error:  # datasets raises many classes
            if file := next((f for files in parquet.values() for f in files if not _readable(f)), None):
                raise ValueError(f"{file} is damaged: its rows cannot be read") from error
            for first, file in ((files[0], f) for files in parquet.values() for f in files):
                of, other = (sorted(f"{f.name} ({f.type})" for f in read_schema(x)) for x in (first, file))
                if of != other or len({c.split(" (")[0] for c in of}) < len(of):
                    both = f"{first} has the columns {', '.join(of)}" + f", {file} {', '.join(other)}" * (of != other)
                    raise ValueError(f"{both}; allowed: the same in all files of a split, each once") from error
            raise ValueError(UNKNOWN.format(str(path), _first_line(error))) from error


def train_of(path: Path, splits: Iterable[str]) -> str:
    """Return the name of the split to train on; ``ValueError`` if there is none."""
    if (train := next((s for t in TRAIN for s in splits if s.lower() == t), None)) is None:
        raise ValueError(f"{path}: no split named 'train'; found {', '.join(splits)}")
    return train


def layout_of(
    path: Path, splits: Sequence[str], columns: Sequence[str], files: Mapping[str, Sequence[str]], tokenizer: str | None
) -> Layout:
    """Return the layout of a set of one's own by the names of its splits and columns.

    A copy that is named as a public set is has that set's label, owner and test split. ``ValueError`` where two columns
    say whose an example is.
    """
    kind, reads, label = guess_layout(columns)
    said = SETS["public"].get(path.name, {})
    if not reads:
        label = next((c for c in (said.get("label"), *LABELS) if c in columns), "label")
    owners = [c for c in OWNERS if c in columns and said.get("owner", c) == c]
    if len(owners) > 1:
        raise ValueError(f"{path}: columns {' and '.join(owners)} all say whose an example is; allowed: one of them")
    tests = tuple(dict.fromkeys(s for t in (said.get("test"), *TESTS) for s in splits if s.lower() == t))
    train, owner = train_of(path, splits), next(iter(owners), None)
    return Layout(str(path), kind, label, reads, train, owner=owner, files=files, tokenizer=tokenizer, tests=tests)


def _readable(file: str) -> bool:
    """Return whether every row of a parquet file can be read."""
    from pyarrow.parquet import ParquetFile

    try:
        return all(batch is not None for batch in ParquetFile(file).iter_batches())
    except Exception:  # pyarrow's, or the system's
        return False


def _first_line(error: Exception) -> str:
    """Return the first line of a library's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
