"""Vision Mamba against a slow scan, the published forward and the released exits, all written out a second time."""

import argparse
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.engine.checks import check_experiment
from fedlib.models import registry as weights
from fedlib.models.adapters import apply_finetune_
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.ree import Ree
from fedlib.models.registry import build_backbone
from fedlib_lab.runs.costs import load_shapes, taken_by
from fedlib_lab.zoo.vim import VIMS, Mixer, VimSpec, load_vim, published_name

TOY = VimSpec(img_size=12, patch_size=4, dim=8, depth=4, state_dim=3)  # 9 patches, class token at 4, T = 10


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=generator(seed), **kwargs)


def published(config, classes=5, seed=0):
    """A random state dict in the published layout."""
    d, inner, N, rank = config.dim, config.expand * config.dim, config.state_dim, math.ceil(config.dim / 16)
    tokens = (config.img_size // config.patch_size) ** 2 + 1
    shapes = {
        "cls_token": (1, 1, d), "pos_embed": (1, tokens, d), "norm_f.weight": (d,), "head.weight": (classes, d),
        "head.bias": (classes,), "patch_embed.proj.weight": (d, 3, config.patch_size, config.patch_size),
        "patch_embed.proj.bias": (d,),
    }  # fmt: skip
    for i in range(config.depth):
        mixer = {"in_proj.weight": (2 * inner, d), "out_proj.weight": (d, inner)}
        for b in ("", "_b"):
            mixer |= {
                f"A{b}_log": (inner, N), f"D{b}": (inner,), f"conv1d{b}.weight": (inner, 1, config.conv_width),
                f"conv1d{b}.bias": (inner,), f"x_proj{b}.weight": (rank + 2 * N, inner),
                f"dt_proj{b}.weight": (inner, rank), f"dt_proj{b}.bias": (inner,),
            }  # fmt: skip
        shapes |= {f"layers.{i}.norm.weight": (d,)} | {f"layers.{i}.mixer.{k}": s for k, s in mixer.items()}
    return {k: 0.5 * normal(*s, seed=seed + i) for i, (k, s) in enumerate(shapes.items())}


def published_mixer(state, place, x):
    """(B, T, d) through the mixer of ``bimamba_type="v2"`` with ``if_divide_out``, channels before time."""
    x, z = (state[f"{place}in_proj.weight"] @ x.mT).chunk(2, 1)  # (B, inner, T)
    out = 0
    for b, flip in (("", lambda t: t), ("_b", lambda t: t.flip(-1))):
        w = {k: state[f"{place}{k}"] for k in (f"conv1d{b}.weight", f"conv1d{b}.bias", f"x_proj{b}.weight",
             f"dt_proj{b}.weight", f"dt_proj{b}.bias", f"A{b}_log", f"D{b}")}  # fmt: skip
        taps = w[f"conv1d{b}.weight"].shape[-1]
        u = F.conv1d(flip(x), w[f"conv1d{b}.weight"], w[f"conv1d{b}.bias"], padding=taps - 1, groups=x.shape[1])
        u = F.silu(u[..., : x.shape[-1]])
        N, rank = w[f"A{b}_log"].shape[1], w[f"dt_proj{b}.weight"].shape[1]
        dt, B, C = (w[f"x_proj{b}.weight"] @ u).split((rank, N, N), 1)
        delta = F.softplus(w[f"dt_proj{b}.weight"] @ dt + w[f"dt_proj{b}.bias"][:, None])
        A, h, ys = -w[f"A{b}_log"].exp(), 0, []
        for t in range(x.shape[-1]):
            h = torch.exp(delta[:, :, t, None] * A) * h + (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
            ys.append((h * C[:, None, :, t]).sum(-1))
        y = torch.stack(ys, -1) + w[f"D{b}"][:, None] * u
        out = out + flip(y * F.silu(flip(z)))
    return (out / 2).mT @ state[f"{place}out_proj.weight"].T


def published_forward(state, config, images):
    """(hidden, residual) after every block of the published model: residual + hidden feeds the next block's norm."""
    patches = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], config.patch_size)
    x = patches.flatten(2).mT
    middle = x.shape[1] // 2
    x = torch.cat((x[:, :middle], state["cls_token"].expand(len(x), -1, -1), x[:, middle:]), 1) + state["pos_embed"]
    hidden, residual = x, None
    for i in range(config.depth):
        residual = hidden if residual is None else residual + hidden
        normed = residual / (residual.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"layers.{i}.norm.weight"]
        hidden = published_mixer(state, f"layers.{i}.mixer.", normed)
        yield hidden, residual


