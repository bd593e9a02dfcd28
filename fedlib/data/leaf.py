"""LEAF's json files: ``train/*.json`` and ``test/*.json``, each with ``users``, ``num_samples`` and ``user_data``.

FEMNIST as LEAF's ``preprocess.sh`` writes it (facts 7.2): ``user_data[writer] = {"x": [784 floats in [0, 1], 1 is
white, ...], "y": [0..61, ...]}``; classes are digits, upper and lower case. Pixels are truncated to 8 bits and writers
numbered by sorted name, as in the release of ReeFL. The files are large, so their size has no limit; they are parsed as
plain json and nothing else, and what is no such file is refused by name.
"""

import json
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from .decode import TESTS, say_unread, visible_files

CLASSES = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
SIDE = 28


class Words(ValueError):
    """A set of LEAF's that holds no pixels."""


def is_leaf(path: Path) -> bool:
    """Is ``path`` a folder whose training split is made of json files?"""
    return any((path / "train").glob("*.json"))


def read_leaf(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The arrays of ``DataSet`` and the class names; ``ValueError`` names a damaged or missing file, or of words."""
    test = next((t for t in TESTS if any((path / t).glob("*.json"))), "test")
    read = {p for folder in ("train", test) for p in (path / folder).glob("*.json")}
    others = [str(p.relative_to(path)) for p in visible_files(path) if p not in read]
    say_unread(f"{path}: trained on train/*.json, tested on {test}/*.json", others)
    splits = {}
    for split, folder in (("train", "train"), ("test", test)):
        files = sorted(p for p in (path / folder).glob("*.json") if p.is_file())
        if not files:
            raise ValueError(f"{path}: no {split}/*.json; LEAF's preprocess.sh writes both splits with '-t sample'")
        splits[split] = _read_split(files)
    ids = {user: i for i, user in enumerate(sorted(splits["train"]))}
    out: dict[str, torch.Tensor] = {}
    for split, users in splits.items():
        images, labels = zip(*users.values(), strict=True)
        owners = [np.full(len(y), ids.get(user, -1), np.int64) for user, y in zip(users, labels, strict=True)]
        out[f"{split}_images"] = torch.from_numpy(np.concatenate(images))
        out[f"{split}_labels"] = torch.from_numpy(np.concatenate(labels))
        out["owners" if split == "train" else "test_owners"] = torch.from_numpy(np.concatenate(owners))
    return out, CLASSES


def _read_split(files: Iterable[Path]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 1, 28, 28) and labels (n,) per writer, sorted by name."""
    users: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file in files:
        try:
            for user, arrays in _read_file(file).items():
                if user in users:
                    raise ValueError(f"writer {user[:40]!r} is in two files")
                users[user] = arrays
        except Words as error:
            raise ValueError(f"{file}: {error}") from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # also not JSON, not UTF-8, ragged
            raise ValueError(f"{file} is damaged or no LEAF file ({error})") from error
    return dict(sorted(users.items()))


def _read_file(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        raise ValueError("expected an object with users, num_samples and user_data")
    users, counts, data = (content[k] for k in ("users", "num_samples", "user_data"))
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)):
        raise ValueError("expected lists of users and num_samples, and an object of user_data")
    if len(users) != len(counts) or len(set(users)) != len(users) or set(users) != data.keys():
        raise ValueError("users, num_samples and user_data do not name the same writers")
    return {user: _arrays(user, count, data[user]) for user, count in zip(users, counts, strict=True)}


def _arrays(user: str, count: int, data: dict) -> tuple[np.ndarray, np.ndarray]:
    who = f"writer {user[:40]!r}"
    if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
        raise ValueError(f"{who}: expected x and y")
    first = data["x"][0] if isinstance(data["x"], list) and data["x"] else None
    if isinstance(first, str) or isinstance(first, list) and first and isinstance(first[0], str | list):
        raise Words(
            f"{who} has words (Shakespeare, Sent140, Reddit) or names of pictures (CelebA), which are not read; "
            "allowed: FEMNIST's pixels, or train.parquet with columns text or image, label and client_id"
        )
    x, y = np.asarray(data["x"], np.float64), np.asarray(data["y"])
    if x.shape != (count, SIDE * SIDE) or y.shape != (count,) or count == 0:
        raise ValueError(f"{who}: shapes {x.shape} and {y.shape} are not {count} x {SIDE * SIDE} pixels and labels")
    if not (x.min() >= 0 and x.max() <= 1):  # also NaN
        raise ValueError(f"{who}: pixels outside [0, 1]")
    if y.dtype.kind != "i" or y.min() < 0 or y.max() >= len(CLASSES):
        raise ValueError(f"{who}: labels must be whole numbers in 0..{len(CLASSES) - 1}")
    return (255 * x).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y.astype(np.int64)
