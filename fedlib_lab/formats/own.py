"""Data of one's own: objects under a name that experiments store, and folders that ``save_to_disk`` wrote.

What is registered is known by its content: a stored run of other data under the same name is refused, not mistaken.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlib.core.storage import digest_tensors
from fedlib.core.validation import shown
from fedlib.data.cache import FORMAT, Read, files_digest
from fedlib.data.questions import KEYED
from fedlib.data.silence import silence_libraries
from fedlib.data.tokenizer import tokenizer_key

from .decode import OWNERS, Layout, Part, decode, train_and_test
from .images import SCALED, decode_images
from .local import check_pieces, layout_of, train_of, visible_files

Own = Callable[[str | None], tuple[dict, Read]]
TAKEN = "a datasets.Dataset or DatasetDict, a torchvision set without a transform, or a pair of arrays"


def own_set(name: str, train: object, test: object, classes: Sequence[str] | None) -> Own:
    """Build what :func:`fedlib.register_data` keeps: called with a tokenizer, it is as ``local.local_set``."""
    splits = _splits(name, train, test)
    if classes is not None and (isinstance(classes, str) or not isinstance(classes, Sequence)):
        raise ValueError(f"{name}: classes = {shown(classes)}; allowed: a list of names")
    if splits is not None:
        columns = splits[train_of(Path(name), splits)].column_names
        layout_of(Path(name), list(splits), columns, {}, None)  # refuses what names tell
        if classes is not None:
            raise ValueError(f"{name}: classes name labels of arrays, a datasets.Dataset names its own; allowed: None")
        return partial(_of_splits, name, splits, {"registered": [content_digest(t) for t in splits.values()]}, ())
    layout = Layout(name, "images", "label", test=None if test is None else "test")
    pairs = {"train": _pair(name, train)} | ({} if test is None else {"test": _pair(name, test)})
    if pictures := {s: inputs for s, (inputs, *_) in pairs.items() if isinstance(inputs, list)}:
        decoded, _ = decode_images(pictures, None, None, layout)
        pairs |= {s: (decoded[s], *pairs[s][1:]) for s in pictures}
    parts: list[Part] = []
    for inputs, labels, named in pairs.values():  # a test set without names has those of the training set
        parts.append(_part(name, inputs, labels, classes or named or (parts[0].classes if parts else None)))
    if len({p.inputs.ndim for p in parts}) > 1:
        raise ValueError(f"{name}: images in one of train and test, and token ids in the other; allowed: one kind")
    if len(shapes := {p.inputs.shape[1:] for p in parts}) > 1:
        warnings.warn(f"{name}: train and test are of unequal shapes, {sorted(shapes)}", stacklevel=3)
    tensors, names = train_and_test(parts, layout)
    decoded = {k: x.clone() for k, x in tensors.items()}, names  # whatever becomes of the arrays
    key = {"registered": digest_tensors(decoded[0], {"classes": " ".join(decoded[1])}), "format": FORMAT}
    return lambda tokenizer: (key, lambda size: (decoded, False))


def content_digest(table: Any) -> str:
    """Digest a ``Dataset``'s content and the files that its cells name: its fingerprint only says how it was made."""
    from datasets.table import embed_table_storage
    from pyarrow.ipc import new_stream

    digest = hashlib.sha256(repr(table.features).encode())
    for part in table.with_format("arrow").iter(batch_size=1000):
        sink, whole = io.BytesIO(), embed_table_storage(part).replace_schema_metadata(None)
        with new_stream(sink, whole.schema) as stream:
            stream.write_table(whole)
        digest.update(sink.getbuffer())
    return digest.hexdigest()[:16]


def add_owners(name: str, train: Any, partitioner: Any) -> Any:
    """Return the rows of ``train`` that ``partitioner`` gives to a part, with the part's number as owner."""
    if not hasattr(train, "add_column"):
        raise ValueError(f"{name}: a partitioner divides a datasets.Dataset, and this is a {type(train).__name__}")
    owners = np.full(len(train), -1)
    train = (_splits(name, train, None) or {"train": train})["train"].with_format(None)
    with silence_libraries():
        try:
            partitioner.dataset = train.add_column("its row", list(range(len(train))))
            parts = [np.ravel(partitioner.load_partition(i)["its row"]) for i in range(partitioner.num_partitions)]
        except Exception as error:  # of flwr-datasets, or of a partitioner of one's own
            raise ValueError(f"{name}: the partitioner cannot divide it: {str(error).splitlines()[0][:200]}") from error
    for part, rows in enumerate(parts):
        if rows.size and (rows.dtype.kind not in "iu" or not 0 <= rows.min() <= rows.max() < len(owners)):
            raise ValueError(f"{name}: part {part} has rows {shown(rows.tolist())}; allowed: 0 to {len(owners) - 1}")
        for row in rows.tolist():
            if owners[row] >= 0:
                raise ValueError(f"{name}: row {row} is in parts {owners[row]} and {part}; allowed: in one, once")
            owners[row] = part
    named = train.remove_columns([c for c in OWNERS if c in train.column_names])
    if len(held := np.flatnonzero(owners >= 0)) < len(owners):
        warnings.warn(f"{name}: {(owners < 0).sum()} of {len(owners)} rows are in no part and not used", stacklevel=3)
    return named.select(held).add_column(OWNERS[-1], owners[held].tolist())