def test_vim_tiny_has_the_published_parameter_count():
    # Per direction, 384 channels: conv 4 * 384 + 384, x_proj (12 + 2 * 16) * 384, dt_proj 12 * 384 + 384,
    # A 16 * 384, D 384 = 1,920 + 16,896 + 4,992 + 6,144 + 384 = 30,336. Block: norm 192, in_proj 768 * 192 = 147,456,
    # out_proj 192 * 384 = 73,728, two directions: 282,048. Stem: patches 768 * 192 + 192, class token 192, 197 positions.
    stem = 768 * 192 + 192 + 192 + 197 * 192
    with torch.device("meta"):
        vim = VIMS["vim_tiny"].build()
    assert sum(p.numel() for p in vim.parameters()) == stem + 24 * 282_048 == 6_954_816
    assert 6_954_816 + 192 + 193 * 1000 == 7_148_008  # with the final norm and ImageNet's head: the published 7 M
    assert vim.spec.class_token == 98 and vim.spec.dt_rank == 12


def test_blocks_equal_the_published_forward_and_its_layout():
    state, images = published(TOY), normal(2, 3, 12, 12, seed=99)
    vim = load_vim(state, TOY)
    with torch.no_grad():
        z = vim.stem(images[None])
        for i, (hidden, residual) in enumerate(published_forward(state, TOY, images)):
            torch.testing.assert_close(z[0], residual, rtol=1e-4, atol=1e-5)  # the stream is residual + hidden
            z = vim.run(z, i, i + 1)
            torch.testing.assert_close(z[0], residual + hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vim.run(vim.stem(images[None]), 0, 4), z)


def test_a_block_reads_both_ways():
    mixer = Mixer(TOY)
    for i, p in enumerate(mixer.parameters()):
        torch.nn.init.normal_(p, 0, 0.5, generator=generator(i))
    x = normal(1, 1, 10, 8, seed=50)
    other = x.clone()
    other[..., 5, :] += 1

    def changed():
        with torch.no_grad():
            return ((mixer(x) - mixer(other)).abs().amax((0, 1, 3)) > 1e-6).tolist()

    assert all(changed())
    with torch.no_grad():
        flipped = mixer(x.flip(-2)).flip(-2)
        mixer.ahead, mixer.back = mixer.back, mixer.ahead
        torch.testing.assert_close(mixer(x), flipped)  # the other way round is the other direction
    for p in (mixer.back.D, mixer.back.x_proj.weight):
        torch.nn.init.zeros_(p)
    assert changed() == [False] * 5 + [True] * 5  # ahead alone, no token sees a later one


def test_load_vim_names_what_does_not_fit():
    state = published(TOY)
    with pytest.raises(ValueError, match="missing layers.2.mixer.A_b_log; unknown layers.2.mixer.A_c_log"):
        load_vim({k.replace("layers.2.mixer.A_b", "layers.2.mixer.A_c"): v for k, v in state.items()}, TOY)
    with pytest.raises(
        ValueError, match="not a Vision Mamba checkpoint of 4 blocks: missing layers.0.mixer.A_log, pos_embed$"
    ):
        load_vim({k: v for k, v in state.items() if k not in ("pos_embed", "layers.0.mixer.A_log")}, TOY)
    with pytest.raises(ValueError, match=r"layers.1.mixer.dt_proj_b.bias \(15,\) does not become \(16,\)"):
        load_vim(state | {"layers.1.mixer.dt_proj_b.bias": torch.zeros(15)}, TOY)
    with pytest.raises(ValueError, match=r"pos_embed \(1, 12, 8\) does not become \(10, 8\)"):
        load_vim(state | {"pos_embed": torch.zeros(1, 12, 8)}, TOY)


def test_every_parameter_has_one_published_name():
    names = [published_name(n) for n in load_vim(published(TOY), TOY).state_dict()]
    assert sorted(names) == sorted(set(published(TOY)) - {"norm_f.weight", "head.weight", "head.bias"})


def test_vim_tiny_loads_the_hubs_file(monkeypatch, tmp_path):
    state, asked = published(VIMS["vim_tiny"], classes=1000), []
    file = tmp_path / "vim.pth"
    torch.save({"model": state, "args": argparse.Namespace(lr=1e-3), "epoch": 299}, file)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a: asked.append(a) or str(file))
    vim = build_backbone("vim_tiny.stream")
    assert asked == [("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth")]
    assert torch.equal(vim.blocks[23].mixer.back.D, state["layers.23.mixer.D_b"]) and not vim.spec.reads_update
    torch.save({"model": published(TOY)}, file)
    with pytest.raises(ValueError, match="not a Vision Mamba checkpoint of 24 blocks: missing layers.10"):
        build_backbone("vim_tiny")
    torch.save({"model": state, "args": pytest.Item}, file)  # anything else that would be unpickled is refused
    with pytest.raises(
        ValueError, match=f"the weights of 'vim_tiny' in {file} cannot be read: Weights only load failed"
    ):
        build_backbone("vim_tiny")


