"""The bare loop on two cores: this process and one persistent fork of it train half of a round's clients each.

What clients keep (their heads with FedPer, models of their own with Ditto) lies in memory that both share.
"""

import time

import torch
import torch.multiprocessing as mp
from workload import Federation, serve

KEPT = {"fedavg": (), "fedper": ("linear.",), "ditto": ("",)}  # how the names of what clients keep begin


class TwoProcesses:
    methods = tuple(KEPT)

    def __init__(self, federation: Federation):
        self.federation, self.model, w = federation, federation.model(), federation.workload
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.own = {n: p for n, p in named.items() if KEPT[w.method] and n.startswith(KEPT[w.method])}
        self.two_models = w.method == "ditto"
        self.params = named if self.two_models else {n: p for n, p in named.items() if n not in self.own}
        self.server = {n: p.detach().clone().share_memory_() for n, p in self.params.items()}
        self.sums = [[torch.zeros_like(p).share_memory_() for p in self.server.values()] for _ in range(2)]
        self.memory = [
            {n: p.detach().clone().share_memory_() for n, p in self.own.items()} for _ in range(w.num_clients)
        ]
        context = mp.get_context("fork")  # the fork shares the data and the tensors above
        self.pipe, theirs = context.Pipe()
        context.Process(target=self.helper, args=(theirs,), daemon=True).start()

    def helper(self, pipe) -> None:
        self.pipe.close()  # the parent's end: without it, the parent's death is an end of file here
        try:
            while True:
                what, *arguments = pipe.recv()
                pipe.send(getattr(self, what)(*arguments, 1))
        except EOFError:
            return

    def both(self, what: str, *arguments) -> float:
        """Both processes do it, each for its half of the clients; the sum of their answers."""
        self.pipe.send((what, *arguments))
        return getattr(self, what)(*arguments, 0) + self.pipe.recv()

    @torch.no_grad()
    def train(self, t: int, half: int) -> int:
        sums, total = self.sums[half], 0
        torch._foreach_zero_(sums)
        for client in self.federation.sampled[t][half::2]:
            copy(self.server, self.params)
            if not self.two_models:
                copy(self.memory[client], self.own)
            with torch.enable_grad():
                examples = self.federation.train(self.model, t, client)
            total += examples
            torch._foreach_add_(sums, list(self.params.values()), alpha=examples)
            if self.two_models:  # on the same batches
                copy(self.memory[client], self.own)
                with torch.enable_grad():
                    self.federation.train(self.model, t, client, drawn_to=list(self.server.values()))
            copy(self.own, self.memory[client])
        return total

    @torch.no_grad()
    def test(self, half: int) -> float:
        """The sum of the accuracies (percent) of this half's clients, each on its own part of the test set."""
        total = 0.0
        for client in range(half, self.federation.workload.num_clients, 2):
            copy(self.server, self.params)
            copy(self.memory[client], self.own)
            images, labels = self.federation.test(client)
            total += 100 * (self.model(images).argmax(-1) == labels).float().mean().item()
        return total

    def rounds(self, first: int, n: int) -> list[float]:
        seconds = []
        for t in range(first, first + n):
            began = time.perf_counter()
            total = self.both("train", t)
            for p, mine, theirs in zip(self.server.values(), *self.sums, strict=True):
                torch.add(mine, theirs, out=p).div_(total)
            if self.federation.workload.tested:
                self.both("test")
            seconds.append(time.perf_counter() - began)
        return seconds

    def accuracy(self) -> float:
        if not self.own:
            return self.federation.accuracy(self.trained())
        return self.both("test") / self.federation.workload.num_clients

    def trained(self) -> dict[str, torch.Tensor]:
        heads = {n: self.federation.initial[n] for n in self.own}  # which the server never changes
        return heads | self.server


def copy(of: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(of[name])


if __name__ == "__main__":
    serve(TwoProcesses)
