"""Experiments from layered YAML: base <- method <- table <- profile <- row <- overrides; every key is checked.

Later wins. ``params/<paper>/base.yaml`` and ``methods.yaml`` say the algorithms' settings, ``<table>.yaml`` the grid of
one table, the profiles how big and on which data (``params_files.py``). A column's section of a profile's name says
which data set stands in for the column's own at that profile, if not the profile's; a table's section, which cells a
profile keeps (``only``: of a column, which ``variant`` and ``seeds``) and what else it needs (a stand-in backbone).
What a row (a variant) says of itself stands at every profile, unless its own section of that name says otherwise.
``options`` and ``finetune_options`` are merged key by key. What follows from a smaller number of rounds and of local
epochs, no file says (``scaled_schedules.py``).
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.paths import params_dir
from fedlib.core.validation import check_fields, check_known, check_type, convert, shown
from fedlib.engine.checks import check_experiment
from fedlib.methods import METHODS

from .params_files import GRID_KEYS, field_names, grids, load_checked, load_layered, load_profile, merge, profiles
from .scaled_schedules import following, said_by

# of a table's file, besides profiles' names
SPEC_KEYS = {
    "extends", "common", "axes", "variants", "columns", "claims", "value", "thresholds", "reported", "priority",
    "also", "average", "caps",
}  # fmt: skip
VARIANT_KEYS = {"label", "finetune"}  # of a variant; all others are fields of Experiment
Layers = Mapping[str, Mapping[str, Any]]  # by name, in the order in which they are merged


@dataclass(frozen=True)
class Cell:
    """One run of a table: where it stands (finetune, variant, column, seed) and its experiment.

    A variant is a named method with its options (``DepthFL without distillation``); where a table compares plain
    methods, the variants are the methods.
    """

    finetune: str
    variant: str
    method: str
    label: str
    column: str
    seed: int
    experiment: Experiment
    layers: Layers = field(default_factory=dict, compare=False, repr=False)  # by name, later wins

    def explained(self) -> dict[str, dict[str, object]]:
        """Return, for each key that layers set (``lr``, ``options.zeta``), its values by layer; the last one won."""
        found: dict[str, dict[str, object]] = {}
        for layer, values in self.layers.items():
            for key, value in values.items():
                parts = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value}
                for name, part in parts.items():
                    found.setdefault(name, {})[layer] = part
        return found


def recipe(name: str, profile: str = "small", **choices: object) -> Experiment:
    """Return the experiment of a paper's table: ``recipe("reefl/table1", method="depthfl", profile="small")``.

    ``choices`` are :func:`load_grid`'s overrides. Of fine-tuning modes, columns and seeds that are not chosen the
    table's first counts. ``ValueError`` names the rows among which ``method`` or ``variant`` must choose.
    """
    return recipe_cell(name, profile, choices).experiment


def recipe_cell(name: str, profile: str, choices: Mapping[str, object]) -> Cell:
    """Return the cell of :func:`recipe`, which also says which layer set what."""
    check_type(name, str, "recipe")
    paper, _, table = name.partition("/")
    cells = load_grid(paper, table, profile, choices)
    if len(rows := list(dict.fromkeys(c.variant for c in cells))) > 1:
        axis = "method" if "method" in load_spec(paper, table)["axes"] else "variant"
        raise ValueError(f"{name} has {len(rows)} such rows at {profile!r}: choose {axis} = {', '.join(rows)}")
    return cells[0]


def make_experiment(*layers: Mapping[str, object]) -> Experiment:
    """Make one experiment from layers of keys, fully checked."""
    e = Experiment.from_dict(merge(*layers))
    check_experiment(e)
    return e


def load_experiment(
    paper: str, method: str, profile: str, overrides: Mapping[str, object] | None = None, **row: object
) -> Experiment:
    """Load one experiment outside any table: base <- method <- profile <- row <- overrides.

    The seed is the first of the profile, unless ``overrides`` name one.
    """
    sizes = load_profile(profile, paper)
    row |= {"method": method, "seed": sizes.get("seeds", [1])[0]}
    return make_experiment(*_layers(_paper(paper), profile, sizes, row, overrides or {}).values())


def _layers(
    of_paper: tuple[dict, dict], profile: str, sizes: Mapping, row: Mapping, overrides: Mapping,
    table: tuple[Mapping, Mapping] = ({}, {}), column: tuple[Mapping, Mapping] = ({}, {}),
) -> Layers:  # fmt: skip
    """Return all layers in this order, with what follows from the experiment's size (``scaled_schedules.py``).

    ``table`` and ``column`` are what they say always, and what at ``profile`` alone.
    """
    (base, methods), (row, row_here) = of_paper, at_profile(row, profile)
    said = {"method": at_profile(methods.get(row["method"], {}), profile), "column": column, "table": table}
    published = {"base": base} | {layer: said[layer][0] for layer in ("method", "table", "column")}
    shrunk = {"profile": {k: v for k, v in sizes.items() if k not in GRID_KEYS}}
    shrunk |= {f"{layer} at {profile}": here for layer, (_, here) in said.items()}
    last, full = {f"row at {profile}": row_here, "overrides": overrides}, merge(*published.values(), row)
    made = merge(*published.values(), *shrunk.values(), row, *last.values())
    more = following(full, made, said_by(*shrunk.values(), *last.values()))
    return {**published, **shrunk, "row": row, "follows from its size": more, **last}


def at_profile(layer: Mapping[str, Any], profile: str) -> tuple[dict, dict]:
    """Split a layer: what it says always; at ``profile`` alone (its key of that name), over the profile's own."""
    return {k: v for k, v in layer.items() if k not in profiles()}, dict(layer.get(profile, {}))


