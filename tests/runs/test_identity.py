"""What a run is beyond its experiment's fields: method, data, weights. Stale or mixed results are refused by name."""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedlib import Execution, build_federation, run, run_all, wrap
from fedlib.core.storage import read_json, read_tensors, write_json, write_tensors
from fedlib.methods import METHODS, base, register
from fedlib.methods.sliced.reefl import ReeFL
from fedlib.models import registry
from fedlib_lab.runs import code_digest as reached
from fedlib_lab.runs import identity
from fedlib_lab.runs import store as runs_module
from fedlib_lab.runs.identity import OtherInputs, differences, kit_rules, known_inputs
from fedlib_lab.runs.packed import listed
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import ONE, assert_same, short, small, state
from tests.helpers.tracked import OUTPUTS

SMALL = dict(num_train=60, num_test=10, num_clients=6, clients_per_round=3)


def tiny(method="reefl", **changes):
    return short(method, **(SMALL | dict(rounds=2, evaluate_every=0) | changes))


def train(e, folder, **how):
    return run(e, ONE, folder, progress=False, checkpoint_seconds=0, **how)


@pytest.fixture
def only_here(monkeypatch):
    """Methods registered as ``fedprox`` and ``proximal`` are gone after the test."""
    for name in ("fedprox", "proximal"):
        monkeypatch.setitem(METHODS, name, None)


def defined(text, folder):
    """The class FedProx that ``text`` defines, as a fresh process would import it from a file."""
    (folder / "code").mkdir(exist_ok=True)
    file = folder / "code" / f"{time.time_ns()}.py"
    file.write_text(text)
    space = {"__name__": "mine"}
    exec(compile(text, str(file), "exec"), space)
    return space.get("FedProx")


FEDPROX = '''
from dataclasses import dataclass
from fedlib.methods import Method

SCALE = 1.0

def pull(p, start):
    """Towards the start."""
    return SCALE * (p - start)

@dataclass(frozen=True)
class FedProx(Method):
    """FedProx with early exits."""

    mu: float = 0.1  # weight of the proximal term

    def local_update(self, cohort) -> None:
        start = cohort.start
        cohort.train(self.local_loss, gradient=lambda name, p: self.mu * pull(p, start[name]))
'''


@pytest.mark.parametrize(
    "old, new, told, words",
    [
        ("self.mu * pull", "1000 * self.mu * pull", "source of class FedProx", "method"),
        ("return SCALE * (p", "return 2 * SCALE * (p", "source of class FedProx", "method"),  # a function it calls
        ("SCALE = 1.0", "SCALE = 3.0", "source of class FedProx", "method"),
        ("mu: float = 0.1", "mu: float = 100.0", "method option mu: 0.1 there, 100.0 here", "options"),
        ("class FedProx(Method)", "class FedProx(Method, object)", "source of class FedProx", "method"),
    ],
)
def test_an_edited_method_of_ones_own_is_refused(old, new, told, words, tmp_path, only_here):
    e = tiny("fedprox", finetune="frozen")
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    first = train(e, tmp_path)
    METHODS["fedprox"] = defined(FEDPROX.replace(old, new), tmp_path)
    for ask in (lambda **how: find_run(e, tmp_path, **how), lambda **how: train(e, tmp_path, **how),
                lambda **how: run_all([e], ONE, tmp_path, progress=False, **how)[0]):  # fmt: skip
        with pytest.raises(
            OtherInputs,
            match=f"{e.slug} is stored in .*: {told}.*. To run it anew and forget this one: again='other' in run or run_all; .* another folder .*accept='{words}'",
        ):
            ask()
        assert ask(accept=words).summary == first.summary
    assert find_run(e, tmp_path / "elsewhere") is None


