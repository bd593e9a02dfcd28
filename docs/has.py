"""Does this environment have what an extra of ``pyproject.toml`` asks for? ``make ENV=active`` asks before it runs.

Exit status 1, and one sentence that says what to install, where it does not. Needs Python alone.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def asked(extra: str) -> list[str]:
    """Return the requirements of the core and of ``extra``, with those of the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found, left = list(project["dependencies"]), [extra]
    while left:
        for one in project["optional-dependencies"][left.pop()]:
            named = re.fullmatch(r"fedlib-kit\[(.*)\]", one)
            left += named.group(1).split(",") if named else []
            found += [] if named or one in found else [one]
    return found


def lacking(extra: str) -> list[str]:
    """Return what ``extra`` asks for and this environment has not, or has too old; and the kit itself."""
    out = []
    for one in asked(extra):
        requirement, _, marker = one.partition(";")
        name, _, least = requirement.strip().partition(">=")
        if "linux" in marker and sys.platform != "linux":
            continue
        try:
            if _numbers(importlib.metadata.version(name)) < _numbers(least.split(",")[0]):
                out.append(requirement.strip())
        except importlib.metadata.PackageNotFoundError:
            out.append(requirement.strip())
    return out


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3]]


if __name__ == "__main__":
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        sys.exit("make: Python 3.11-3.14 is needed, and this is " + ".".join(map(str, sys.version_info[:2])))
    (wanted,) = sys.argv[1:]
    if missing := lacking(wanted):
        sys.exit(
            f"make: {sys.prefix} lacks {', '.join(missing)}; pip install -e '.[{wanted}]' brings it, "
            "make without ENV=active uses an environment of its own"
        )
