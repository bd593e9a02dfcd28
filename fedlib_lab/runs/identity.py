"""What a run was trained with beyond the fields of its experiment, so that no stale or mixed result is ever returned.

A run stores the method's resolved options, its code and a backbone of one's own (``code_digest.py``), and digests of
the data set and the pre-trained weights, as decoded and as files. Looking it up compares what is cheaply known on this
machine (data and weights may be absent; equal files are equal data, and nothing is decoded); training and resuming
compare everything. What a run does not say, as runs of older versions, is not compared.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedlib.core.experiment import Experiment
from fedlib.core.paths import has_minilm, minilm_file
from fedlib.core.validation import check_known
from fedlib.data.cache import files_digest, known_digest, published_digest, source_digest
from fedlib.data.datasets import DATASETS, is_available, load_dataset, source_key
from fedlib.data.tokenizer import has_tokenizer
from fedlib.engine.federation import Federation
from fedlib.methods import METHODS, Method, build_method
from fedlib.models.maps import MapSpec
from fedlib.models.registry import OWN, SHIPPED, backbone_spec, folder_of_weights, tokenizer_of, weights_file

from ..formats.decode import SETS
from ..zoo.foreign_specs import ForeignSpec
from ..zoo.wrapped import WrappedSpec, in_eval
from .code_digest import UNVERIFIED, code_of, digest_of

KINDS = ("options", "method", "kit", "backbone", "data", "weights")  # what can differ, in the words of ``accept``
WEIGHTS_FILES = ("config.json", "*.safetensors", "*.bin", "*.index.json")  # of a model's folder
CENTRAL = "how batch norm sees the test set"
Inputs = Mapping[str, Any]  # as JSON holds them
Accept = str | Iterable[str]


class OtherInputs(ValueError):
    """A stored run was trained with another method, other data or other weights than those at hand."""

    def __init__(self, e: Experiment, path: Path, differing: Mapping[str, list[str]], rounds: int | None = None):
        what = "; ".join(text for texts in differing.values() for text in texts)
        stored = "is stored" if rounds is None else f"is stored up to round {rounds}"
        then = "take it as it is" if rounds is None else "go on from there all the same"
        words = ",".join(differing)
        found = f"{path.name} {stored} in {path.parent}, but differs from what is at hand: {what}"
        anew = "To run it anew and forget this one: again='other' in run or run_all"
        both = "to have both: another folder (folder=, FEDLIB_OUTPUTS)"
        super().__init__(f"{found}. {anew}; {both}; to {then}: accept={words!r} (FEDLIB_ACCEPT={words})")


def accepted(accept: Accept) -> frozenset[str]:
    """Return the kinds of difference that the caller, or ``$FEDLIB_ACCEPT``, takes responsibility for."""
    said = [accept] if isinstance(accept, str) or not isinstance(accept or (), Iterable) else accept or ()
    words = [w.strip() for text in (*said, os.environ.get("FEDLIB_ACCEPT", "")) for w in str(text).split(",")]
    check_known(filter(None, words), KINDS, "accept = {} is not possible")
    return frozenset(filter(None, words))


def inputs_of(f: Federation) -> dict[str, object]:
    """Return everything that ``f`` trains with, for the record."""
    e = f.experiment
    found = {"options": _options(f.method), "method": code_of(type(f.method)), "backbone": _own_backbone(e.backbone)}
    found |= {"kit": kit_rules(e), "data": f.data.digest, "source": _source(e)}
    if e.pretrained:
        found["weights"] = _weights_file_digest(e) or _weights_digest(f)
        found["weights_files"] = _weights_folder_digest(e)
    return {k: v for k, v in found.items() if v}


def kit_rules(e: Experiment) -> dict[str, int]:
    """Return the versions of the kit's own rules: of those that were once others and that concern ``e``.

    1, which is not said: a subset was balanced; crops counted the picture's pixels; batch norm saw test batches, and
    static statistics those of all pictures in their order; readers chose otherwise between splits, columns and names,
    and mean and SD were of all pictures; levels that no client has answered centrally; whose last unit ran before
    others' dropped what these drew; batch norms of wrapped nets mistook how some gradients lie.
    """
    spec = None
    with contextlib.suppress(ValueError):  # of one's own, not registered here
        spec = backbone_spec(e.backbone)
    maps = isinstance(spec, MapSpec)
    drops = isinstance(spec, ForeignSpec) and spec.as_trained and not spec.causal
    concerns = {
        "how a subset is chosen": e.subset == "proportional" and not (e.num_train is e.num_test is None),
        "how crops are counted": e.augment.startswith("crop"),
        CENTRAL: maps and e.batch_norm in ("batch", "local"),
        "how static statistics are made": maps and e.batch_norm == "static",
        "which model answers centrally": isinstance(e.budgets, tuple) and max(e.budgets, default=0) + 1 < e.num_exits,
        "how data of one's own are read": e.dataset not in (*DATASETS, *SETS["alike"]),
        "who draws what is dropped": drops or bool(e.finetune_options.get("lora_dropout")),
        "how wrapped batch norms learn": isinstance(spec, WrappedSpec)
        and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in spec.net.modules()),
    }
    return {rule: 2 for rule, it_does in concerns.items() if it_does}


def other_rules(there: Inputs, here: Inputs) -> list[str]:
    """List what of the kit has another version than ``there``: rules and classes. A version that is not said is 1.

    Empty where nothing is said at all.
    """
    rules = here.get("kit", {}) if there else {}
    found = [rule for rule, version in rules.items() if there.get("kit", {}).get(rule, 1) != version]
    for name, version in here.get("method", {}).items() if "method" in there else ():
        was = there["method"].get(name, 1)
        if not isinstance(was, str) and not isinstance(version, str) and was != version:
            found.append(f"version of {name}: {was} there, {version} here")
    return found


def older_rules(e: Experiment, record: Mapping[str, Any]) -> list[str]:
    """List what of the kit has another version than the one that made the run of ``record``."""
    return other_rules(record.get("inputs", {}), {"kit": kit_rules(e), "method": code_of(METHODS[e.method])})


def concern(rules: Iterable[str], value: str) -> bool:
    """Return whether one of ``rules`` concerns ``value``, a column of ``tables.collect``.

    A client's own test set is as it was, so ``CENTRAL`` concerns only values of the central one.
    """
    return any(value in ("accuracy", "exits", "last", "ensemble") or rule != CENTRAL for rule in rules)


def check_verified(e: Experiment, inputs: Inputs, accept: frozenset[str]) -> None:
    """Raise ``ValueError`` if a run could never be compared with what is at hand, and ``accept`` does not say so."""
    for kind, values in {"method": inputs["method"].values(), "backbone": [inputs.get("backbone")]}.items():
        why = next((v for v in values if str(v).startswith(UNVERIFIED)), None)
        if why is not None and kind not in accept:
            told = f"{e.slug} could not be told from a run of other code: {why}. Make it a constant, a function or"
            how = f"run it with accept={kind!r} (FEDLIB_ACCEPT={kind}), which finds it again too"
            raise ValueError(f"{told} a class, or {how}")


def known_inputs(e: Experiment, recorded: Collection[Inputs]) -> dict[str, object]:
    """Return what of the kinds ``recorded`` is known of ``e`` here without training; only files new here are read.

    A method that is not registered here, and data and weights that are not at hand, are left out.
    """
    found: dict[str, object] = {}
    kinds = {kind for inputs in recorded for kind in inputs}
    if e.method in METHODS and {"method", "options"} & kinds:
        found["method"] = code_of(METHODS[e.method])
        with contextlib.suppress(ValueError):  # an option that the method no longer has
            found["options"] = _options(build_method(e.method, e.options))
    if kinds:
        found["kit"] = kit_rules(e)
    if e.backbone in OWN or "backbone" not in kinds:
        found["backbone"] = _own_backbone(e.backbone)
    if "data" in kinds:
        source = _source(e)
        if source is None or any(inputs.get("source") != source for inputs in recorded if "data" in inputs):
            found["data"] = _data_digest(e)
    if e.pretrained and {"weights", "weights_files"} & kinds:
        found |= {"weights": _weights_file_digest(e), "weights_files": _weights_folder_digest(e)}
    return {k: v for k, v in found.items() if v is not None}


def differences(e: Experiment, there: Inputs, here: Inputs) -> dict[str, list[str]]:
    """Return what differs, by kind; what either does not say is not compared."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    old, new = there.get("options", {}), here.get("options", {})
    other = sorted(k for k in old.keys() & new.keys() if old[k] != new[k])
    found["options"] = [f"method option {k}: {old[k]!r} there, {new[k]!r} here" for k in other]
    if "method" in there and "method" in here:
        found["method"] = _other_code(there["method"], here["method"])
    found["kit"] = other_rules(there, here)
    if there and "backbone" in here and _differ(there.get("backbone", ""), here["backbone"]):
        found["backbone"].append(f"the backbone {e.backbone!r}, its shape or its code")
    if there.get("data") and here.get("data") and there["data"] != here["data"]:
        found["data"].append(f"the data of {e.dataset!r}: digest {there['data']} there, {here['data']} here")
    known = [k for k in ("weights", "weights_files") if there.get(k) and here.get(k)]
    if known and there[known[0]] != here[known[0]]:
        found["weights"].append(f"the pre-trained weights of {e.backbone!r}")
    return {kind: texts for kind, texts in found.items() if texts}


