"""A server's round in which two clients send a few numbers."""

from fedlib.core.clients import Client
from fedlib.core.slices import STEM, ParamInfo, Slice
from fedlib.methods import Arrived, Round, Setting
from fedlib.methods.sums import MaskedMean, Update
from fedlib.models.vit import ViTSpec


def infos(**shapes):
    units = {"stem": STEM, "low": 0, "high": 1, "unheld": 2}
    return {n: ParamInfo(("a",) + (None,) * (len(s) - 1), "backbone", units[n], s) for n, s in shapes.items()}


def two_clients(params, info):
    """Client 7 (30 examples) holds blocks 0-1, client 3 (10 examples) block 0 only."""
    clients = (Client(7, 1, 30), Client(3, 0, 10))
    slices = (Slice.prefix(2, (0, 1)), Slice.prefix(1, (0,)))
    rows = {n: range(sum(s.holds(info[n]) for s in slices)) for n in params}
    return Update(clients, slices, params, rows)


def setting(info, num_clients=4):
    return Setting(ViTSpec(), (0, 1), info, num_clients, rounds=10)


def merged(parts):
    """The cohorts' sums, merged as they arrive."""
    total = MaskedMean({})
    for part in parts:
        total.merge(part)
    return total


def one_round(method, server, updates, s):
    """What executor and round loop do with the cohorts' updates."""
    mean = merged(method.summarise(update, s) for update in updates)
    return method.aggregate(server, Arrived(mean), Round(server.t + 1, (), s))
