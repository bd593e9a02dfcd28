"""The batches of a local training: drawn again by hand, padded, continued by a second training."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib import Experiment, register_data
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.data.federated import load_federated
from fedlib.data.transforms import sample_views
from fedlib.engine.batches import client_rows, draw_batches, in_order, positions_of, shuffled_rows
from tests.helpers.draws import client_generators


@pytest.fixture
def setup(tiny):
    """Three clients of unequal size, two epochs in batches of 8."""
    e = tiny.replace(batch_size=8, local_epochs=2, augment="none")
    data = load_federated(e)
    ids = np.argsort(data.num_examples)[[3, -1, 7]]
    return e, data, [Client(int(i), 0, int(data.num_examples[i])) for i in ids]


def drawn(e, data, client, t, epochs):
    """A client's batches, (rows, views) each, drawn from its own generator as one would in a plain loop."""
    generator, mine, n = torch_generator(e.seed, "local", t, client.id), data.client(client.id), client.num_examples
    for _ in range(epochs):
        order = torch.randperm(n, generator=generator).numpy()
        views = torch.zeros(n, 5)
        if e.augment != "none":
            views = sample_views(e.augment, n, 32, generator, e.crop_pad, e.crop_scale)  # deit_micro reads 32 x 32
        for a in range(0, n, e.batch_size):
            yield mine[order[a : a + e.batch_size]], views[a : a + e.batch_size]


@pytest.mark.parametrize("augment", ["none", "crop", "rrc_flip"])
def test_every_clients_batches_are_those_of_a_plain_loop(setup, augment):
    e, data, clients = setup
    e = e.replace(augment=augment)
    batches = draw_batches(e, data, clients, client_generators(e.seed, 3))
    assert len({c.num_examples for c in clients}) == 3 and (batches.views is None) == (augment == "none")
    for k, client in enumerate(clients):
        wanted = list(drawn(e, data, client, 3, 2))
        assert batches.steps[k] == len(wanted) == batches.active[:, k].sum() and batches.active[: len(wanted), k].all()
        for step, (rows, views) in enumerate(wanted):
            n = len(rows)
            assert (batches.rows[step, k, :n].numpy() == rows).all()
            assert torch.equal(batches.weights[step, k, :n], torch.full((n,), 1 / n))
            assert (
                not batches.weights[step, k, n:].any()
                and (batches.examples[step, k, n:] == data.client(client.id)[0]).all()
            )
            if batches.views is not None:
                assert torch.equal(batches.views[step, k, :n], views)
                assert (batches.views[step, k, n:] == torch.tensor([0.0, 0, 1, 1, 0])).all()  # padding: the whole image
        assert not batches.weights[len(wanted) :, k].any()
    assert batches.width == [int((w > 0).sum(-1).max()) for w in batches.weights]
    assert (batches.rows.numpy() == batches.examples).all()


@pytest.mark.parametrize("shape", [(8, 8), (32, 32), (64, 64), (28, 40)], ids=str)
def test_a_crop_shifts_by_pixels_of_the_net_whatever_the_pictures_size(setup, shape):
    """Of a net that reads 32 x 32 up to 4 pixels are an eighth: of small pictures, of its size, large, oblong."""
    e, data, clients = setup
    pictures = torch.zeros(len(data.inputs), 1, *shape, dtype=torch.uint8)
    e = e.replace(augment="crop", crop_pad=4, local_epochs=20)
    views = draw_batches(e, replace(data, inputs=pictures), clients, client_generators(1, 1)).views.flatten(0, 2)
    assert (32 * views[:, :2]).unique().tolist() == list(range(-4, 5))


def test_a_client_draws_the_same_in_any_company(setup):
    e, data, clients = setup
    together = draw_batches(e, data, clients, client_generators(e.seed, 1))
    for k, client in enumerate(clients):
        alone = draw_batches(e, data, [client], client_generators(e.seed, 1))
        s, _, b = alone.rows.shape
        assert torch.equal(together.rows[:s, k, :b], alone.rows[:, 0])
        assert torch.equal(together.weights[:s, k, :b], alone.weights[:, 0])


