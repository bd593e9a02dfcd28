"""The test files of what was changed, or of a folder, for ``make quick``: ``python -m tests.helpers.touched [FOLDER]``."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def changed() -> list[str]:
    """Files that differ from commit ``$SINCE``, by default from where this branch left ``main`` (or the last commit)."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")[:-1]

    base = [s] if (s := os.environ.get("SINCE")) else git("merge-base", "HEAD", "main") or ["HEAD"]
    return git("diff", "--name-only", base[0]) + git("ls-files", "--others", "--exclude-standard")


def tests_of(name: str) -> Iterable[Path]:
    """A test file itself; of a module its own file, else those that import it."""
    path = Path(name).with_suffix("") if not name.endswith("__init__.py") else Path(name).parent
    if path.name.startswith("test_"):
        own = ROOT / name
    else:
        inside = path.relative_to(path.parts[0]) if path.parts[0] in ("fedlib", "fedlib_lab") else path
        own = TESTS / inside.parent / f"test_{inside.name}.py"
    if own.exists():
        return [own]
    module = ".".join(path.parts)
    imports = (f"from {module} import", f"from {module.rpartition('.')[0]} import {path.name}")
    return [p for p in TESTS.rglob("test_*.py") if any(i in p.read_text() for i in imports)]


def main(folder: str = "") -> None:
    if folder:
        if not (TESTS / folder).is_dir():
            folders = sorted(p.name for p in TESTS.iterdir() if p.is_dir() and any(p.glob("test_*.py")))
            raise SystemExit(f"FOLDER = {folder!r} is not possible; allowed: {', '.join(folders)}")
        found = {TESTS / folder}
    else:
        found = {p for name in changed() if name.endswith(".py") for p in tests_of(name)}
    print(*sorted(p.relative_to(ROOT) for p in found | {TESTS / "test_architecture.py"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