def saved_set(path: Path, tokenizer: str | None) -> tuple[dict, Read] | None:
    """Read as ``local.local_set`` a folder that ``save_to_disk`` wrote; None for another folder."""
    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    from datasets import load_from_disk

    files = [p for p in visible_files(path) if p.suffix == ".arrow"]
    check_pieces(files)
    try:
        splits = _splits(str(path), load_from_disk(str(path)), None)
    except Exception as error:  # datasets raises many classes
        raise ValueError(f"{path} is no whole folder of save_to_disk: {str(error).splitlines()[0][:200]}") from error
    others = tuple(str(p.relative_to(path)) for p in visible_files(path) if p.suffix not in (".arrow", ".json"))
    return _of_splits(str(path), splits or {}, {"files": files_digest(files, path)}, others, tokenizer)


def _splits(name: str, train: Any, test: Any) -> dict | None:
    """Return the splits by name of what `datasets` made, as they would be unformatted; None of something else."""
    splits = dict(train) if isinstance(train, Mapping) else {"train": train}
    splits |= {} if test is None else {"test": test}
    if not any(type(x).__module__.startswith("datasets.") for x in splits.values()):
        return None
    from datasets import Dataset

    wrong = next((x for x in splits.values() if not isinstance(x, Dataset)), None)
    if wrong is not None or isinstance(train, Mapping) and test is not None:
        found = "a DatasetDict and a test beside it" if wrong is None else f"a {type(wrong).__name__} among its splits"
        raise ValueError(f"{name}: {found}; allowed: {TAKEN}, of one kind for train and test")
    if late := next((s for s, x in splits.items() if x.format["type"] == "custom"), None):
        why = f"{name}: split {late!r} has a transform (with_transform, set_transform), which is not applied"
        raise ValueError(f"{why}; allowed: the rows that .map(...) made, with no transform")
    return splits


def _of_splits(where: str, splits: Mapping, key: dict, unread: tuple, tokenizer: str | None) -> tuple[dict, Read]:
    layout = layout_of(Path(where), list(splits), splits[train_of(Path(where), splits)].column_names, {}, tokenizer)
    layout, plain = replace(layout, unread=unread), {s: t.with_format(None) for s, t in splits.items()}
    key = key | {"format": FORMAT} | (KEYED if layout.kind == "spans" else SCALED if layout.kind == "images" else {})
    return key | (tokenizer_key(tokenizer) if layout.reads else {}), lambda size: decode(plain, layout, size)


def _pair(name: str, given: Any) -> tuple[Any, Any, Sequence[str] | None]:
    """Return (inputs, labels, class names if any) of arrays or a torchvision set; inputs may be Pillow's images."""
    listed = all(hasattr(given, n) for n in ("__getitem__", "__len__")) and not hasattr(given, "keys")  # a table's
    if any(getattr(given, "__dict__", {}).get(n) is not None for n in ("transform", "target_transform")):
        raise ValueError(f"{name}: the {type(given).__name__} has a transform, drawn once for all; allowed: {TAKEN}")
    if listed and not isinstance(given, (tuple, list, str)):
        pairs = [given[i] for i in range(len(given))]  # images, and labels as numbers
        classes, images = getattr(given, "classes", None), [image for image, *_ in pairs]
        if not all(hasattr(i, "getpixel") for i in images):  # some are no images of Pillow's
            images = [np.asarray(i) for i in images]
            if len({i.shape for i in images}) > 1:
                raise ValueError(f"{name}: images of several sizes; as a datasets.Dataset they are brought to one")
            images = np.stack(images)
        return images, np.asarray([label for _, label, *_ in pairs]), classes
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"{name}: {shown(type(given).__name__)} is no data set; allowed: {TAKEN}")
    try:
        inputs, labels = (x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x) for x in given)
    except ValueError as error:  # rows of unequal length
        raise ValueError(f"{name}: {error}; allowed: {TAKEN}") from error
    return inputs, labels, None


def _part(name: str, inputs: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None) -> Part:
    """Build one split of arrays."""
    if not (inputs.ndim and labels.ndim == 1 and 0 < len(labels) == len(inputs) and labels.dtype.kind in "iu"):
        raise ValueError(f"{name}: labels {labels.dtype} {labels.shape}, inputs {inputs.shape}; allowed: integers (N,)")
    low, high = int(labels.min()), int(labels.max())  # of the arrays' own type one more may be 0
    if classes is None and high >= len(labels):
        why = f"{name}: label {high} would make more classes than the {len(labels)} examples"
        raise ValueError(f"{why}; allowed: classes numbered from 0, or named by classes")
    names = [str(c) for c in (range(high + 1) if classes is None else classes)]
    if low < 0 or high >= len(names):
        raise ValueError(f"{name}: labels {low} to {high}; allowed: 0 to {len(names) - 1}")
    return Part(_inputs(name, inputs), labels.astype(np.int64), None, names)


def _inputs(name: str, x: np.ndarray) -> np.ndarray:
    """Convert to images uint8 (N, C, H, W), or token ids int32 (N, T); ``ValueError`` for anything else."""
    x = x[:, None] if x.dtype == np.uint8 and x.ndim == 3 else x
    if x.dtype == np.uint8 and x.ndim == 4 and (x.shape[1] in (1, 3) or x.shape[3] in (1, 3)):
        return x if x.shape[1] in (1, 3) else x.transpose(0, 3, 1, 2)
    allowed = "uint8 images (N, H, W), (N, C, H, W) or (N, H, W, C), or integers (N, T) from 0 to 2**31 - 1, token ids"
    if x.ndim == 2 and x.size and x.dtype.kind in "iu":
        low, high = int(x.min()), int(x.max())
        if 0 <= low and high < 2**31:
            return x.astype(np.int32)
        raise ValueError(f"{name}: token ids from {low} to {high}; allowed: {allowed}")
    raise ValueError(f"{name}: inputs are {x.dtype} {x.shape}; allowed: {allowed}")
