"""Data of one's own: objects under a name that experiments store, and folders that ``save_to_disk`` wrote.

What is registered is known by its content: a stored run of other data under the same name is refused, not mistaken.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.storage import digest_tensors
from ..core.validation import shown
from .cache import Decoded, files_digest
from .decode import Layout, Part, decode, divide
from .images import SCALED
from .local import OWNERS, check_pieces, layout_among, layout_of
from .questions import KEYED
from .quiet import quietly
from .tokenizer import tokenizer_key

Read = Callable[[int | None], tuple[Decoded, bool]]  # as ``decode.decode``, for a network of some input size
Splits = Mapping[str, Any]  # of ``datasets.Dataset``
Own = Callable[[int, str | None], tuple[dict, Read]]
TAKEN = "a datasets.Dataset or DatasetDict, a torchvision set without a transform, or a pair of arrays"


def own_set(name: str, train: object, test: object, classes: Sequence[str] | None) -> Own:
    """What :func:`fedlib.register_data` keeps: called with format and tokenizer, it is as ``local.local_set``."""
    splits = _splits(train, test)
    if splits is not None:
        return partial(_of_splits, name, splits, {"registered": [t._fingerprint for t in splits.values()]})
    parts = [_part(name, x, classes) for x in ([train] if test is None else [train, test])]
    decoded = divide(parts, Layout(name, "images", "label", test=None if test is None else "test"))
    key = {"registered": digest_tensors(decoded[0], {"classes": " ".join(decoded[1])})}
    return lambda format, tokenizer: (key | {"format": format}, lambda size: (decoded, False))


def divided(name: str, train: Any, partitioner: Any) -> Any:
    """What of ``train`` is in a part of ``partitioner``, with the part's number in the column of owners."""
    if not hasattr(train, "add_column"):
        raise ValueError(f"{name}: a partitioner divides a datasets.Dataset, and this is a {type(train).__name__}")
    owners = np.full(len(train), -1)
    with quietly():
        try:
            partitioner.dataset = train.add_column("its row", list(range(len(train))))
            for part in range(partitioner.num_partitions):
                owners[partitioner.load_partition(part)["its row"]] = part
        except Exception as error:  # of flwr-datasets, or of a partitioner of one's own
            raise ValueError(f"{name}: the partitioner cannot divide it: {str(error).splitlines()[0][:200]}") from error
    named = train.remove_columns([c for c in OWNERS if c in train.column_names])
    held = np.flatnonzero(owners >= 0)
    return named.select(held).add_column(OWNERS[-1], owners[held].tolist())


def saved_set(path: Path, format: int, tokenizer: str | None) -> tuple[dict, Read] | None:
    """As ``local.local_set``, of a folder that ``save_to_disk`` wrote; None of another."""
    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    from datasets import load_from_disk

    files = sorted(path.rglob("*.arrow"))
    check_pieces(files)
    try:
        splits = _splits(load_from_disk(str(path)), None)
    except Exception as error:  # datasets raises many classes
        raise ValueError(f"{path} is no whole folder of save_to_disk: {str(error).splitlines()[0][:200]}") from error
    return _of_splits(str(path), splits or {}, {"files": files_digest(files, path)}, format, tokenizer)


def _splits(train: Any, test: Any) -> dict | None:
    """The splits by name of what `datasets` made; None of something else."""
    if not type(train).__module__.startswith("datasets."):
        return None
    if not isinstance(train, Mapping):
        return {"train": train} | ({"test": test} if test is not None else {})
    if "train" not in train:
        raise ValueError(f"no split named 'train'; found {', '.join(train)}")
    return dict(train)


def _of_splits(
    where: str, splits: Splits, key: dict, format: int, tokenizer: str | None
) -> tuple[dict, Read]:  # fmt: skip
    kind, reads, label = layout_among(splits["train"].column_names)
    layout = layout_of(Path(where), splits, kind, reads, label, {}, tokenizer)
    key = key | {"format": format} | (KEYED if kind == "spans" else SCALED if kind == "images" else {})
    return key | (tokenizer_key(tokenizer) if reads else {}), lambda size: decode(splits, layout, size)


def _part(name: str, given: Any, classes: Sequence[str] | None) -> Part:
    """One split of arrays, or of a set of torchvision's."""
    if not isinstance(given, (tuple, list, str)) and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        pairs = [given[i] for i in range(len(given))]  # images, and labels as numbers
        classes = classes or getattr(given, "classes", None)
        images = [np.asarray(image) for image, *_ in pairs]
        if len({i.shape for i in images}) > 1:
            raise ValueError(f"{name}: images of several sizes; as a datasets.Dataset they are brought to one")
        given = np.stack(images), np.asarray([label for _, label, *_ in pairs])
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"{name}: {shown(type(given).__name__)} is no data set; allowed: {TAKEN}")
    inputs, labels = (x.numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in given)
    if (
        not inputs.ndim
        or labels.ndim != 1
        or len(inputs) != len(labels)
        or labels.dtype.kind not in "iu"
        or not len(labels)
    ):
        raise ValueError(f"{name}: labels {labels.dtype} {labels.shape}, inputs {inputs.shape}; allowed: integers (N,)")
    names = list(map(str, classes)) if classes is not None else [str(c) for c in range(labels.max() + 1)]
    if labels.min() < 0 or labels.max() >= len(names):
        raise ValueError(f"{name}: labels {labels.min()} to {labels.max()}; allowed: 0 to {len(names) - 1}")
    return Part(_inputs(name, inputs), labels.astype(np.int64), None, names)


def _inputs(name: str, x: np.ndarray) -> np.ndarray:
    """Images as uint8 (N, C, H, W), or token ids as int32 (N, T)."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and (x.shape[1] in (1, 3) or x.shape[3] in (1, 3)):
        return x if x.shape[1] in (1, 3) else x.transpose(0, 3, 1, 2)
    if x.ndim == 2 and x.dtype.kind in "iu":
        return x.astype(np.int32)
    allowed = "uint8 images (N, H, W), (N, C, H, W) or (N, H, W, C), or integers (N, T), token ids"
    raise ValueError(f"{name}: inputs are {x.dtype} {x.shape}; allowed: {allowed}")
