"""Bounded runs away from home: a rehearsal in an environment that lacks what is packed, parts that fail or hang, tars."""

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.away import KEPT
from benchmarks.away.home import home
from benchmarks.away.pack import PACKAGES, STAND_INS, _check_sizes, pack
from benchmarks.away.tars import unpacked, write_tar
from fedlib import Experiment
from fedlib_lab.runs.store import find_run

ROOT = Path(__file__).parents[2]
MACHINE = "torch torchvision timm peft pandas pyarrow scikit-learn scipy matplotlib safetensors pyyaml pytest".split()
CELLS = ["cafedistill/table1", "variant=[cafedistill, fedper]"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Two smoke runs with all that they need."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDLIB_OUTPUTS", str(folder / "outputs"))  # what other tests stored is not missing
        assert pack(to=folder / "away", profile="smoke", cells=CELLS, beside="") == 0
    return folder / "away"


def brought(names):
    """Distributions that installing ``names`` brings."""
    found, todo = set(), [Requirement(name) for name in names]
    while todo:
        r = todo.pop()
        with suppress(importlib.metadata.PackageNotFoundError):
            if r.name.lower() not in found:
                wanted = map(Requirement, importlib.metadata.distribution(r.name).requires or [])
                todo += [q for q in wanted if q.marker is None or q.marker.evaluate({"extra": ""})]
                found.add(r.name.lower())
    return found - PACKAGES.keys() - STAND_INS.keys()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of an environment that has what ``MACHINE`` brings, and nothing that is packed."""
    env = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    (packages,) = env.glob("lib/python*/site-packages")
    for name in brought(MACHINE):
        found = importlib.metadata.distribution(name)
        for top in {f.parts[0] for f in found.files or [] if f.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(found.locate_file(top)))
    python = env / "bin" / "python"
    for module in (*PACKAGES.values(), *STAND_INS.values(), "nbval", "scipy_openblas32", "fedlib"):
        assert not any((packages / f"{module}{end}").exists() for end in ("", ".py")), module
    return python


def test_a_rehearsal_on_a_machine_that_lacks_what_is_packed(packed, bare, tmp_path, capsys):
    """Smoke runs in less than 45 seconds: the plan is soon done; then home, twice."""
    out, store, began = tmp_path / "out", tmp_path / "store", time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FEDLIB", "PYTHON", "HF_"))}
    command = [bare, "-m", "benchmarks.away", "run", "--device", "cpu", "--seconds", "45", "--out", out]
    command += ["--skip", "speed", "goals", "--plan", packed / "plan.json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert time.monotonic() - began < 45.5, done.stdout  # and the start of Python
    assert done.returncode == 0, done.stdout + done.stderr + repr(unpacked(out / "logs.tar"))
    files = list(out.iterdir())
    assert len(files) <= 8 and all(f.is_file() and f.stat().st_size <= 16 * 2**20 for f in files)
    told, plan = json.loads((out / "machine.json").read_text()), json.loads((packed / "plan.json").read_text())
    assert told["commit"] == plan["commit"] and set(told["from_the_folder"]) == PACKAGES.keys() | STAND_INS.keys()
    parts = [p["part"] for p in json.loads((out / "report.json").read_text())]
    assert parts.index("tests") < parts.index(plan["runs"][0]["name"]) and "speed" not in parts

    assert home([out / "runs.tar"], store) == 0
    assert "taken" in capsys.readouterr().out
    names = {name.split("/")[0] for name in unpacked(out / "runs.tar")}
    assert plan["runs"][0]["name"] in names == {p.name for p in store.iterdir()}
    for r in plan["runs"]:
        if r["name"] in names:
            assert find_run(Experiment.from_dict(r["experiment"]), store).summary["status"] == "finished"
    file = store / plan["runs"][0]["name"] / "summary.json"
    file.write_text("mine")
    assert home([out / "runs.tar"], store) == 0  # it overwrites nothing
    assert "there already" in capsys.readouterr().out and file.read_text() == "mine"


# --- parts that fail, hang, or do not fit -----------------------------------------------------------------------------

CHILD = """
import json, os, pathlib, signal, subprocess, sys, time
what, *rest = sys.argv[1:]
KEPT = "experiment.json", "metrics.jsonl", "summary.json"
if what == "fill":
    path = pathlib.Path(os.environ["FEDLIB_OUTPUTS"], "runs", "of_spare_cores")
    path.mkdir()
    [(path / name).write_text("{}") for name in KEPT]
    time.sleep(60)
