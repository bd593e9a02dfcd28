"""An environment of its own for every rival: ``python -m benchmarks.setup_rivals [flower] [pfl] …``.

Without names, all. ``checkouts``: PFLlib and FL-bench, which are no packages, share one; what ``$PFLLIB`` or
``$FLBENCH`` does not name is cloned at a pinned commit, if git reaches it.
The others cannot share one (BlazeFL needs Python 3.12, pfl ends there, flwr pins packages that others pin differently).
``rivals/requirements-<name>.txt`` pins every package with its hash; all have the same torch. Idempotent. A rival for
which no interpreter is found is skipped with a sentence and is then missing, visibly, in the benchmark's table.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.systems import CHECKOUTS, RIVALS, VENVS, checkout

PYTHONS = {
    "flower": ((3, 11), (3, 13)),
    "pfl": ((3, 11), (3, 12)),
    "blazefl": ((3, 12), (3, 13)),
    "checkouts": ((3, 11), (3, 13)),
}  # first and last


def find_uv() -> str | None:
    """uv beside this interpreter, or on PATH."""
    return shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")


def version_of(python: str) -> tuple[int, ...] | None:
    """(major, minor) of an interpreter with a global interpreter lock; None if it does not run."""
    code = "import sys; print(*sys.version_info[:2], getattr(sys, '_is_gil_enabled', lambda: True)())"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    words = done.stdout.split()
    return tuple(map(int, words[:2])) if done.returncode == 0 and words[2:] == ["True"] else None


def candidates(minor: int, uv: str) -> Iterator[str]:
    """Where a Python 3.<minor> may be: this one, PATH, what uv finds without a download, pyenv's folder."""
    yield sys.executable
    yield from filter(None, [shutil.which(f"python3.{minor}")])
    found = subprocess.run(
        [uv, "python", "find", "--no-python-downloads", f"3.{minor}"], capture_output=True, text=True
    )
    yield from found.stdout.split()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/python")))


def find_python(first: tuple[int, int], last: tuple[int, int], uv: str) -> str | None:
    """An interpreter from ``first`` to ``last``; this one if it fits, else the oldest."""
    own = sys.version_info[:2]
    if first <= own <= last:
        return sys.executable
    for minor in range(first[1], last[1] + 1):
        for python in candidates(minor, uv):
            if version_of(python) == (3, minor):
                return python
    return None


def install(name: str, uv: str) -> str:
    """Make or renew ``.venv-bench/<name>``; returns a sentence about it. Raises ``CalledProcessError`` on failure."""
    requirements, folder = RIVALS / f"requirements-{name}.txt", VENVS / name
    stamp, digest = folder / ".installed", hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return f"{name}: up to date"
    first, last = PYTHONS[name]
    python = find_python(first, last, uv)
    if python is None:
        wanted = " or ".join(f"3.{m}" for m in range(first[1], last[1] + 1))
        return f"{name}: skipped, because no Python {wanted} was found on PATH, by uv or in pyenv's folder"
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", python, folder], check=True)
    target = ["--python", folder / "bin" / "python", "--require-hashes", "-r", requirements]
    subprocess.run([uv, "pip", "install", "--quiet", *target], check=True)
    stamp.write_text(digest)
    return f"{name}: installed with {python}"


def clone(name: str) -> str:
    """Fetch one commit of a rival of ``CHECKOUTS`` where none of its code is; returns a sentence about it."""
    folder, (url, commit) = checkout(name), CHECKOUTS[name]
    if folder.exists():
        return f"{name}: {folder} is there"
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    git = ["git", "-C", partial, "-c", "advice.detachedHead=false"]
    try:
        subprocess.run(["git", "init", "--quiet", partial], check=True)
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", url, commit], check=True)
        subprocess.run([*git, "checkout", "--quiet", commit], check=True)
    except (OSError, subprocess.CalledProcessError):
        return f"{name}: skipped, because git could not fetch {commit[:8]} of {url}; set ${name} to a checkout"
    partial.rename(folder)
    return f"{name}: cloned to {folder}"


def main(names: list[str]) -> None:
    if unknown := [n for n in names if n not in PYTHONS]:
        sys.exit(f"rivals: {unknown[0]!r} is unknown; allowed: {', '.join(PYTHONS)}")
    if (uv := find_uv()) is None:
        sys.exit("rivals: uv was found neither beside this Python nor on PATH; it is in requirements-uv.lock")
    for name in names or PYTHONS:
        print(install(name, uv), flush=True)
        for code in CHECKOUTS if name == "checkouts" else ():
            print(clone(code), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
