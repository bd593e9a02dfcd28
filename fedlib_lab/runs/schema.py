"""JSON Schemas (draft 2020-12) of experiments and of the files of ``params/``, for editors and for programs.

All of it comes from the dataclasses: types, limits and choices from the annotations of :class:`Experiment` and of the
methods' options, what a field means from the docstring. Methods of your own count if they are registered before.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from fedlib.core.experiment import Experiment
from fedlib.core.validation import check_known, field_hints
from fedlib.methods import METHODS, OLD_OPTIONS

from .params import SPEC_KEYS
from .params_files import GRID_KEYS, SIZES, profiles

Schema = dict[str, Any]
NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
SEEDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def schemas(what: Literal["experiment", "params"] = "experiment") -> dict[str, Schema]:
    """Return by name the schema of an ``experiment``, or those of a paper's files and of profiles, each a document.

    A file of ``params/<paper>`` that is no ``base``, ``methods`` or ``columns`` is a ``table``; ``profile`` is of
    ``params/<paper>/profiles``, ``sizes`` of ``params/profiles``. ``experiment.json`` of a run holds an experiment under
    that key. ``ValueError`` for another word.
    """
    check_known([what], ("experiment", "params"), "schema: {} is unknown")
    defaults, told = Experiment().to_dict(), _told()
    own = {n: s | {"default": defaults[n], "description": told[n]} for n, s in _properties(Experiment).items()}
    own["method"] |= {"enum": sorted(METHODS)}
    options = [
        {"if": {"properties": {"method": {"const": name}}, "required": ["method"]},
         "then": {"properties": {"options": _closed(_options(method))}}} for name, method in METHODS.items()
    ]  # fmt: skip
    defs = {"options": {"allOf": options}}
    defs["experiment"] = _closed(own) | {"$ref": "#/$defs/options"}
    if what == "experiment":
        found = {what: {"$ref": "#/$defs/experiment"}}
    else:
        layer, section = _layer({}), dict.fromkeys(profiles(), {"$ref": "#/$defs/section"})
        row = _layer({"label": {"type": "string"}, "like": {"type": "string"}, "finetune": NAMES, **section})
        column = {"type": "object", "additionalProperties": _layer(section)}
        cells = {k: NAMES for k in ("finetune", "variant", "columns")} | {"seeds": SEEDS, "only": {"type": "object"}}
        defs["section"] = _layer(cells | {"fallback": layer})
        spec = dict.fromkeys(SPEC_KEYS, {}) | {"common": layer, "columns": column, "priority": {"type": "integer"}}
        spec["variants"] = {"type": "object", "additionalProperties": row}
        found = {
            "base": _layer({"extends": {"type": "string"}}), "methods": _closed(dict.fromkeys(METHODS, _layer(section))),
            "columns": column, "table": _closed(spec | section), "sizes": _closed({**_refs(SIZES - GRID_KEYS), "seeds": SEEDS}),
            "profile": _layer({"seeds": SEEDS, "fallback": layer}),
        }  # fmt: skip
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {name: head | {"title": f"fedlib {name}"} | schema | {"$defs": defs} for name, schema in found.items()}


def _told() -> dict[str, str]:
    """Return what the docstring of :class:`Experiment` says of each field; names stand in its columns 2 to 22."""
    found, names = {}, []
    for line in (inspect.getdoc(Experiment) or "").splitlines():
        if line.startswith("  "):
            names = line[2:22].strip().split(", ") if line[2:22].strip() else names
            found |= {n: f"{found.get(n, '')} {line[22:]}".strip() for n in names}
    return found


def _properties(cls: type) -> dict[str, Schema]:
    """Return the schema of every field of dataclass ``cls``, as its annotations say it."""
    from pydantic import TypeAdapter

    return {f.name: TypeAdapter(field_hints(cls)[f.name]).json_schema() for f in fields(cls)}


def _options(method: type) -> dict[str, Schema]:
    """Return the schema of every option of ``method``, also as stored runs call it."""
    own = _properties(method)
    return {old: own[new] | {"deprecated": True} for new, old in OLD_OPTIONS.items() if new in own} | own


def _closed(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _refs(names: set[str]) -> dict[str, Schema]:
    return {name: {"$ref": f"#/$defs/experiment/properties/{name}"} for name in sorted(names)}


def _layer(more: Mapping[str, Schema]) -> Schema:
    """Return the schema of some fields of an experiment, and of ``more`` beside or in place of them."""
    every = {f.name for f in fields(Experiment)}
    return _closed({**_refs(every), **more}) | {"$ref": "#/$defs/options"}
