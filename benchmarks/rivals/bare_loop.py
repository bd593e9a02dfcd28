"""The least that sequential execution takes: one process trains client after client, with nothing but PyTorch."""

import time

import torch
from workload import Federation, serve


class BareLoop:
    def __init__(self, federation: Federation):
        self.federation, self.model = federation, federation.model()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.server = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def round(self, t: int) -> None:
        total, mean = 0, [torch.zeros_like(p) for p in self.server]
        for client in self.federation.sampled[t]:
            torch._foreach_copy_(self.params, self.server)
            with torch.enable_grad():
                examples = self.federation.train(self.model, t, client)
            total += examples
            torch._foreach_add_(mean, self.params, alpha=examples)
        self.server = torch._foreach_div(mean, total)

    def rounds(self, first: int, n: int) -> list[float]:
        seconds = []
        for t in range(first, first + n):
            began = time.perf_counter()
            self.round(t)
            seconds.append(time.perf_counter() - began)
        return seconds

    def trained(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.model.trained(), self.server, strict=True))


if __name__ == "__main__":
    serve(BareLoop)
