"""Where params and outputs lie."""

from pathlib import Path

import pytest

from fedlib import run, run_all
from fedlib.core import paths
from fedlib.core.paths import outputs_dir, params_dir, root
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import ONE, small


def test_outside_a_checkout_the_recipes_are_those_that_the_package_brings(tmp_path, monkeypatch):
    """Also beside a folder of another's that is called params; ``$FEDLIB_ROOT`` and a checkout win."""
    monkeypatch.delenv("FEDLIB_ROOT")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params").mkdir()
    assert params_dir() == paths.PACKAGE.parent / "params"  # not installed: what lies beside the package
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "site-packages/fedlib")
    (installed := tmp_path / "site-packages/fedlib/params/profiles").mkdir(parents=True)
    assert params_dir() == installed.parent
    (tmp_path / "params/profiles").mkdir()
    assert params_dir() == tmp_path / "params"


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30)], ids=["a name", "a path"])
@pytest.mark.parametrize("ask", [lambda e, f: run(e, ONE, f), lambda e, f: run_all([e], ONE, f), find_run, run_path])
def test_names_that_are_too_long_are_refused_in_one_sentence(name, ask, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="longer than this file system's names may be"):
        ask(small("fedavg"), tmp_path / name)
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / name))
    with pytest.raises(ValueError, match="longer than this file system's names may be"):
        ask(small("fedavg"), None)
    assert not list(tmp_path.iterdir())


def test_a_tilde_in_fedlib_outputs_is_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said, folder in {
        "~/x": tmp_path / "x",
        "~": tmp_path,
        "/a/~/b": Path("/a/~/b"),
        "": root() / "outputs",
    }.items():
        monkeypatch.setenv("FEDLIB_OUTPUTS", said)
        assert outputs_dir() == folder
    monkeypatch.setenv("FEDLIB_OUTPUTS", "~nobody-of-that-name/x")
    with pytest.raises(ValueError, match="FEDLIB_OUTPUTS = '~nobody-of-that-name/x': nobody of that name has a home"):
        outputs_dir()
