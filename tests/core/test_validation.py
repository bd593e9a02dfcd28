"""What a dataclass's annotations say of its fields holds: types, options, limits, conditions; and what does not fit."""

import itertools
import pathlib
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import numpy as np
import pytest
import torch

import fedlib
from fedlib import Execution, Experiment, build_federation
from fedlib.core import hub, threads
from fedlib.core.paths import params_dir
from fedlib.core.storage import read_json
from fedlib.core.validation import Above, AtLeast, AtMost, Below, When, check_conditions, check_fields, check_instance
from fedlib.engine import memory
from fedlib.engine.checks import check_experiment, without_defaults
from fedlib.methods.sliced.reefl import ReeFL
from tests.helpers.tracked import OUTPUTS

ROOT = pathlib.Path(__file__).parents[2]
STORED = sorted((OUTPUTS / "runs").glob("*/experiment.json"))


@dataclass(frozen=True)
class Options:
    kind: Literal["plain", "fancy"] = "plain"
    share: Annotated[float, Above(0), AtMost(1)] = 0.5
    count: Annotated[int, AtLeast(1), Below(9)] | None = None
    parts: tuple[Annotated[float, Above(0)], ...] = (1.0,)
    extra: Annotated[float, AtLeast(0), When(kind="fancy")] = 0.0

    def __post_init__(self):
        check_instance(self, "options")
        check_conditions(self, "options")


@dataclass(frozen=True)
class Own(Options):
    """A user's own: other defaults under the plain types."""

    kind: str = "fancy"
    share: float = 0.25
    extra: float = 2.0


@dataclass(frozen=True)
class Wider(Options):
    kind: Literal["plain", "mine"] = "mine"
    share: Annotated[float, AtMost(2)] = 1.5


@pytest.mark.parametrize(
    "cls, values, message",
    [
        (Options, {"share": 0}, "options: share = 0.0 must be above 0 and at most 1"),
        (Options, {"share": 1.5}, "share = 1.5 must be above 0 and at most 1"),
        (Options, {"share": float("nan")}, "share = nan: expected a finite number"),
        (Options, {"count": 9}, "count = 9 must be at least 1 and below 9"),
        (Options, {"parts": [1, -1]}, "parts = -1.0 must be above 0"),
        (Options, {"kind": "fanzy"}, "kind = 'fanzy' is not possible; did you mean 'fancy'?"),
        (Options, {"extra": 1}, "extra = 1.0 has no effect with kind = 'plain'; it needs kind = 'fancy'"),
        (Own, {"kind": "x"}, "kind = 'x' is not possible"),
        (Own, {"share": 7}, "share = 7.0 must be above 0 and at most 1"),
        (Own, {"extra": -1}, "extra = -1.0 must be at least 0"),
        (Wider, {"kind": "fancy"}, "kind = 'fancy' is not possible"),
        (Wider, {"share": 3}, "share = 3.0 must be at most 2"),
    ],
)
def test_limits_and_options_hold_and_plain_types_of_a_subclass_keep_them(cls, values, message):
    with pytest.raises(ValueError) as error:
        cls(**values)
    assert message in str(error.value)


def test_what_is_allowed_is_converted():
    o = Options("fancy", np.float64(1), np.int64(8), np.array([1, 2]), 3)
    assert o == Options("fancy", 1.0, 8, (1.0, 2.0), 3.0) and type(o.count) is int and type(o.parts[0]) is float
    assert Options(count=None).count is None
    # a field declared anew may mean something else: its limits stay, its condition does not
    assert Own(kind="plain", extra=1.0).extra == 1.0 and Wider().share == 1.5
    assert check_fields(Options, {"share": 1}, "x") == {"share": 1.0}


# --- experiments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, message",
    [
        ({"momentum": 1.0}, "experiment: momentum = 1.0 must be at least 0 and below 1"),
        ({"crop_scale": 1.5}, "crop_scale = 1.5 must be above 0 and at most 1"),
        ({"crop_pad": -1}, "crop_pad = -1 must be at least 0"),
        ({"clip_value": 0}, "clip_value = 0.0 must be above 0"),
        ({"seed": -1}, "seed = -1 must be at least 0"),
        ({"exit_blocks": [-1, 2, 5, 8]}, "exit_blocks = -1 must be at least 0"),
        ({"num_train": 0}, "num_train = 0 must be at least 1"),
        ({"rounds": np.float64(3)}, "rounds = 3.0: expected int"),
        ({"roundz": 3}, "experiment: unknown key 'roundz'; did you mean 'rounds'?"),
    ],
)
def test_an_experiment_refuses_by_name_however_it_is_made(values, message):
    for make in (lambda: Experiment(**values), lambda: Experiment.from_dict(values), lambda: Experiment().replace(**values)):  # fmt: skip
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)