RULES = {  # what the kit once did otherwise, and an experiment that it concerns; beside it one that it does not
    "how a subset is chosen": (dict(num_train=60), dict(num_train=60, subset="balanced")),
    "how crops are counted": (dict(augment="crop"), dict(augment="none")),
    "how batch norm sees the test set": (dict(backbone="resnet8"), dict(backbone="resnet8", batch_norm="tracked")),
    "how static statistics are made": (dict(backbone="resnet8", batch_norm="static"), dict(backbone="resnet8")),
    "which model answers centrally": (dict(budgets=(0, 1)), dict(budgets=(0, 1, 2, 3))),
    "how data of one's own are read": (dict(dataset="./mine"), dict(dataset="cifar10")),
    "how wrapped batch norms learn": (
        dict(backbone="normed", batch_norm="tracked", num_exits=1),
        dict(backbone="resnet8"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_run_of_the_time_when_the_kit_did_otherwise_is_refused_if_that_concerns_it(rule, tmp_path, monkeypatch):
    """Its record says no version of the rule; of a run that it does not concern nothing is asked."""
    monkeypatch.setitem(registry.OWN, "normed", None)  # forgotten afterwards
    wrap(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4)), ["1"], (3, 32, 32), name="normed")
    for concerned, changes in zip((True, False), RULES[rule], strict=True):
        e = tiny("fedavg", finetune="full", num_train=None, num_test=None, augment="none").replace(**changes)
        assert (rule in kit_rules(e)) == concerned
        now = {"options": {}, "kit": kit_rules(e)}
        then = {"options": {}, "kit": {k: v for k, v in now["kit"].items() if k != rule}}
        told = differences(e, then, known_inputs(e, [then]))
        assert told.get("kit", []) == [rule] * concerned
        assert not differences(e, now, known_inputs(e, [now])).get("kit")
        assert not differences(e, {}, known_inputs(e, [{}])).get("kit")  # a run that says nothing


def test_comments_layout_and_docstrings_of_a_method_do_not_count(tmp_path, only_here):
    e = tiny("fedprox", finetune="frozen", rounds=1)
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    train(e, tmp_path)
    text = FEDPROX.replace("# weight of the proximal term", "# mu").replace("Towards the start", "Back")
    METHODS["fedprox"] = defined(text.replace("start = cohort.start", "start = (\n            cohort.start)"), tmp_path)
    assert find_run(e, tmp_path) is not None
    METHODS["fedprox"] = defined("\n".join(["x = 5", text]), tmp_path)  # nothing that the class reads
    assert find_run(e, tmp_path) is not None


def test_a_method_without_a_source_has_its_compiled_code(only_here):
    def made(text):
        space = {"__name__": "mine"}
        exec(text, space)  # as `python -c` or a plain interpreter
        return reached.code_of(space["FedProx"])["FedProx"]

    assert made(FEDPROX) == made(FEDPROX) != made(FEDPROX.replace("self.mu * pull", "2 * self.mu * pull"))


def test_a_method_of_a_notebook_cell_is_recognised():
    """Its class has no file; its functions have their cell."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()

    def cell(text):
        shell.run_cell(text).raise_error()
        return reached.code_of(shell.user_ns["FedProx"])["FedProx"]

    first = cell(FEDPROX)
    assert cell("\n\n" + FEDPROX) == first != cell(FEDPROX.replace("self.mu *", "9 * self.mu *"))


def test_a_changed_default_or_version_of_the_kit_is_refused(tmp_path, monkeypatch):
    e = tiny(rounds=1)
    train(e, tmp_path)
    with monkeypatch.context() as m:
        m.setattr(ReeFL, "version", 2, raising=False)
        with pytest.raises(OtherInputs, match="version of ReeFL: 1 there, 2 here"):
            find_run(e, tmp_path)
        assert find_run(e, tmp_path, accept=["kit"]) is not None
    assert find_run(e, tmp_path) is not None

    @dataclass(frozen=True)
    class Changed(ReeFL):
        temperature: float = 2.0

    Changed.__module__, Changed.__name__ = ReeFL.__module__, "ReeFL"
    monkeypatch.setitem(METHODS, "reefl", Changed)
    with pytest.raises(OtherInputs, match="method option temperature: 1.0 there, 2.0 here"):
        find_run(e, tmp_path)


@pytest.mark.parametrize("where, name", [(ReeFL, "local_loss"), (base, "cross_entropies"), (base.Method, "remembers")])
def test_what_stands_in_place_of_the_kits_code_is_part_of_the_run(where, name, tmp_path, monkeypatch):
    """What was stored before was returned whatever one had put there, and what it trained was taken for the kit's."""
    e, was = tiny(rounds=1), vars(where)[name]
    train(e, tmp_path / "kits")
    own = property(lambda self: True) if name == "remembers" else lambda *given: was(*given)
    monkeypatch.setattr(where, name, own)
    with pytest.raises(OtherInputs, match=rf"\.{name}: your own here, not there"):
        train(e, tmp_path / "kits")
    train(e, tmp_path / "own")
    assert find_run(e, tmp_path / "own") is not None
    monkeypatch.undo()
    assert find_run(e, tmp_path / "kits") is not None
    with pytest.raises(OtherInputs, match=rf"\.{name}: your own there, not here"):
        find_run(e, tmp_path / "own")


def test_options_that_came_or_went_since_are_not_compared(tmp_path):
    """A later option with a neutral default refuses no stored run."""
    e = tiny(rounds=1)
    path = train(e, tmp_path).path
    content = read_json(path / "experiment.json")
    del content["inputs"]["options"]["zeta"]
    content["inputs"]["options"]["gone"] = 3
    write_json(path / "experiment.json", content)
    assert find_run(e, tmp_path) is not None


def test_a_run_of_a_method_that_is_not_registered_here_can_be_looked_at(tmp_path, only_here):
    e = tiny("fedprox", finetune="frozen", rounds=1)
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    train(e, tmp_path)
    del METHODS["fedprox"]
    assert find_run(e, tmp_path) is not None


def write_images(folder, seed, side=8):
    """Forty noisy images of two classes as parquet files."""
    import io

    import datasets
    from PIL import Image

    rng = np.random.default_rng(seed)
    for split, n in (("train", 30), ("test", 10)):
        rows = []
        for _ in range(n):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (side, side), dtype=np.uint8)).save(buffer, "PNG")
            rows.append({"bytes": buffer.getvalue(), "path": None})
        table = datasets.Dataset.from_dict(
            {"image": rows, "label": [i % 2 for i in range(n)]},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}),
        )
        folder.mkdir(exist_ok=True)
        table.to_parquet(folder / f"{split}.parquet")


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A function that puts other images at the same path, and an experiment on them."""
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    e = tiny(dataset="mine", num_train=None, num_test=None, rounds=4, augment="none")
    return e, lambda seed, **how: write_images(tmp_path / "data" / "mine", seed, **how)


def test_other_data_under_the_same_name_are_refused_also_in_one_process(images, tmp_path):
    e, put = images
    put(0)
    first = train(e, tmp_path)
    put(1)
    with pytest.raises(OtherInputs, match="the data of 'mine': digest .* there, .* here.*accept='data'"):
        find_run(e, tmp_path)
    assert find_run(e, tmp_path, accept="data").summary == first.summary
    second = train(e, tmp_path / "anew")  # not what this process had read before
    assert second.record["inputs"]["data"] != first.record["inputs"]["data"]
    put(0)  # other times, the same content
    assert find_run(e, tmp_path).summary == first.summary


def test_data_without_a_cache_have_the_same_digest(images, tmp_path, monkeypatch):
    from fedlib.data.datasets import load_dataset

    e, put = images
    put(0)
    kept = load_dataset("mine").digest
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "file" / "nowhere"))
    with pytest.warns(UserWarning, match="could not be kept"):
        assert load_dataset("mine").digest == kept != ""


def test_a_stored_run_is_found_where_its_data_are_absent(images, tmp_path):
    e, put = images
    put(0)
    train(e, tmp_path)
    (tmp_path / "data" / "mine" / "train.parquet").write_bytes(b"damaged")
    assert find_run(e, tmp_path) is not None
    shutil.rmtree(tmp_path / "data" / "mine")
    assert find_run(e, tmp_path) is not None and run_all([e], ONE, tmp_path, progress=False)


def test_a_run_is_not_resumed_on_other_data(images, tmp_path, monkeypatch):
    e, put = images
    put(0)
    interrupt(e, 2, tmp_path, monkeypatch)
    put(1)
    with pytest.raises(
        OtherInputs,
        match=f"{e.slug} is stored up to round 2 in .*: the data of 'mine'.*; to go on from there all the same",
    ):
        train(e, tmp_path)
    assert find_run(e, tmp_path) is None
    mixed = train(e, tmp_path, accept="data")  # the user's own responsibility, for the record
    (again,) = mixed.record["resumed"]
    assert again["after_round"] == 2 and again["inputs"].keys() == {"data", "source"}
    for seed in (0, 1):  # the mixture is what neither data set gives
        put(seed)
        with pytest.raises(OtherInputs, match="the data of 'mine'"):
            find_run(e, tmp_path)


def test_a_changed_partition_of_rounds_cannot_hide_behind_a_damaged_record(images, tmp_path, monkeypatch):
    """The checkpoint has the record too: without experiment.json the other data are refused all the same."""
    e, put = images
    put(0)
    path = interrupt(e, 2, tmp_path, monkeypatch)
    (path / "experiment.json").unlink()
    put(1)
    with pytest.raises(OtherInputs, match="the data of 'mine'"):
        train(e, tmp_path)


def test_a_checkpoint_of_the_last_round_is_compared_before_it_becomes_a_result(tmp_path, monkeypatch):
    """The files of a finished run may be gone, as a version control takes them, and its checkpoint may stay."""
    e = tiny(rounds=1)
    whole = train(e, tmp_path)
    for name in ("summary.json", "experiment.json", "metrics.jsonl"):
        (whole.path / name).unlink()
    with monkeypatch.context() as m:
        m.setattr(ReeFL, "version", 2, raising=False)
        with pytest.raises(OtherInputs, match="is stored up to round 1 .* version of ReeFL: 1 there, 2 here"):
            train(e, tmp_path)
        assert not (whole.path / "summary.json").exists()
    again = train(e, tmp_path)
    assert (again.summary, again.metrics) == (whole.summary, whole.metrics)


def interrupt(e, rounds, folder, monkeypatch):
    """Stop ``e`` after so many rounds, each of them a checkpoint."""
    original = runs_module.run_rounds

    def some(*args):
        for r in original(*args):
            if r.t > rounds:
                raise KeyboardInterrupt
            yield r

    with monkeypatch.context() as m:
        m.setattr(runs_module, "run_rounds", some)
        with pytest.raises(KeyboardInterrupt):
            train(e, folder)
    return run_path(e, folder)


def test_changed_pre_trained_weights_are_refused(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    file = tmp_path / "weights.safetensors"
    shutil.copy(registry.WEIGHTS["deit_micro"], file)
    monkeypatch.setitem(registry.WEIGHTS, "deit_micro", file)
    e = tiny(pretrained=True, rounds=3)
    train(e, tmp_path / "whole")
    interrupt(e, 1, tmp_path / "part", monkeypatch)
    tensors = load_file(file)
    save_file({k: v + (k == "stem.pos_embed") for k, v in tensors.items()}, file)
    for folder in ("whole", "part"):
        with pytest.raises(OtherInputs, match="the pre-trained weights of 'deit_micro'.*accept='weights'"):
            train(e, tmp_path / folder)
    file.unlink()
    assert find_run(e, tmp_path / "whole") is not None  # absent here


def test_weights_that_no_file_of_the_kit_holds_are_known_by_their_tensors(tmp_path):
    """As downloaded ones: the digest does not depend on the tensors' names, nor on adapters and exits."""

    def digest(**changes):
        return identity._weights_digest(build_federation(tiny(pretrained=True, **changes)))

    same = digest()
    assert digest(seed=9, method="depthfl", finetune="pa") == same == digest(finetune="full")
    assert identity._weights_digest(build_federation(tiny(pretrained=False))) != same


