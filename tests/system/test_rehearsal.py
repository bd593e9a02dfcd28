"""The notebooks of the papers at profile ``paper``, on stand-ins of its weights and data: the loading code is the real one.

One of each paper is part of ``make test``, all are part of ``make test-all``. They run in a process of their own, whose
FEDLIB_* folders are its own too, and which is given a time.
"""

import os
import signal
import subprocess
import sys

import pytest

from fedlib.data.datasets import load_dataset
from tests.helpers.stand_ins import NAMES, ROOT

SAMPLE = [  # of each paper, of few runs
    "cafedistill/figure10_thresholds", "fedepth/vit_fine_tuning", "raffm/figure5_prioritisation",
    "reefl/table4_modulation", "scalefl/bert",
]  # fmt: skip
SECONDS = 900  # for one notebook

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The stand-ins, once written."""
    folder = tmp_path_factory.mktemp("stand-ins")
    assert rehearsed(folder) == ""
    return folder


def rehearsed(folder, *names):
    """What the rehearsal of notebooks ``names`` said, if it failed; without names, stand-ins are written and no more."""
    command = [sys.executable, "-m", "tests.helpers.stand_ins", str(folder), *(names or ["--prepare"])]
    with open(folder / "log", "w+") as log:  # a pipe would stay open as long as any child of the process lives
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(SECONDS * max(1, len(names)))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return log.read()[-4000:] if code else ""


def test_a_notebook_of_every_paper_runs_at_profile_paper(folder):
    assert rehearsed(folder, *SAMPLE) == ""


def test_imagenet_is_read_from_the_folders_that_it_is_unpacked_to(folder, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(folder / "data"))
    monkeypatch.setenv("FEDLIB_CACHE", str(folder / "cache"))
    data = load_dataset("imagenet", size=32)
    assert data.train_inputs.shape == (1000, 3, 32, 32) and len(data.test_labels) == 50
    assert data.classes[1] == "n00000001"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {*SAMPLE}))
def test_every_notebook_of_a_paper_runs_at_profile_paper(name, folder):
    assert rehearsed(folder, name) == ""
