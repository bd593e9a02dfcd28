"""What cannot be run is refused before any compute, in one sentence."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from fedlib import Experiment, build_federation
from fedlib.engine.checks import check_experiment, without_defaults


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


def test_all_that_is_refused_is_said_at_once():
    e = Experiment(method="depthfl", backbone="convnet3", classes_per_client=3, milestones=(0.5,), crop_pad=40)
    with pytest.raises(ValueError) as error:
        check_experiment(e)
    said = str(error.value).splitlines()
    assert [line.split(" = ")[0] for line in said] == [
        f"experiment: {key}"
        for key in ("classes_per_client", "milestones", "pretrained", "crop_pad", "finetune", "num_exits")
    ]
    assert all("allowed: " in line or "; it needs " in line for line in said)
    check_experiment(
        e.replace(classes_per_client=2, milestones=None, pretrained=False, crop_pad=2, finetune="full", num_exits=3)
    )


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


@pytest.mark.parametrize("split", ["train", "test"])
def test_colours_in_either_split_are_refused_by_a_backbone_of_one_channel(split, monkeypatch):
    from fedlib import register_data

    monkeypatch.setattr("fedlib_lab.formats.readers.OWN_DATA", {})
    given = {s: (np.zeros((8, 28, 28, 1 + 2 * (s == split)), np.uint8), np.arange(8) % 2) for s in ("train", "test")}
    e = Experiment(
        method="fedavg", dataset=register_data("mixed", **given), backbone="vit_digits", pretrained=False,
        finetune="full", num_clients=2, clients_per_round=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="reads images of 1 channel, and those of dataset = 'mixed' have 3; allowed"):
        build_federation(e)
    build_federation(e.replace(backbone="deit_micro"))


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(
    "most, at, fits", [(30_521, 0, True), (30_522, 0, False), (10**9, 31, False), (10**9, 32, True)]
)
def test_token_ids_beyond_the_vocabulary_are_refused(split, most, at, fits, monkeypatch):
    """``bert_micro`` reads 32 tokens of 30,522 words; what it does not read is not asked for."""
    from fedlib import register_data

    monkeypatch.setattr("fedlib_lab.formats.readers.OWN_DATA", {})
    given = [(np.ones((40, 40), np.int64), np.arange(40) % 2) for _ in range(2)]
    given[split][0][3, at] = most
    e = Experiment(
        dataset=register_data("ids", *given), backbone="bert_micro", pretrained=False, finetune="full", augment="none",
        num_exits=3, num_clients=4, clients_per_round=2,
    )  # fmt: skip
    if fits:
        build_federation(e)
    else:
        sentence = f"dataset = 'ids' has token ids from 1 to {most}, and backbone = 'bert_micro' knows 30522 words"
        with pytest.raises(ValueError, match=sentence):
            build_federation(e)


@pytest.mark.parametrize("ids", [np.full((4, 8), -100), np.full((4, 8), 2**31), np.full((4, 8), 2**64 - 1, np.uint64)])
def test_numbers_that_are_no_token_ids_are_refused(ids):
    from fedlib import register_data

    with pytest.raises(ValueError, match="ids: token ids from .* to .*; allowed: uint8 images .* from 0 to"):
        register_data("ids", (ids, np.arange(4) % 2))


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
        (
            "reefl",
            {"distill": "none", "zeta": 0.3},
            "zeta = 0.3 has no effect with distill = 'none'; it needs distill = 'best'",
        ),
        ("reefl", {"distill": "mutual"}, "distill = 'mutual' is not possible; allowed: best, none"),
        ("reefl", {"beta1": 0.5}, "beta1 = 0.5 has no effect with aggregation = 'mean'"),
        ("inclusivefl", {"momentum_distill": False, "beta": 0.5}, "beta = 0.5 has no effect with momentum_distill"),
        ("reefl", {"use_ree": False, "ree_width": 32}, "ree_width = 32 has no effect with use_ree = False"),
    ],
)
def test_options_of_methods_are_in_range_and_do_something(method, options, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment(method=method, options=options))
    assert message in str(error.value)


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


def test_a_spelled_out_default_is_the_same_experiment():
    e = Experiment()
    assert without_defaults(e.replace(options={"zeta": 0.2}, finetune_options={"r": 32})) == e
    assert without_defaults(e.replace(options={"zeta": 0.3})).options == {"zeta": 0.3}
    assert without_defaults(e.replace(method="mine", options={"zeta": 0.2})).options == {"zeta": 0.2}  # nobody knows it


@pytest.mark.parametrize(
    "values, message",
    [
        ({"method": "refl"}, "method = 'refl' is unknown; did you mean 'reefl'?"),
        ({"options": {"zetta": 0.3}}, "options of reefl: unknown key 'zetta'; did you mean 'zeta'?"),
        ({"options": {"distill": "bets"}}, "did you mean 'best'?"),
        ({"options": {"ree_heads": 7}}, "ree_heads = 7 does not divide ree_width = 16"),
        ({"num_exits": 5}, "num_exits = 5 does not divide 12 blocks; allowed: [1, 2, 3, 4, 6, 12]"),
        ({"exit_blocks": [2, 5, 8, 12]}, "deit_micro has blocks 0..11"),
        ({"finetune": "lorra"}, "finetune = 'lorra' is unknown; did you mean 'lora'?"),
        ({"finetune_options": {"rank": 4}}, "unknown key 'rank' for lora"),
        ({"finetune": "pa", "finetune_options": {"r": 0}}, "r = 0 is not possible; allowed: 1..64"),
        ({"finetune_options": {"lora_alpha": "64"}}, "lora_alpha = '64' is not possible; allowed: a number above 0"),
        (
            {"finetune_options": {"lora_dropout": 1.0}},
            "lora_dropout = 1.0 is not possible; allowed: 0 up to 1, without",
        ),
        ({"finetune": "ia3", "finetune_options": {"r": 2}}, "finetune_options: unknown key 'r' for ia3"),
        ({"backbone": "deit_smal_patch16_224"}, "did you mean 'deit_small_patch16_224'?"),
        ({"backbone": "xcit_nano_12_p16_224"}, "before cut 'blocks.1' the net reads 'getitem_3' of before an earlier"),
        ({"finetune": "lily"}, "finetune = 'lily' with {}: peft says: it shares tensors between blocks"),
        ({"finetune": "vera"}, "does not support PeftType.VERA"),
        ({"finetune": "osf"}, "it trains nothing, or by hooks of parameters, which would not run for each client"),
        (
            {"finetune": "osf", "backbone": "resnet10t"},
            "it trains nothing, or by hooks of parameters",
        ),  # no linear layer
        ({"finetune": "ln_tuning"}, "finetune = 'ln_tuning' is unknown"),
        ({"finetune_options": {"target_modules": "all-linear"}}, "stem.patch_embed is no linear layer or convolution"),
        ({"finetune_options": {"init_lora_weights": "eva"}}, "'eva' is not possible; allowed: what reads no data"),
        ({"method": "scalefl_vit", "finetune": "ia3"}, "cannot be cut in width; allowed: frozen"),
        ({"method": "scalefl_vit", "num_exits": 3}, "set options.widths for 3 exits"),
        ({"method": "inclusivefl", "options": {"aggregation": "feddyn"}}, "needs momentum_distill = False"),
    ],
)
def test_impossible_combinations_are_refused_before_compute(values, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment.from_dict(values))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dataset": "mnist"}, "backbone = 'bert_micro' cannot read dataset = 'mnist', which holds images; allowed:"),
        ({"backbone": "deit_micro"}, "backbone = 'deit_micro' cannot read dataset = 'sst2', which holds sentences; allowed: minilm"),
        ({"augment": "crop"}, "augment = 'crop' is for images; allowed with 'bert_micro': none"),
        ({"pretrained": True}, "pretrained = True is not possible with backbone = 'bert_micro'; allowed: False"),
        ({"method": "scalefl_vit"}, "scalefl_vit: backbone: a Bert is not what it cuts, which is a ViT"),
        ({"backbone": "mini_lm"}, "backbone = 'mini_lm' is unknown; did you mean 'minilm'?"),
        ({"method": "reefl", "backbone": "bert_micro.mean"}, "reefl: backbone: Ree needs a class token, the exits of 'bert_micro.mean' read the mean of all tokens; allowed: 'bert_micro', or"),
        ({"num_exits": 4}, "num_exits = 4 does not divide 3 blocks; allowed: [1, 3]"),
    ],
)  # fmt: skip
def test_what_text_cannot_do_is_said_before_any_compute(change, message):
    pytest.importorskip("fedlib_lab")  # which reads sentences
    e = Experiment(dataset="sst2", augment="none", backbone="bert_micro", pretrained=False, num_exits=3)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_experiment(e.replace(**change))


VALID = dict(
    method="depthfl", options={"temperature": 0.3}, dataset="mnist", num_train=100, num_test=None,
    partition="dirichlet", dirichlet_alpha=0.5, classes_per_client=2, augment="crop", crop_pad=2, crop_scale=0.1,
    backbone="deit_micro", pretrained=True, finetune="frozen", finetune_options={}, num_exits=4,
    exit_blocks=[2, 5, 8, 11], num_clients=20, clients_per_round=5, budgets="uniform", rounds=3, local_epochs=1,
    batch_size=8, lr=0.1, min_lr=0.01, momentum=0.5, weight_decay=0.1, clip_value=1.0, nonfinite="drop",
    evaluate_every=1, seed=1,
)  # fmt: skip
NUMBERS = {k for k, v in VALID.items() if type(v) in (int, float)} | {"num_test"}


def wrong(key, rng):
    """A value that ``key`` cannot have."""
    deep = nested = []
    for _ in range(rng.choice([1, 5, 2000])):
        nested.append([])
        nested = nested[0]
    odd = [b"bytes", {"a": {"b": 1}}, {1: 2}, object(), {"set"}, 1j, deep, float("nan"), float("inf"), -float("inf"), 10**400,
           -(10**400), 2**64, "\ud800\0", "數" * rng.randint(1, 2000), "", "1e-3", range(3), np.float64("nan"), {"k": float("nan")},
           {"k": object()}, {"k": deep}, [[None]], [1, "2"], type, np.complex64(3), np.datetime64("2024"), np.array([3, 3])]  # fmt: skip
    if key in NUMBERS:
        odd += [True, -1, -0.5, "3", -(2**63)]
    if type(VALID[key]) is float:
        odd.remove(2**64)  # large, but a number
    if type(VALID[key]) is bool:
        odd += [0, 1, "true", None]
    return rng.choice(odd)


def mutated(rng):
    """A valid configuration with one thing wrong, and the word that a message about it must hold."""
    values = json.loads(json.dumps(VALID))
    kind = rng.randrange(4)
    if kind == 0:
        key = rng.choice(
            [rng.choice(list(VALID)) + rng.choice("sz_ é\n"), rng.choice(["", "\0", "数据", "__class__", "x" * 5000])]
        )
        values[key] = rng.choice([1, None, VALID])
        return values, "unknown key"
    if kind == 1:
        values["options"][rng.choice(["zetta", "", "数", "lr"])] = 1
        return values, "options of depthfl: unknown key"
    if kind == 2:
        key = rng.choice(["zeta", "temperature", "beta1", "kd_weight"])
        values["options"][key] = rng.choice([float("nan"), "0.1", True, [1], {"a": 1}, 10**400, b"x", float("inf")])
        return values, key
    key = rng.choice(list(VALID))
    values[key] = wrong(key, rng)
    return values, key


def test_ten_thousand_invalid_configurations_give_clear_errors():
    """``ValueError`` with the key's name in a few lines, and no other exception from the depths."""
    rng, escaped, tried = random.Random(0), [], 0
    while tried < 10_000:
        values, word = mutated(rng)
        try:
            check_experiment(Experiment.from_dict(values))
        except ValueError as error:
            text = str(error)
            tried += 1
            if word not in text or len(text) > 4000 or text.count("\n") > 2:
                escaped.append((word, text[:300]))
        except Exception as error:
            tried += 1
            escaped.append((word, repr(error)[:300]))
        else:  # the few draws that are valid after all
            allowed = ("dataset", "num_test", "exit_blocks", "options", "finetune_options", "clip_value", "budgets")
            assert word in allowed, (
                word,
                values[word],
            )
    assert not escaped, f"{len(escaped)}: {escaped[:5]}"