def test_provenance_keeps_what_trained_the_run(tmp_path, monkeypatch):
    """A resume adds a provenance; a rebuild of damaged files adds nothing."""
    e = tiny(rounds=3)
    path = interrupt(e, 1, tmp_path, monkeypatch)
    first = read_json(path / "experiment.json")["provenance"]
    run(e, Execution(workers=2, executor="threads"), tmp_path, progress=False, checkpoint_seconds=0)
    content = read_json(path / "experiment.json")
    assert content["provenance"] == first and first["workers"] == 1
    assert [(s["after_round"], s["workers"]) for s in content["resumed"]] == [(1, 2)]
    assert content["stored"] == time.strftime("%Y-%m-%d") and "inputs" not in content["resumed"][0]
    for name in ("experiment.json", "summary.json"):
        (path / name).write_text("x")
        with pytest.warns(UserWarning, match="rebuilding it from the checkpoint"):
            train(e, tmp_path)
        assert read_json(path / "experiment.json") == content


def test_a_go_without_a_checkpoint_leaves_no_trace(tmp_path, monkeypatch):
    e = tiny(rounds=2)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(runs_module, "run_rounds", dies)
        with pytest.raises(KeyboardInterrupt):
            train(e, tmp_path)
    done = run(e, Execution(workers=2, executor="threads"), tmp_path, progress=False)
    assert done.record["provenance"]["workers"] == 2 and done.record["resumed"] == []


