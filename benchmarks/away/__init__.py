"""Bounded runs on a machine that is at hand for minutes, without a network: ``python -m benchmarks.away``.

``pack`` puts what such a machine lacks into ``.away/`` (``pack.py``), ``run`` works through a plan there until its time
is up (``run.py``), ``home`` takes finished runs into the store (``home.py``). ``run`` itself needs the standard library
alone: it finds the packages that the machine lacks.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 2**20
KEPT = ("experiment.json", "metrics.jsonl", "summary.json")  # of a finished run; the summary is written last