if what == "train":
    r = json.loads(pathlib.Path(rest[0]).read_text())["runs"][int(rest[1])]
    path = pathlib.Path(os.environ["FEDLIB_OUTPUTS"], "runs", r["name"])
    path.mkdir()
    if r["does"] == "fails":
        sys.exit("no")
    if r["does"] == "ends":
        [(path / name).write_text("{}") for name in KEPT]
        time.sleep(0.3)
    if r["does"] == "waits":
        (path / "checkpoint.safetensors").write_text("round 3")
        time.sleep(60)
"""
HANGS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open(FILE, "a").write(f"{p.pid}\\n")
time.sleep(60)
"""


TURN = """
import json, sys, time
from pathlib import Path
from benchmarks.away import run
vars(run).update(json.loads(sys.argv[1]), _cores=lambda: 4)
if sys.argv[2]:
    setattr(getattr(run, (at := sys.argv[2].split("."))[0]), at[1], lambda *_, **more: time.sleep(60))
sys.exit(run.run("cpu", float(sys.argv[3]), *map(Path, sys.argv[4:6]), together=int(sys.argv[6])))
"""


def turn(folder, plan, seconds, hanging="", together=1, **code):
    """The exit status of a turn whose processes run ``code`` instead, and its wall seconds."""
    code, began = json.dumps({name: ["-c", text] for name, text in code.items()}), time.monotonic()
    command = [sys.executable, "-c", TURN, code, hanging, str(seconds), folder / "out", plan, str(together)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)})  # what is left behind goes too
    return done.returncode, time.monotonic() - began


def planned(folder, **does):
    """A plan of runs that do so, each of so many MACs."""
    runs = [{"name": name, "does": what, "macs": macs} for name, (what, macs) in does.items()]
    (folder / "other.json").write_text(json.dumps({"commit": "0", "packages": {}, "runs": runs, "beside": [{}]}))
    return folder / "other.json"


def test_a_red_suite_stops_nothing_and_runs_that_fit_go_first(tmp_path):
    plan = planned(tmp_path, a=("fails", 1e3), b=("ends", 1e3), c=("waits", 1e15), d=("ends", 1e3))
    red, refused = "print('1 failed'); raise SystemExit(1)", "raise SystemExit(2)"
    status, _ = turn(tmp_path, plan, 10, SUITE=red, MEASURE=refused, CHILD=CHILD)
    assert status == 0
    report = {p["part"]: p for p in json.loads((tmp_path / "out/report.json").read_text())}
    assert report["tests"]["ended"] == "failed with 1" and report["tests"]["says"] == "1 failed"
    assert list(report)[:3] == ["tests", "speed", "goals"]
    assert report["speed"]["ended"] == "failed with 2" and report["a"]["ended"] == "failed with 1"
    assert [p for p in report if len(p) == 1] == ["a", "b", "d", "c"]  # c does not fit: it has what is left
    assert report["beside"]["ended"].startswith("stopped")
    assert report["c"]["ended"].startswith("stopped at its limit") and report["d"]["from"] == "b"
    assert {n.split("/")[0] for n in unpacked(tmp_path / "out/runs.tar")} == {"b", "d", "of_spare_cores"}
    assert unpacked(tmp_path / "out/checkpoint.tar") == {"c/checkpoint.safetensors": b"round 3"}


def test_several_runs_go_on_together_and_all_that_the_end_interrupts_comes_back(tmp_path):
    plan = planned(tmp_path, a=("waits", 1e3), b=("waits", 1e3), c=("ends", 1e3), d=("ends", 1e15))
    status, seconds = turn(tmp_path, plan, 8, SUITE="", MEASURE="", CHILD=CHILD, together=3)
    report = {p["part"]: p for p in json.loads((tmp_path / "out/report.json").read_text())}
    assert status == 0 and seconds < 8.5
    assert report["c"]["at"] < report["a"]["at"] and report["a"]["ended"].startswith("stopped at its limit after")
    assert "d" not in report  # it does not fit, which those that go on do not wait for
    assert {n.split("/")[0] for n in unpacked(tmp_path / "out/checkpoint.tar")} == {"a", "b"}
    assert "beside" not in report  # no core is spare


def test_where_everything_hangs_the_deadline_is_kept_and_nobody_is_left(tmp_path):
    hangs = HANGS.replace("FILE", repr(str(tmp_path / "pids")))
    plan = planned(tmp_path, a=("hangs", 1))
    status, seconds = turn(tmp_path, plan, 6, SUITE=hangs, MEASURE=hangs, CHILD=hangs)
    assert status == 1 and seconds < 6.5  # the start of Python is not in the six
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 3 and not any(Path("/proc", pid).exists() for pid in pids if not is_zombie(pid))
    assert not list((tmp_path / "out").glob("checkpoint.tar"))


def is_zombie(pid):
    with suppress(OSError):
        return "State:\tZ" in Path("/proc", pid, "status").read_text()
    return False


