"""Readers of data: public sets by name, folders and files, and what a user registers, found in this order.

A set of one's own by :func:`register_data`; a folder ``$FEDLIB_DATA/<name>``, or a path; a public one of ``sets.yaml``.
Read next: ``decode.py`` (splits as arrays), ``local.py``.
"""

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedlib.core.paths import named_folder
from fedlib.core.validation import shown
from fedlib.data.cache import FORMAT, Decoded, Read
from fedlib.data.questions import KEYED
from fedlib.data.silence import load_public
from fedlib.data.tokenizer import has_tokenizer, tokenizer_key

from .decode import SETS, Layout, decode
from .docstrings import docstrings_key, read_docstrings
from .local import local_set
from .own import Own, add_owners, own_set, saved_set
from .speech import read_speech_commands

HUB = {name: Layout(**said) for name, said in SETS["public"].items()}
BY_ID = {one.where: name for name, one in HUB.items() if [x.where for x in HUB.values()].count(one.where) == 1}
NAMES = (*HUB, "speech_commands", "docstrings")
TEXTS = ("docstrings", *(name for name, source in HUB.items() if source.reads))
OWN_DATA: dict[str, Own] = {}  # of one's own, by the name that it was given


def register_data(
    name: str, train: object, test: object = None, classes: Sequence[str] | None = None, partitioner: object = None
) -> str:
    """Let experiments of this process say ``dataset = name`` and mean ``train`` and ``test``; returns ``name``.

    Each may be a ``datasets.Dataset`` (columns as in a parquet file: docs/guide/data.md), a set of torchvision's
    without a transform, or arrays (inputs, labels): uint8 images (N, H, W), (N, C, H, W) or (N, H, W, C), or token ids
    (N, T), and labels (N,), named by ``classes``. ``train`` may be a ``DatasetDict``. Without ``test`` a tenth is held
    out. A ``partitioner`` of flwr-datasets divides ``train``, a ``Dataset``: its parts are the owners, so with
    ``partition = "natural"`` the clients. ``ValueError`` for anything else, and for a name of the kit's or a path's.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,60}", name) or name in ("mnist", *NAMES):
        raise ValueError(f"register_data: name = {shown(name)} is the kit's, or no word; allowed: letters, digits, _")
    train = add_owners(name, train, partitioner) if partitioner is not None else train
    OWN_DATA[name] = own_set(name, train, test, classes)
    if (folder := _local_copy(name)) is not None:
        warnings.warn(f"{name!r} is what is registered here; not used: {folder}", stacklevel=2)
    return name


def find(name: str, tokenizer: str | None) -> tuple[dict, Read] | None:
    """Return the cache key of ``name`` and its reader for a network of some input size (``decode.decode``), or None."""
    if name in OWN_DATA:
        return OWN_DATA[name](tokenizer)
    if (local := _local_copy(name)) is not None:
        return saved_set(local, tokenizer) or local_set(local, tokenizer)
    name = BY_ID.get(name, name)
    if name == "speech_commands":
        return {"hub": "speech_commands v0.02", "format": FORMAT}, lambda size: (read_speech_commands(), False)
    if name == "docstrings":
        return docstrings_key(tokenizer), lambda size: (read_docstrings(tokenizer, size), tokenizer is not None)
    return (_hub_key(HUB[name], tokenizer), partial(_read_hub, name, tokenizer)) if name in HUB else None


def at_hand(name: str, tokenizer: str | None) -> bool | None:
    """Return whether ``name`` can be read without a download; None: not known here."""
    if BY_ID.get(name, name) in TEXTS and not has_tokenizer(tokenizer):  # text is nothing without a tokenizer
        return False
    return True if name in ("docstrings", *OWN_DATA) or _local_copy(name) is not None else None


def _local_copy(name: str) -> Path | None:
    if (data := named_folder("FEDLIB_DATA")) is not None and not data.exists():
        warnings.warn(f"FEDLIB_DATA = {str(data)!r} is not there, so nothing is read from it", stacklevel=2)
    for n in (name, BY_ID.get(name, name)):  # under an id of the hub, or the name of the set that it is
        inside = Path(n).parts and ".." not in Path(n).parts  # $FEDLIB_DATA itself, or above it, is no set
        if inside and data is not None and os.path.exists(data / n):
            return data / n
    path = Path(n).expanduser()
    return path if os.sep in n and os.path.exists(path) else None  # False too for names too long for a path


def _hub_key(layout: Layout, tokenizer: str | None = None) -> dict:
    key = {"hub": layout.where, "label": layout.label, "format": FORMAT}
    key |= ({"config": layout.config} if layout.config else {}) | (KEYED if layout.kind == "spans" else {})
    return key | (tokenizer_key(tokenizer) if layout.reads else {})


def _read_hub(name: str, tokenizer: str | None, size: int | None) -> tuple[Decoded, bool]:
    layout, otherwise = replace(HUB[name], tokenizer=tokenizer), "connect once, or pass the path of a local copy"
    config = [layout.config] if layout.config else []
    return decode(load_public(f"{name!r} ({layout.where})", otherwise, layout.where, *config), layout, size)
