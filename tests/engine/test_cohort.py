"""Cohort training: one path for one client or many, equal to plain PyTorch written a second time."""

import copy
import math
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.engine.schedules import round_rate
from fedlib.methods import METHODS, Method
from fedlib.methods.losses import cross_entropies
from fedlib_lab.rivals.ranks import Ranks
from tests.helpers.granted import few_blocks, granted


def train(e, **execution):
    *_, last = run_rounds(build_federation(e), Execution(**execution))
    return last


SLOW = pytest.mark.slow  # the third mode is enough for every day


@pytest.mark.parametrize("finetune", [pytest.param("full", marks=SLOW), "lora", pytest.param("frozen", marks=SLOW)])
@pytest.mark.parametrize("method", METHODS)
def test_a_cohort_of_one_equals_a_cohort_of_all(tiny, monkeypatch, method, finetune):
    if (method, finetune) == ("fedbabu", "frozen"):
        pytest.skip("its exits are never trained")
    if issubclass(METHODS[method], Ranks) and finetune != "lora":
        pytest.skip("it has no ranks")
    e = tiny.replace(method=method, finetune=finetune, weight_decay=1e-3, local_epochs=2, **granted(method),
                     backbone=few_blocks(monkeypatch, method),
                     num_train=160, num_clients=10, clients_per_round=5, batch_size=16,  # of one and of two batches
                     options={"feddf": {"server_lr": 5e-5}, "darkdistill": {"passes": 1, "hidden": 64}}.get(method, {}),
                     finetune_options=tiny.finetune_options if finetune == "lora" else {})  # fmt: skip
    one, many = train(e, workers=1, cohort_size=1), train(e, workers=1)
    threaded = train(e, workers=2, cohort_size=2)
    # FedDF's server's Adam makes more of rounding, where gradients are small; FLoRA merges it into the backbone
    atol = 1e-4 if method in ("feddf", "flora") else 1e-5
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=0, atol=atol)
        torch.testing.assert_close(threaded.server.params[name], p, rtol=0, atol=atol)
    assert one.metrics.keys() == many.metrics.keys()


@pytest.mark.parametrize("finetune", ["pa", "sa", "ssf", "ia3", "loha", "oft", "gralora"])
def test_adapters_train_the_same_in_a_cohort(tiny, finetune):
    e = tiny.replace(method="reefl", finetune=finetune, finetune_options={}, rounds=1, momentum=0.9)
    one, many = train(e, workers=1, cohort_size=1), train(e, workers=1)
    moved = 0.0
    start = build_federation(e).server.params
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=0, atol=1e-5)
        moved = max(moved, (p - start[name]).abs().max().item()) if "blocks" in name else moved
    assert moved > 1e-6


def batches_of(federation, client, t):
    """A client's batches, drawn again from its own generator (one epoch, no augmentation)."""
    e, data = federation.experiment, federation.data
    rows = data.client(client.id)
    order = torch.randperm(len(rows), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
    for a in range(0, len(rows), e.batch_size):
        mine = rows[order[a : a + e.batch_size]]
        x = data.inputs[mine].float() / 255
        yield (x.expand(-1, 3, -1, -1) - data.mean.view(3, 1, 1)) / data.std.view(3, 1, 1), data.labels[mine]


def test_fedavg_equals_timm_trained_by_a_plain_loop(tiny):
    """An independent reference: timm's ViT, torch.optim.SGD, one client after the other."""
    from timm.models.vision_transformer import VisionTransformer

    e = tiny.replace(method="fedavg", finetune="full", finetune_options={}, augment="none")
    f = build_federation(e)
    timm_vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=10)
    timm_vit.norm = torch.nn.LayerNorm(64, eps=1e-5)

    def to_timm(params):
        out = {}
        for name, p in params.items():
            key = name.removeprefix("backbone.").removeprefix("stem.")
            key = key.replace("head.exits.0.norm", "norm").replace("head.exits.0.linear", "head")
            key = key.replace("patch_embed.", "patch_embed.proj.").replace("prefix", "cls_token")
            if key in ("cls_token", "pos_embed"):
                p = p[None]
            out[key] = p.view(64, 3, 8, 8) if key == "patch_embed.proj.weight" else p
        for b in range(12):
            for kind in ("weight", "bias"):
                parts = [out.pop(f"blocks.{b}.attn.{x}.{kind}") for x in "qkv"]
                out[f"blocks.{b}.attn.qkv.{kind}"] = torch.cat(parts)
        return out

    theta = to_timm(f.server.params)
    for t in (1, 2):
        total, examples = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in theta.items()}, 0
        for client in f.sample_clients(t):
            model = copy.deepcopy(timm_vit)
            model.load_state_dict(theta)
            optimizer = torch.optim.SGD(model.parameters(), round_rate(e, t))
            for x, y in batches_of(f, client, t):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
            for k, v in model.state_dict().items():
                total[k] += client.num_examples * v
            examples += client.num_examples
        theta = {k: (v / examples).float() for k, v in total.items()}
    for name, p in to_timm(train(e).server.params).items():
        torch.testing.assert_close(p, theta[name], rtol=0, atol=1e-5)


