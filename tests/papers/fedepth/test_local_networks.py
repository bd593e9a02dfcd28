"""CKA and CCA of representations: what they do not see, and values by hand."""

import numpy as np
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib_lab.papers.fedepth.local_networks import linear_cka, local_features, mean_cca, similarities


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(n, seed=1):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


X, Y = normal(60, 5), normal(60, 5) @ normal(5, 8, seed=2) + 0.5 * normal(60, 8, seed=3)


@pytest.mark.parametrize("measure", [linear_cka, mean_cca, lambda x, y: mean_cca(x, y, 0.9)])
def test_rotation_scale_and_shift_do_not_count(measure):
    value = measure(X, Y)
    assert 0.1 < value < 0.999
    assert measure(3 * X @ rotation(5) + 7, Y) == pytest.approx(value)
    assert measure(X, 0.01 * Y @ rotation(8)) == pytest.approx(value)
    assert measure(Y, X) == pytest.approx(value)
    assert measure(X, 2 * X @ rotation(5)) == pytest.approx(1)


def test_any_invertible_map_counts_for_cka_and_not_for_cca():
    stretched = X @ torch.diag(torch.tensor([1.0, 2, 5, 10, 50], dtype=torch.float64)) @ rotation(5)
    assert mean_cca(stretched, Y) == pytest.approx(mean_cca(X, Y))
    assert mean_cca(stretched, X) == pytest.approx(1)
    assert linear_cka(stretched, X) < 0.9


def test_values_by_hand():
    a = torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1])
    b = torch.tensor([1.0, 1, -1, -1, 1, 1, -1, -1])
    c = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])  # a, b and c are orthogonal, of norm sqrt 8
    assert linear_cka(a[:, None], b[:, None]) == mean_cca(a[:, None], b[:, None]) == 0
    # K = 2aa' + .. : x = (a, b), y = (a, c): cross 8^2; own sqrt(8^2 + 8^2) each
    x, y = torch.stack([a, b], 1), torch.stack([a, c], 1)
    assert linear_cka(x, y) == pytest.approx(64 / 128)
    assert mean_cca(x, y) == pytest.approx((1 + 0) / 2)
    assert mean_cca(x, a[:, None]) == pytest.approx(1)  # over the one direction of the smaller side
    # y = (2a, c): cross (2 * 8)^2; own sqrt(32^2 + 8^2)
    y = torch.stack([2 * a, c], 1)
    assert linear_cka(x, y) == pytest.approx(256 / (128**0.5 * (32**2 + 8**2) ** 0.5))
    assert mean_cca(x, y) == pytest.approx(0.5)
    # 80 % of y's variance lies along a
    assert mean_cca(x, y, variance=0.8) == pytest.approx(1) and mean_cca(x, y, variance=0.81) == pytest.approx(0.5)
    # correlation of single features: both are |cos|, CKA its square
    mixed = 0.6 * a + 0.8 * b
    assert mean_cca(a[:, None], mixed[:, None]) == pytest.approx(0.6)
    assert linear_cka(a[:, None], mixed[:, None]) == pytest.approx(0.36)


def test_more_features_than_examples():
    wide = torch.cat([X[:20], normal(20, 100, seed=9)], 1)
    direct = (lambda x, y: ((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())).item())(
        wide - wide.mean(0), Y[:20] - Y[:20].mean(0)
    )
    assert linear_cka(wide, Y[:20]) == pytest.approx(direct)
    assert mean_cca(wide, normal(20, 30, seed=8)) == pytest.approx(1)  # meaningless, as said: use ``variance``


def test_maps_are_flattened_and_constants_are_like_nothing():
    maps = normal(30, 4, 3, 3)
    assert linear_cka(maps, maps.flatten(1)) == pytest.approx(1)
    assert linear_cka(maps, torch.ones(30, 2)) == mean_cca(torch.ones(30, 2), maps) == 0
    with pytest.raises(ValueError, match="of 30 and 29 examples cannot be compared"):
        linear_cka(maps, maps[1:])
    with pytest.raises(ValueError, match=r"variance = 0 must be in \(0, 1\]"):
        mean_cca(X, Y, 0)


def test_local_networks_start_alike_and_grow_apart():
    e = Experiment(method="fedavg", backbone="resnet8", pretrained=False, finetune="full", num_exits=1, clip_value=None,
                   partition="dealt", classes_per_client=2, num_train=120, num_test=60, num_clients=6,
                   clients_per_round=3, rounds=2, augment="none", batch_size=10, local_epochs=2, lr=0.1)  # fmt: skip
    f = build_federation(e)
    features = local_features(f, f.server, [4, 0], 50)
    assert sorted(features) == [0, 4] and [x.shape for x in features[0]] == [(50, 16), (50, 32), (50, 64)]
    tables = similarities(features)
    for table in tables.values():
        assert table.shape == (3, 3) and (table >= 0).all() and (table <= 1).all()
        assert table == pytest.approx(table.T)  # mean over both orders of a pair
    same = similarities({0: features[0], 1: features[0]})
    assert np.allclose(same["CKA"].diagonal(), 1) and np.allclose(same["CCA"].diagonal(), 1)
    assert (tables["CKA"].diagonal() < 0.999).any()
    frozen = local_features(build_federation(e.replace(lr=1e-9, min_lr=0)), f.server, [4, 0], 50)
    assert similarities(frozen)["CKA"].diagonal() == pytest.approx(1, abs=1e-3)