def test_numpy_values_and_paths_are_taken_as_what_they_mean():
    plain = Experiment(rounds=3, lr=0.5, exit_blocks=(2, 5, 8, 11), pretrained=False, options={"zeta": 0.25})
    given = Experiment(
        rounds=np.int64(3), lr=np.float32(0.5), exit_blocks=np.array([2, 5, 8, 11]), pretrained=np.False_,
        options={"zeta": np.float64(0.25)},
    )  # fmt: skip
    assert given == plain and given.hash == plain.hash and type(given.rounds) is int
    assert Experiment(dataset=pathlib.Path("/data/digits")).dataset == "/data/digits"
    assert Experiment(dataset=pathlib.Path("mnist")).dataset == "./mnist"  # a folder, not the set of that name
    assert Experiment("depthfl", {"zeta": 0.1}) == Experiment(method="depthfl", options={"zeta": 0.1})


def test_every_field_is_documented():
    for cls in (Experiment, Execution):
        documented = cls.__doc__.replace(",", " ").split()
        assert {f.name for f in fields(cls)} <= set(documented), cls


def test_the_front_door_shows_what_there_is():
    import pydoc

    assert set(fedlib.__all__) <= set(dir(fedlib))
    text = pydoc.render_doc(fedlib, renderer=pydoc.plaintext)
    for line in ("class Experiment", "class Execution", "run(e:", "run_all(", "run_rounds(", "largest gradient entry"):
        assert line in text, line


@pytest.mark.parametrize(
    "values, message",
    [
        ({"crop_pad": 5000}, "crop_pad = 5000 leaves nothing of the 32 x 32 pixels that deit_micro reads"),
        ({"crop_pad": 10**7, "backbone": "vit_digits", "pretrained": False}, "allowed: 0..27"),
        ({"finetune_options": {"r": 10**6}}, "finetune_options: r = 1000000 is not possible; allowed: 1..64"),
        ({"finetune": "sa", "finetune_options": {"r": 65}}, "r = 65 is not possible; allowed: 1..64"),
        ({"partition": "iid", "dirichlet_alpha": 0.1}, "dirichlet_alpha = 0.1 has no effect with partition = 'iid'"),
        ({"classes_per_client": 5}, "it needs partition = 'pathological'"),
        ({"examples_per_client": 5}, "it needs partition = 'drawn'"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused_before_compute(values, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment(**values))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"public_fraction": 0.001},
            "public_fraction = 0.001 of every class's training examples rounds to none of these 200; allowed: 0, or more than 0.025",
        ),
        (
            {"validation_fraction": 0.02, "evaluate_on": "validation"},
            "validation_fraction = 0.02 of every class's training examples rounds to none of these 200",
        ),
        (
            {"validation_fraction": 0.99},
            "validation_fraction = 0.99 of every class's training examples leaves none of 200; allowed: less",
        ),
    ],
)
def test_a_split_that_rounds_to_nothing_is_refused(values, message):
    e = Experiment(num_train=200, num_test=20, finetune="frozen", **values)
    with pytest.raises(ValueError) as error:
        build_federation(e)
    assert message in str(error.value)


def test_memory_budgets_need_a_tuner_whose_memory_can_be_counted():
    e = Experiment(method="fedepth", num_exits=1, finetune="waveft", num_train=200, num_test=20)
    with pytest.raises(
        ValueError,
        match="fedepth: scenario = 'fair', r = 0.167: this finetune's layers look at values, so what they cost cannot be counted",
    ):
        build_federation(e)


def test_a_drawn_client_holds_no_more_than_there_is():
    e = Experiment(partition="drawn", num_train=200, examples_per_client=201, finetune="frozen")
    with pytest.raises(ValueError, match="examples_per_client = 201 exceeds the 200 training examples"):
        build_federation(e)
    assert build_federation(e.replace(examples_per_client=200)).data.num_examples[0] == 200