def load_spec(paper: str, table: str) -> dict:
    """Load ``params/<paper>/<table>.yaml`` over the table it ``extends``; ``columns`` default to the paper's own.

    A row that names no method adds to the row of its name in the table below, or to the row that it is ``like``.

    ``axes.method`` lists plain methods; else ``variants`` maps a name to a ``label``, the ``finetune`` modes it is
    limited to, and fields of the experiment, and ``axes.variant`` may choose among them.
    """
    spec = _merged_spec(paper, table)
    axes, given = spec["axes"], spec.get("variants", {})
    plain = {name: row for name, row in given.items() if "like" not in row}
    check_known([row["like"] for row in given.values() if "like" in row], plain, f"{paper}/{table}: like = {{}}")
    given = {n: row if n in plain else merge(plain[row["like"]], _without(row, "like")) for n, row in given.items()}
    if "method" in axes:
        spec["variants"] = {m: given.get(m, {"method": m}) for m in axes["method"]}
    else:
        spec["variants"] = {name: given[name] for name in axes.get("variant", given)}
    return spec


def _merged_spec(paper: str, table: str) -> dict:
    """Merge the table's file over those that it extends, its rows as they are written."""
    check_known([table], grids(paper), "table = {} is unknown")
    spec = load_checked(params_dir() / paper / f"{table}.yaml", SPEC_KEYS | set(profiles()))
    if "extends" in spec:
        below = _without(_merged_spec(paper, spec.pop("extends")), "priority")
        rows = below.get("variants", {})
        more = {n: v if "method" in v else merge(rows.get(n, {}), v) for n, v in spec.get("variants", {}).items()}
        spec = merge(below, spec, {"variants": more} if more else {})
    if "columns" not in spec:
        spec["columns"] = load_layered(paper, "columns")
    return spec


def _without(layer: Mapping[str, Any], key: str) -> dict:
    return {k: v for k, v in layer.items() if k != key}


def load_fallback(paper: str, table: str, profile: str) -> dict:
    """Load what stands in for data that are not at hand: the table's own word, else the profile's; {}: nothing can."""
    return load_spec(paper, table).get(profile, {}).get("fallback", load_profile(profile, paper).get("fallback")) or {}


def load_grid(paper: str, table: str, profile: str, overrides: Mapping[str, object] | None = None) -> list[Cell]:
    """Load all cells of ``params/<paper>/<table>.yaml`` at a profile, each a checked experiment.

    ``overrides`` may hold any field of :class:`Experiment`, lists for ``finetune``, ``variant`` and ``method`` (any
    method where the table compares methods, else the variants of these methods), and ``columns`` and ``seeds``. Raises
    ``ValueError`` before any compute.
    """
    spec, sizes, overrides = load_spec(paper, table), load_profile(profile, paper), _given(overrides)
    check_known(overrides, field_names() | {"seeds", "columns", "variant"}, "overrides: unknown key {}")
    kept = _without(spec.get(profile, {}), "fallback")  # the table's own word here: its cells, then any other key
    only = _limits(spec, kept.pop("only", None) or {}, overrides)  # null: none of what it extends
    finetunes = _listed(overrides.pop("finetune", kept.pop("finetune", spec["axes"]["finetune"])))
    variants = _variants(spec, kept.pop("variant", list(spec["variants"])), overrides)
    columns = _columns(spec, overrides.pop("columns", kept.pop("columns", list(spec["columns"]))), profile, overrides)
    seeds = overrides.pop("seeds", kept.pop("seeds", sizes.get("seeds", [1])))
    of_paper, of_table, cells = _paper(paper), (spec.get("common", {}), kept), []
    for finetune, (name, variant), (column, said) in itertools.product(finetunes, variants.items(), columns.items()):
        limits = only.get(column, {})
        asked = name in limits.get("variant", [name]) and finetune in _listed(variant.get("finetune", finetune))
        if not (asked and (here := [seed for seed in seeds if seed in limits.get("seeds", seeds)])):
            continue
        row = {k: v for k, v in variant.items() if k not in VARIANT_KEYS} | {"finetune": finetune, "seed": here[0]}
        layers = _layers(of_paper, profile, sizes, row, overrides, of_table, said)
        place, e = (name, variant["method"], variant.get("label", name), column), make_experiment(*layers.values())
        for seed in here:  # in which alone these cells differ
            own = {**layers, "row": {**layers["row"], "seed": seed}}
            cells.append(Cell(finetune, *place, seed, e.replace(seed=seed), own))
    if not cells:
        raise ValueError(f"{paper}/{table} has no such cell at {profile!r}; allowed: rows, modes, seeds that meet")
    return cells