def test_runs_of_older_versions_are_adopted(tmp_path, monkeypatch):
    """Without a record nothing is compared; a resumed one says what it knows from then on."""
    e = tiny(rounds=3)
    train(e, tmp_path / "whole")
    done = run_path(e, tmp_path / "whole")
    path = interrupt(e, 2, tmp_path / "part", monkeypatch)
    for p in (done, path):
        content = read_json(p / "experiment.json")
        write_json(p / "experiment.json", {k: content[k] for k in ("experiment", "provenance")})
    for name in ("checkpoint", "previous"):
        tensors, metadata = read_tensors(path / f"{name}.safetensors")
        write_tensors(path / f"{name}.safetensors", tensors, {k: v for k, v in metadata.items() if k != "record"})
    monkeypatch.setattr(ReeFL, "version", 2, raising=False)
    assert find_run(e, tmp_path / "whole").day == ""
    resumed = train(e, tmp_path / "part").record
    assert resumed["provenance"]["workers"] == 1 and resumed["resumed"][0]["inputs"]["method"]["ReeFL"] == 2
    monkeypatch.setattr(ReeFL, "version", 3)
    assert find_run(e, tmp_path / "whole") is not None
    with pytest.raises(OtherInputs, match="version of ReeFL: 2 there, 3 here"):
        find_run(e, tmp_path / "part")


