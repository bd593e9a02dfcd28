"""A framework with its own loop over rounds, as the harness drives it: the loop runs in a thread, round by round."""

import time
from collections.abc import Callable
from threading import Semaphore, Thread

import torch
from torch import nn
from workload import Federation


class Stepwise:
    """``loop`` calls :meth:`gate` at the start of every round, where it stands still until the harness asks for one.

    What the framework learns is not compared: its clients and batches are of its own drawing.
    """

    methods = ("fedavg", "fedper", "ditto")

    def start(self, loop: Callable[[], object]) -> None:
        """Run ``loop`` up to its first round; what it raises is raised."""
        self.arrived, self.allowed, self.error = Semaphore(0), Semaphore(0), None
        Thread(target=self.run, args=(loop,), daemon=True).start()
        self.wait()

    def run(self, loop: Callable[[], object]) -> None:
        try:
            loop()
        except BaseException as error:  # SystemExit too, with which command lines end
            self.error = error
        self.arrived.release()

    def gate(self) -> None:
        self.arrived.release()
        self.allowed.acquire()

    def wait(self) -> None:
        self.arrived.acquire()
        if self.error is not None:
            raise RuntimeError("the framework's loop ended") from self.error

    def rounds(self, first: int, n: int) -> list[float]:
        seconds = []
        for _ in range(n):
            began = time.perf_counter()
            self.allowed.release()
            self.wait()
            seconds.append(time.perf_counter() - began)
        return seconds

    def trained(self) -> dict[str, torch.Tensor]:
        return {}


def halves(federation: Federation) -> tuple[nn.Module, nn.Module]:
    """The workload's model in two: what comes before the head, and the head, which FedPer's clients keep."""
    base = federation.model()
    head, base.linear = base.linear, nn.Identity()
    return base, head