def test_a_backbone_of_one_channel_does_not_read_colours(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for split, name in itertools.product(("train", "test"), "ab"):
        (tmp_path / "set" / split / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (28, 28), (40 * i, 0, 9)).save(tmp_path / "set" / split / name / f"{i}.png")
    e = Experiment(
        method="fedavg", dataset=str(tmp_path / "set"), backbone="vit_digits", pretrained=False, finetune="full",
        num_clients=2, clients_per_round=2,
    )  # fmt: skip
    with pytest.raises(
        ValueError,
        match="backbone = 'vit_digits' reads images of 1 channel, and those of dataset = .* have 3; allowed: a backbone of 3 channels",
    ):
        build_federation(e)
    build_federation(e.replace(backbone="deit_micro"))


# --- methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("reefl", {"temperature": 0}, "temperature = 0.0 must be above 0"),
        ("reefl", {"temperature": -1.0}, "temperature = -1.0 must be above 0"),
        ("reefl", {"zeta": 7}, "zeta = 7.0 must be above 0 and at most 1"),
        ("reefl", {"ramp_fraction": 1.5}, "ramp_fraction = 1.5 must be at least 0 and at most 1"),
        ("reefl", {"kd_weight": -0.1}, "kd_weight = -0.1 must be at least 0"),
        ("reefl", {"ree_width": 0}, "ree_width = 0 must be at least 1"),
        ("reefl", {"ree_mlp_ratio": 0}, "ree_mlp_ratio = 0.0 must be above 0"),
        ("inclusivefl", {"beta1": 2}, "beta1 = 2.0 must be at least 0 and below 1"),
        ("inclusivefl", {"beta2": -0.1}, "beta2 = -0.1 must be at least 0 and below 1"),
        ("inclusivefl", {"server_lr": -1}, "server_lr = -1.0 must be above 0"),
        ("inclusivefl", {"adam_tau": 0}, "adam_tau = 0.0 must be above 0"),
        ("inclusivefl", {"beta": 1.1}, "beta = 1.1 must be at least 0 and at most 1"),
        ("depthfl", {"feddyn_alpha": 0}, "feddyn_alpha = 0.0 must be above 0"),
        (
            "scalefl_vit",
            {"widths": [1e-9, 0.5, 0.7, 1]},
            "widths: 1e-09 leaves axis 'residual' empty; allowed: 0.016..1",
        ),
        ("scalefl_vit", {"widths": [0, 0.5, 0.7, 1]}, "widths = 0.0 must be above 0 and at most 1"),
        ("scalefl_vit", {"widths": [0.5, 1]}, "widths = [0.5, 1.0] must be 4 numbers"),
        ("fedavg", {"zeta": 0.3}, "options of fedavg: unknown key 'zeta'"),
        ("reefl", {"distill": "none", "temperature": 2}, "temperature = 2.0 has no effect with distill = 'none'"),
        ("reefl", {"kd_weight": 0.5, "ramp_fraction": 0.1}, "ramp_fraction = 0.1 has no effect with kd_weight = 0.5"),
        ("depthfl", {"zeta": 0.3}, "zeta = 0.3 has no effect with distill = 'mutual'; it needs distill = 'best'"),
        ("reefl", {"beta1": 0.5}, "beta1 = 0.5 has no effect with aggregation = 'mean'"),
        ("inclusivefl", {"momentum_distill": False, "beta": 0.5}, "beta = 0.5 has no effect with momentum_distill"),
        ("reefl", {"use_ree": False, "ree_width": 32}, "ree_width = 32 has no effect with use_ree = False"),
    ],
)
def test_options_of_methods_are_in_range_and_do_something(method, options, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment(method=method, options=options))
    assert message in str(error.value)


def test_a_method_made_by_hand_refuses_too():
    @dataclass(frozen=True)
    class Mine(ReeFL):
        """A user's own, with the plainest of types."""

        distill: str = "last"
        temperature: float = 2.0

    for make, message in (
        (lambda: ReeFL(distill="x"), "options of reefl: distill = 'x' is not possible"),
        (lambda: Mine(distill="lats"), "options of mine: distill = 'lats' is not possible; did you mean 'last'?"),
        (lambda: Mine(temperature=0), "temperature = 0.0 must be above 0"),
        (lambda: ReeFL(weighting=3), "weighting = 3 is not possible"),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)
    assert Mine(distill="best").temperature == 2.0


