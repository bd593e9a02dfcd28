"""The YAML files under ``params/``: read strictly, found by paper, and put over one another.

``params/profiles/<profile>.yaml`` says only how big, ``params/<paper>/profiles/<profile>.yaml`` on which data and with
which backbone. A paper whose ``base.yaml`` ``extends`` another builds on that one's base, methods, columns and
profiles. Read next: ``params.py``.
"""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.paths import params_dir
from fedlib.core.validation import check_known, shown

MAX_BYTES = 2**20  # of a params file
SIZES = {"seeds", "num_train", "num_test", "num_clients", "clients_per_round", "rounds", "evaluate_every"}
GRID_KEYS = {"seeds", "fallback"}  # of a profile: which cells, not what a cell is
NO_GRIDS = {"base", "methods", "columns", "claims", "others", "predictions", "devices", "headline"}


def load_yaml(path: Path) -> dict:
    """Read a mapping with YAML's safe loader: no object tags, no key given twice, no file over a mebibyte.

    Scalars are YAML 1.2's: ``010`` is ten, ``1e-3`` a number, ``1:30``, ``on`` and dates are text.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path}: {path.stat().st_size} bytes exceed the {MAX_BYTES} of a params file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"no such params file: {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not plain YAML: {error}") from error
    value = {} if (said := parse_yaml(text, path)) is None else said
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a mapping of names to values, got {type(value).__name__}")
    return value


def parse_yaml(text: str, where: object) -> Any:
    """Return what the YAML ``text`` says; ``ValueError`` begins with ``where``."""
    from yaml import YAMLError

    try:
        return copy.deepcopy(_parsed(text))
    except (YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: not plain YAML: {error}") from error


@lru_cache(maxsize=256)
def _parsed(text: str) -> object:
    """Return what ``text`` says, cached: a grid reads the same few files once for each of its tables."""
    import yaml

    return yaml.load(text, _strict_loader())


SCALARS = {  # of YAML 1.2's core schema, by tag; what matches none is text
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


@cache
def _strict_loader() -> type:
    """Make YAML's safe loader strict: it would let the last of equal keys win and aliases grow, and read YAML 1.1."""
    import yaml

    class Strict(yaml.SafeLoader):
        yaml_implicit_resolvers = {}

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            for key, count in Counter(k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode)).items():
                if count > 1:
                    raise yaml.MarkedYAMLError("a mapping", node.start_mark, f"key {key!r} is given twice")
            return node

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                told = "aliases are not used: write it out"
                raise yaml.MarkedYAMLError("an alias", self.peek_event().start_mark, told)
            return super().compose_node(parent, index)

    for tag, pattern in SCALARS.items():
        Strict.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), None)

    def integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
        text = loader.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)

    Strict.add_constructor("tag:yaml.org,2002:int", integer)
    return Strict


def papers() -> list[str]:
    """List the folders of ``params/`` that hold a paper's files (or an extension's)."""
    return sorted(p.name for p in params_dir().iterdir() if (p / "base.yaml").is_file())


def grids(paper: str) -> list[str]:
    """List the tables of ``paper``: its params files that describe a grid."""
    return sorted(p.stem for p in paper_dir(paper).glob("*.yaml") if p.stem not in NO_GRIDS)


def load_profile(profile: str, paper: str | None = None) -> dict:
    """Load the profile's sizes, then ``paper``'s own choices at it; ``ValueError`` names an unknown profile or key."""
    check_known([profile], profiles(), "profile = {} is unknown")
    layers = [load_checked(params_dir() / "profiles" / f"{profile}.yaml", SIZES)]
    for folder in _lineage(paper) if paper is not None else []:
        for path in sorted((folder / "profiles").glob("*.yaml")):
            check_known([path.stem], profiles(), f"{path}: no profile has this name")
            if path.stem == profile:
                layers.append(load_checked(path, field_names() | GRID_KEYS))
    return merge(*layers)


def profiles() -> list[str]:
    return sorted(p.stem for p in (params_dir() / "profiles").glob("*.yaml"))


def field_names() -> set[str]:
    return {f.name for f in fields(Experiment)}


def load_checked(path: Path, allowed: set[str]) -> dict:
    """Load the mapping in ``path``; ``ValueError`` names a key that is not among ``allowed``."""
    values = load_yaml(path)
    check_known(values, allowed, f"{path}: unknown key {{}}")
    return values


def paper_dir(paper: str) -> Path:
    """Return the folder of the paper's params; ``ValueError`` with the known papers if there is none of that name."""
    check_known([paper], papers(), "paper = {} is unknown")
    return params_dir() / paper


def _lineage(paper: str, below: tuple[str, ...] = ()) -> list[Path]:
    """List the folders that make up ``paper``, those that it extends first."""
    folder = paper_dir(paper)
    if (other := load_yaml(folder / "base.yaml").get("extends")) is None:
        return [folder]
    if other in (*below, paper):
        raise ValueError(f"{folder / 'base.yaml'}: extends = {shown(other)}: papers extend each other in a circle")
    return [*_lineage(other, (*below, paper)), folder]


def load_layered(paper: str, name: str) -> dict:
    """Load ``<name>.yaml`` of the papers that make up ``paper``, later over earlier; {} if none has one."""
    paths = [folder / f"{name}.yaml" for folder in _lineage(paper)]
    return merge(*(load_yaml(path) for path in paths if path.is_file()))


def merge(*layers: Mapping[str, Any]) -> dict:
    """Merge layers, of which later ones win; mappings (``options``, ``finetune_options``) are merged key by key."""
    out: dict = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = {**out[key], **value} if both else value
    return out


def nested(values: Mapping[str, Any]) -> dict:
    """Return ``{"options.zeta": 0.5}`` as ``{"options": {"zeta": 0.5}}``."""
    parts = [(name.partition("."), value) for name, value in values.items()]
    return merge(*({key: {inner: value} if inner else value} for (key, _, inner), value in parts))
