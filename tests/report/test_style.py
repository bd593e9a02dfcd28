"""A method's look is one everywhere and can be told apart, and words are safe to draw."""

import itertools
import re

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedlib.methods import METHODS
from fedlib_lab.papers.reefl.teachers import plot_teachers
from fedlib_lab.report.figure_text import fonts, plain
from fedlib_lab.report.style import color_of, looks_of, marker_of, model_of, named, title_of
from fedlib_lab.report.tables import label_of
from tests.helpers.figures import frame

pytestmark = pytest.mark.usefixtures("strict")
GROUPS = (  # methods that stand in one figure
    "exclusivefl inclusivefl scalefl_vit depthfl reefl fedavg",
    "fedavg heterofl splitmix depthfl fedepth",
    "heterofl fedavg decoupled scalefl_vit splitmix feddf raffm",
    "local fedavg fedprox scalefl depthfl fedper fedrep fedbabu fedamp pfedgraph fedrod ditto fedpac cafedistill",
)
# Machado et al. 2009, severity 1: how linear RGB looks without red, without green, and to most.
SEEN = np.array([
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    np.eye(3),
])  # fmt: skip


def lab(rgb):
    """Linear RGB -> CIE L*a*b*."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.where((t := xyz / [0.9505, 1, 1.089]) > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a, b):
    """The smallest distance of two colours to any eye."""
    linear = [np.where((c := np.array(to_rgb(x))) <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for x in (a, b)]
    return min(np.linalg.norm(lab(m @ linear[0]) - lab(m @ linear[1])) for m in SEEN)


def test_methods_of_a_figure_can_be_told_apart_by_every_eye():
    assert distance("#ff0000", "#ff0000") == 0 and distance("#000000", "#ffffff") > 90
    for group in map(str.split, GROUPS):
        assert len({marker_of(m) for m in group}) == len(group)
        for a, b in itertools.combinations(group, 2):
            assert distance(color_of(a), color_of(b)) > 17, (a, b)
    twins = {"scalefl": "scalefl_vit", "fedavg_level1": "fedavg"}  # one method, in papers of their own
    looks = {n: (m.color, m.marker) for n, m in METHODS.items() if m.__module__.startswith(("fedlib.", "fedlib_lab."))}
    assert len(looks) == 33 and all(looks[a] == looks[b] for a, b in twins.items())
    assert len(set(looks.values())) == len(looks) - len(twins)
    for a, b in itertools.combinations(set(looks) - set(twins), 2):
        assert distance(color_of(a), color_of(b)) > 8, (a, b)


def test_an_unknown_method_has_a_look_of_its_own_that_stays(monkeypatch):
    assert color_of("mine") == color_of("mine") and color_of("mine") != color_of("yours")
    monkeypatch.setitem(METHODS, "mine", type("Mine", (), {"color": "#123456", "marker": "H"}))
    assert (color_of("mine"), marker_of("mine"), label_of("mine")) == ("#123456", "H", "mine")
    monkeypatch.setitem(METHODS, "better", type("Better", (METHODS["reefl"],), {"label": "Better"}))
    assert label_of("better") == "Better" and color_of("better") != color_of("reefl")  # a look is not inherited


def test_variants_share_the_methods_colour_and_differ_in_dash():
    six = [(f"depthfl_{i}", "depthfl", f"DepthFL, {i}") for i in range(5)] + [("depthfl", "depthfl", "depthfl")]
    looks = looks_of(named(frame([*six, ("reefl", "reefl", "reefl")])))
    dashes = [looks.dashes[n] for n in looks.dashes if n.startswith("DepthFL")]
    assert len(set(dashes)) == 6 and looks.dashes["DepthFL"] == "" == looks.dashes["ReeFL"]
    assert {looks.markers[n] for n in looks.markers if n.startswith("DepthFL")} == {marker_of("depthfl")}
    assert looks.palette["DepthFL"] == to_rgb(color_of("depthfl"))


def test_titles_are_a_readers_words():
    assert title_of("cifar100_alpha1", "cifar10") == "CIFAR-10 standing in for CIFAR-100, Dirichlet 1"
    assert title_of("cifar100_alpha0.1", "cifar100") == title_of("cifar100_alpha0.1") == "CIFAR-100, Dirichlet 0.1"
    assert title_of("cifar100_beta10") == "CIFAR-100, 10 classes a client"
    assert title_of("cifar10_alpha_u0.3", "cifar10") == "CIFAR-10, unbalanced Dirichlet 0.3"
    assert title_of("speech_commands", "fsdd") == "Free Spoken Digits standing in for Speech Commands"
    assert title_of("my_column", "/data/my_birds") == "my birds standing in for my column"
    assert (model_of("bert_base.384"), model_of("my_net")) == ("BERT-base", "my_net")


def test_words_are_drawn_literally():
    assert plain("a$b$") == r"a\$b\$" and plain("_x").lstrip("\u200b") == "_x" and not plain("_x").startswith("_")
    assert "DejaVu Sans" in fonts()
    for other in ("\U000f0000\u4e00", "\ue000"):  # private use: no font has it
        assert re.search(r"U\+[0-9A-F]{4,}", plain(other))
    figure = plt.figure()
    text = figure.text(0, 0.5, plain("$x$ costs $y"))
    figure.draw_without_rendering()
    assert text._preprocess_math(text.get_text()) == ("$x$ costs $y", False)


def test_the_callers_settings_stay_as_they_were():
    before = dict(matplotlib.rcParams)
    plot_teachers({"running": np.array([1, 2]), "batch": np.array([2, 1])}, "3 seeds")
    assert dict(matplotlib.rcParams) == before
