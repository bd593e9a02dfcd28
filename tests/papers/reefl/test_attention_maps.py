"""Attention maps: Eqs. 7-9 against the blocks' own outputs and against hand-made tokens."""

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fedlib import run
from fedlib.core.experiment import Experiment
from fedlib.engine.federation import build_model
from fedlib.methods import build_method
from fedlib_lab.papers.reefl.attention_maps import (
    MAPS,
    Attention,
    attention_maps,
    attention_of,
    attention_row,
    pick_by_exit,
    run_attention,
)
from fedlib_lab.papers.reefl.attention_plots import EQUATIONS, browse, map_picture, plot_blocks, plot_heads, plot_slide
from fedlib_lab.runs.trained import load_trained


def model_of(finetune="lora", method="reefl", **options):
    e = Experiment(method=method, options=options, finetune=finetune, num_exits=4)
    return build_model(e, build_method(method, options), 10)


@pytest.fixture(scope="module")
def images():
    return torch.randn(1, 3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("finetune", ["frozen", "lora", "pa", "sa", "ssf"])
@torch.no_grad()
def test_rows_reproduce_the_blocks_attention_output(finetune, images):
    """sum_j row_j v_j, projected, is what the block's attention adds to its class token."""
    model = model_of(finetune)
    z = model.backbone.run(model.backbone.stem(images), 0, 2)
    block = model.backbone.blocks[2]
    row = attention_row(block, z[..., 0, :], z)  # (1, 3, heads, T)
    assert torch.allclose(row.sum(-1), torch.ones(()), atol=1e-6)
    attn = block.attn.base_layer if hasattr(block.attn, "base_layer") else block.attn
    h = block.norm1(z)
    v = attn.v(h).unflatten(-1, (attn.heads, -1)).transpose(-2, -3)  # (1, 3, heads, T, a)
    out = attn.proj((row.unsqueeze(-2) @ v).squeeze(-2).flatten(-2))
    assert torch.allclose(out, attn(h)[..., 0, :], atol=1e-5)


@torch.no_grad()
def test_maps_are_equations_7_to_9(images):
    model = model_of()
    torch.nn.init.normal_(model.head.attn.qkv.weight, 0, 0.3, generator=torch.Generator().manual_seed(2))
    found = attention_maps(model, images)
    assert {n: tuple(m.shape) for n, m in found.maps.items()} == {n: (3, 12, 4, 4, 4) for n in "x read m c".split()}
    assert torch.allclose(found.logits, model(images)[:, 0], atol=1e-5)  # watching changes nothing

    z0 = model.backbone.stem(images)
    z1 = model.backbone.run(z0, 0, 1)
    past = []
    m_0, m_1 = model.head.tokens(z1[..., 0, :], past)
    _, handed_back = model.head.step(0, z1[..., 0, :], past)
    assert torch.allclose(handed_back, m_1, atol=1e-6)
    z1_modulated = torch.cat((m_1.unsqueeze(-2), z1[..., 1:, :]), -2)

    def map_of(block, token, z):
        return attention_row(model.backbone.blocks[block], token, z)[0, ..., 1:].unflatten(-1, (4, 4))

    expected = {
        ("x", 0): map_of(0, z0[..., 0, :], z0),  # Eq. 7, l = 1
        ("m", 0): map_of(0, m_1, z0),  # Eq. 8, l = 1: through the block that made it
        ("c", 0): map_of(0, m_0 + z1[..., 0, :], z0),  # Eq. 9, l = 1
        ("x", 1): map_of(1, z1[..., 0, :], z1),  # Eq. 7, l = 2: not modulated
        ("read", 1): map_of(1, m_1, z1_modulated),  # what block 2 reads instead
    }
    for (name, block), value in expected.items():
        assert torch.allclose(found.maps[name][:, block], value, atol=1e-6), (name, block)
    assert torch.equal(found.maps["x"][:, 0], found.maps["read"][:, 0])  # nothing is modulated before block 1
    assert (found.maps["x"][:, 1:] - found.maps["read"][:, 1:]).abs().amax() > 1e-3


@pytest.mark.parametrize(
    "method, options, with_m",
    [("depthfl", {}, []), ("reefl", {"only_at_exits": True}, [2, 5, 8, 11]), ("reefl", {"use_ree": False}, []),
     ("reefl", {"modulate": False}, list(range(12)))],
)  # fmt: skip
def test_maps_are_missing_where_ree_does_not_run(method, options, with_m, images):
    maps = attention_maps(model_of(method=method, **options), images).maps
    assert [b for b in range(12) if maps["m"][:, b].isfinite().all()] == with_m
    assert maps["x"].isfinite().all() and maps["read"].isfinite().all()


def test_earliest_correct_exit():
    # labels 1, 0, 1; predictions per exit: [0, 0, 0], [1, 1, 0], [1, 0, 0] -> first correct: exit 1, exit 0, none
    predictions = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 0]])
    attention = Attention({}, torch.nn.functional.one_hot(predictions, 2).float(), (3, 7, 11))
    assert attention.earliest_correct(torch.tensor([1, 0, 1])).tolist() == [1, 0, -1]