@pytest.mark.parametrize("hanging, expected", [("Turn.pack_runs", 3), ("shutil.rmtree", 1)])
def test_where_packing_or_deleting_hangs_the_alarm_ends_it(hanging, expected, tmp_path):
    """Of 5 seconds 4.5 are over."""
    status, seconds = turn(tmp_path, planned(tmp_path), 5, hanging, SUITE="", MEASURE="", CHILD="")
    assert status == expected and seconds < 5.5


# --- tars, sizes ------------------------------------------------------------------------------------------------------


def tar_of(file, *infos):
    with tarfile.open(file, "w") as tar:
        for info in infos:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return file


def entry(name, kind=tarfile.REGTYPE, size=0):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "bad",
    [entry("../x"), entry("a/../../x"), entry("/tmp/x"), entry("a/summary.json", tarfile.SYMTYPE),
     entry("a/summary.json", tarfile.LNKTYPE), entry("a", tarfile.DIRTYPE), entry("a/other.json"),
     entry("a/clients/summary.json"), entry("a/.lock")],
    ids=lambda info: f"{info.name} {info.type.decode()}",
)  # fmt: skip
def test_a_tar_with_anything_but_the_three_files_is_refused(bad, tmp_path, capsys):
    good = [entry(f"good/{name}") for name in KEPT]
    assert home([tar_of(tmp_path / "x.tar", *good, bad)], tmp_path / "store") == 1
    assert "x.tar is refused" in capsys.readouterr().err and not list((tmp_path / "store").iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "x.tar"]


def test_a_damaged_tar_is_refused(tmp_path, capsys):
    members = [(f"a/{name}", b"x" * 5000) for name in KEPT]
    write_tar(tmp_path / "x.tar", members)
    whole = (tmp_path / "x.tar").read_bytes()
    for damaged in (whole[:6000], whole[: len(whole) // 2], whole[:512], b"", b"no tar" * 1000, b"\1" + whole[1:]):
        (tmp_path / "x.tar").write_bytes(damaged)
        assert home([tmp_path / "x.tar"], tmp_path / "store") == 1
        assert "x.tar is damaged" in capsys.readouterr().err
    write_tar(tmp_path / "x.tar", members[:2])
    assert home([tmp_path / "x.tar"], tmp_path / "store") == 1
    assert "a lacks summary.json" in capsys.readouterr().err
    write_tar(tmp_path / "x.tar", members)
    assert home([tmp_path / "x.tar"], tmp_path / "store") == 1
    assert "a of " in capsys.readouterr().err and not list((tmp_path / "store").iterdir())


def test_what_is_too_large_says_what_to_leave_out():
    sizes, sets = (
        {"tree": 8.3, "packages": 6.7, "cifar10": 17.4, "cifar100": 99.6, "mnist": 0.0},
        ["cifar10", "cifar100"],
    )
    with pytest.raises(
        ValueError, match=r"tree 8.3 \+ packages 6.7 \+ cifar10 17.4 \+ cifar100 99.6 = 132.0 MiB are more "
    ):
        _check_sizes(sizes, sets, 64)
    with pytest.raises(
        ValueError, match="leave out cifar100: 32.4 MiB are left; with cifar100 as the only set it is 114.6"
    ):
        _check_sizes(sizes, sets, 64)
    with pytest.raises(ValueError, match="without data 15.0 MiB are left, still too many: raise --limit-mib"):
        _check_sizes(sizes, sets, 10)
    _check_sizes(sizes, sets, 133)


def test_pack_refuses_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLIB_DATA", raising=False)
    (tmp_path / "mine").mkdir()
    for refused, asked in {
        "is no folder of pack": {"to": tmp_path / "mine"},
        "cifar10 is not at hand": {"data": ["mnist", "cifar10"]},
        "no run of the plan is on cifar10; they are on mnist": {"data": ["cifar10"]},
        "leave it out": {"data": ["mnist", "sst2"]},
        "raise --limit-mib": {"limit_mib": 1},
    }.items():
        with pytest.raises(ValueError, match=refused):
            pack(**{"to": tmp_path / "away", "profile": "smoke", "cells": CELLS, "beside": "", **asked})
    assert not (tmp_path / "away").exists()


def test_an_interrupted_run_goes_first_the_next_time(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    last = json.loads((packed / "plan.json").read_text())["runs"][-1]["name"]
    write_tar(tmp_path / "checkpoint.tar", [(f"{last}/checkpoint.safetensors", b"1")])
    pack(to=tmp_path / "away", profile="smoke", cells=CELLS, beside="", go_on=tmp_path / "checkpoint.tar")
    assert json.loads((tmp_path / "away/plan.json").read_text())["runs"][0]["name"] == last
    assert unpacked(tmp_path / "away/checkpoint.tar") == unpacked(tmp_path / "checkpoint.tar")
