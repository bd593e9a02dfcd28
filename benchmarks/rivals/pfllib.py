"""PFLlib by its own command line, on a copy of the workload in its own format: one process, PyTorch's own threads.

Of the checkout at $PFLLIB nothing is copied or changed. Its model "CNN" is the workload's. Where the workload tests,
PFLlib evaluates as by default, which also takes the training loss of all clients, and with Ditto tests both models.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
from stepwise import Stepwise, halves
from torch import nn
from workload import Federation, serve

ALGORITHMS = {"fedavg": "FedAvg", "fedper": "FedPer", "ditto": "Ditto"}


class Net(nn.Module):
    def __init__(self, federation: Federation):
        super().__init__()
        self.base, self.fc = halves(federation)

    def forward(self, images):
        return self.fc(self.base(images))


class PFLlib(Stepwise):
    def __init__(self, federation: Federation):
        w, system = federation.workload, Path(os.environ["PFLLIB"], "system")
        sys.path.insert(0, str(system))
        from flcore.servers.serverbase import Server
        from flcore.trainmodel import models

        self.federation, select = federation, Server.select_clients

        def at_the_start_of_a_round(server):
            self.server = server
            self.gate()
            return select(server)

        models.FedAvgCNN = lambda **_: Net(federation)
        Server.select_clients = at_the_start_of_a_round
        self.folder = tempfile.TemporaryDirectory()
        self.write_data()
        os.chdir(Path(self.folder.name, "system"))
        options = {
            "-data": "Cifar10", "-m": "CNN", "-algo": ALGORITHMS[w.method], "-dev": "cpu", "-nc": w.num_clients,
            "-jr": w.per_round / w.num_clients, "-gr": w.rounds, "-lbs": w.batch_size, "-lr": w.lr, "-mu": w.mu,
            "-eg": 1 if w.tested else w.rounds + 1,
        }  # fmt: skip
        sys.argv = ["main.py", *(str(word) for pair in options.items() for word in pair)]
        self.start(lambda: runpy.run_path(str(system / "main.py"), run_name="__main__"))

    def write_data(self) -> None:
        """A file a client and set, as PFLlib's generators write them."""
        for part in ("system", "dataset/Cifar10/train", "dataset/Cifar10/test"):
            Path(self.folder.name, part).mkdir(parents=True)
        f = self.federation
        for client in range(f.workload.num_clients):
            rows = f.rows_of(client)
            for part, (x, y) in {"train": (f.images[rows], f.labels[rows]), "test": f.test(client)}.items():
                path = Path(self.folder.name, "dataset/Cifar10", part, f"{client}.npz")
                np.savez_compressed(path, data={"x": x.numpy(), "y": y.numpy()})

    def accuracy(self) -> float:
        self.server.send_models()
        ditto = self.federation.workload.method == "ditto"
        _, examples, right, _ = (self.server.test_metrics_personalized if ditto else self.server.test_metrics)()
        return 100 * sum(right) / sum(examples)


if __name__ == "__main__":
    serve(PFLlib)