def a_few(images=4, blocks=3, side=2):
    """Made-up attention of three exits; the classes of the images are 0, 1, 0, 1; the third is never right."""
    maps = {n: torch.rand(images, blocks, 2, side, side, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(MAPS)}  # fmt: skip
    maps["m"][:, 0] = torch.nan
    right = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1]]).bool()  # (exits, images)
    labels = torch.tensor([0, 1, 0, 1])
    logits = torch.nn.functional.one_hot(torch.where(right, labels, 1 - labels), 2).float()
    return Attention(maps, logits, (0, 1, 2)), labels


def test_the_first_image_of_each_class_and_group_of_exits_is_picked():
    attention, labels = a_few()
    first = attention.earliest_correct(labels)
    assert first.tolist() == [0, 2, -1, 1]
    assert pick_by_exit(first, labels, 3).tolist() == [[0, -1, -1], [-1, 3, 1]]
    assert pick_by_exit(first, labels, 3, groups=1).tolist() == [[0], [1]]  # the first, not the earliest exit
    # four exits in thirds: 1 and 2, 3, 4
    assert pick_by_exit(torch.arange(4), torch.zeros(4), 4).tolist() == [[0, 2, 3]]


def test_the_slide_shows_maps_of_the_earliest_correct_exits_block():
    attention, labels = a_few()
    photos = [np.full((8, 8, 3), 60 * i, np.uint8) for i in range(4)]
    chosen = pick_by_exit(attention.earliest_correct(labels), labels, 3)
    axes = plot_slide(photos, attention, labels, ["cat", "dog"], chosen)
    assert axes.shape == (2, 3, 3) and [ax.get_ylabel() for ax in axes[:, 0, 0]] == ["cat", "dog"]
    photo, before, after = axes[1, 2]  # image 1, block 3
    np.testing.assert_array_equal(photo.images[0].get_array(), photos[1])
    for ax, name in ((before, "x"), (after, "m")):
        np.testing.assert_allclose(ax.images[1].get_array(), attention.maps[name][1, 2].mean(0))
    assert photo.get_xlabel() == "exit 3" and not axes[0, 1, 0].images  # no image of a cat leaves there
    assert [ax.get_title() for ax in axes[0, 0]] == ["image", "before Ree", "modulated"]
    once = plot_slide(
        photos, attention, labels, ["cat", "dog"], torch.tensor([[0], [1]]), "a net", EQUATIONS
    )  # Figure 11
    assert once.shape == (2, 1, 4) and once[1, 0, 0].get_xlabel() == "exit 3"
    np.testing.assert_allclose(once[1, 0, 3].images[1].get_array(), attention.maps["c"][1, 2].mean(0))
    assert once[0, 0, 0].figure.figure.get_suptitle().endswith("\na net")
    plt.close("all")


def test_a_grid_shows_the_mean_and_every_head_of_every_block():
    attention, _ = a_few()
    axes = plot_heads(np.full((8, 8, 3), 7, np.uint8), attention, 1, "a cat")
    assert axes.shape == (3, 3) and [ax.get_ylabel() for ax in axes[:, 0]] == ["mean", "head 1", "head 2"]
    maps = attention.maps["read"][1]  # (blocks, heads, side, side)
    for row, wanted in enumerate((maps.mean(1), maps[:, 0], maps[:, 1])):
        for ax, one in zip(axes[row], wanted, strict=True):
            np.testing.assert_allclose(ax.images[1].get_array(), one)
    assert [ax.get_title() for ax in axes[0]] == ["block 1", "block 2", "block 3"]
    plt.close("all")