def _differ(there: str, here: str) -> bool:
    return there != here or here.startswith(UNVERIFIED)


def _other_code(there: Mapping[str, int | str], here: Mapping[str, int | str]) -> list[str]:
    """List code of one's own that differs, or is on one side only. The kit's versions: :func:`other_rules`."""
    texts = []
    for name in sorted(there.keys() | here.keys()):
        a, b = there.get(name), here.get(name)
        if isinstance(a, str) and isinstance(b, str):
            why = f" ({b})" if b.startswith(UNVERIFIED) else ""
            texts += [f"source of class {name}, or what it reads{why}"] if _differ(a, b) else []
        elif isinstance(a, str) or isinstance(b, str):
            texts.append(f"{name}: your own {'there, not here' if isinstance(a, str) else 'here, not there'}")
    return texts


def _options(method: Method) -> dict[str, object]:
    """Return all fields of the method as JSON gives them back; of a value that JSON cannot hold, its type."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return json.loads(json.dumps(values, default=lambda value: type(value).__name__))


def _own_backbone(name: str) -> str:
    """Return the digest of a backbone of one's own: its shape, code and weights; "" of the kit's and timm's.

    A name that was the kit's and is timm's now says so: what is stored under it without this word is the former. So
    does a net that its owner froze in part: a run that is stored without this word trained all of it.
    """
    spec = OWN.get(name)
    if spec is None and name == "resnet18":
        return "timm's"
    if spec is None or spec == SHIPPED.get(name):
        return ""
    digest = digest_of(dataclasses.replace(spec, source=None) if isinstance(spec, ForeignSpec) else spec)
    if isinstance(spec, WrappedSpec) and (in_eval(spec.net) or not all(p.requires_grad for p in spec.net.parameters())):
        return f"{digest}, as frozen"
    return digest


def _key(e: Experiment) -> dict | None:
    """Return what ``e``'s data are decoded from; None where that is not at hand, or damaged."""
    tokenizer = tokenizer_of(e.backbone)
    try:
        return source_key(e.dataset, tokenizer) if tokenizer is None or has_tokenizer(tokenizer) else None
    except (ImportError, OSError, ValueError):  # text without a tokenizer; damaged files
        return None


