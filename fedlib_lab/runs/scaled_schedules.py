"""What follows from a profile's ``rounds`` and ``local_epochs``, so that a smaller run is the published one, shrunk.

Their ratios to the published numbers are the profile's two factors. With the rounds go an exponential schedule, whose
last rate stays the published one, milestones and a warm-up; with the local epochs a method's other epochs (its options
called ``*_epochs``), rounded, and at least one. What a profile, a row or an override says itself stands.
Read next: ``params.py``.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.validation import check_fields, unmet_condition
from fedlib.methods import build_method


def following(published: Mapping[str, object], made: Mapping[str, object], said: Collection[str]) -> dict[str, object]:
    """Return the keys of an experiment that follow from what ``made`` changes of ``published``; those ``said`` do not.

    ``said`` has fields of the experiment, and ``options.<name>``.
    """
    full, made = (Experiment().to_dict() | check_fields(Experiment, x, "experiment") for x in (published, made))
    found = {**_rounds(full, made), "options": _epochs(full, made, said)}
    return {k: v for k, v in found.items() if k not in said and v}


def said_by(*layers: Mapping[str, Any]) -> set[str]:
    """Return the keys that ``layers`` name."""
    return {k for x in layers for k in (*x, *(f"options.{name}" for name in x.get("options", ())))} - {"options"}


def _rounds(full: Mapping, made: Mapping) -> dict[str, object]:
    """Return what goes with the number of rounds: the last rate stays, and what counts rounds is a share of them."""
    found: dict[str, object] = {}
    if made["rounds"] == full["rounds"]:
        return found
    if made["schedule"] == full["schedule"] == "exponential":
        before, now = ((x["rounds"] - 1) // made["decay_every"] for x in (full, made))
        if now:
            found["decay"] = round(full["decay"] ** (before / now), 6)
    if full["milestones"]:
        found["milestones"] = [m / full["rounds"] if m >= 1 else m for m in full["milestones"]]
    if full["warmup_rounds"] >= 1:
        found["warmup_rounds"] = full["warmup_rounds"] / full["rounds"]
    return found


def _epochs(full: Mapping, made: Mapping, said: Collection[str]) -> dict[str, int]:
    """Return the method's other epochs, as many for each local epoch as published."""
    if (factor := made["local_epochs"] / full["local_epochs"]) == 1:
        return {}
    method = build_method(made["method"], made["options"])
    own = {f.name: getattr(method, f.name) for f in fields(method) if f.name.endswith("_epochs")}
    matter = {n: k for n, k in own.items() if k is not None and not unmet_condition(method, n)}
    found = {n: max(1, math.floor(k * factor + 0.5)) for n, k in matter.items() if f"options.{n}" not in said}
    return {n: epochs for n, epochs in found.items() if epochs != own[n]}
