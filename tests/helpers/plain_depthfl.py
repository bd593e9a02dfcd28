"""DepthFL's box (Algorithm 1 of Kim et al. 2023) as a plain loop: one client after the other, lists and loss terms."""

import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedlib.core.rng import torch_generator
from fedlib.core.slices import Slice


def plain_depthfl(f, rounds, remembers=True):
    """The server's parameters after ``rounds``, at a constant rate, without augmentation or clipping.

    Without ``remembers`` clients forget their gradient: how much of the numbers is the memory's.
    """
    e, alpha, eta = f.experiment, f.method.feddyn_alpha, f.method.kd_weight
    theta = {n: p.clone() for n, p in f.server.params.items()}
    h, kept = {n: torch.zeros_like(p) for n, p in theta.items()}, {}
    for t in range(1, rounds + 1):
        arrived = {n: [] for n in theta}
        for client in f.sample_clients(t):
            part = Slice.prefix(f.setting.exit_units[client.budget] + 1, range(client.budget + 1))
            w = {n: p.clone().requires_grad_() for n, p in theta.items() if part.holds(f.setting.infos[n])}
            g = kept.get(client.id, {n: torch.zeros_like(p) for n, p in w.items()})
            for x, y in _batches(f, client, t):
                logits = functional_call(f.model, {**theta, **w}, (x[None],))[: client.budget + 1, 0]
                loss = sum(F.cross_entropy(z, y) for z in logits)
                for i, own in enumerate(logits):
                    for j, other in enumerate(logits):
                        if i != j:
                            kl = F.kl_div(own.log_softmax(1), other.detach().softmax(1), reduction="batchmean")
                            loss = loss + eta / (len(logits) - 1) * kl
                for n, p in w.items():
                    loss = loss - (p * g[n]).sum() + alpha / 2 * (p - theta[n]).square().sum()
                grads = torch.autograd.grad(loss, list(w.values()))
                with torch.no_grad():
                    for p, d in zip(w.values(), grads, strict=True):
                        p -= e.lr * d
            if remembers:
                kept[client.id] = {n: g[n] - alpha * (p.detach() - theta[n]) for n, p in w.items()}
            for n, p in w.items():
                arrived[n].append(p.detach())
        for n, models in arrived.items():
            if models:
                mean = sum(models) / len(models)
                h[n] = h[n] - alpha * len(models) / e.num_clients * (mean - theta[n])
                theta[n] = mean - h[n] / alpha
    return theta


def _batches(f, client, t):
    e, rows = f.experiment, f.data.client(client.id)
    generator = torch_generator(e.seed, "local", t, client.id)
    for _ in range(e.local_epochs):
        order = torch.randperm(len(rows), generator=generator).numpy()
        for a in range(0, len(rows), e.batch_size):
            mine = torch.from_numpy(rows[order[a : a + e.batch_size]])
            yield f.data.view(f.data.inputs, f.setting.spec.input_shape, mine), f.data.labels[mine]