def test_a_second_local_training_goes_on_drawing_where_the_first_stopped(setup):
    e, data, clients = setup
    e = e.replace(augment="crop")
    draws = client_generators(e.seed, 2)
    first, second = (draw_batches(e, data, clients, draws, epochs) for epochs in (1, 2))
    longer = draw_batches(e, data, clients, client_generators(e.seed, 2), 3)
    for k in range(len(clients)):
        a, b = first.steps[k], second.steps[k]
        assert (a, b, a + b) == (longer.steps[k] // 3, 2 * longer.steps[k] // 3, longer.steps[k])
        for field in ("rows", "views", "weights"):
            both = torch.cat([getattr(first, field)[:a, k], getattr(second, field)[:b, k]])
            assert torch.equal(both, getattr(longer, field)[: a + b, k])
    assert not torch.equal(first.rows, second.rows[: len(first.rows)])


def test_rounds_draw_apart_and_a_round_draws_again(setup):
    e, data, clients = setup
    drawn = [draw_batches(e, data, clients, client_generators(e.seed, t)) for t in (1, 2, 1)]
    assert torch.equal(drawn[0].rows, drawn[2].rows) and not torch.equal(drawn[0].rows, drawn[1].rows)


def test_members_of_one_client_share_its_batches(setup):
    e, data, (a, b, _) = setup
    pairs, singles = (draw_batches(e, data, clients, client_generators(e.seed, 1)) for clients in ([a, b, a], [a, b]))
    assert torch.equal(pairs.rows[:, :2], singles.rows) and torch.equal(pairs.rows[:, 2], singles.rows[:, 0])
    assert torch.equal(pairs.weights[:, 2], singles.weights[:, 0])


def test_padding_is_no_wider_than_the_largest_client(setup):
    e, data, clients = setup
    batches = draw_batches(e.replace(batch_size=1000), data, clients, client_generators(e.seed, 1))
    assert batches.rows.shape == (2, 3, max(c.num_examples for c in clients)) and batches.active.all()


@pytest.mark.parametrize("by_example", [True, False])
def test_examples_in_order_come_once(setup, by_example):
    e, data, clients = setup
    batches = zip(*((r.T, w.T) for r, w in in_order(data, clients, e.batch_size, by_example)), strict=True)
    rows, weights = map(torch.cat, batches)
    for k, client in enumerate(clients):
        own, mine = client_rows(data, client.id, by_example), data.client(client.id)
        assert (rows[weights[:, k] == 1, k].numpy() == own).all() and (np.sort(own) == mine).all()
        assert (rows[weights[:, k] == 0, k] == own[0]).all() and (own == mine).all() == by_example
    asked = np.stack([data.client(c.id)[[-1, 0, 3]] for c in clients], 1)[None].transpose(0, 2, 1)  # (1, K, 3)
    places = positions_of(data, clients, asked, by_example)
    for k, client in enumerate(clients):
        assert (client_rows(data, client.id, by_example)[places[0, k]] == asked[0, k]).all()


def test_where_norms_see_neighbours_batches_are_mixed_however_the_set_is_sorted():
    """What a net makes ahead of a stage, and statistics that are recomputed, rest on batches of all classes."""
    y = np.arange(400) // 100
    register_data("sorted", (np.zeros((400, 8, 8), np.uint8), y), (np.zeros((4, 8, 8), np.uint8), np.arange(4)))
    e = Experiment(dataset="sorted", num_clients=2, clients_per_round=2, partition="iid", augment="none")
    data = load_federated(e)
    clients = [Client(i, 0, 200) for i in range(2)]
    for rows, _ in in_order(data, clients, 50, False):
        assert all(len(data.labels[mine].unique()) == 4 for mine in rows)
    assert all(len(data.labels[rows].unique()) == 4 for rows in shuffled_rows(data).split(50))
    assert sorted(shuffled_rows(data).tolist()) == list(range(400))
    assert not torch.equal(shuffled_rows(data), shuffled_rows(load_federated(e.replace(seed=2))))
