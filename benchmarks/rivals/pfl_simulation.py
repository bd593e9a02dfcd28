"""Apple's pfl (0.6): its FederatedAveraging and SimulatedBackend, in two processes joined by torch.distributed.

The harness starts the two as pfl's guide to fast simulations does, by setting PFL_WORKER_ADDRESSES and PFL_WORKER_RANK.
"""

import time
from itertools import chain, pairwise

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from workload import Federation, serve


class Clock(TrainingProcessCallback):
    def on_train_begin(self, *, model):
        self.times = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        return False, Metrics()


def no_metrics(images, labels):
    """pfl asks every model for it."""
    return {}


class Pfl:
    def __init__(self, federation: Federation):
        self.federation, w = federation, federation.workload
        model = federation.model()
        model.metrics = no_metrics
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.model = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(trainable, lr=1.0))
        sampled = chain.from_iterable(((t, c) for c in clients) for t, clients in enumerate(federation.sampled))
        data = FederatedDataset(self.user, lambda: next(sampled))
        self.backend = SimulatedBackend(data, data, [WeightByDatapoints()])
        self.algorithm, self.clock = FederatedAveraging(), Clock()
        self.local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=w.lr, local_batch_size=w.batch_size)

    def user(self, key: tuple[int, int]) -> PyTorchTensorDataset:
        rows = self.federation.client_rows(*key)
        return PyTorchTensorDataset((self.federation.images[rows], self.federation.labels[rows]))

    def rounds(self, first: int, n: int) -> list[float]:
        settings = NNAlgorithmParams(
            central_num_iterations=first + n, evaluation_frequency=10**9,
            train_cohort_size=self.federation.workload.per_round, val_cohort_size=None,
        )  # fmt: skip
        self.algorithm.run(
            settings, self.backend, self.model, self.local, callbacks=[self.clock], send_metrics_to_platform=False
        )
        return [b - a for a, b in pairwise(self.clock.times)]

    def trained(self) -> dict[str, torch.Tensor]:
        return self.model.pytorch_model.trained()


if __name__ == "__main__":
    serve(Pfl)
