"""The engine benchmark: rivals and fedlib train the same clients on the same batches, and the harness counts honestly."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import engine_speed, gpu, harness, one_core, prepare, scale, setup_rivals, systems
from benchmarks.names import to_fedlib, to_plain
from benchmarks.ours import federation_of
from benchmarks.rivals.workload import Federation, Workload
from benchmarks.systems import SYSTEMS, running
from fedlib import Experiment
from fedlib.engine.evaluation import exit_logits, served_parts

ROOT = Path(__file__).parents[2]

SMALL = Workload("small", batch_size=16, num_clients=6, examples=40, per_round=3, rounds=4)
LORA = dataclasses.replace(SMALL, name="small LoRA", lora_blocks=(1, 11))
RESNET = dataclasses.replace(SMALL, name="small ResNet", architecture="resnet8", img_size=32, lr=1e-3)
REEFL = dataclasses.replace(LORA, name="small ReeFL", method="reefl")
FEDPER, DITTO = (
    dataclasses.replace(
        RESNET, name=f"small {m}", method=m, tested=True, architecture="convnet3_slim", rounds=12, lr=0.05
    )
    for m in ("fedper", "ditto")
)
ALL = (SMALL, LORA, RESNET, REEFL, FEDPER, DITTO)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workloads")
    return {w.name: prepare.write_workload(w, folder / f"{w.name}.safetensors") for w in ALL}


@pytest.mark.parametrize("w", [SMALL, LORA, RESNET, FEDPER], ids=lambda w: w.name)
def test_both_names_and_one_function(w, files):
    shared = Federation(files[w.name])
    tensors = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(i)) / 10 for i, (k, v) in enumerate(shared.initial.items())}  # fmt: skip
    back = to_plain(to_fedlib(tensors, w), w)
    assert back.keys() == tensors.keys() and all(torch.equal(back[k], tensors[k]) for k in tensors)
    shared.initial = tensors
    plain, f = shared.model(), federation_of(shared)
    own = exit_logits(f, f.server, served_parts(f, f.server)[0])[-1]
    answers = plain(shared.test_images)  # batch norm reads all of them at once
    rounding = 2e-3 if w is RESNET else 1e-5  # twenty norms one after the other enlarge it
    torch.testing.assert_close(own, answers, atol=rounding, rtol=1e-5)


@pytest.mark.parametrize(
    "w, names",
    [
        (SMALL, ("bare loop", "two processes", "fedlib")),
        (LORA, ("bare loop", "fedlib, one client at a time")),
        (RESNET, ("bare loop", "two processes, channels last", "fedlib")),
        (FEDPER, ("two processes", "fedlib")),
        (DITTO, ("two processes, channels last", "fedlib, one client at a time")),
    ],
    ids=lambda x: x.name if isinstance(x, Workload) else "",
)
def test_batches_are_those_that_fedlib_draws(w, names, files):
    """All end two rounds with the same parameters and accuracy: same clients, same batches, same mean."""
    with running([SYSTEMS[n] for n in names], files[w.name]) as started:
        times = harness.time_interleaved(started, rounds=1, repeats=1, warm_up=1)
        facts = harness.facts(started)
    assert set(times.system) == set(names) and (times.seconds > 0).all()
    assert (facts["max_difference"] < 2e-5).all() and facts["accuracy"].round(3).nunique() == 1, facts
    assert (facts["rounds"] == 2).all() and (facts["lines"] > 20).all()


@pytest.mark.parametrize("name", ["PFLlib", "FL-bench"])
@pytest.mark.parametrize("w", [FEDPER, DITTO], ids=lambda w: w.name)
def test_a_checkout_trains_and_tests_the_clients(name, w, files):
    """By its own drawing of batches, and by its own scale of pixels: only that it learns can be asked."""
    if why := SYSTEMS[name].missing():
        pytest.skip(why)
    with running([SYSTEMS["two processes"], SYSTEMS[name]], files[w.name]) as started:
        times = harness.time_interleaved(started, rounds=5, repeats=2, warm_up=1)
        facts = harness.facts(started)
    assert (times.seconds > 0).all() and facts.max_difference.isna()[name]
    assert (facts.accuracy > 20).all(), facts


def test_a_loop_of_its_own_stands_still_between_rounds(monkeypatch):
    monkeypatch.syspath_prepend(systems.RIVALS)
    from stepwise import Stepwise

    system, did = Stepwise(), []

    def loop():
        for t in range(3):
            system.gate()
            did.append(t)
        raise ValueError("no round 4")

    system.start(loop)
    assert did == [] and len(system.rounds(0, 2)) == 2 and did == [0, 1]
    with pytest.raises(RuntimeError, match="the framework's loop ended") as caught:
        system.rounds(2, 1)
    assert str(caught.value.__cause__) == "no round 4" and did == [0, 1, 2]


def test_a_checkout_is_named_or_cloned(monkeypatch, tmp_path):
    monkeypatch.setenv("PFLLIB", str(tmp_path / "none"))
    assert "no checkout of PFLLIB: run python -m benchmarks.setup_rivals checkouts" in SYSTEMS["PFLlib"].missing()
    monkeypatch.setitem(systems.CHECKOUTS, "PFLLIB", (str(tmp_path / "nowhere"), "0" * 40))
    assert "skipped, because git could not fetch 00000000 of" in setup_rivals.clone("PFLLIB")
    (tmp_path / "none").mkdir()
    assert setup_rivals.clone("PFLLIB") == f"PFLLIB: {tmp_path / 'none'} is there"


def test_only_fedlib_trains_reefl(files):
    with running([SYSTEMS["fedlib"], SYSTEMS["fedlib, one client at a time"]], files[REEFL.name]) as started:
        for r in started:
            r.rounds(2)
        assert harness.facts(started)["max_difference"].max() < 2e-5
    with pytest.raises(RuntimeError, match="method = 'reefl' is not possible here; allowed: fedavg"):
        with running([SYSTEMS["bare loop"]], files[REEFL.name]):
            pass


def test_a_dead_system_is_reported_and_nothing_survives(files):
    with pytest.raises(RuntimeError, match="round 5 was asked for, but rounds = 4 are stored"):
        with running([SYSTEMS["two processes"]], files[SMALL.name]) as (r,):
            family = systems.tree(r.processes)
            r.rounds(5)
    deadline = time.time() + 10
    while any(p.is_running() for p in family) and time.time() < deadline:
        time.sleep(0.05)
    assert not any(p.is_running() for p in family)


def test_ratios_are_between_neighbouring_blocks():
    """A slows from 1 to 3 s together with B, from 2 to 6: the ratio stays 2, whatever the medians over all say."""
    rows = [("A", 0, 1, 1.0), ("B", 0, 1, 2.0), ("A", 1, 2, 3.0), ("B", 1, 2, 6.0), ("A", 2, 3, 3.0), ("B", 2, 3, 9.0)]
    times = pd.DataFrame(rows, columns=["system", "repeat", "round", "seconds"])
    out = harness.summary(times, "A")
    assert list(out.index) == ["A", "B"] and out.loc["B", "seconds"] == 6
    assert tuple(out.loc["B", ["ratio", "ratio_min", "ratio_max"]]) == (2, 2, 3)
    with pytest.raises(ValueError, match="against = 'C' was not timed; allowed: A, B"):
        harness.summary(times, "C")


def test_memory_of_the_whole_process_tree_is_seen():
    code = "import subprocess, sys; x = b'1' * 50_000_000; subprocess.run([sys.executable, '-c', 'x = b\"1\" * 100_000_000; input()'])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    with harness.MemorySampler([parent]) as sampler:
        deadline = time.time() + 20
        while sampler.peak < 150e6 and time.time() < deadline:
            time.sleep(0.05)
    parent.communicate(b"\n")
    assert 150e6 < sampler.peak < 250e6 and sampler.processes == 2


def test_a_peak_between_two_samples_is_bounded():
    """100 MB are held for less than a sample's interval: no sample sees them, the kernel's own peak does."""
    code = "input(); x = b'1' * 100_000_000; del x; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    sampler = harness.MemorySampler([process])
    sampler.sample()
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    sampler.sample()
    process.communicate(b"\n")
    assert sampler.peak < 60e6 and 90e6 < sampler.unseen < 130e6


def test_lines_of_user_code(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(
        '"""Not\ncode."""\n\n# nor this\nx = f(\n    1,\n)  # three lines\n\n\ndef g():\n    "no"\n    return """two\nlines"""\n'
    )
    assert harness.count_lines(file) == 3 + 1 + 2


def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="'Flowers' is unknown; allowed: fedlib"):
        systems.select(["Flowers"])
    absent = dataclasses.replace(SYSTEMS["pfl"], venv="nowhere")
    assert absent.missing() == "no environment .venv-bench/nowhere: run python -m benchmarks.setup_rivals nowhere"
    with pytest.raises(SystemExit, match="'fedjax' is unknown; allowed: flower, pfl, blazefl, checkouts"):
        setup_rivals.main(["fedjax"])


def record(seconds):
    """A stored measurement: seconds a round by system and turn."""
    times = [
        {"system": n, "repeat": i, "round": i + 1, "seconds": s}
        for n, turns in seconds.items()
        for i, s in enumerate(turns)
    ]
    told = [{"system": n, "peak_mib": 100.0 * len(n), "first_round_seconds": 3.0} for n in seconds]
    return {"workload": "W1", "times": times, "facts": told, "missing": [], "provenance": {}}


def test_verdicts_take_the_fastest_rival():
    """pfl's medians are 1.5 and 1.2 of ours: 1.35 over the turns; the bare loop is slower, our own loop is no rival."""
    slow = {"fedlib": [1, 1], "bare loop": [2, 2], "pfl": [1.5, 1.2], "fedlib, one at a time on 2 threads": [1.1, 1.1]}
    table = engine_speed.verdicts({"W1": record(slow)}).set_index(["workload", "target"])
    row = table.loc[("W1", "≥ 1.25× the fastest rival")]
    assert (row.against, row.obtained, row.range, row.verdict) == ("pfl", 1.35, "1.20–1.50", "holds")
    assert table.loc[("W1", "≥ 1.8× Flower")].verdict == "not measured" and len(table) == len(engine_speed.TARGETS) + 2
    first, memory = table.loc[("W1", "first round ≤ 2×")], table.loc[("W1", "peak memory ≤ 1.5×")]
    assert (first.obtained, first.verdict) == (3, "does not hold")
    assert (memory.obtained, memory.against, memory.verdict) == (
        2,
        "pfl",
        "does not hold",
    )  # len("fedlib") / len("pfl")


