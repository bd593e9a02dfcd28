"""The README's promises: its example runs, its notebooks and commands exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_example_method_runs_as_printed(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(code.splitlines()) < 40
    code = code.replace("rounds=20", "rounds=1, num_train=200, num_test=50")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "'status': 'finished'" in done.stdout, done.stderr


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    notebooks = {p.relative_to(ROOT / "notebooks").with_suffix("").as_posix() for p in ROOT.glob("notebooks/*/*.ipynb")}
    targets = set(re.findall(r"^(\w+):", makefile, re.M)) | notebooks | {n.split("_")[0] for n in notebooks}
    assert set(re.findall(r"make (\w+(?:/\w+)?)", TEXT)) - {"each", "and"} <= targets


def test_every_test_that_the_readme_names_exists():
    defined = set(
        re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py")), re.M)
    )
    assert set(re.findall(r"`(test_\w+)`", TEXT)) <= defined
