"""BlazeFL (2.0) in its multi-process mode with shared memory: two workers, started for every round by the framework.

This is its documented way to true parallelism on a Python with a global interpreter lock. The pool forks, so its
workers inherit the data and the model. ``blazefl_threads.py`` is the multi-threaded mode.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
from blazefl.core import BaseServerHandler, IPCMode, ProcessPoolClientTrainer, SHMHandle
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import Federation, serve

mp.set_start_method("fork")
inherited = {}


@dataclass
class Download:
    t: int
    vector: torch.Tensor


@dataclass
class Upload:
    examples: int
    vector: torch.Tensor | SHMHandle


class Server(BaseServerHandler[Upload, Download]):
    def __init__(self, federation: Federation, vector: torch.Tensor):
        self.federation, self.vector, self.t, self.buffer = federation, vector, 0, []

    def sample_clients(self) -> list[int]:
        return self.federation.sampled[self.t]

    def downlink_package(self) -> Download:
        return Download(self.t, self.vector.clone())

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


class Trainer(ProcessPoolClientTrainer[Upload, Download, int]):
    def __init__(self, size: int):
        self.size, self.cache, self.device, self.share_dir = size, [], "cpu", Path()
        self.num_parallels, self.ipc_mode, self.stop_event = 2, IPCMode.SHARED_MEMORY, mp.Manager().Event()

    def get_client_config(self, cid: int) -> int:
        return cid

    def prepare_uplink_package_buffer(self) -> Upload:
        return Upload(0, torch.empty(self.size))

    @staticmethod
    def worker(config, payload, device, stop_event, *, shm_buffer=None) -> Upload:
        federation, model, params = inherited["federation"], inherited["model"], inherited["params"]
        vector_to_parameters(payload.vector.clone(), params)
        examples = federation.train(model, payload.t, config)
        shm_buffer.vector.copy_(parameters_to_vector(params).detach())
        return Upload(examples, SHMHandle())

    def uplink_package(self) -> list[Upload]:
        package, self.cache = self.cache, []
        return package


class BlazeFL:
    def __init__(self, federation: Federation):
        self.model = federation.model()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        torch.optim.SGD(self.params).zero_grad()  # what PyTorch loads at the first step, every fork now inherits
        inherited.update(federation=federation, model=self.model, params=self.params)
        self.server = Server(federation, parameters_to_vector(self.params).detach())
        self.trainer = Trainer(len(self.server.vector))

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
        vector_to_parameters(self.server.vector, self.params)
        return self.model.trained()


if __name__ == "__main__":
    serve(BlazeFL)