def test_offline_is_one_clear_sentence(monkeypatch):
    def offline(*args):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(ConnectionError, match="weights of 'vim_tiny' are not cached and could not be downloaded"):
        build_backbone("vim_tiny")


def test_initialisation_is_mambas_and_a_function_of_the_seed():
    a, b, c = (build_backbone("vim_micro", pretrained=False, seed=s) for s in (1, 1, 2))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(a.stem.pos_embed, c.stem.pos_embed)
    back = a.blocks[3].mixer.back
    steps = F.softplus(back.dt_proj.bias)
    assert 0.001 <= steps.min() < 0.003 and 0.03 < steps.max() <= 0.1 + 1e-6
    torch.testing.assert_close(back.A_log.exp(), torch.arange(1.0, 17).expand(128, 16))
    assert a.blocks[0].mixer.out_proj.weight.abs().max() <= (128 * 12) ** -0.5


def released_exits(state, config, head, images, exit_blocks):
    """The release's loop on Vim: exits read the block's ``hidden`` at the class token; Ree's answer is written there."""
    blocks, middle, logits, history = config.depth, 4, [], []
    hidden, residual = next(published_forward(state, config, images))
    for i in range(blocks):
        if i:
            residual = residual + hidden
            normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-5)
            hidden = published_mixer(state, f"layers.{i}.mixer.", normed * state[f"layers.{i}.norm.weight"])
        token = hidden[:, middle]
        if isinstance(head, Classifiers):
            if i in exit_blocks:
                logits.append(head.exits[exit_blocks.index(i)](token))
            continue
        m = ree_rows(head, torch.stack([*history, token], 1))
        if i in exit_blocks:
            logits.append(head.classifier(m[:, 0] + token))
        history.append(m[:, -1])
        hidden = torch.cat((hidden[:, :middle], m[:, -1:], hidden[:, middle + 1 :]), 1)
    return torch.stack(logits)


