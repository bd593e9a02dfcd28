"""The project as git tracks it: what a run, a notebook or a demo left in a working folder's ``outputs`` changes no test.

``conftest.py`` lays it out once for a test run: a folder of links, with ``outputs`` file by file.
"""

import os
import shutil
import subprocess
from pathlib import Path

VARIABLE = "FEDLIB_TESTS_TRACKED"


def lay_out(root: Path, folder: Path) -> None:
    """Link the project ``root`` into ``folder`` and name it to all that inherit the environment."""
    listed, git = None, shutil.which("git")
    if git is not None:
        listed = subprocess.run([git, "ls-files", "-z", "outputs"], cwd=root, capture_output=True, text=True)
    names = [n for n in (listed.stdout if listed else "").split("\0") if n and (root / n).is_file()]
    if listed is None or listed.returncode:  # an unpacked archive
        names = [p.relative_to(root).as_posix() for p in (root / "outputs").rglob("*") if p.is_file()]
    folder.mkdir(parents=True)
    for path in root.iterdir():
        if path.name != "outputs":
            (folder / path.name).symlink_to(path)
    for parent in {(folder / n).parent for n in names}:
        parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).symlink_to(root / name)
    os.environ[VARIABLE] = str(folder)


OUTPUTS = Path(os.environ.get(VARIABLE, "")) / "outputs"