@pytest.mark.parametrize(
    "values, message",
    [
        ({"method": "inclusivefl", "backbone": "resnet8"}, "inclusivefl: momentum_distill = True adds up what blocks of equal shape learnt, and those of backbone = 'resnet8' differ; allowed: False, or a ViT, Vim or BERT"),
        ({"method": "reefl", "backbone": "llama_tiny", "dataset": "sst2"}, "reefl: backbone: Ree needs a class token, and 'llama_tiny' has none that could be handed back; allowed: use_ree = False, or a ViT, Vim or BERT of the kit's own"),
        ({"method": "heterofl", "backbone": "llama_tiny", "dataset": "sst2"}, "heterofl: backbone = 'llama_tiny' cannot be cut in width: its queries and keys are rotated in pairs by position"),
        ({"method": "depthfl", "backbone": "bert_micro", "dataset": "stsb"}, "depthfl: distill = 'mutual' is for classes, and the labels of dataset = 'stsb' are none; allowed: data of classes, or without it"),
        ({"method": "feddf", "backbone": "bert_micro.mean", "dataset": "stsb", "public_fraction": 0.1}, "feddf: its ensemble's softmax is for classes"),
        ({"method": "heterofl", "backbone": "bert_micro.mean", "dataset": "stsb"}, "heterofl: masked = True is for classes"),
        ({"method": "scalefl", "backbone": "bert_micro.mean", "dataset": "stsb"}, "scalefl: temperature = 3.0: a regression has no classes to soften; allowed: 1"),
        ({"method": "fedavg", "backbone": "resnet8", "dataset": "cifar10", "finetune": "boft"}, "finetune = 'boft' is not defined on this backbone"),
    ],
)  # fmt: skip
def test_what_would_fail_in_training_is_refused_before_compute(values, message):
    method = Experiment(**{"num_exits": 1, "pretrained": False, "augment": "none", "finetune": "full"} | values)
    with pytest.raises(ValueError) as error:
        check_experiment(method)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["static", "local"])
def test_a_net_without_batch_norm_has_no_statistics_to_keep(policy):
    e = Experiment(
        method="fedavg", backbone="convnet3_slim", pretrained=False, augment="none", finetune="full", num_exits=3,
        exit_blocks=(0, 1, 2), num_train=200, num_test=20, num_clients=5, clients_per_round=2, batch_norm=policy,
    )  # fmt: skip
    with pytest.raises(
        ValueError,
        match=f"batch_norm = '{policy}': backbone = 'convnet3_slim' and its exits have no batch norm; allowed: batch, tracked",
    ):
        build_federation(e)
    build_federation(e.replace(batch_norm="tracked"))  # what whole grids say, nets without norms among them
    build_federation(e.replace(exit_head="norm"))  # exits have one


# --- names -------------------------------------------------------------------------------------------------------


def test_a_spelled_out_default_is_the_same_experiment():
    e = Experiment()
    assert without_defaults(e.replace(options={"zeta": 0.2}, finetune_options={"r": 32})) == e
    assert without_defaults(e.replace(options={"zeta": 0.3})).options == {"zeta": 0.3}
    assert without_defaults(e.replace(method="mine", options={"zeta": 0.2})).options == {"zeta": 0.2}  # nobody knows it


@pytest.mark.skipif(not STORED, reason="no stored runs")
def test_stored_runs_keep_their_names_and_stay_possible():
    for file in STORED:
        e = Experiment.from_dict(read_json(file)["experiment"])
        assert e.slug == file.parent.name
        without_defaults(e)  # its method can still be built
        check_conditions(e, "experiment")


# --- memory ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_needed_and_free(monkeypatch):
    e = Experiment(method="fedavg", num_exits=1, finetune="full", num_train=200, num_test=50)
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    with pytest.raises(ValueError, match=r"need about 0\.0 GiB and 0\.0 GiB are free on cpu"):
        build_federation(e)
    monkeypatch.undo()
    build_federation(e)
    huge = e.replace(method="reefl", num_exits=4, options={"ree_width": 8 * 10**9})
    with pytest.raises(ValueError, match=r"need about [\d.]+ GiB and [\d.]+ GiB are free"):
        build_federation(huge)