def ree_rows(ree, rows):
    """Ree with every query: (B, n, d) tokens -> (B, n + 1, d)."""
    x = torch.cat((ree.meta_token.expand(len(rows), 1, -1), rows), 1) + ree.positions[: rows.shape[1] + 1]
    q, k, v = ree.attn.qkv(ree.norm1(x)).unflatten(-1, (3, ree.attn.heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = ((q @ k.mT) * ree.attn.width**-0.5).softmax(-1) @ v
    x = x + ree.attn.out(mixed.transpose(1, 2).flatten(-2))
    return x + ree.mlp(ree.norm2(x))


def heads():
    ree, classifiers = Ree(8, 4, 5, (1, 3)), Classifiers(8, 5, (1, 3))
    for head in (ree, classifiers):
        for i, p in enumerate(head.parameters()):
            torch.nn.init.normal_(p, 0.1, 0.3, generator=generator(i))
    return {"ree": ree, "classifiers": classifiers}


@pytest.mark.parametrize("kind", ["ree", "classifiers"])
def test_exits_equal_the_released_loop(kind):
    state, images, head = published(TOY), normal(2, 3, 12, 12, seed=99), heads()[kind]
    with torch.no_grad():
        expected = released_exits(state, TOY, head, images, (1, 3))
        torch.testing.assert_close(
            ExitModel(load_vim(state, TOY), head, (1, 3))(images[None])[:, 0], expected, rtol=1e-3, atol=1e-4
        )
        stream = ExitModel(load_vim(state, replace(TOY, reads_update=False)), head, (1, 3))(images[None])[:, 0]
    assert (stream - expected).abs().max() > 1e-2


def test_stream_exits_read_the_class_token_itself():
    state, images, head = published(TOY), normal(2, 3, 12, 12, seed=99), heads()["classifiers"]
    model = ExitModel(load_vim(state, replace(TOY, reads_update=False)), head, (1, 3))
    with torch.no_grad():
        tokens = [(hidden + residual)[:, 4] for hidden, residual in published_forward(state, TOY, images)]
        expected = torch.stack([head.exits[j](tokens[b]) for j, b in enumerate((1, 3))])
        torch.testing.assert_close(model(images[None])[:, 0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reads_update", [True, False])
def test_ree_hands_back_exactly_the_middle_token(monkeypatch, reads_update):
    vim = load_vim(published(TOY), replace(TOY, reads_update=reads_update))
    model, seen, handed = ExitModel(vim, heads()["ree"], (1, 3)), [], []
    run, step = vim.run, model.head.step
    monkeypatch.setattr(vim, "run", lambda z, a, b: seen.append((z, run(z, a, b))) or seen[-1][1])
    monkeypatch.setattr(model.head, "step", lambda *a: handed.append(step(*a)) or handed[-1])
    with torch.no_grad():
        model(normal(1, 2, 3, 12, 12))
    for block in range(3):
        (before, after), entering_next = seen[block], seen[block + 1][0]
        different = (after != entering_next).any(-1).any(1).squeeze(0)
        assert different.tolist() == [t == 4 for t in range(10)]
        expected = handed[block][1] + (before[..., 4, :] if reads_update else 0)
        torch.testing.assert_close(entering_next[..., 4, :], expected, rtol=0, atol=0)


@pytest.fixture
def toy_experiment(monkeypatch, tiny):
    monkeypatch.setitem(weights.OWN, "vim_toy", VimSpec(img_size=16, patch_size=4, dim=16, depth=4, state_dim=4))
    return tiny.replace(backbone="vim_toy", num_train=150, num_test=20, finetune_options={})


def train(e, **execution):
    *_, last = run_rounds(build_federation(e), Execution(**execution))
    return last


@pytest.mark.parametrize("finetune", ["full", "frozen", "lora", "ia3"])
@pytest.mark.parametrize("method", ["reefl", "depthfl", "exclusivefl", "inclusivefl", "fedavg"])
def test_a_cohort_of_one_equals_a_cohort_of_all(toy_experiment, method, finetune):
    e = toy_experiment.replace(method=method, finetune=finetune)
    one, many, threaded = (
        train(e, workers=1, cohort_size=1), train(e, workers=1), train(e, workers=2, cohort_size=2)
    )  # fmt: skip
    start, moved = build_federation(e).server.params, {}
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=0, atol=1e-5)
        torch.testing.assert_close(threaded.server.params[name], p, rtol=0, atol=1e-5)
        part = "head" if "head." in name else "backbone"  # InclusiveFL's names begin with exit0/ ...
        before = start[name if name in start else name.split("/", 1)[1]]
        moved[part] = moved.get(part, 0) + (p - before).abs().sum().item()
    assert not one.diverged and all(v > 0 for v in moved.values())
    assert set(moved) == ({"head"} if finetune == "frozen" else {"head", "backbone"})


def test_lora_sits_on_the_projections_and_starts_as_the_identity():
    vim, images = build_backbone("vim_micro", pretrained=False), normal(1, 2, 3, 32, 32)
    with torch.no_grad():
        before = vim.run(vim.stem(images), 0, 12)
        apply_finetune_(vim, Classifiers(64, 10, (11,)), "lora", {"r": 4}, 0)
        torch.testing.assert_close(vim.run(vim.stem(images), 0, 12), before)
    trained = {re.sub(r"\d+", "i", n) for n, p in vim.named_parameters() if p.requires_grad}
    assert trained == {f"blocks.i.mixer.{m}.lora_{x}.default.weight" for m in ("in_proj", "out_proj") for x in "AB"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pretrained": True}, "pretrained = True is not possible with backbone = 'vim_micro'; allowed: False"),
        ({"finetune": "pa"}, "finetune = 'pa' is not defined on this backbone; allowed:"),
        ({"finetune": "sa"}, "finetune = 'sa' is not defined on this backbone"),
        ({"finetune": "ssf"}, "finetune = 'ssf' is not defined on this backbone"),
        ({"method": "scalefl_vit"}, "scalefl_vit: backbone: a Vim is not what it cuts, which is a ViT"),
        ({"backbone": "vim_tinny"}, "backbone = 'vim_tinny' is unknown; did you mean 'vim_tiny'?"),
        ({"exit_blocks": (2, 5, 8, 12)}, "vim_micro has blocks 0..11"),
    ],
)
def test_what_vim_cannot_do_is_said_before_any_compute(change, message):
    e = Experiment(backbone="vim_micro", pretrained=False, finetune="full").replace(**change)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_experiment(e)


def test_configs_stand_in_for_each_other():
    assert replace(VIMS["vim_tiny"], reads_update=False) == VIMS["vim_tiny.stream"]
    assert VIMS["vim_micro"].img_size == 32 and VIMS["vim_micro"].class_token == 8


def test_training_is_priced_with_the_scan():
    """Backwards twice the forward pass, but for the scan, whose products alone are counted there, and the tokens."""
    e = Experiment(method="depthfl", dataset="cifar10", backbone="vim_micro", finetune="full", pretrained=False)
    shapes = load_shapes(e)
    forward = shapes.setting.measure.macs(shapes.slices[-1])
    assert 2.4 < taken_by(e, shapes.budgets - 1).macs / forward < 3
