"""Central pre-training of the kit's own small backbones; ``notebooks/pretraining/deit_micro.ipynb`` runs it.

A plain supervised recipe (AdamW, cosine, label smoothing, random resized crops and flips) on one device. The first
epochs may see images of half the side, which are a quarter of the tokens (progressive resizing): position embeddings
are averaged over 2 x 2 cells for them. Interrupted training goes on from the last state, saved every few minutes.
The result is a federated starting point, not a record. Read next: ``__main__.py``, the same from a terminal.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from fedlib.core.rng import torch_generator
from fedlib.data.datasets import DataSet
from fedlib.data.transforms import render, sample_views
from fedlib.layers.linear import init_normal_
from fedlib.models.exits import Classifier
from fedlib.models.vit import ViT, ViTSpec


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of the pre-training run."""

    epochs: int = 20
    half_size_epochs: int = 0  # so many of them, the first, see images of half the side
    batch_size: int = 256
    lr: float = 2e-3
    warmup_epochs: float = 1.0
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    augment: str = "rrc_flip"
    min_scale: float = 0.35
    precision: str = "float32"  # of the training's matrix products: float32 or bfloat16 (autocast)
    seed: int = 0


RECIPES = {  # of the backbones with weights of the kit's own, by name
    "deit_micro": Recipe(),
    "deit_mini": Recipe(epochs=20, half_size_epochs=17, lr=1.5e-3, precision="bfloat16"),
}


def build_upstream(config: ViTSpec, num_classes: int, seed: int) -> nn.ModuleDict:
    """A randomly initialised ViT and one classifier on its last class token."""
    generator = torch_generator(seed, "upstream init")
    classifier = Classifier(config.dim, num_classes)
    init_normal_(classifier, generator)
    return nn.ModuleDict({"vit": ViT(config).init_(generator), "classifier": classifier})


def class_tokens(vit: ViT, images: torch.Tensor) -> torch.Tensor:
    """Last-block class tokens (B, d) of rendered images (B, 3, H, W), of the network's size or smaller."""
    return vit.run(tokens_of(vit, images[None]), 0, vit.spec.depth)[0, :, 0]


def tokens_of(vit: ViT, images: torch.Tensor) -> torch.Tensor:
    """What the first block reads (1, B, T, d) of images (1, B, 3, H, W); smaller ones see averaged positions."""
    spec, side = vit.spec, images.shape[-1] // vit.spec.patch_size
    full = spec.img_size // spec.patch_size
    if side == full:
        return vit.stem(images)
    extra, grid = vit.stem.pos_embed.split((spec.extra_tokens, full**2))
    grid = F.adaptive_avg_pool2d(grid.T.unflatten(-1, (full, full)), side).flatten(1).T
    return torch.func.functional_call(vit.stem, {"pos_embed": torch.cat((extra, grid))}, (images,))


@torch.no_grad()
def evaluate_upstream(
    model: nn.ModuleDict, data: DataSet, device: str, batch_size: int = 1000, half: bool = False
) -> float:
    """Top-1 accuracy in percent on the test split, of images of ``half`` the side if asked."""
    mean, std = (s.to(device) for s in data.mean_std())
    correct = 0
    for a in range(0, len(data.test_labels), batch_size):
        x = render(data.test_inputs[a : a + batch_size].to(device), None, model["vit"].spec.img_size, mean, std)
        logits = _logits(model, x, half)
        correct += (logits.argmax(1).cpu() == data.test_labels[a : a + batch_size]).sum().item()
    return 100 * correct / len(data.test_labels)


def _logits(model: nn.ModuleDict, x: torch.Tensor, half: bool) -> torch.Tensor:
    return model["classifier"](class_tokens(model["vit"], F.avg_pool2d(x, 2) if half else x)[None])[0]


