"""Packed runs: the same names, bytes and look-ups as folders, under the folder of one's own runs."""

import importlib.util
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from fedlib import extend, forget, run, runs_frame
from fedlib.core.storage import DamagedFile, read_json, read_lines, write_json, write_lines
from fedlib_lab.runs.identity import OtherInputs
from fedlib_lab.runs.packed import FORGOTTEN, KEPT, Packed, listed, runs_in, seen
from fedlib_lab.runs.store import find_run, run_path, stored_runs
from fedlib_lab.runs.trained import load_trained
from tests.helpers.stored import ONE, small
from tests.helpers.tracked import OUTPUTS

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("packs_of_runs", ROOT / "docs/packs.py")
packs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packs)
E1, E2 = (small("fedavg", rounds=1, schedule="constant", seed=seed) for seed in (3, 4))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two finished runs as folders, with their weights."""
    folder = tmp_path_factory.mktemp("made")
    for e in (E1, E2):
        run(e, ONE, folder, progress=False)
    return folder


@pytest.fixture
def loose(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs")


@pytest.fixture
def packed(loose):
    """Both packed, without their folders and weights."""
    assert packs.pack(loose, remove=True) == (sorted([E1.slug, E2.slug]), [])
    for e in (E1, E2):
        shutil.rmtree(loose / e.slug)
    return loose


def the_pack(folder):
    (file,) = folder.glob("*.runs.jsonl")
    return file


def bytes_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.glob("*/*") if p.name in KEPT}


def test_all_stored_runs_are_packed_and_unpacked_byte_for_byte(tmp_path):
    """Of those that are stored as folders now, and of those that are packed."""
    runs = [(p.name, k, (p / k).read_bytes()) for p in listed(OUTPUTS / "runs", "*", "summary.json") for k in KEPT]
    assert len(runs) > 3 * 700
    by_pack = {}
    for name, kept, content in runs:
        of = by_pack.setdefault(Path(packs.pack_of(tmp_path / "packs" / name)), {})
        of.setdefault(name, {})[kept] = content.decode()
    for file, of in by_pack.items():
        packs.write(file, of)
    assert packs.main(["--folder", str(tmp_path / "packs"), "--unpack", str(tmp_path / "again")]) == 0
    assert bytes_of(tmp_path / "again") == {f"{name}/{kept}": content for name, kept, content in runs}
    for file in (OUTPUTS / "runs").glob("*.runs.jsonl"):  # the committed packs have the bytes that these runs have
        if set(runs_in(str(file))) == set(by_pack[tmp_path / "packs" / file.name]):
            assert file.read_bytes() == (tmp_path / "packs" / file.name).read_bytes()


def test_no_run_that_git_holds_lies_beside_the_packs():
    runs = OUTPUTS / "runs"
    if list(runs.glob("*.runs.jsonl")):
        assert not list(runs.glob("*/*.json*")), "finished runs lie beside the packs: run `make pack`"
        assert sum(p.is_file() for p in OUTPUTS.rglob("*")) < 800


def test_a_pack_is_the_same_bytes_for_the_same_runs_in_whatever_order_they_came(loose, tmp_path):
    packs.pack(loose, into=tmp_path / "at_once")
    for e in (E2, E1):
        packs.pack(loose, [e.slug], into=tmp_path / "one_by_one")
    assert the_pack(tmp_path / "at_once").read_bytes() == the_pack(tmp_path / "one_by_one").read_bytes()
    assert the_pack(tmp_path / "at_once").name == "fedavg-mnist.runs.jsonl"
    before = os.stat(the_pack(tmp_path / "at_once"))
    packs.pack(loose, into=tmp_path / "at_once")
    assert os.stat(the_pack(tmp_path / "at_once")) == before  # not even written


def test_the_guide_s_lines_read_a_pack_without_the_kit_and_without_torch(tmp_path):
    guide = (ROOT / "docs/guide/results.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n(import json\n.*?)```", guide, re.S)
    runs = {p.name: packs.read(p) for p in listed(OUTPUTS / "runs", "reefl-cifar10-*", "summary.json")}
    (tmp_path / "outputs/runs").mkdir(parents=True)
    packs.write(tmp_path / "outputs/runs/reefl-cifar10.runs.jsonl", runs)
    alone = "import sys; sys.modules |= dict.fromkeys(('fedlib', 'fedlib_lab', 'torch'))\n"
    told = f"{alone}{lines}\nprint(json.dumps({{r['run']: [r['accuracy'], r['seed'], len(r['curve'])] for r in rows}}))"
    out = subprocess.run([sys.executable, "-c", told], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    stored = [r for r in stored_runs(OUTPUTS / "runs", ["reefl-cifar10-"]) if r.path.name in runs]
    assert len(stored) > 50
    expected = {r.path.name: [r.accuracy, r.experiment.seed, len(r.metrics)] for r in stored}
    assert json.loads(out.splitlines()[-1]) == expected


def test_a_packed_run_is_found_listed_and_read_as_its_folder_was(made, packed, monkeypatch):
    assert [p.name for p in packed.iterdir() if p.is_dir()] == []
    before, after = list(stored_runs(made)), list(stored_runs(packed))
    same = [(r.experiment, r.summary, r.metrics, r.record, r.path.name) for r in before]
    assert [(r.experiment, r.summary, r.metrics, r.record, r.path.name) for r in after] == same
    assert runs_frame(made).equals(runs_frame(packed))
    monkeypatch.setattr("fedlib_lab.runs.store._run_missing", lambda *_: pytest.fail("it is trained again"))
    for e in (E1, E2):
        found = run(e, ONE, packed, progress=False)
        assert found == find_run(e, packed) and found.path == packed / e.slug == run_path(e, packed)
        assert found.path.parent == packed and found.experiment == e
        for name in KEPT:
            file, was = found.path / name, (made / e.slug / name).read_bytes()
            assert file.read_bytes() == was and file.read_text("utf-8") == was.decode() and file.exists()
            assert file.is_file() and file.stat().st_size == len(was)
            with file.open() as lines:
                assert "".join(lines) == was.decode()
        assert read_json(found.path / "summary.json") == read_json(made / e.slug / "summary.json")
        assert found.path.exists() and not (found.path / "checkpoint.safetensors").exists()
        assert pickle.loads(pickle.dumps(found)).path.joinpath("summary.json").is_file()
    assert find_run(E1.replace(seed=9), packed) is None and seen(packed / "fedavg-mnist-frozen-s9-00000000") is None
    assert not [p for p in packed.iterdir() if p.is_dir()]  # reading unpacks nothing


def test_a_run_under_its_former_name_is_found_in_a_pack(loose):
    e = E1.replace(evaluate_every=1)
    former = loose / e.former_slug
    (loose / E1.slug).rename(former)
    packs.pack(loose, remove=True)
    shutil.rmtree(former)
    assert find_run(E1, loose).path.name == e.former_slug
    assert find_run(E1.replace(evaluate_every=0), loose).path.name == e.former_slug


def test_a_run_of_ones_own_wins_and_the_pack_stays(packed):
    bytes_before, there = the_pack(packed).read_bytes(), find_run(E1, packed)
    again = run(E1, ONE, packed, progress=False, again=True)
    assert (packed / E1.slug / "experiment.json").is_file() and not isinstance(again.path, Packed)
    own = read_json(packed / E1.slug / "summary.json")
    write_json(packed / E1.slug / "summary.json", own | {"seconds": 12345.0})
    assert find_run(E1, packed).summary["seconds"] == 12345.0 != there.summary["seconds"]
    assert [r.summary["seconds"] for r in stored_runs(packed, [E1.slug])] == [12345.0]
    assert the_pack(packed).read_bytes() == bytes_before
    assert there.path.joinpath("summary.json").read_text() == runs_in(str(the_pack(packed)))[E1.slug]["summary.json"]


def test_a_forgotten_run_is_hidden_until_its_folder_is_deleted(packed):
    bytes_before = the_pack(packed).read_bytes()
    assert forget(E1, packed) and find_run(E1, packed) is None and not forget(E1, packed)
    assert [r.experiment for r in stored_runs(packed)] == [E2]
    run(E1, ONE, packed, progress=False)
    assert not isinstance(find_run(E1, packed).path, Packed)
    assert forget(E1, packed) and find_run(E1, packed) is None  # that one is gone, and the packed one stays hidden
    shutil.rmtree(packed / E1.slug)
    assert isinstance(find_run(E1, packed).path, Packed) and the_pack(packed).read_bytes() == bytes_before


def test_an_unfinished_run_of_ones_own_is_gone_on_with(packed):
    e = E1.replace(rounds=3)
    done = run(e, ONE, packed, progress=False)
    packs.pack(packed, remove=True)
    shutil.rmtree(packed / e.slug)
    stopped = run(e, ONE, packed, progress=False, again=True, on_round=lambda r: r.t == 2)
    assert stopped.summary["status"] == "stopped" and find_run(e, packed) is None
    assert e.slug not in {r.path.name for r in stored_runs(packed)}
    rounds = []
    ended = run(e, ONE, packed, progress=False, on_round=lambda r: rounds.append(r.t))
    assert rounds == [3] and ended.summary["exits"] == done.summary["exits"]


def test_other_inputs_are_refused_of_a_packed_run(loose):
    file = loose / E1.slug / "experiment.json"
    content = read_json(file)
    others = dict.fromkeys(content["inputs"]["options"], "other")
    write_json(file, content | {"inputs": content["inputs"] | {"options": others}})
    packs.pack(loose, remove=True)
    with pytest.raises(OtherInputs, match=rf"{E1.slug} is stored in {loose}, but differs .*: method option"):
        find_run(E1, loose)
    assert find_run(E1, loose, "options").path == loose / E1.slug


def test_weights_stay_in_the_folder_and_are_those_of_the_packed_run(loose, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    packs.pack(remove=True)
    assert not bytes_of(loose) and (loose / E1.slug / "checkpoint.safetensors").exists()
    assert isinstance(find_run(E1).path, Packed)
    load_trained(E1, ONE)
    assert not (tmp_path / "retrained").exists()
    longer = extend(E1, 2, execution=ONE, progress=False)
    assert longer.summary["t"] == 2 and not isinstance(longer.path, Packed)
    shutil.rmtree(loose / E1.slug)
    with pytest.raises(ValueError, match="came without its weights"):
        extend(E1, 3)
    load_trained(E1, ONE)  # beside the store
    assert [p.name for p in (tmp_path / "retrained").iterdir()] == [E1.slug] and not (loose / E1.slug).exists()


def test_a_run_that_was_made_anew_takes_the_place_of_the_packed_one(packed, made, capsys):
    """By its bytes; of the others not one changes, and weights stay."""
    run_of, before = packed / E1.slug, runs_in(str(the_pack(packed)))
    run(E1, ONE, packed, progress=False, again=True)
    assert (run_of / FORGOTTEN).exists()  # the older one stays hidden until it is replaced
    write_json(run_of / "summary.json", read_json(run_of / "summary.json") | {"seconds": 9.0})
    own = {name: (run_of / name).read_text() for name in KEPT}
    assert packs.main(["--folder", str(packed), "--remove"]) == 0
    assert capsys.readouterr().out == f"1 runs are packed; 1 of them take the place of an older one: {E1.slug}\n"
    assert runs_in(str(the_pack(packed))) == {E1.slug: own, E2.slug: before[E2.slug]}
    assert find_run(E1, packed).summary["seconds"] == 9.0 and isinstance(find_run(E1, packed).path, Packed)
    assert [p.name for p in run_of.iterdir()] == ["checkpoint.safetensors"]


def test_no_folder_goes_whose_bytes_are_not_in_the_pack(loose, monkeypatch):
    """Not even of a run that is made anew while the others are packed."""
    before, write, late = bytes_of(loose), packs.write, {}

    def meanwhile(file, runs):
        write(file, runs)
        for e in (E1, E2):
            summary = loose / e.slug / "summary.json"
            write_json(summary, read_json(summary) | {"seconds": 8.0})
            late[e.slug] = summary.read_bytes()

    monkeypatch.setattr(packs, "write", meanwhile)
    packs.pack(loose, remove=True)
    assert bytes_of(loose) == before | {f"{name}/summary.json": content for name, content in late.items()}
    monkeypatch.setattr(packs, "write", write)
    assert packs.pack(loose, remove=True) == (sorted(late), sorted(late)) and not bytes_of(loose)
    assert {r.summary["seconds"] for r in stored_runs(loose)} == {8.0}


@pytest.mark.parametrize("left", [("experiment.json",), ("experiment.json", "metrics.jsonl"), ("metrics.jsonl",), KEPT])
def test_what_is_left_of_a_packed_folder_goes_only_if_the_pack_has_it(left, packed, made):
    """Files of a deletion that was cut off go; those of a run that was begun, or of other bytes, stay."""
    (packed / E1.slug).mkdir()
    for name in left:
        shutil.copy(made / E1.slug / name, packed / E1.slug)
    packs.pack(packed, remove=True)
    begun = left[0] == "experiment.json" and left != KEPT  # as after a kill in the first rounds of a run of one's own
    assert set(bytes_of(packed)) == ({f"{E1.slug}/{name}" for name in left} if begun else set())
    assert (find_run(E1, packed) is None) == begun
    (packed / E1.slug).mkdir(exist_ok=True)
    (packed / E1.slug / "metrics.jsonl").write_text("other")
    packs.pack(packed, remove=True)
    assert (packed / E1.slug / "metrics.jsonl").read_text() == "other"


def test_only_finished_runs_are_packed_and_what_cannot_be_read_stays(loose):
    (loose / E1.slug / "summary.json").unlink()
    (loose / E2.slug / "metrics.jsonl").write_text("{")
    with pytest.warns(UserWarning, match="is left out"):
        assert packs.pack(loose, remove=True) == ([], [])
    assert len(bytes_of(loose)) == 5 and not list(loose.glob("*.jsonl"))


def test_a_run_that_is_being_run_is_not_removed(loose):
    with FileLock(loose / E1.slug / ".lock"):
        packs.pack(loose, remove=True)
    assert {Path(name).parent.name for name in bytes_of(loose)} == {E1.slug} and not isinstance(
        find_run(E1, loose).path, Packed
    )


def test_a_pack_that_does_not_read_as_written_costs_no_folder(loose, monkeypatch):
    monkeypatch.setattr(packs, "write_lines", lambda file, lines: write_lines(file, lines[1:]))
    with pytest.raises(DamagedFile, match="it does not read as it was written"):
        packs.pack(loose, remove=True)
    assert len(bytes_of(loose)) == 6


def test_a_damaged_pack_is_one_sentence(packed):
    file = the_pack(packed)
    whole = file.read_bytes()
    for damaged in (
        whole[:-40],
        whole.replace(b"accuracy", b"accuracz", 1),
        b"<<<<<<< HEAD\n" + whole,
        b"\xff" + whole,
    ):
        file.write_bytes(damaged)
        with pytest.raises(DamagedFile, match=r"fedavg-mnist.runs.jsonl is damaged \(.*\); restore it"):
            find_run(E1, packed)
        with pytest.warns(UserWarning, match="the runs in fedavg-mnist.runs.jsonl are left out: .* is damaged"):
            assert list(stored_runs(packed)) == []
    file.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(DamagedFile, match="a run is there twice"):
        find_run(E1, packed)
    file.write_bytes(whole)
    assert find_run(E1, packed) is not None


@pytest.mark.parametrize(
    "name", ["../out", "fedavg-mnist-../../out", "/tmp/fedavg-mnist-out", "depthfl-mnist-s0-00000000"]
)
def test_no_name_in_a_pack_leads_elsewhere(name, packed, tmp_path):
    file = the_pack(packed)
    write_lines(file, [line | {"run": name} if line["run"] == E2.slug else line for line in read_lines(file)])
    with pytest.raises(DamagedFile, match=f"{re.escape(name)}' is no run of this file"):
        find_run(E1, packed)
    before = sorted(tmp_path.rglob("*"))
    assert packs.main(["--folder", str(packed), "--unpack", str(tmp_path / "a/b/c")]) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pack_of_another_version_is_refused(packed, made):
    file = the_pack(packed)
    write_lines(file, [line | {"pack": 2} for line in read_lines(file)])
    with pytest.raises(ValueError, match="is a pack of version 2, and this kit reads 1: update the kit"):
        run(E1, ONE, packed, progress=False)
    shutil.copytree(made / E1.slug, packed / E1.slug)
    with pytest.warns(UserWarning, match="version 2"), pytest.raises(ValueError, match="a pack of version 2"):
        packs.pack(packed, remove=True)
    assert len(bytes_of(packed)) == 3 and read_lines(file)[0]["pack"] == 2


def _read_all(folder, found):
    found.put(
        [(r.path.name, r.summary["digest"] if "digest" in r.summary else r.accuracy) for r in stored_runs(folder)]
    )


def _pack(folder, at):
    """Pack and remove; killed at the ``at``-th file operation."""
    left = [at]

    def counted(operation):
        def call(*args, **named):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return operation(*args, **named)

        return call

    os.replace, os.fsync, Path.unlink, Path.rmdir = map(counted, (os.replace, os.fsync, Path.unlink, Path.rmdir))
    packs.pack(folder, remove=True)


fork = multiprocessing.get_context("fork")


def test_two_processes_at_once_pack_and_read_the_same(made, loose):
    """Both pack and remove, two others read meanwhile: each sees both runs at every moment."""
    found = fork.Queue()
    packers = [fork.Process(target=packs.pack, args=(loose,), kwargs={"remove": True}) for _ in range(2)]
    readers = [fork.Process(target=_read_all, args=(loose, found)) for _ in range(4)]
    for p in (readers[0], *packers, *readers[1:]):
        p.start()
    seen_ones = [found.get(timeout=60) for _ in readers]
    for p in (*packers, *readers):
        p.join(60)
        assert p.exitcode == 0
    assert all(len(of) == 2 and of == seen_ones[0] for of in seen_ones)
    assert not bytes_of(loose) and [r.summary for r in stored_runs(loose)] == [r.summary for r in stored_runs(made)]


@pytest.mark.parametrize("anew", [False, True])
def test_killed_at_any_operation_no_run_is_lost(anew, made, tmp_path):
    """What is left reads as before, and packing again ends it; also of a run made anew beside the older one's pack."""
    start = shutil.copytree(made, tmp_path / "start")
    if anew:
        packs.pack(start, into=tmp_path / "older")
        shutil.copy(the_pack(tmp_path / "older"), start)
        run(E1, ONE, start, progress=False, again=True)
        assert (start / E1.slug / FORGOTTEN).exists()
    before = [(r.path.name, r.summary, r.metrics, r.record) for r in stored_runs(start)]
    killed = 0
    for at in range(100):
        folder = shutil.copytree(start, tmp_path / str(at))
        p = fork.Process(target=_pack, args=(folder, at))
        p.start()
        p.join(60)
        assert [(r.path.name, r.summary, r.metrics, r.record) for r in stored_runs(folder)] == before, at
        assert all(find_run(e, folder) is not None for e in (E1, E2))
        if p.exitcode == 0:
            break
        assert p.exitcode == -signal.SIGKILL
        killed += 1
        packs.pack(folder, remove=True)
        assert [(r.path.name, r.summary, r.metrics, r.record) for r in stored_runs(folder)] == before
        assert not bytes_of(folder) and not list(folder.glob(f"*/{FORGOTTEN}"))
        shutil.rmtree(folder)
    assert killed >= 8


def test_a_pack_that_another_process_writes_anew_is_read_anew(packed, made):
    """Also within a tick of the clock: a pack is a new file each time."""
    for seconds in (1.0, 2.0, 3.0):
        lines = read_lines(the_pack(packed))
        for line in lines:
            was = json.loads(line["summary.json"])
            write_json(made.parent / "x.json", {k: v for k, v in was.items() if k != "digest"} | {"seconds": seconds})
            line["summary.json"] = (made.parent / "x.json").read_text()
        write_lines(the_pack(packed), lines)
        assert {r.summary["seconds"] for r in stored_runs(packed)} == {seconds}


def test_looking_up_is_quick_beside_a_hundred_packs(packed):
    """No look-up reads another pack than its own."""
    for i in range(100):
        (packed / f"m{i}-mnist.runs.jsonl").write_text("damaged")
    began = time.process_time()
    for _ in range(20):
        assert find_run(E1, packed) is not None and find_run(E1.replace(seed=9), packed) is None
    assert time.process_time() - began < 5
