"""BlazeFL (2.0) in its multi-threaded mode, which it recommends on a Python without a global interpreter lock.

With the lock, two threads still overlap inside PyTorch's operators. Each of the two works on a model of its own.
"""

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from blazefl.core import BaseServerHandler, ThreadPoolClientTrainer
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import Federation, serve


@dataclass
class Download:
    t: int
    vector: torch.Tensor


@dataclass
class Upload:
    examples: int
    vector: torch.Tensor


def trainable(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


class Server(BaseServerHandler[Upload, Download]):
    def __init__(self, federation: Federation, vector: torch.Tensor):
        self.federation, self.vector, self.t, self.buffer = federation, vector, 0, []

    def sample_clients(self) -> list[int]:
        return self.federation.sampled[self.t]

    def downlink_package(self) -> Download:
        return Download(self.t, self.vector)

    def load(self, payload: Upload) -> bool:
        self.buffer.append(payload)
        complete = len(self.buffer) == self.federation.workload.per_round
        if complete:
            self.global_update(self.buffer)
            self.buffer = []
        return complete

    def global_update(self, buffer: list[Upload]) -> None:
        total = sum(u.examples for u in buffer)
        self.vector = torch.zeros_like(self.vector)
        for u in buffer:
            self.vector.add_(u.vector, alpha=u.examples / total)
        self.t += 1


class Trainer(ThreadPoolClientTrainer[Upload, Download]):
    def __init__(self, federation: Federation):
        self.federation, self.models, self.cache, self.device = federation, SimpleQueue(), [], "cpu"
        self.num_parallels, self.stop_event = 2, threading.Event()
        for _ in range(self.num_parallels):
            self.models.put(federation.model())

    def worker(self, cid, device, payload, stop_event) -> Upload:
        model = self.models.get()
        vector_to_parameters(payload.vector.clone(), trainable(model))
        examples = self.federation.train(model, payload.t, cid)
        upload = Upload(examples, parameters_to_vector(trainable(model)).detach())
        self.models.put(model)
        return upload

    def uplink_package(self) -> list[Upload]:
        package, self.cache = self.cache, []
        return package


class BlazeFL:
    def __init__(self, federation: Federation):
        self.model = federation.model()
        self.server = Server(federation, parameters_to_vector(trainable(self.model)).detach())
        self.trainer = Trainer(federation)

    def rounds(self, first: int, n: int) -> list[float]:
        seconds = []
        for _ in range(n):
            began = time.perf_counter()
            self.trainer.local_process(self.server.downlink_package(), self.server.sample_clients())
            for upload in self.trainer.uplink_package():
                self.server.load(upload)
            seconds.append(time.perf_counter() - began)
        return seconds

    def trained(self) -> dict[str, torch.Tensor]:
        vector_to_parameters(self.server.vector, trainable(self.model))
        return self.model.trained()


if __name__ == "__main__":
    serve(BlazeFL)