def train_upstream(
    config: ViTSpec, data: DataSet, recipe: Recipe, folder: Path, device: str = "cpu", save_seconds: float = 120.0
) -> Iterator[dict]:
    """Train epoch by epoch, yielding ``{epoch, loss, accuracy}``; ``folder`` holds the resumable state.

    The epoch's order and crops are a function of (seed, epoch), so a resumed run equals an uninterrupted one. The
    accuracy is of images of the size that the epoch trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_upstream(config, data.num_classes, recipe.seed).to(device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, fused=True)
    history, done, total = _restore(folder, model, optimizer, recipe, device)
    yield from history

    images, labels = data.train_inputs.to(device), data.train_labels.to(device)
    mean, std = (s.to(device) for s in data.mean_std())
    steps, saved = math.ceil(len(labels) / recipe.batch_size), time.monotonic()
    for epoch in range(len(history), recipe.epochs):
        half = epoch < recipe.half_size_epochs
        generator = torch_generator(recipe.seed, "upstream epoch", epoch)
        order = torch.randperm(len(labels), generator=generator).to(device)
        views = sample_views(recipe.augment, len(labels), images.shape[-1], generator, min_scale=recipe.min_scale).to(
            device
        )
        for step in range(done, steps):
            rate = _learning_rate(recipe, epoch * steps + step, steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            x = render(images[rows], views[rows], config.img_size, mean, std)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                logits = _logits(model, x, half)
            loss = F.cross_entropy(logits.float(), labels[rows], label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if time.monotonic() - saved >= save_seconds:
                _save(folder, model, optimizer, recipe, history, step + 1, total)
                saved = time.monotonic()
        record = {
            "epoch": epoch + 1,
            "loss": round(total.item() / steps, 4),
            "accuracy": evaluate_upstream(model, data, device, half=half),
        }
        history.append(record)
        done, total = 0, torch.zeros_like(total)
        _save(folder, model, optimizer, recipe, history, done, total)
        saved = time.monotonic()
        yield record


def load_upstream(config: ViTSpec, num_classes: int, folder: Path) -> nn.ModuleDict:
    """The model as trained so far in ``folder``."""
    model = build_upstream(config, num_classes, 0)
    tensors = load_file(folder / "state.safetensors")
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    return model


def export_backbone(vit: ViT, file: Path) -> None:
    """Write the backbone's weights in half precision, as ``models.registry`` reads them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().half().contiguous().cpu() for k, v in vit.state_dict().items()}, file)


@torch.no_grad()
def features(vit: ViT, images: torch.Tensor, stats: tuple[torch.Tensor, torch.Tensor], batch_size: int = 1000):
    """Frozen last-block class tokens (N, d) of uint8 images."""
    size = vit.spec.img_size
    parts = [class_tokens(vit, render(x, None, size, *stats)) for x in images.split(batch_size)]
    return torch.cat(parts)


def linear_probe(vit: ViT, data: DataSet, num_train: int = 10_000) -> float:
    """Test accuracy (percent) of logistic regression on frozen features of ``num_train`` examples."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = torch.randperm(len(data.train_labels), generator=torch_generator(0, "probe"))[:num_train]
    stats = data.mean_std()
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    probe.fit(features(vit, data.train_inputs[order], stats).numpy(), data.train_labels[order].numpy())
    return 100 * probe.score(features(vit, data.test_inputs, stats).numpy(), data.test_labels.numpy())


def _learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then cosine to zero over ``epochs``."""
    warmup, total = recipe.warmup_epochs * steps, recipe.epochs * steps
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def _save(
    folder: Path, model: nn.Module, optimizer, recipe: Recipe, history: list[dict], step: int, total: torch.Tensor
) -> None:
    """Write the state after ``step`` steps of an unfinished epoch, whose losses sum to ``total``."""
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()} | {"total": total}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": v.contiguous() for k, v in state.items()}
    metadata = {"recipe": json.dumps(asdict(recipe)), "history": json.dumps(history), "step": str(step)}
    part = folder / f"state.{os.getpid()}.part"
    save_file(tensors, part, metadata)
    os.replace(part, folder / "state.safetensors")


def _restore(
    folder: Path, model: nn.Module, optimizer, recipe: Recipe, device: str
) -> tuple[list[dict], int, torch.Tensor]:
    """Load the stored state into model and optimizer if it belongs to the same recipe: history, step, sum of losses."""
    from safetensors import safe_open

    file = folder / "state.safetensors"
    if not file.exists():
        return [], 0, torch.zeros((), device=device)
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
    if {**asdict(Recipe()), **json.loads(metadata["recipe"])} != asdict(recipe):
        raise ValueError(f"{file} belongs to another recipe: {metadata['recipe']}; choose another folder")
    tensors = load_file(file)
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    state: dict[int, dict] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, i, name = key.split(".")
            state.setdefault(int(i), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    total = tensors.get("total", torch.zeros(())).to(device)
    return json.loads(metadata["history"]), int(metadata.get("step", 0)), total
