"""FL-bench by its own command line, in its parallel mode: two actors of Ray, one thread each.

Of the checkout at $FLBENCH nothing is copied or changed; its CIFAR-10 is the workload's, its model "custom" too. Its
clients' further tests, before and after every local training, are off.
"""

import json
import os
import pickle
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from stepwise import Stepwise, halves
from workload import Federation, serve


class FLBench(Stepwise):
    def __init__(self, federation: Federation):
        w, checkout = federation.workload, os.environ["FLBENCH"]
        sys.path.insert(0, checkout)
        os.environ["PYTHONPATH"] = os.pathsep.join((checkout, str(Path(__file__).parent)))  # for Ray's actors
        import ray
        import src.server.fedavg as own
        from data.utils.datasets import BaseDataset
        from src.utils.models import DecoupledModel

        class Net(DecoupledModel):
            def __init__(self, **_):
                super().__init__()
                self.base, self.classifier = halves(federation)

        def dataset(server):
            self.server = server
            images = [x * federation.std + federation.mean for x in (federation.images, federation.test_images)]
            labels = torch.cat((federation.labels, federation.test_labels))
            return BaseDataset(torch.cat(images), labels, list(range(10)), **server.get_dataset_transforms())

        def rounds(epochs, *_, **__):
            for epoch in epochs:
                self.gate()
                yield epoch

        resources = ray.cluster_resources
        ray.cluster_resources = lambda: {"GPU": 0.0, **resources()}  # FL-bench asks for it where there is none
        own.MODELS["custom"], own.track, own.FedAvgServer.get_dataset = Net, rounds, dataset
        self.folder = tempfile.TemporaryDirectory()
        own.FLBENCH_ROOT = Path(self.folder.name)
        self.write_partition(federation)
        settings = {
            "method": w.method, "dataset.name": "cifar10", "model.name": "custom", "mode": "parallel",
            "parallel.num_gpus": 0, "parallel.num_workers": 2, "optimizer.lr": w.lr, "common.batch_size": w.batch_size,
            "common.join_ratio": w.per_round / w.num_clients, "common.global_epoch": w.rounds, "common.local_epoch": 1,
            "common.client_side_evaluation": False, "common.use_cuda": False, "common.save_log": False,
            "common.test.client.interval": 1 if w.tested else -1, "+ditto.lamda": w.mu,
        }  # fmt: skip
        sys.argv = ["main.py", *(f"{key}={value}" for key, value in settings.items())]
        os.chdir(self.folder.name)
        self.start(lambda: runpy.run_path(os.path.join(checkout, "main.py"), run_name="__main__"))

    def write_partition(self, federation: Federation) -> None:
        """Who holds which rows, as FL-bench's ``generate_data.py`` writes it; test rows follow the training rows."""
        folder, clients = Path(self.folder.name, "data", "cifar10"), federation.workload.num_clients
        folder.mkdir(parents=True)
        tests = torch.arange(len(federation.test_labels)).add(len(federation.labels)).tensor_split(clients)
        indices = [
            {"train": federation.rows_of(c).tolist(), "val": [], "test": tests[c].tolist()} for c in range(clients)
        ]
        everybody = list(range(clients))
        separation = {"train": everybody, "val": everybody, "test": everybody, "total": clients}
        (folder / "args.json").write_text(json.dumps({"split": "sample"}))
        (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": indices}))

    def accuracy(self) -> float:
        self.server.test_client_models()
        return self.server.test_results[self.server.current_epoch + 1]["all_clients"]["before"]["test"].accuracy


if __name__ == "__main__":
    serve(FLBench)
