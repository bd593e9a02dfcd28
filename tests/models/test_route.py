"""Routes of cohorts: what nobody reads is left out and changes nothing."""

import numpy as np
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.layers.conv import fold_clients
from fedlib.models.route import Route

TINY = Experiment(
    pretrained=False, num_train=160, num_test=40, num_clients=8, clients_per_round=6, rounds=2, augment="none",
    batch_size=8, seed=5,
)  # fmt: skip


@pytest.mark.parametrize("finetune", ["full", "lora", "pa", "sa", "ssf"])
def test_unread_tokens_of_last_blocks_change_no_logit_and_no_gradient(finetune):
    """Five stacked clients of depths 12, 12, 9, 3, 3: clients end at blocks 2, 8 and 11."""
    f = build_federation(TINY.replace(method="reefl", finetune=finetune))
    model, generator = f.model, torch.Generator().manual_seed(0)
    stacked = {n: p + 0.05 * torch.randn(5, *p.shape, generator=generator) for n, p in f.server.params.items()}
    images = torch.randn(5, 2, 3, 32, 32, generator=generator)
    depths = np.array([12, 12, 9, 3, 3])
    alive = [int((depths > b).sum()) for b in range(12)]
    for name, info in f.setting.infos.items():
        if name in stacked and info.unit >= 0:
            stacked[name] = stacked[name][: alive[info.unit]]
    route = Route(alive, {j: slice(0, alive[b]) for j, b in enumerate(model.exit_units)})

    def outcome(whole):
        model.backbone.whole_blocks = whole
        leaves = {n: p.clone().requires_grad_() for n, p in stacked.items()}
        model.put_(leaves)
        logits = model(images, route)
        weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        grads = torch.autograd.grad((logits * weights).sum(), list(leaves.values()), materialize_grads=True)
        return logits.detach(), dict(zip(leaves, grads, strict=True))

    (logits, grads), (short, short_grads) = outcome(True), outcome(False)
    torch.testing.assert_close(short, logits, rtol=1e-4, atol=1e-5)
    for name, g in grads.items():
        torch.testing.assert_close(short_grads[name], g, rtol=1e-3, atol=1e-5, msg=name)
    assert all(len(p) == len(stacked[n]) for n, p in model.named_parameters() if n in stacked)  # put back afterwards


def test_gradients_of_maps_lie_as_maps_do_whoever_goes_on_and_has_an_exit():
    """Of another layout, a ReLU's gradient takes seven times as long as the ReLU."""
    f = build_federation(TINY.replace(method="depthfl", backbone="resnet8", finetune="full", num_exits=3))
    stacked, alive, lies = {}, [3, 3, 2], []
    for name, info in f.setting.infos.items():
        if name in f.server.params:
            holders = 3 if info.unit < 0 else alive[info.unit]
            stacked[name] = f.server.params[name].expand(holders, *info.shape).clone().requires_grad_()
    f.model.put_(stacked)

    def look(block, _, z):
        z.register_hook(lambda grad: lies.append(fold_clients(grad).data_ptr() == grad.data_ptr()))

    for block in f.model.backbone.blocks:
        block.register_forward_hook(look)
    images = torch.randn(3, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    route = Route(alive, {j: slice(0, n) for j, n in enumerate(alive)})
    f.model(images, route).square().sum().backward()
    assert lies == [True] * 3