def test_depthfl_equals_its_box_written_as_a_plain_loop(tiny):
    """FedDyn's penalty as a loss term, client states across rounds, mutual distillation, weight decay after clipping."""
    e = tiny.replace(method="depthfl", finetune="frozen", finetune_options={}, augment="none", weight_decay=1e-3,
                     num_clients=5, clients_per_round=5, num_train=150, budgets="maximum", lr=0.1)  # fmt: skip
    f = build_federation(e)
    alpha, model = 0.1, copy.deepcopy(f.model)
    theta = {n: p.clone() for n, p in f.server.params.items()}
    h = {n: torch.zeros_like(p) for n, p in theta.items()}
    states = {}
    for t in (1, 2):
        eta, arrived = math.exp(-5 * (1 - min(t, 0.6) / 0.6) ** 2), []
        for client in f.sample_clients(t):
            g = states.setdefault(client.id, {n: torch.zeros_like(p) for n, p in theta.items()})
            w = {n: p.clone().requires_grad_() for n, p in theta.items()}
            for x, y in batches_of(f, client, t):
                logits = torch.func.functional_call(model, w, (x[None],))[:, 0]
                loss = sum(F.cross_entropy(z, y) for z in logits)
                for i, j in np.ndindex(4, 4):
                    if i != j:
                        p, q = logits[j].detach().log_softmax(-1), logits[i].log_softmax(-1)
                        loss = loss + eta / 3 * F.kl_div(q, p, reduction="batchmean", log_target=True)
                for n in w:
                    loss = loss - (w[n] * g[n]).sum() + alpha / 2 * ((w[n] - theta[n]) ** 2).sum()
                for n, d in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
                    with torch.no_grad():
                        w[n] -= round_rate(e, t) * (d.clamp(-1, 1) + e.weight_decay * w[n])
            states[client.id] = {n: g[n] - alpha * (w[n].detach() - theta[n]) for n in w}
            arrived.append({n: p.detach() for n, p in w.items()})
        for n in theta:
            mean = torch.stack([a[n] for a in arrived]).mean(0)
            h[n] = h[n] - alpha * 5 / 5 * (mean - theta[n])
            theta[n] = mean - h[n] / alpha
    for name, p in train(e).server.params.items():
        torch.testing.assert_close(p, theta[name], rtol=0, atol=2e-5)


def test_frozen_parameters_have_no_gradients_state_or_copies(tiny):
    f = build_federation(tiny.replace(method="reefl"))
    assert not set(f.frozen) & set(f.server.params)
    assert not any(f.model.get_parameter(n).requires_grad for n in f.frozen)
    before = {n: p.clone() for n, p in f.frozen.items()}
    for _ in run_rounds(f, Execution(workers=1)):
        pass
    assert all(torch.equal(p, before[n]) for n, p in f.frozen.items())


def test_a_step_leaves_nothing_behind_for_the_next(tiny, monkeypatch):
    """Old gradients between the freed activations would split the memory that the next forward could take again."""
    grad, kept = torch.autograd.grad, []

    def watched(loss, leaves, **options):
        assert not [r for r in kept if r() is not None]
        out = grad(loss, leaves, **options)
        kept[:] = [weakref.ref(g) for g in out]
        return out

    monkeypatch.setattr(torch.autograd, "grad", watched)
    train(tiny.replace(method="reefl", momentum=0.9, local_epochs=2, rounds=1), workers=1)
    assert kept


