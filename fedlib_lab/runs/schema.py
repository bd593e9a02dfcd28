"""JSON Schemas (draft 2020-12) of experiments and of the files of ``params/``, for editors and for programs.

``schema.yaml`` says what a file is made of. Fields and options come from the dataclasses: types, limits and choices
from the annotations of :class:`Experiment` and of the methods, what a field means from the docstring. Methods of your
own count if they are registered before.
"""

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.tables import read_table
from fedlib.core.validation import check_known, field_hints
from fedlib.methods import METHODS, OLD_OPTIONS

from .params_files import SIZES, profiles

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas(what: str = "experiment") -> dict[str, Schema]:
    """Return by name the schema of an ``experiment``, or of the kinds of files of ``params``, each a document.

    A file of ``params/<paper>`` that is no ``base``, ``methods`` or ``columns`` is a ``table``; a ``profile`` is of
    ``params/<paper>/profiles``, ``sizes`` of ``params/profiles``. In a run's ``experiment.json`` an experiment stands
    under that key. ``ValueError`` for another word.
    """
    check_known([what], ("experiment", "params"), "schema: {} is unknown")
    said = json.loads(json.dumps(read_table(Path(__file__).with_suffix(".yaml"))))  # one's own, with lists
    defs, own, told, defaults = said.pop("$defs"), _properties(Experiment), _told(), Experiment().to_dict()
    for name, schema in own.items():
        schema |= {"default": defaults[name], "description": told[name]}
    own["method"]["enum"] = sorted(METHODS)
    own["finetune"] |= {"type": ["string", "array"]} if what == "params" else {}  # rows and tables list modes
    defs |= {"fields": {"type": "object", "properties": own, "allOf": [*map(_options, METHODS)]}}
    defs["sections"] = {"properties": dict.fromkeys(profiles(), {"$ref": "#/$defs/section"})}
    defs["methods"] = _closed(dict.fromkeys(METHODS, {"$ref": "#/$defs/column"}))
    defs["sizes"] = _closed({n: own.get(n, {"$ref": "#/$defs/seeds"}) for n in sorted(SIZES)})
    names = [what] if what in said else [name for name in said if name != "experiment"]
    return {n: {"$schema": DRAFT, "title": f"fedlib {n}", **said[n], "$defs": defs} for n in names}


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


def _options(method: str) -> Schema:
    """Return what holds of ``options`` if this is the method; they may be called as stored runs call them."""
    own = _properties(METHODS[method])
    own |= {old: own[new] | {"deprecated": True} for new, old in OLD_OPTIONS.items() if new in own and old not in own}
    asked = {"properties": {"method": {"const": method}}, "required": ["method"]}
    return {"if": asked, "then": {"properties": {"options": _closed(own)}}}


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}