def test_the_table_of_facts_is_the_same_measured_now_or_read_again():
    now = record({"fedlib": [1.0]})
    read = now | {"facts": [dict(sorted(row.items())) for row in now["facts"]]}
    assert list(engine_speed.facts_table({"W1": now})) == ["first_round_seconds", "peak_mib"]
    pd.testing.assert_frame_equal(engine_speed.facts_table({"W1": now}), engine_speed.facts_table({"W1": read}))


def test_benches_refuse_typos():
    assert engine_speed.load_bench("smoke", {"rounds": 3}).rounds == 3
    for overrides, message in (
        ({"systems": ["Flowers"]}, "did you mean 'Flower'"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"repeats": 0}, "repeats = 0 must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_speed.load_bench("small", overrides)
    with pytest.raises(ValueError, match="profile = 'smal' is unknown; did you mean 'small'"):
        engine_speed.load_bench("smal")


def test_stored_measurements_are_not_repeated(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    bench, calls = engine_speed.load_bench("smoke"), []
    monkeypatch.setattr(engine_speed, "measure_population", lambda n, rounds: {"num_clients": n})
    monkeypatch.setattr(
        harness, "time_interleaved", lambda *a, **k: calls.append(a) or pd.DataFrame(record({"fedlib": [1.0]})["times"])
    )
    monkeypatch.setattr(
        harness, "facts", lambda started: pd.DataFrame({"system": ["fedlib"], "lines": [3]}).set_index("system")
    )
    monkeypatch.setattr(engine_speed, "running", lambda *a: contextlib.nullcontext([]))
    assert engine_speed.load("smoke", bench, run_missing=False) == ({}, None) and not calls
    first = engine_speed.load("smoke", bench)
    assert engine_speed.load("smoke", bench) == first and len(calls) == 1
    assert first[1]["rows"] == [{"num_clients": 100}] and first[0]["W1"]["facts"] == [{"system": "fedlib", "lines": 3}]


def test_both_executions_of_the_gpu_comparison_run():
    e = gpu.CASES["deit_micro, 32 px, 10 clients"].replace(clients_per_round=2, examples_per_client=4, batch_size=4)
    out = gpu.compare(e, "cpu", rounds=1, repeats=1)
    assert out["ratio"] == out["one at a time"] / out["together"] and out["TFLOP/s"] > 0
    assert "of float32 peak" not in out  # of a card only


def test_speed_beside_a_bare_loop_and_ways_of_convolutions_are_measured(tmp_path, monkeypatch, capsys):
    few = {"examples_per_client": 4, "num_clients": 2, "clients_per_round": 2}
    for name in ("convnet3_slim", "deit_micro"):
        e = Experiment(backbone=name, batch_size=4, **gpu.SPEED | few)
        found = gpu.speed(e, "cpu", 0.1, lambda name=name: gpu.plain(name))
        assert found["ratio"] == found["images/s, fedlib"] / found["images/s, bare"] > 0
        assert found["launches a step"] > 50 and found["TFLOP/s"] > 0
    assert gpu._images(e, "cpu", 0.1) > 0
    alone, five = (gpu.of_seeds(e, "cpu", n, 0.1) for n in (1, 5))
    assert five["images/s"] > 0 and five["launches a step"] < 4 * alone["launches a step"]  # all around one step
    monkeypatch.setattr(gpu, "of_seeds", lambda e, device, n, seconds: {"seeds": n, "of": e.backbone})
    monkeypatch.setattr(gpu, "speed", lambda e, device, seconds, bare: {"of": type(bare()).__name__})
    gpu.main(["goals", "--device", "cpu", "--json", str(tmp_path / "g.json")])
    asked = [
        (r["net"], r.get("seeds"), r.get("graphs", r.get("compiled")), r["goal"])
        for r in json.loads((tmp_path / "g.json").read_text())
    ]
    assert asked[3] == ("deit_micro", 5, True, 150_000)
    deit_small = [("deit_small_patch16_224", None, compiled, 7_700) for compiled in (False, True)]
    assert asked[16:] == deit_small[: 1 + gpu.COMPILES]
    assert len(asked) == 17 + gpu.COMPILES == len(capsys.readouterr().out.splitlines())
    monkeypatch.setattr(gpu, "SHAPES", ((2, 4, 3, 8),))
    gpu.main(["convolutions", "--device", "cpu", "--json", str(tmp_path / "c.json")])
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [row["clients"] for row in rows] == [1, 5, 10, 20] and min(rows[0][p] for p in ("grouped", "columns")) > 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_one_core_is_measured_and_the_page_says_what_was_stored():
    found = one_core.measure("convnet3_slim", 160, (1,), turns=1, clients=1, dataset="mnist")
    assert found["ratio"]["1"] == found["seconds"]["bare"] / found["seconds"]["1"] > 0
    page = (ROOT / "benchmarks/README.md").read_text()
    for row in json.loads((ROOT / "outputs/benchmarks/one_core/epyc.json").read_text())["rows"]:
        name = {"resnet8": "ResNet-8", "convnet3_slim": "`convnet3_slim`"}[row["net"]]
        (line,) = (x for x in page.splitlines() if x.startswith(f"| {name}, batch {row['batch']} |"))
        assert all(f"{x:.2f}×" in line for x in row["ratio"].values()) and line.count("×") == len(row["ratio"])


def test_the_page_on_speed_says_what_is_stored(monkeypatch):
    """Every number of its two tables: seconds, and how many times fedlib's with the range over turns."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(ROOT / "outputs"))
    records, _ = engine_speed.load("small", engine_speed.load_bench("small"), run_missing=False)
    times, page = engine_speed.times_table(records), (ROOT / "benchmarks/README.md").read_text()
    said = lambda r: f"{r.seconds:.2f} ({r.ratio:.2f}×, {r.ratio_min:.2f}–{r.ratio_max:.2f})"  # noqa: E731
    for workload in (w for w in records if w[:2] != "W3"):
        on_images = workload[:2] in ("W4", "W5")
        others = ("PFLlib", "FL-bench") if on_images else ("pfl", "BlazeFL, threads", "Flower")
        found = times.loc[workload]
        (bare,) = (n for n in found.index if n == "two processes" + ", channels last" * on_images)
        cells = [f"{found.seconds['fedlib']:.2f}", *(said(found.loc[n]) for n in (bare, *others))]
        assert f"| {workload} | {' | '.join(cells)} |" in page
        assert found.ratio[list(others)].min() > 1  # "No rival is faster"
    devices = {(r["provenance"]["family"], r["provenance"]["commit"]) for r in records.values()}
    assert len(devices) == 1  # in one run, on one machine


def test_the_page_on_gpus_says_what_was_measured():
    """Every number of its two tables, and the rounds a second and those reached, are the stored ones."""
    stored = json.loads((ROOT / "outputs/benchmarks/gpu/h100.json").read_text())
    page = " ".join((ROOT / "docs/gpu.md").read_text().replace("**", "").split())
    by_shape: dict = {}
    for r in stored["convolutions"]:
        cells = by_shape.setdefault(f"{r['in']} to {r['out']}, 3x3, {r['px']}", [])
        cells += [f"{r[path]:.1f}" for path in ("grouped", "loop", "columns")]
    for shape, cells in by_shape.items():
        assert f"| {shape} | {' | '.join(cells)} |" in page
    for r in stored["speed"][:2]:
        rates = " | ".join(f"{r[f'images/s, {what}']:,.0f}" for what in ("fedlib", "bare", "bare, compiled"))
        assert f"| {r['net']} | {rates} | {r['ratio']:.1f} | {r['launches a step']:.0f} |" in page
    told = stored["paper_scale"]
    one, two, four = (f"{told['rounds a second, all processes'][n]:.1f}" for n in "124")
    assert f"Two processes make {two} rounds a second on the card together, one {one}, four {four}." in page
    reached = told["reached in 384 s, four at once"]
    words = {"cafedistill": "CAFEDistill", "fedrod": "FedRoD", "fedper": "FedPer", "local": "Local"}
    assert all(f"{t} ({words[method]})" in page for method, t in reached.items())
    others = [v["cpu"] for name, v in stored["methods"].items() if name != "flexlora"]
    assert len(others) == 32 and max(others) < 3e-5 and all(v["again in bytes"] for v in stored["methods"].values())


def test_memory_of_a_population_is_not_the_peak_of_the_process_that_measures_it():
    """A new process takes over its parent's peak in ``ru_maxrss``; 2 GiB were held here for a moment."""
    ballast = bytearray(2 * 2**30)
    ballast[:: 2**12] = b"x" * (2 * 2**18)  # every page
    del ballast
    row = scale.measure_population(20, 2)
    assert 100 < row["peak_mib"] < 1800
    assert set(row) == {"num_clients", "build_seconds", "seconds", "peak_mib"}


def test_fresh_pages_are_timed():
    """A page takes more than zeroing 4 KiB at 100 GB/s, and less than a millisecond."""
    assert 0.04 < harness.fetch_pages(4) < 1000


def test_memory_is_fetched_before_each_first_round_and_never_again(monkeypatch):
    did = []

    class Fake:
        rounds_done = 0

        def __init__(self, name):
            self.system = systems.System(name, "none.py")

        def rounds(self, n):
            did.append((self.system.name, n))
            return [1.0] * n

    monkeypatch.setattr(harness, "fetch_pages", lambda mib: did.append(mib))
    harness.time_interleaved([Fake("a"), Fake("b")], rounds=3, repeats=2, at_hand_mib=7)
    assert did == [7, ("a", 1), 7, ("b", 1), *[("a", 3), ("b", 3)] * 2]
