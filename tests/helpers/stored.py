"""What the tests of stored runs share: short experiments, a run's final state, and processes that are already warm."""

import json
import subprocess
import sys

import torch

from fedlib import Execution, Experiment
from fedlib.core.storage import read_tensors
from fedlib_lab.runs.packed import KEPT
from fedlib_lab.runs.store import find_run, run_path

ONE = Execution(workers=1)
FINETUNE = {"depthfl": "lora", "inclusivefl": "lora", "reefl": "frozen"}


def short(method, **changes):
    finetune = FINETUNE.get(method, "frozen")
    values = dict(
        method=method, finetune=finetune, finetune_options={"r": 4} if finetune == "lora" else {}, pretrained=False,
        num_train=200, num_test=40, num_clients=8, clients_per_round=4, rounds=4, evaluate_every=1, seed=3,
    )  # fmt: skip
    return Experiment(**(values | changes))


def small(method, **changes):
    """Rounds of a fraction of a second."""
    return short(method, **(dict(num_train=60, num_test=10, num_clients=6, clients_per_round=3) | changes))


def laid_out(path, folder):
    """The stored run ``path``, a folder or packed, as a folder in ``folder``."""
    there = folder / path.name
    there.mkdir(parents=True)
    for name in KEPT:
        (there / name).write_bytes((path / name).read_bytes())
    return there


def state(e, folder):
    """Everything a run leaves behind that must not depend on interruptions."""
    path = run_path(e, folder)
    tensors, metadata = read_tensors(path / "checkpoint.safetensors")
    memories = {c: read_tensors(path / "clients" / f"{c}-{t}.safetensors")[0] for c, t in metadata["memories"].items()}
    found = find_run(e, folder)
    timeless = [{k: v for k, v in m.items() if k != "seconds"} for m in found.metrics]
    summary = {k: v for k, v in found.summary.items() if k != "seconds"}
    return tensors, memories, timeless, summary


def assert_same(a, b):
    for x, y in zip(a[:2], b[:2], strict=True):
        assert x.keys() == y.keys()
    assert all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert all(torch.equal(m[k], b[1][c][k]) for c, m in a[1].items() for k in m)
    assert a[2:] == b[2:]


def assert_same_rounds(here, there):
    """Two executors went through the same rounds, bit for bit."""
    for a, b in zip(here, there, strict=True):
        assert list(a.losses.items()) == list(b.losses.items())  # also in the order of the plan
        assert a.metrics == b.metrics
        for x, y in ((a.server.params, b.server.params), (a.server.memory, b.server.memory)):
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        assert a.memories.keys() == b.memories.keys()
        assert all(torch.equal(m[k], b.memories[c][k]) for c, m in a.memories.items() for k in m)


def assert_nothing_left_over(folder):
    """No temporary file, and no client memory that neither of the last two checkpoints names."""
    assert not list(folder.rglob("*.part"))
    for clients in folder.rglob("clients"):
        metadata = read_tensors(clients.parent / "checkpoint.safetensors")[1]
        named = {*metadata["memories"].items(), *((str(c), t) for c, t in metadata["replaced"])}
        assert {f.name for f in clients.iterdir()} <= {f"{c}-{t}.safetensors" for c, t in named}


FORKS = """
import json, os, signal, sys, time
from pathlib import Path
import filelock, peft, safetensors.torch, torch, tqdm.auto
torch.set_num_threads(1)
from fedlib import Execution, Experiment, build_federation, run_all

def work(job):
    if job["at_operation"] is not None:
        left = job["at_operation"]
        def counted(operation):
            def call(*args, **kwargs):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return operation(*args, **kwargs)
            return call
        os.replace, os.fsync, Path.unlink = counted(os.replace), counted(os.fsync), counted(Path.unlink)
    grid = [Experiment.from_dict(e) for e in job["grid"]]
    run_all(grid, Execution(workers=1), Path(job["folder"]), False, checkpoint_seconds=0)

for line in sys.stdin:
    job, children, began = json.loads(line), [], time.monotonic()
    build_federation(Experiment.from_dict(job["grid"][0]))  # the data: loaded once, before the forks
    for _ in range(job["processes"]):
        if not (pid := os.fork()):
            try:
                work(job)
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    if job["seconds"] is not None:
        time.sleep(job["seconds"])
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(json.dumps({"ends": ends, "seconds": time.monotonic() - began}), flush=True)
"""


class Forks:
    """A process that has imported and loaded everything, and forks workers that run a grid until they are killed."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def run(self, grid, folder, processes=1, seconds=None, at_operation=None):
        """Run ``grid``; SIGKILL after so many seconds, or at so many file operations. Exit codes (-9: killed), time."""
        job = {"grid": [e.to_dict() for e in grid], "folder": str(folder), "processes": processes, "seconds": seconds,
               "at_operation": at_operation}  # fmt: skip
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())
