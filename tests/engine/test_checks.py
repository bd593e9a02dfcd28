"""What cannot be run is refused before any compute, in one sentence."""

import itertools

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
        ({"backbone": "deit_smal_patch16_224"}, "did you mean 'deit_small_patch16_224'?"),
        ({"backbone": "vit_base_patch16_siglip_224"}, "has no class token"),
        ({"backbone": "resnet34"}, "is not a VisionTransformer"),
        ({"finetune": "lily"}, "finetune = 'lily' with {}: peft says: it shares tensors between blocks"),
        ({"finetune": "vera"}, "does not support PeftType.VERA"),
        ({"method": "scalefl_vit", "finetune": "ia3"}, "cannot be cut in width; allowed: full"),
        ({"method": "scalefl_vit", "num_exits": 3}, "set options.widths for 3 exits"),
        ({"method": "inclusivefl", "options": {"aggregation": "feddyn"}}, "needs momentum_distill = False"),
    ],
)
def test_impossible_combinations_are_refused_before_compute(values, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment.from_dict(values))
    assert message in str(error.value)