def test_needed_bytes_are_what_the_tensors_take():
    from fedlib.engine.federation import build_model

    e = Experiment(method="fedavg", num_exits=1, finetune="full", batch_size=8)
    shapes = build_model(e, check_experiment(e), 10, meta=True)
    size, config = sum(p.numel() for p in shapes.parameters()), shapes.backbone.spec
    tokens = 8 * 17  # 16 patches and the class token
    assert memory.bytes_to_train(e, shapes, 100) == 4 * (7 * size + tokens * 12 * (8 * config.dim + 2 * config.ffn_dim))
    assert (
        memory.bytes_to_train(e.replace(momentum=0.5), shapes, 100) - memory.bytes_to_train(e, shapes, 100) == 4 * size
    )


def test_free_memory_counts_the_containers_limit(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\n")
    assert memory.available(cpu) == 500 * 1024
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert memory.available(cpu) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available(cpu) == 500 * 1024
    (tmp_path / "meminfo").unlink()
    assert memory.available(cpu) > 2**28  # of the machine


# --- devices, folders, networks, threads -------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cudaa", "gpu", "mps", "cuda:-1", "cuda:x", "", "cuda:99999999999"])
def test_unknown_devices_are_refused(device):
    for make in (lambda: Execution(device), lambda: build_federation(Experiment(), device)):
        with pytest.raises(
            ValueError, match=r"execution: device = .* is not possible; allowed: cpu, cuda, cuda:<number>"
        ):
            make()


def test_absent_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device = 'cuda', but PyTorch finds 0 GPUs here; allowed: cpu$"):
        Execution("cuda")
    assert Execution("cuda", executor="ray").home == "cpu"  # its workers' machines may have some
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Execution("cuda:1").device == "cuda:1"
    with pytest.raises(
        ValueError, match="device = 'cuda:2', but PyTorch finds 2 GPUs here; allowed: cpu, cuda:0, cuda:1"
    ):
        replace(Execution("cuda:1"), device="cuda:2")


def test_an_executions_unknown_keyword_is_named():
    with pytest.raises(ValueError, match="execution: unknown key 'worker'; did you mean 'workers'?"):
        Execution(worker=3)


def test_params_outside_a_checkout_are_one_sentence(tmp_path, monkeypatch):
    from fedlib.runs.params import load_grid

    monkeypatch.delenv("FEDLIB_ROOT")
    monkeypatch.chdir(tmp_path)
    for call in (params_dir, lambda: load_grid("reefl", "table1", "smoke")):
        with pytest.raises(ValueError, match="no folder .*params: .* start inside a checkout, or set FEDLIB_ROOT") as e:
            call()
        assert "\n" not in str(e.value)


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch):
    import time

    from huggingface_hub import constants

    from fedlib.models.registry import build_backbone

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answers", lambda endpoint: asked.append(endpoint))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it tries again"))
    for name in ("vim_tiny", "deit_tiny_patch16_224.fb_in1k"):
        with pytest.raises(ConnectionError, match="not cached and could not be downloaded: connect once"):
            build_backbone(name)
    assert len(asked) == 2
    assert constants.HF_HUB_OFFLINE is False


def test_whether_the_hub_answers():
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        assert hub._answers(address)
    server.shutdown()
    server.server_close()
    assert not hub._answers(address)


@pytest.mark.parametrize(
    "torch_first, policy, expected",
    [(False, None, "PASSIVE False"), (True, None, "PASSIVE True"), (False, "ACTIVE", "ACTIVE False"),
     (True, "PASSIVE", "PASSIVE False")],
)  # fmt: skip
def test_waiting_threads_sleep_where_fedlib_comes_first(torch_first, policy, expected):
    import os

    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | (
        {"OMP_WAIT_POLICY": policy} if policy else {}
    )
    there = "sys.modules['torch'] = object(); " if torch_first else ""
    code = f"import os, sys; {there}import fedlib; print(os.environ['OMP_WAIT_POLICY'], fedlib.core.threads._too_late)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == expected


def test_spinning_threads_are_told_where_one_worker_uses_several(monkeypatch, recwarn):
    monkeypatch.setattr(threads, "_too_late", True)
    threads.warn_if_spinning(1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="torch was imported before fedlib, so its 4 threads spin"):
        threads.warn_if_spinning(4)