def check_apart(cells: Iterable[Cell]) -> None:
    """Raise ``ValueError`` where an override makes two cells one run whose column or row set its key differently.

    Under another data set's name, which tables say (``here MNIST``), cells may be one run.
    """
    first: dict[tuple, tuple[Cell, dict]] = {}
    for cell in cells:
        below = merge(*(values for layer, values in cell.layers.items() if layer != "overrides"))
        other, was = first.setdefault((cell.experiment, below.get("dataset")), (cell, below))
        for key in (k for k in cell.layers["overrides"] if below.get(k) != was.get(k)):
            one, two = (f"{c.label!r} in {c.column!r}" for c in (other, cell))
            why = f"{key} = {shown(cell.layers['overrides'][key])} makes one run of {one} and {two}"
            raise ValueError(f"overrides: {why}, which differ in it; allowed: one of the two (columns, variant)")


def _limits(spec: dict, only: Mapping[str, Mapping], overrides: Mapping) -> dict[str, dict]:
    """Return, for each column in a table's ``only``, the variants and seeds it keeps; ``overrides`` win."""
    asked = {"seeds": {"seed", "seeds"}, "variant": {"variant", "method"}}
    check_known(only, spec["columns"], "only = {} is unknown")
    for column, limits in only.items():
        check_known(limits.get("variant", []), spec["variants"], "only = {} is unknown")
        check_known(limits, asked, f"only: {column}: unknown key {{}}")
    return {c: {k: v for k, v in limits.items() if not asked[k] & set(overrides)} for c, limits in only.items()}


def _listed(value: object) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _columns(spec: dict, names: object, profile: str, overrides: Mapping) -> dict[str, tuple[dict, dict]]:
    """Return per column its settings and its stand-in's at ``profile`` (none where ``overrides`` name the data set)."""
    check_known(_listed(names), spec["columns"], "overrides: columns = {}")
    found = {name: at_profile(spec["columns"][name], profile) for name in _listed(names)}
    return {name: (always, {} if "dataset" in overrides else here) for name, (always, here) in found.items()}


def _variants(spec: dict, kept: list[str], overrides: dict) -> dict[str, dict]:
    """Return the variants that the profile keeps or ``overrides`` ask for (their keys are taken out)."""
    known, plain = spec["variants"], "method" in spec["axes"]
    if "method" in overrides:
        wanted = _listed(overrides.pop("method"))
        if plain:
            return {m: known.get(m, {"method": m}) for m in wanted}
        check_known(wanted, {v["method"] for v in known.values()}, "overrides: method = {} is not in this table")
        return {name: v for name, v in known.items() if v["method"] in wanted}
    names = _listed(overrides.pop("variant", kept))
    check_known(names, known, "overrides: variant = {} is unknown")
    return {name: known[name] for name in names}


def _given(overrides: Mapping[str, object] | None) -> dict[str, Any]:
    """Return ``overrides`` as a dict; ``ValueError`` names a grid's key whose value is no name, nor a list of such."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(f"overrides = {shown(overrides)}: expected a mapping of names to values")
    overrides = dict(overrides or {})
    if "seed" in overrides:
        if (one := overrides.pop("seed")) not in _listed(among := overrides.get("seeds", one)):
            raise ValueError(f"overrides: seed = {shown(one)} is not among seeds = {shown(among)}")
        overrides["seeds"] = one
    check_fields(Experiment, {k: overrides[k] for k in ("options", "finetune_options") if k in overrides}, "overrides")
    for key, kind in {"finetune": str, "method": str, "variant": str, "columns": str, "seeds": int}.items():
        if key in overrides:
            overrides[key] = found = [convert(v, kind, f"overrides: {key}") for v in _listed(overrides[key])]
            if len(found) > len({*found}):
                raise ValueError(f"overrides: {key} = {shown(found)} names one twice; allowed: each once")
    return overrides


def _paper(paper: str) -> tuple[dict, dict]:
    """Return what all methods of ``paper`` share, and what each of them changes."""
    base, methods = load_layered(paper, "base"), load_layered(paper, "methods")
    base.pop("extends", None)
    check_known(methods, METHODS, f"{params_dir() / paper / 'methods.yaml'}: unknown method {{}}")
    return base, methods
