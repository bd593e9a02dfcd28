"""Flower's simulation (flwr 1.41, message API, Ray): one actor a core, the data and the model kept by each actor.

A simulation cannot be paused between two rounds without its threads polling, so every call is a complete run from
the model reached so far. Starting Ray and the actors counts as start-up and not as a round: a query wakes all
actors first, and the strategy takes the time of each round.
"""

import logging
import time
from functools import cache
from itertools import pairwise

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Federation, serve

logging.getLogger("flwr").setLevel(logging.ERROR)
BACKEND = {"init_args": {"num_cpus": 2, "address": "local"}, "client_resources": {"num_cpus": 1, "num_gpus": 0}}
client_app = ClientApp()


@cache
def load(path: str):
    torch.set_num_threads(1)
    federation = Federation(path)
    model = federation.model()
    torch.optim.SGD(model.parameters()).zero_grad()  # what PyTorch loads at its first step counts as start-up
    return federation, model


@client_app.query()
def wake(message, context):
    load(message.content["config"]["path"])
    client = MetricRecord({"client": int(context.node_config["partition-id"])})
    return Message(RecordDict({"node": client}), reply_to=message)


@client_app.train()
def train(message, context):
    config, client = message.content["config"], int(context.node_config["partition-id"])
    federation, model = load(config["path"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    metrics = MetricRecord({"num-examples": federation.train(model, config["round"], client)})
    return Message(RecordDict({"arrays": ArrayRecord(model.trained()), "metrics": metrics}), reply_to=message)


class GivenClients(FedAvg):
    """FedAvg on the clients of the shared file."""

    def __init__(self, federation: Federation, first: int, nodes: dict[int, int]):
        super().__init__(fraction_evaluate=0.0)
        self.federation, self.first, self.nodes = federation, first, nodes
        self.times = [time.perf_counter()]

    def configure_train(self, server_round, arrays, config, grid):
        config["round"] = self.first + server_round - 1
        record = RecordDict({"arrays": arrays, "config": config})
        nodes = [self.nodes[c] for c in self.federation.sampled[config["round"]]]
        return [Message(record, message_type="train", dst_node_id=node) for node in nodes]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if errors := [m.error.reason for m in replies if m.has_error()]:
            raise RuntimeError(errors[0])
        result = super().aggregate_train(server_round, replies)
        self.times.append(time.perf_counter())
        return result


class Flower:
    def __init__(self, federation: Federation):
        self.federation, self.server = federation, federation.model().trained()
        self.rounds(0, 0)

    def rounds(self, first: int, n: int) -> list[float]:
        server_app, config, times = ServerApp(), ConfigRecord({"path": self.federation.path}), []
        num_nodes = self.federation.workload.num_clients

        @server_app.main()
        def main(grid, context):
            while len(ids := list(grid.get_node_ids())) < num_nodes:
                time.sleep(0.1)
            query = RecordDict({"config": config})
            answers = grid.send_and_receive([Message(query, message_type="query", dst_node_id=i) for i in ids])
            nodes = {m.content["node"]["client"]: m.metadata.src_node_id for m in answers}
            strategy = GivenClients(self.federation, first, nodes)
            result = strategy.start(grid, ArrayRecord(self.server), num_rounds=n, train_config=config)
            self.server = result.arrays.to_torch_state_dict() if n else self.server
            times.extend(strategy.times)

        run_simulation(server_app, client_app, num_nodes, backend_config=BACKEND)
        return [b - a for a, b in pairwise(times)]

    def trained(self) -> dict[str, torch.Tensor]:
        return self.server


if __name__ == "__main__":
    from flower import Flower  # as a module, so that the actors import it once instead of unpickling it every time

    serve(Flower)
