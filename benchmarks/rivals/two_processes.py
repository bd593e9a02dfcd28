"""The bare loop on two cores: this process and one persistent fork of it train half of a round's clients each."""

import time

import torch
import torch.multiprocessing as mp
from workload import Federation, serve


class TwoProcesses:
    def __init__(self, federation: Federation):
        self.federation, self.model = federation, federation.model()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.server = [p.detach().clone().share_memory_() for p in self.params]
        self.sums = [[torch.zeros_like(p).share_memory_() for p in self.server] for _ in range(2)]
        context = mp.get_context("fork")  # the fork shares the data and the tensors above
        self.pipe, theirs = context.Pipe()
        context.Process(target=self.helper, args=(theirs,), daemon=True).start()

    def helper(self, pipe) -> None:
        self.pipe.close()  # the parent's end: without it, the parent's death is an end of file here
        try:
            while True:
                pipe.send(self.train(*pipe.recv(), self.sums[1]))
        except EOFError:
            return

    @torch.no_grad()
    def train(self, t: int, clients: list[int], sums: list[torch.Tensor]) -> int:
        torch._foreach_zero_(sums)
        total = 0
        for client in clients:
            torch._foreach_copy_(self.params, self.server)
            with torch.enable_grad():
                examples = self.federation.train(self.model, t, client)
            total += examples
            torch._foreach_add_(sums, self.params, alpha=examples)
        return total

    def rounds(self, first: int, n: int) -> list[float]:
        seconds = []
        for t in range(first, first + n):
            began = time.perf_counter()
            clients = self.federation.sampled[t]
            self.pipe.send((t, clients[1::2]))
            total = self.train(t, clients[::2], self.sums[0]) + self.pipe.recv()
            for p, mine, theirs in zip(self.server, *self.sums, strict=True):
                torch.add(mine, theirs, out=p).div_(total)
            seconds.append(time.perf_counter() - began)
        return seconds

    def trained(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.model.trained(), self.server, strict=True))


if __name__ == "__main__":
    serve(TwoProcesses)
