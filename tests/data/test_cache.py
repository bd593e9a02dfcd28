"""What was decoded or divided once is kept."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from fedlib.data import cache
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
        assert len(load_dataset("mnist").train_inputs) == 4000


def test_files_of_the_old_size_and_time_are_other_files(tmp_path, monkeypatch):
    """As ``cp -p`` and ``rsync -t`` leave them; also in one process, and where the digest was kept."""
    import os

    from fedlib.data import cache

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SETTLED", -1.0)  # kept at once
    file = tmp_path / "a"
    file.write_bytes(b"one")
    os.utime(file, (1, 1))
    first = cache.files_digest([file], tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 1 and cache.files_digest([file], tmp_path) == first
    time.sleep(0.02)  # a tick of the file system's clock
    file.write_bytes(b"two")
    os.utime(file, (1, 1))
    second = cache.files_digest([file], tmp_path)
    file.unlink()
    file.write_bytes(b"one")
    assert cache.files_digest([file], tmp_path) == first != second
    cache._digests.clear()
    assert cache.files_digest([file], tmp_path) == first  # from the disk


def test_what_was_written_a_moment_ago_is_read_again(tmp_path, monkeypatch):
    """Two writes in one tick of the clock leave the same times."""
    from fedlib.data import cache

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    cache.files_digest([Path(__file__)], Path(__file__).parent)
    file = tmp_path / "a"
    digests = []
    for text in "ab":
        file.write_text(text)
        digests.append(cache.files_digest([file], tmp_path))
    assert digests[0] != digests[1]


def test_a_set_that_depends_on_a_size_has_no_digest_without_one(tmp_path, monkeypatch):
    """Of text that was fetched for no network in particular it was taken for that of every network."""
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path))
    for size in (None, 8):
        cache.cached_for(size, {"a": 1}, lambda size: (({"x": torch.ones(size or 3)}, []), True))
    assert cache.known_digest({"a": 1}) is None
    assert cache.known_digest({"a": 1}, 8) is not None