def _source(e: Experiment) -> str | None:
    """Return the digest of the files that ``e``'s data are decoded from; None if these are not at hand, or unknown."""
    key = _key(e)
    return source_digest(key) if key is not None and "hub" not in key else None


def _data_digest(e: Experiment) -> str | None:
    """Return the digest of ``e``'s data set as it is now; None where it is not at hand, or cannot be read."""
    key = _key(e)
    if key is None or (known := known_digest(key)) is not None:
        return known if key else None
    try:
        size, tokenizer = backbone_spec(e.backbone).input_shape[-1], tokenizer_of(e.backbone)
        known = known_digest(key, size) or published_digest(key, size)
        return known or _decoded_digest(e.dataset, size, tokenizer, json.dumps(key))
    except (ImportError, ValueError):
        return None


@lru_cache(maxsize=32)
def _decoded_digest(name: str, size: int, tokenizer: str | None, key: str) -> str | None:
    return load_dataset(name, size=size, tokenizer=tokenizer).digest if is_available(name, tokenizer) else None


def _weights_file_digest(e: Experiment) -> str | None:
    """Return the digest of the file that ``e``'s backbone is loaded from; None where it is unknown without loading."""
    file = weights_file(e.backbone)
    if file is None and e.backbone.startswith("minilm") and has_minilm():
        file = minilm_file("model.safetensors")
    return _file_digest(file, files_digest([file], file.parent)) if file and file.is_file() else None


def _weights_folder_digest(e: Experiment) -> str | None:
    """Return the digest of the files of the folder that ``e``'s backbone is loaded from; None if there is none."""
    folder = folder_of_weights(e.backbone)
    return folder and files_digest(sorted(p for x in WEIGHTS_FILES for p in folder.glob(x)), folder)


@lru_cache(maxsize=32)
def _file_digest(file: Path, key: str) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:16]


def _weights_digest(f: Federation) -> str:
    """Return the digest of the backbone's tensors before round 1, whatever they are called."""
    tensors = {**f.frozen, **f.server.params}
    infos = {n: f.setting.infos[n] for n in tensors if n in f.setting.infos}  # not a method's own copies
    drawn = {f"backbone.{n}" for n in f.model.backbone.drawn}
    mine = (tensors[n] for n, i in infos.items() if i.kind == "backbone" and n not in drawn)
    data = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in mine)
    return hashlib.sha256("".join(sorted(hashlib.sha256(d).hexdigest() for d in data)).encode()).hexdigest()[:16]