def test_figure_1b_shows_the_image_both_maps_and_their_difference():
    """A column for the image, a row for what modulation changed: one scale for all blocks, on both sides of zero."""
    before = torch.rand(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    after = before.clone()
    after[1, 1, :, 2, 3] += 0.5
    attention = Attention({"x": before, "read": after}, torch.zeros(3, 2, 10), (0, 1, 2))
    image = np.full((8, 8, 3), 7, np.uint8)
    axes = plot_blocks(image, attention, 1)
    assert axes.shape == (3, 4) and axes[0, 0].get_title() == "image" and axes[0, 1].get_title() == "block 1"
    assert (axes[0, 0].images[0].get_array() == 7).all() and [len(ax.images) for ax in axes[:, 0]] == [1, 0, 0]
    changed = [ax.images[1].get_array() for ax in axes[2, 1:]]
    expected = np.zeros((4, 4))
    expected[2, 3] = 0.5
    for block, drawn in enumerate(changed):
        assert np.allclose(drawn, expected if block == 1 else 0, atol=1e-6)
    assert {ax.images[1].get_clim() for ax in axes[2, 1:]} == {(-0.5, 0.5)}
    plt.close(axes[0, 0].figure)


def test_a_click_changes_the_picture_and_nothing_else_does():
    attention, _ = a_few()
    photos = [np.full((8, 8, 3), 60 * i, np.uint8) for i in range(4)]
    picture = partial(map_picture, photos, attention)
    one = picture(1, 2, None)
    others = [picture(2, 2, None), picture(1, 1, None), picture(1, 2, 0), picture(1, 0, None)]
    assert one.startswith(b"\x89PNG") and len({one, *others}) == 5
    assert picture(1, 2, None) == one  # whatever was looked at before
    assert not plt.get_fignums()  # nothing for a notebook to show twice


def test_the_browser_shows_the_first_choice_and_follows_its_controls():
    attention, _ = a_few()
    box = browse([np.full((8, 8, 3), 60 * i, np.uint8) for i in range(4)], attention, list("abcd"))
    image, block, head = box.children[0].children
    assert [o[0] for o in image.options] == list("abcd") and block.max == 3
    assert [o[0] for o in head.options] == ["mean", "1", "2"]


def test_a_picture_of_ones_own_has_the_maps_of_the_same_test_picture(tmp_path, tiny):
    from PIL import Image

    done = run(tiny.replace(method="reefl", rounds=1), folder=tmp_path / "runs")
    f, server = load_trained(done.experiment)
    own = f.data.test_inputs[3].expand(3, -1, -1).permute(1, 2, 0).numpy()
    Image.fromarray(own).save(tmp_path / "own.png")
    pixels, found = attention_of(done, tmp_path / "own.png")
    wanted = run_attention(f, server, f.data.test_inputs[3:4])
    assert np.array_equal(pixels, own) and torch.equal(found.logits, wanted.logits)
    for name, maps in wanted.maps.items():
        assert torch.equal(found.maps[name].nan_to_num(), maps.nan_to_num())
    deep, turned, on_white = own[..., 0].astype(np.uint16) * 257, Image.Exif(), np.full((32, 32, 4), 255, np.uint8)
    turned[0x0112] = 3  # upside down
    on_white[:16, :, :3], on_white[16:, :, 3] = own[:16], 0
    own_half = np.concatenate([own[:16], np.full((16, 32, 3), 255, np.uint8)])
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(own[::-1, ::-1].copy()).save(tmp_path / "turned.png", exif=turned)
    Image.fromarray(on_white).save(tmp_path / "clear.png")
    for name, seen in {"deep": own, "turned": own, "clear": own_half}.items():  # as data of such pictures are read
        assert np.array_equal(attention_of(done, tmp_path / f"{name}.png")[0], seen), name
    Image.fromarray(own).resize((200, 150)).save(tmp_path / "large.png")
    axes = plot_blocks(*attention_of(done, tmp_path / "large.png"), 0, "a digit")
    assert len(axes)
    plt.close("all")
