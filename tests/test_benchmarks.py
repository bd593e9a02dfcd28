"""The engine benchmark: rivals and fedlib train the same clients on the same batches, and the harness counts honestly."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "notebooks" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402
import prepare  # noqa: E402
import setup_rivals  # noqa: E402
import systems  # noqa: E402
from names import to_fedlib, to_plain  # noqa: E402
from systems import SYSTEMS, System, running  # noqa: E402
from workload import Federation, ViT, Workload  # noqa: E402

TINY = Workload(
    "tiny", batch_size=4, lr=0.5, num_clients=6, examples=10, per_round=3, rounds=12, dim=16, depth=2, heads=2,
    ffn_dim=24, lora_rank=3, lora_alpha=6, pretrained=False,
)  # fmt: skip
LORA = dataclasses.replace(TINY, name="tiny LoRA", lora_blocks=(1,))
BARE = SYSTEMS["bare loop"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workloads")
    return {w.name: prepare.write_workload(w, folder / f"{w.name}.safetensors") for w in (TINY, LORA)}


def own_federation(w: Workload, shared: Federation, rounds: int = 2):
    """fedlib's federation on the shared file's weights and pixels: what its own system in the benchmark runs."""
    from fedlib import build_federation
    from fedlib.methods import Setting
    from fedlib.models.adapters import apply_finetune_
    from fedlib.models.exit_model import ExitModel
    from fedlib.models.vit import ViT as OwnViT
    from fedlib.models.vit import ViTConfig

    e = dataclasses.replace(prepare.experiment(w), rounds=rounds)
    f = build_federation(e.replace(finetune="full", finetune_options={}))
    vit = OwnViT(ViTConfig(w.img_size, w.patch_size, w.dim, w.depth, w.heads, w.ffn_dim))
    head = f.method.build_head(w.dim, w.depth, 10, (w.depth - 1,))
    options = dict(e.finetune_options)
    if w.lora_blocks:
        options["target_modules"] = [f"blocks.{b}.attn.{j}" for b in w.lora_blocks for j in "qv"]
    apply_finetune_(vit, head, e.finetune, options, e.seed)
    model = ExitModel(vit, head, (w.depth - 1,)).eval()
    model.load_state_dict(to_fedlib(shared.initial, w))
    setting = Setting(vit.config, model.exit_blocks, model.infos(), w.num_clients, rounds)
    cut = slice(2, -2)  # fedlib's digits are padded to 32 pixels
    data = dataclasses.replace(f.data, images=f.data.images[..., cut, cut], test_images=f.data.test_images[..., cut, cut])
    mean, std = (x.expand(3) for x in shared_mean_std(shared))
    data = dataclasses.replace(data, mean=mean, std=std)
    server = f.method.init_server(model.trainable(), setting)
    return dataclasses.replace(
        f, experiment=e, setting=setting, data=data, model=model, frozen=model.frozen(), server=server
    )
