"""Axes: relabelling one changes no answer, cuts go round trip, a ranked cut is permuting and then cutting a prefix."""

import pytest
import torch

from fedlib import Experiment
from fedlib.core.slices import Slice, take_all
from fedlib.engine.federation import build_model
from fedlib.methods import METHODS, build_method
from fedlib.models.bert import BertSpec
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.parameter_info import axes_of
from fedlib.models.ree import Ree
from fedlib.models.vit import ViTSpec

VIT = ViTSpec(img_size=8, patch_size=4, dim=16, depth=2, heads=2, ffn_dim=24)
BERT = BertSpec(length=6, vocab_size=30, dim=16, depth=2, heads=2, ffn_dim=24, marks=(1, 2))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def built(spec, ree=False):
    head = Ree(16, 2, 5, (0, 1)) if ree else Classifiers(16, 5, (0, 1))
    model = ExitModel(spec.build(), head.init_(generator(1)), (0, 1))
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator(2))
    return model.requires_grad_(False)


def inputs(spec):
    if spec is VIT:
        return torch.randn(1, 3, 3, 8, 8, generator=generator(4))
    return torch.tensor([[[1, 7, 9, 2, 0, 0], [1, 3, 2, 0, 0, 0], [1, 11, 12, 13, 14, 2]]])


@pytest.mark.parametrize("spec, ree", [(VIT, False), (VIT, True), (BERT, False)])
def test_permuting_any_axis_leaves_the_answers_unchanged(spec, ree):
    model = built(spec, ree)
    infos, x = model.infos(), inputs(spec)
    axes, before = axes_of(model, infos), model(inputs(spec))
    assert {a.split("/")[-1] for a in axes} == {"residual", "classes", "qk", "vo", "ffn"}
    params = {n: p.detach() for n, p in model.named_parameters()}
    for axis in axes.values():
        if not axis.permutable:
            continue
        order = axis.ranked(torch.randn(axis.size, generator=generator(5)), lambda n: n)
        if axis.name.endswith("/qk"):  # a query's feature goes with its key's, within a head
            assert axis.segments == (8, 8) and set(order[:8]) == set(range(8))
        part = Slice.prefix(2, (0, 1), index={axis.name: order})
        model.put_(take_all(params, infos, part))
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4, msg=lambda m, a=axis.name: a + m)
    model.put_(params)


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_has_a_place(method):
    e = Experiment(method=method, finetune="ssf")
    infos = build_model(e, build_method(method, {}), 10, meta=True).infos()
    assert all(len(i.axes) == len(i.shape) for i in infos.values())
    assert {i.unit for i in infos.values()} == set(range(-1, 12))
    assert infos["backbone.blocks.10.mlp.fc1.base_layer.weight"].unit == 10
    assert infos["backbone.blocks.1.mlp.fc1.scale"].kind == "adapter"