def test_a_resumed_run_ends_with_the_numbers_of_an_uninterrupted_one(images, tmp_path, monkeypatch):
    e, put = images
    put(0)
    train(e, tmp_path / "whole")
    interrupt(e, 2, tmp_path / "part", monkeypatch)
    put(0)  # written again, the same: not refused
    train(e, tmp_path / "part")
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "part"))


def test_looking_up_a_table_takes_milliseconds_a_run(tmp_path):
    e = tiny(pretrained=True, rounds=1)
    path = train(e, tmp_path).path
    grid = [e.replace(seed=s) for s in range(100, 220)]
    for other in grid:
        content = read_json(path / "experiment.json") | {"experiment": other.to_dict()}
        shutil.copytree(path, run_path(other, tmp_path))
        write_json(run_path(other, tmp_path) / "experiment.json", content)
    began = time.process_time()
    assert all(find_run(other, tmp_path) for other in grid)
    assert (time.process_time() - began) / len(grid) < 0.03


def test_arguments_are_checked_in_words(tmp_path):
    e = tiny(rounds=1)
    with pytest.raises(ValueError, match="accept = 'dta' is not possible; did you mean 'data'"):
        find_run(e, tmp_path, accept="options,dta")
    for bad in (lambda: run(e, "cpu"), lambda: run_all([e], "cpu")):
        with pytest.raises(ValueError, match="execution = 'cpu': expected Execution, got str"):
            bad()
    for bad in (3, "", b"runs", ["runs"], "a\0b"):
        for ask in (lambda bad=bad: run(e, ONE, bad), lambda bad=bad: run_all([e], ONE, bad), lambda bad=bad: find_run(e, bad)):  # fmt: skip
            with pytest.raises(ValueError, match="folder = .*: expected the path of a folder"):
                ask()
    with pytest.raises(ValueError, match="'reefl' is not an Experiment"):
        run("reefl", ONE, tmp_path)
    with pytest.raises(ValueError, match="run_all takes several experiments"):
        run_all(e, ONE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_a_string(tmp_path):
    e = tiny(rounds=1)
    first = run(e, ONE, str(tmp_path), progress=False)
    assert first.path == run_path(e, tmp_path) and find_run(e, str(tmp_path)) == first
    assert run_all([e], ONE, str(tmp_path), progress=False) == [first]


def test_differences_can_be_accepted_where_no_argument_reaches(tmp_path, monkeypatch):
    e = tiny(rounds=1)
    train(e, tmp_path)
    monkeypatch.setattr(ReeFL, "version", 2, raising=False)
    monkeypatch.setenv("FEDLIB_ACCEPT", "kit, data")
    assert find_run(e, tmp_path) is not None


@pytest.mark.parametrize("name", [".lock", "summary.json", "experiment.json", "checkpoint.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_one_sentence(name, tmp_path):
    e = tiny(rounds=1)
    run_path(e, tmp_path).joinpath(name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{name} is a folder"):
        run_all([e], ONE, tmp_path, progress=False)
    with pytest.raises(ValueError, match=f"{name} is a folder or a device where a run has a file; move it away"):
        train(e, tmp_path)


def test_the_example_of_the_readme_edited_does_not_return_the_old_number(tmp_path, monkeypatch, only_here, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "class Proximal" in c]
    code = code.replace("rounds=20", "rounds=1, num_train=100, num_test=10, finetune='frozen'")
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    defined(code, tmp_path)
    first = capsys.readouterr().out
    defined(code, tmp_path)  # the same again: the stored run
    assert capsys.readouterr().out.endswith(first) and "'accuracy'" in first
    assert code.count("self.mu *") == 1
    with pytest.raises(OtherInputs, match="source of class Proximal"):
        defined(code.replace("self.mu *", "1000 * self.mu *"), tmp_path)


def test_options_that_spell_out_defaults_are_the_same_run(tmp_path):
    plain, spelt = small("reefl"), small("reefl", options={"zeta": 0.2})
    assert plain.slug != spelt.slug and run_path(plain, tmp_path) == run_path(spelt, tmp_path)
    first = run(spelt, ONE, tmp_path, progress=False)
    assert first.path.name == plain.slug and run(plain, ONE, tmp_path, progress=False).record == first.record
    (tmp_path / plain.slug).rename(tmp_path / spelt.slug)  # a run of an earlier version keeps its own spelling
    assert run_path(spelt, tmp_path).name == spelt.slug and run_path(plain, tmp_path).name == plain.slug


def test_a_name_belongs_to_one_class(monkeypatch):
    """A cell that is run again defines its class again; a class of the same name elsewhere is another one."""
    monkeypatch.setattr("fedlib.methods.METHODS", dict(METHODS))
    for _ in range(2):
        register("fedprox_of_mine")(type("FedProx", (METHODS["fedavg"],), {"__module__": "__main__"}))
    for name in ("fedprox_of_mine", "fedavg"):
        with pytest.raises(ValueError, match=f"a method named '{name}' exists already"):
            register(name)(type("FedAvg", (METHODS["fedavg"],), {"__module__": "elsewhere"}))


def test_a_value_that_cannot_be_compared_is_refused_before_any_compute(tmp_path, only_here):
    e = tiny("fedprox", finetune="frozen", rounds=1)
    METHODS["fedprox"] = defined("import threading\n" + FEDPROX.replace("SCALE = 1.0", "LOCK = threading.Lock()"
        ).replace("return SCALE * (p - start)", "return LOCK and p - start"), tmp_path)  # fmt: skip
    words = f"{e.slug} could not be told from a run of other code: unverified: LOCK in pull .* a _thread.lock"
    with pytest.raises(ValueError, match=words):
        train(e, tmp_path)
    assert not run_path(e, tmp_path).exists()
    assert train(e, tmp_path, accept="method").summary["status"] == "finished"
    with pytest.raises(OtherInputs, match="source of class FedProx, or what it reads .unverified: LOCK"):
        find_run(e, tmp_path)
    assert find_run(e, tmp_path, accept="method") is not None


def test_a_global_that_the_rounds_changed_does_not_lose_the_run(tmp_path, only_here):
    text = FEDPROX.replace("SCALE = 1.0", "SCALE, SEEN = 1.0, []").replace(
        "start = cohort.start", "SEEN.append(len(SEEN))\n        start = cohort.start"
    )
    e = tiny("fedprox", finetune="frozen", rounds=1)
    METHODS["fedprox"] = defined(text, tmp_path)
    with pytest.warns(UserWarning, match="fedprox's class changed in training; allowed: state in Server.memory"):
        assert train(e, tmp_path).summary["status"] == "finished"
    METHODS["fedprox"] = defined(text, tmp_path)  # as a fresh process
    assert find_run(e, tmp_path) is not None


OWN_SPEC = '''
from dataclasses import dataclass
from fedlib.models.vit import ViT, ViTSpec

class Net(ViT):
    def run(self, z, a, b):
        return 1.0 * super().run(z, a, b)

@dataclass(frozen=True)
class FedProx(ViTSpec):
    """A shape of one's own, and what it builds."""

    def build(self):
        return Net(self)
'''


def test_a_backbone_of_ones_own_is_part_of_the_run(tmp_path, monkeypatch):
    shape = registry.ViTSpec(img_size=32, patch_size=8, dim=16, depth=4, heads=2, ffn_dim=32)
    monkeypatch.setitem(registry.OWN, "mine", shape)
    e = tiny("depthfl", finetune="full", finetune_options={}, backbone="mine", rounds=2)
    first = train(e, tmp_path)
    assert find_run(e, tmp_path).summary == first.summary and len(first.record["inputs"]["backbone"]) == 16
    interrupt(e, 1, tmp_path / "part", monkeypatch)
    wider = registry.ViTSpec(img_size=32, patch_size=8, dim=32, depth=4, heads=2, ffn_dim=32)
    monkeypatch.setitem(registry.OWN, "mine", wider)
    for folder in ("", "part"):
        with pytest.raises(OtherInputs, match="the backbone 'mine', its shape or its code.*accept='backbone'"):
            train(e, tmp_path / folder)
    with pytest.raises(ValueError, match="holds the rounds of another model: .* is .* there, .* here"):
        train(e, tmp_path / "part", accept="backbone")
    codes = []
    for text in (OWN_SPEC, OWN_SPEC, OWN_SPEC.replace("1.0 *", "2.0 *")):
        monkeypatch.setitem(registry.OWN, "mine", defined(text, tmp_path)(32, 8, dim=16, depth=4, heads=2, ffn_dim=32))
        codes.append(identity.inputs_of(build_federation(e))["backbone"])
    assert codes[0] == codes[1] != codes[2]
    monkeypatch.delitem(registry.OWN, "mine")
    assert find_run(e, tmp_path) is not None  # not registered here: it can be looked at


def test_a_backbone_of_the_kit_that_was_replaced_is_refused(tmp_path, monkeypatch):
    e = tiny(rounds=1)
    train(e, tmp_path)
    monkeypatch.setitem(registry.OWN, "deit_micro", registry.ViTSpec(depth=11))
    with pytest.raises(OtherInputs, match="the backbone 'deit_micro'"):
        find_run(e, tmp_path)


def test_data_of_the_old_size_and_time_are_refused(images, tmp_path):
    import os

    from PIL import Image

    def put(seed):
        rng = np.random.default_rng(seed)
        for i in range(40):
            file = tmp_path / "data" / "mine" / ("train" if i < 30 else "test") / "ab"[i % 2] / f"{i}.bmp"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(file)
            os.utime(file, (1, 1))
        return sorted((p.stat().st_size, p.stat().st_mtime) for p in (tmp_path / "data").rglob("*.bmp"))

    e = images[0].replace(rounds=1)
    before = put(0)
    train(e, tmp_path)
    assert put(1) == before
    with pytest.raises(OtherInputs, match="the data of 'mine': digest"):
        find_run(e, tmp_path)


def test_a_look_up_decodes_nothing(images, tmp_path, monkeypatch):
    """Also where nothing is kept: the files' bytes say that they are the same."""
    from fedlib_lab.formats import readers

    e, put = images
    put(0)
    train(e, tmp_path)
    put(0)

    def refuse(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(identity, "load_dataset", refuse)
    monkeypatch.setattr(readers, "decode", refuse)
    assert find_run(e, tmp_path) is not None
    put(71)
    with pytest.raises(AssertionError, match="decoded"):
        find_run(e, tmp_path)


def test_a_piece_without_its_partner_is_refused(images, tmp_path):
    from fedlib.data.datasets import load_dataset

    _, put = images
    put(0)
    folder = tmp_path / "data" / "mine"
    (folder / "train.parquet").rename(folder / "train-00000-of-00002.parquet")
    with pytest.raises(
        ValueError, match="train-00000-of-00002.parquet is one of 2 pieces, and train-00001-of-00002 is"
    ):
        load_dataset("mine")
    shutil.copy(folder / "train-00000-of-00002.parquet", folder / "train-00001-of-00002.parquet")
    assert len(load_dataset("mine").train_labels) == 60


def test_a_rewritten_folder_of_weights_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from fedlib_lab.zoo.foreign_loading import build_model
    from fedlib_lab.zoo.foreign_specs import ForeignSpec

    folder = tmp_path / "model"
    spec = ForeignSpec("vit", str(folder), dim=16, depth=4, heads=2, ffn_dim=32, img_size=32, patch_size=8)
    monkeypatch.setitem(registry.OWN, "mine", spec)
    build_model(spec).save_pretrained(folder)
    e = tiny("depthfl", backbone="mine", pretrained=True, finetune="frozen", finetune_options={}, rounds=1)
    first = train(e, tmp_path)
    assert find_run(e, tmp_path).summary == first.summary
    model = build_model(spec)
    model.embeddings.cls_token.data += 1
    model.save_pretrained(folder)
    with pytest.raises(OtherInputs, match="the pre-trained weights of 'mine'"):
        find_run(e, tmp_path)


def test_a_stored_run_can_be_forgotten_and_run_again(tmp_path, only_here):
    from fedlib import forget

    e = tiny("fedprox", finetune="frozen", rounds=1)
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    first = train(e, tmp_path / "runs")
    METHODS["fedprox"] = defined(FEDPROX.replace("SCALE = 1.0", "SCALE = 300.0"), tmp_path)
    second = train(e, tmp_path / "runs", again=True)
    assert second.record["inputs"]["method"] != first.record["inputs"]["method"]
    assert find_run(e, tmp_path / "runs").record == second.record
    path = second.path
    (path / "notes.txt").write_text("mine")
    assert forget(e, tmp_path / "runs") and find_run(e, tmp_path / "runs") is None
    assert [p.name for p in path.iterdir()] == ["notes.txt"]
    (path / "notes.txt").unlink()
    path.rmdir()
    assert not forget(e, tmp_path / "runs")
    with pytest.raises(ValueError, match="unknown key 'nu'"):  # before anything is forgotten
        train(e.replace(options={"nu": 1}), tmp_path / "runs", again=True)


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_list_runs_anew_what_an_edit_concerns_and_says_so(unfinished, tmp_path, only_here, capsys):
    """``again="other"`` may stay in a notebook: what is as at hand is kept, and going on keeps the rounds since."""
    mine, kits = tiny("fedprox", finetune="frozen"), tiny("fedavg", finetune="frozen")
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    run(mine, ONE, tmp_path / "runs", checkpoint_seconds=0, on_round=lambda r: unfinished)
    kept = train(kits, tmp_path / "runs")
    METHODS["fedprox"] = defined(FEDPROX.replace("SCALE = 1.0", "SCALE = 300.0"), tmp_path)
    ask = lambda **how: run_all([mine, kits], ONE, tmp_path / "runs", **how)  # noqa: E731
    with pytest.raises(OtherInputs, match="again='other'"):
        ask()
    assert run_path(mine, tmp_path / "runs").exists()  # nothing is lost by asking
    capsys.readouterr()
    first, second = ask(again="other")
    assert capsys.readouterr().out.startswith(f"forgotten, and run anew: {mine.slug}\n")
    fresh = train(mine, tmp_path / "fresh").summary
    assert {k: v for k, v in first.summary.items() if k != "seconds"} == {
        k: v for k, v in fresh.items() if k != "seconds"
    }
    assert second.record == kept.record and second.summary == kept.summary
    assert [r.record for r in ask(again="other")] == [first.record, second.record]
    assert "forgotten" not in capsys.readouterr().out
    assert [r.summary["status"] for r in ask(again=True)] == ["finished"] * 2
    assert capsys.readouterr().out.count("forgotten, and run anew: ") == 2
    METHODS["fedprox"] = defined(FEDPROX, tmp_path)
    before = find_run(mine, tmp_path / "runs", "method")
    assert run_all([mine], ONE, tmp_path / "runs", accept="method", again="other")[0].record == before.record  # keep
    for word in ("others", 3, None):
        with pytest.raises(ValueError, match=f"again = {word!r} is not possible;.* allowed: False, True, other"):
            ask(again=word)
    with pytest.raises(ValueError, match="unknown key 'nu'"):  # before anything is forgotten
        run_all([kits, mine.replace(options={"nu": 1})], ONE, tmp_path / "runs", again=True)
    assert find_run(kits, tmp_path / "runs") is not None


def test_a_run_that_another_process_trains_is_not_forgotten(tmp_path):
    from filelock import FileLock

    from fedlib import forget

    e = tiny(rounds=1)
    path = train(e, tmp_path).path
    with FileLock(path / ".lock"), pytest.raises(RuntimeError, match="another process is running"):
        forget(e, tmp_path)
    assert find_run(e, tmp_path) is not None


def test_one_and_one_point_nought_are_one_run(tmp_path):
    whole, real = (tiny("reefl", rounds=1, options={"zeta": z}) for z in (1, 1.0))
    assert whole == real and hash(whole) == hash(real) and len({whole, real}) == 1
    assert run_path(whole, tmp_path) == run_path(real, tmp_path) and whole.hash != real.hash
    first = train(whole, tmp_path)
    assert first.path.name == real.slug and find_run(real, tmp_path).summary == first.summary
    first.path.rename(tmp_path / whole.slug)  # as an earlier version named it
    for e in (whole, real):
        assert run_path(e, tmp_path).name == whole.slug and find_run(e, tmp_path) is not None
    named = [run_path(tiny(finetune="lora", finetune_options={"r": r}), tmp_path).name for r in (3, 3.0)]
    assert named[0] == named[1] == tiny(finetune="lora", finetune_options={"r": 3}).slug


def test_a_grid_is_read_once(tmp_path, monkeypatch):
    grid = [tiny(rounds=1, seed=s) for s in (1, 2, 1)]
    first = run_all(grid, ONE, tmp_path, progress=False)
    seen, original = [], runs_module.find_run
    monkeypatch.setattr(runs_module, "find_run", lambda e, *args: seen.append(e.seed) or original(e, *args))
    assert run_all(grid, ONE, tmp_path, progress=False) == first and seen == [1, 2]


def test_stored_runs_are_found_without_decoding_their_data(shared_data, monkeypatch):
    """``known_digests.json`` says of the files at hand what the stored runs say that these decode to."""
    import json

    from fedlib.data.cache import published_digest, source_digest
    from fedlib.data.datasets import source_key
    from fedlib.models.registry import backbone_spec, tokenizer_of

    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    lacking = {}
    for path in listed(OUTPUTS / "runs", "*", "summary.json"):
        content = json.loads((path / "experiment.json").read_text())
        name, backbone = content["experiment"]["dataset"], content["experiment"]["backbone"]
        inputs = content.get("inputs", {})
        if not (shared_data / name).exists() or "data" not in inputs or "source" in inputs:
            continue
        key, size = source_key(name, tokenizer_of(backbone)), backbone_spec(backbone).input_shape[-1]
        if published_digest(key, size) != inputs["data"]:
            lacking[source_digest(key | {"size": size})] = inputs["data"]
    assert not lacking
