"""What was decoded or divided once is kept."""

import os
import subprocess
import sys
import textwrap

import pytest

from fedlib.data.datasets import load_dataset

pytestmark = pytest.mark.usefixtures("cache")


def test_a_federation_of_kept_data_loads_nothing_that_decodes_or_divides(tmp_path):
    code = """
        import sys
        from fedlib import Experiment, build_federation
        build_federation(Experiment(pretrained=False, partition="iid", finetune="full"))
        print(sorted({"datasets", "flwr_datasets", "matplotlib", "mlxtend", "pandas", "scipy"} & set(sys.modules)))
    """
    for loaded in (True, False):
        environment = os.environ | {"FEDLIB_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("datasets" in done.stdout) == loaded and (done.stdout.strip() == "[]") != loaded


def test_data_that_cannot_be_kept_are_read_with_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="file/.* could not be kept .*: set FEDLIB_CACHE"):
        assert len(load_dataset("mnist").train_images) == 4000