def test_population_size_does_not_change_a_round(tiny):
    """Clients that are not sampled cost nothing: no index array, memory or model of theirs is touched."""
    f = build_federation(tiny.replace(num_clients=400, partition="dirichlet", clients_per_round=2))
    touched = []
    original = type(f.data).client
    try:
        type(f.data).client = lambda self, i: touched.append(i) or original(self, i)
        next(iter(run_rounds(f, Execution(workers=1))))
    finally:
        type(f.data).client = original
    assert sorted(touched) == [c.id for c in f.sample_clients(1)]


def test_bfloat16_is_part_of_the_experiment_and_trains(tiny):
    """Autocast rounds matmuls to 8 bits of mantissa: other numbers, but near, in the stored float32."""
    e = tiny.replace(method="reefl")
    half = e.replace(precision="bfloat16")
    assert half.hash != e.hash
    a, b = (train(x).server.params for x in (e, half))
    assert all(p.dtype == torch.float32 for p in b.values())
    start = build_federation(e).server.params
    moved = max((a[n] - start[n]).abs().max() for n in a)
    apart = max((a[n] - b[n]).abs().max() for n in a)
    assert 0 < apart < 0.3 * moved


@pytest.mark.parametrize("of", [torch.mean, torch.sum, lambda x: x[0][:1], lambda x: x, lambda x: 1.0])
def test_a_loss_that_is_no_number_for_each_member_is_refused(tiny, of, monkeypatch):
    """By their mean, members moved less the more of them trained together; the first one's loss moved nobody else."""

    class Own(Method):
        def local_loss(self, batch):
            return of(cross_entropies(batch))

    monkeypatch.setitem(METHODS, "own", Own)
    f = build_federation(tiny.replace(method="own", num_clients=2, clients_per_round=2, budgets="maximum"))
    with pytest.raises(ValueError, match=r"own: a loss of shape .*; allowed: \(2,\), a number a member"):
        next(run_rounds(f, Execution(workers=1, cohort_size=2)))


def test_a_method_that_draws_from_the_global_generator_is_refused(tiny, own):
    """Its numbers followed from what else had drawn in the process, and of forks all drew the same."""
    f = build_federation(tiny.replace(method="own", num_clients=2, clients_per_round=2))
    own.does = staticmethod(lambda cohort: torch.rand(3, generator=cohort.generator("mine", 0)))
    next(run_rounds(f, Execution(workers=1)))
    for whose, draw in {"PyTorch's": torch.rand, "NumPy's": np.random.rand, "Python's": random.randbytes}.items():
        own.does = staticmethod(lambda cohort, draw=draw: draw(3))
        with pytest.raises(ValueError, match=f"own draws from {whose} global generator; allowed: cohort.generator"):
            next(run_rounds(f, Execution(workers=1)))


def test_a_gradient_of_ones_own_reaches_each_member_s_own_entries_or_all_alike(tiny, own):
    """``p[:1]`` was added to every member's: the first one's pull moved all."""
    f = build_federation(
        tiny.replace(method="own", num_clients=2, clients_per_round=2, budgets="maximum", num_train=20, num_test=10)
    )

    def trained(gradient):
        own.does = staticmethod(
            lambda cohort: cohort.train(lambda batch: batch.outputs.sum((0, 2, 3)), gradient=gradient)
        )
        return next(run_rounds(f, Execution(workers=1, cohort_size=2)))

    for wrong in (lambda n, p: p[:1], lambda n, p: None, lambda n, p: p.sum(-1, keepdim=True)):
        with pytest.raises(ValueError, match=r"own: gradient\('.*', p\) of shape .*; allowed: \(2, .*, as p, or \("):
            trained(wrong)
    for right in (lambda n, p: 0, lambda n, p: p.sum(0), lambda n, p: p):
        trained(right)


def test_a_loss_without_a_gradient_is_refused(tiny, own):
    f = build_federation(tiny.replace(method="own", num_clients=2, clients_per_round=2, budgets="maximum"))
    own.does = staticmethod(lambda cohort: cohort.train(lambda batch: batch.outputs.detach().sum((0, 2, 3))))
    with pytest.raises(
        ValueError, match="own: a loss without a gradient; allowed: one that follows from batch.outputs"
    ):
        next(run_rounds(f, Execution(workers=1)))
