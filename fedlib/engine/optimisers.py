"""SGD on stacked leaves; placeholder of this branch."""

import torch


class SGD:
    def __init__(self, leaves, rows, momentum=0.0, weight_decay=0.0, clip_value=None):
        self.leaves, self.rows, self.momentum, self.decay, self.clip = (
            list(leaves),
            list(rows),
            momentum,
            weight_decay,
            clip_value,
        )
        self.velocity = [torch.zeros_like(p) for p in leaves] if momentum else None

    @torch.no_grad()
    def step_(self, grads, rate, active):
        at = [i for i, g in enumerate(grads) if g is not None]
        if not at:
            return
        leaves, grads = [self.leaves[i] for i in at], [grads[i] for i in at]
        if self.clip is not None:
            torch._foreach_clamp_min_(grads, -self.clip)
            torch._foreach_clamp_max_(grads, self.clip)
        if self.decay:
            grads = list(torch._foreach_add(grads, leaves, alpha=self.decay))
        if self.velocity is not None:
            v = [self.velocity[i] for i in at]
            torch._foreach_mul_(v, self.momentum)
            torch._foreach_add_(v, grads)
            grads = v
        if not active.all():
            mask = torch.as_tensor(active, dtype=grads[0].dtype, device=grads[0].device)
            for i, g in zip(at, grads):
                g *= mask[list(self.rows[i])].view(-1, *(1,) * (g.dim() - 1))
        torch._foreach_add_(leaves, grads, alpha=-rate)
