"""Parameters, MACs and memory against published and recomputed numbers, to the digit."""

from dataclasses import replace

import pytest
import torch

from fedlib import Experiment
from fedlib.core.slices import Slice
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.map_exits import PooledClassifiers
from fedlib.models.measure import MIB, Measure
from fedlib.models.resnet import RESNETS, ResNetSpec
from fedlib.models.small import CONVNETS
from fedlib.models.vit import ViTSpec
from fedlib_lab.runs.costs import exit_costs

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")


def measured(spec, num_classes, exit_units=None, **kinds):
    """(parameters, MACs of one example, the measure) of a whole net with its exits."""
    exit_units = exit_units or (spec.depth - 1,)
    with torch.device("meta"):
        model = ExitModel(spec.build(), PooledClassifiers(spec, num_classes, exit_units, **kinds), exit_units)
    measure, whole = Measure(model), Slice.prefix(spec.depth, range(len(exit_units)))
    return measure.parameters(whole), measure.macs(whole), measure


def test_resnet110_without_exits():
    assert measured(RESNETS["resnet110"], 10)[:2] == (1_730_714, 253_149_824)  # ScaleFL: 1.73 M, 253.1 M


@pytest.mark.parametrize(
    ("width", "blocks", "parameters", "macs"),
    [
        (0.70, (18, 18), 210_253, 83_443_932),  # one exit, after block 36, before stage 3 begins
        (0.70, (18, 18, 6), 465_727, 99_675_796),
        (0.75, (18, 18, 12), 866_730, 138_499_248),
    ],
)
def test_scalefls_levels_of_resnet110(width, blocks, parameters, macs):
    spec = ResNetSpec(blocks=blocks, widths=tuple(int(width * w) for w in (16, 32, 64)[: len(blocks)]))
    exits = tuple(u for u in (35, 41, 47) if u < spec.depth)
    assert measured(spec, 10, exits, early="convolutions", final="convolutions")[:2] == (parameters, macs)


@pytest.mark.parametrize(("size", "classes", "macs"), [(32, 100, 555_468_800), (64, 200, 2_221_772_800)])
def test_cafedistills_resnet18(size, classes, macs):
    assert measured(replace(RESNETS["resnet18_cifar"], size=size), classes)[1] == macs


def test_cafedistills_convnet():
    linear = 512 * 10
    assert measured(CONVNETS["convnet3"], 10, final="flatten")[1] - linear == 30_389_760


def test_cifar_resnets_have_their_published_sizes():
    sizes = {20: 0.27, 32: 0.46, 56: 0.85, 110: 1.7}  # million parameters, He et al. 2016, Table 6 (option A)
    for depth, millions in sizes.items():
        assert measured(RESNETS[f"resnet{depth}"], 10)[0] / 1e6 == pytest.approx(millions, rel=0.03)


def test_fedepths_table_of_memory():
    """Table 1 at batch 32, in MiB; it prints 14.05 and 7.21 for the fourth and seventh block."""
    measure = measured(RESNETS["preresnet20"], 10, final="norm_relu")[2]
    blocks = [measure.activation_mib(unit, 32) for unit in range(9)]
    assert [round(b, 2) for b in blocks] == [20.02, 20.02, 20.02, 14.06, 10.07, 10.07, 7.22, 5.28, 5.28]
    assert round(measure.total_mib(32), 2) == 116.04
    values, parameters = 5 * 16 * 32 * 32, 2 * 9 * 16 * 16 + 2 * 2 * 16  # of the first block, by hand
    assert blocks[0] == (2 * 4 * 32 * values + 4 * parameters) / MIB


def test_a_vision_transformers_measures_by_hand():
    spec = ViTSpec()  # 12 blocks, d = 64, 17 tokens, FFN 256
    with torch.device("meta"):
        measure = Measure(ExitModel(spec.build(), Classifiers(64, 10, (5, 11)), (5, 11)))
    tokens, d = 17, 64
    block = 4 * tokens * d * d + 2 * tokens * tokens * d + 2 * tokens * d * 256
    stem, exit = 16 * 192 * d, d * 10
    assert measure.macs(Slice.prefix(12, (0, 1))) == stem + 12 * block + 2 * exit
    assert measure.macs(Slice.prefix(6, (0,))) == stem + 6 * block + exit
    assert measure.macs(Slice.prefix(12, (1,))) == stem + 12 * block + exit
    outputs = tokens * (8 * d + 256)  # norm1, q, k, v, proj, norm2, fc1, fc2 and the block
    parameters = 4 * (d * d + d) + 2 * d * 256 + 256 + d + 4 * d
    assert measure.activation_mib(3, 8) == (2 * 4 * 8 * outputs + 4 * parameters) / MIB


def test_training_memory_counts_one_state_a_chunk():
    """Full fine-tuning keeps no (tokens x channels x states) tensor: 24 blocks of it alone would be 7.1 GiB."""
    e = Experiment(method="depthfl", backbone="vim_tiny", finetune="full", augment="none")
    last = exit_costs(e, 100)[-1]["training_memory_mib"]
    states = 2 * 24 * 13 * 32 * 16 * 384 * 4 / 2**20  # 13 chunks of 197 tokens, batch 32
    assert states < last < 6 * 1024 < 2 * 24 * 197 * 32 * 16 * 384 * 4 / 2**20
