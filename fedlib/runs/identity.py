"""What a run was trained with beyond the fields of its experiment, so that no stale or mixed result is ever returned.

A run stores the method's resolved options, its code (``sources.py``), and digests of the data set and the pre-trained
weights. Looking it up compares what is cheaply known on this machine (data and weights may be absent); training and
resuming compare everything. What a run does not say, as runs of older versions, is not compared.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from ..core.experiment import Experiment
from ..core.paths import has_minilm, minilm_file
from ..core.validation import did_you_mean
from ..data.cache import known_digest
from ..data.datasets import is_available, load_dataset, source_key
from ..data.tokenizer import has_words
from ..engine.federation import Federation
from ..methods import METHODS, Method, build_method
from ..models.registry import backbone_spec, tokenizer_of, weights_file
from .sources import code_of

KINDS = ("options", "method", "data", "weights")  # what can differ, in the words of ``accept``
Inputs = Mapping[str, object]
Accept = str | Iterable[str]


class OtherInputs(ValueError):
    """A stored run was trained with another method, other data or other weights than those at hand."""

    def __init__(self, e: Experiment, path: Path, differing: Mapping[str, list[str]], rounds: int | None = None):
        what = "; ".join(text for texts in differing.values() for text in texts)
        stored = "is stored" if rounds is None else f"is stored up to round {rounds}"
        then = "take it as it is" if rounds is None else "go on from there all the same"
        words = ",".join(differing)
        super().__init__(
            f"{e.slug} {stored} in {path.parent}, but differs from what is at hand: {what}. To run it anew, delete it "
            "or choose another folder (folder=..., FEDLIB_OUTPUTS); "
            f"to {then}, accept={words!r} (FEDLIB_ACCEPT={words})"
        )


def accepted(accept: Accept) -> frozenset[str]:
    """The kinds of difference that the caller, or ``$FEDLIB_ACCEPT``, takes responsibility for."""
    said = [accept] if isinstance(accept, str) else accept or ()
    words = [w.strip() for text in (*said, os.environ.get("FEDLIB_ACCEPT", "")) for w in str(text).split(",")]
    for w in filter(None, words):
        if w not in KINDS:
            raise ValueError(f"accept = {w!r} is not possible{did_you_mean(w, KINDS)}")
    return frozenset(filter(None, words))


def inputs_of(f: Federation) -> dict[str, object]:
    """Everything that ``f`` trains with, for the record."""
    found = {"options": _options(f.method), "method": code_of(type(f.method)), "data": f.data.digest}
    if f.experiment.pretrained:
        found["weights"] = _weights_file_digest(f.experiment) or _weights_digest(f)
    return {k: v for k, v in found.items() if v}


def known_inputs(e: Experiment, recorded: Collection[str]) -> dict[str, object]:
    """What of the ``recorded`` kinds is known of ``e`` here without training: only data that are new here are read.

    A method that is not registered here, and data and weights that are not at hand, are left out.
    """
    found: dict[str, object] = {}
    if e.method in METHODS and {"method", "options"} & set(recorded):
        found["method"] = code_of(METHODS[e.method])
        try:
            found["options"] = _options(build_method(e.method, e.options))
        except ValueError:  # an option that the method no longer has
            pass
    if "data" in recorded:
        found["data"] = _data_digest(e)
    if "weights" in recorded and e.pretrained:
        found["weights"] = _weights_file_digest(e)
    return {k: v for k, v in found.items() if v}


def differences(e: Experiment, there: Inputs, here: Inputs) -> dict[str, list[str]]:
    """What differs, by kind; what either does not say is not compared."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    old, new = there.get("options", {}), here.get("options", {})
    for k in sorted(old.keys() & new.keys()):
        if old[k] != new[k]:
            found["options"].append(f"method option {k}: {old[k]!r} there, {new[k]!r} here")
    if "method" in there and "method" in here:
        found["method"] = _other_code(there["method"], here["method"])
    if there.get("data") and here.get("data") and there["data"] != here["data"]:
        found["data"].append(f"the data of {e.dataset!r}: digest {there['data']} there, {here['data']} here")
    if there.get("weights") and here.get("weights") and there["weights"] != here["weights"]:
        found["weights"].append(f"the pre-trained weights of {e.backbone!r}")
    return {kind: texts for kind, texts in found.items() if texts}


def _other_code(there: Mapping[str, int | str], here: Mapping[str, int | str]) -> list[str]:
    """A version that is not said is 1; a class of one's own must be on both sides."""
    texts = []
    for name in sorted(there.keys() | here.keys()):
        a, b = there.get(name), here.get(name)
        if isinstance(a, str) and isinstance(b, str):
            texts += [f"source of class {name}"] if a != b else []
        elif isinstance(a, str) or isinstance(b, str):
            texts.append(f"class {name}: {'your own' if isinstance(a, str) else 'none of your own'} there, not here")
        elif (a or 1) != (b or 1) and name in here:
            texts.append(f"version of {name}: {a or 1} there, {b} here")
    return texts


def _options(method: Method) -> dict[str, object]:
    """All fields of the method as JSON gives them back; of a value that JSON cannot hold, its type."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return json.loads(json.dumps(values, default=lambda value: type(value).__name__))


def _data_digest(e: Experiment) -> str | None:
    """The digest of ``e``'s data set as it is now; None where it is not at hand, or cannot be read."""
    tokenizer = tokenizer_of(e.backbone)
    if tokenizer is not None and not has_words(tokenizer):
        return None
    try:
        key = source_key(e.dataset, tokenizer)
        if key is None or (known := known_digest(key)) is not None:
            return key and known
        size = backbone_spec(e.backbone).input_shape[-1]
        return known_digest(key, size) or _decoded_digest(e.dataset, size, tokenizer, json.dumps(key))
    except (ImportError, ValueError):  # text without a tokenizer; damaged files
        return None


@lru_cache(maxsize=32)
def _decoded_digest(name: str, size: int, tokenizer: str | None, key: str) -> str | None:
    return load_dataset(name, size=size, tokenizer=tokenizer).digest if is_available(name, tokenizer) else None


def _weights_file_digest(e: Experiment) -> str | None:
    """The digest of the file that ``e``'s backbone is loaded from, where that is known without loading it."""
    file = weights_file(e.backbone)
    if file is None and e.backbone.startswith("minilm") and has_minilm():
        file = minilm_file("model.safetensors")
    if file is None or not file.is_file():
        return None
    status = file.stat()
    return _file_digest(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _file_digest(file: Path, size: int, time: int) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:16]


def _weights_digest(f: Federation) -> str:
    """The digest of the backbone's tensors before round 1, whatever they are called."""
    tensors = {**f.frozen, **f.server.params}
    infos = {n: f.setting.infos[n] for n in tensors if n in f.setting.infos}  # not a method's own copies
    drawn = {f"backbone.{n}" for n in f.model.backbone.drawn}
    mine = (tensors[n] for n, i in infos.items() if i.kind == "backbone" and n not in drawn)
    data = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in mine)
    each = sorted(hashlib.sha256(d).hexdigest() for d in data)
    return hashlib.sha256("".join(each).encode()).hexdigest()[:16]
