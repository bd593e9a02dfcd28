"""What all systems of the engine benchmark share: the model, the clients' data, the order of every batch, the protocol.

Plain PyTorch without fedlib, so that it runs in every rival's own environment. ``prepare.py`` writes the shared file.
A system is a class with the methods of :class:`System`; ``serve(cls)`` makes it answer the harness's commands. To add
one, write such a file beside this one and name it in ``systems.SYSTEMS``.
"""

import json
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

LAYOUT = torch.channels_last if os.environ.get("BENCH_CHANNELS_LAST") else torch.contiguous_format


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark: a ViT on digits or a convnet on CIFAR-10, one local epoch of plain SGD."""

    name: str = "W1"
    method: str = "fedavg"  # what every system knows; else one of its ``methods``: reefl, fedper, ditto
    tested: bool = False  # a round ends with a test of all clients, each on its own part of the test set
    lora_blocks: tuple[int, ...] = ()  # blocks with LoRA on q and v; then the backbone is frozen. Empty: full training
    lora_rank: int = 8
    lora_alpha: int = 16  # scale alpha / rank = 2, as fedlib's default
    batch_size: int = 32
    lr: float = 0.05
    num_clients: int = 40
    examples: int = 100  # per client
    per_round: int = 10
    rounds: int = 300  # sampled clients and batch orders are stored for so many
    img_size: int = 28
    patch_size: int = 7
    dim: int = 64
    depth: int = 12
    heads: int = 4
    ffn_dim: int = 256
    mu: float = 0.5  # of Ditto, whose own models start at the initial one
    architecture: str = "vit"  # or one of NETS, which read 32 x 32 colour images and no size below
    dataset: str = "mnist"
    pretrained: bool = True  # start from fedlib's deit_micro; False: N(0, 0.02)
    seed: int = 1

    @property
    def tokens(self) -> int:
        return (self.img_size // self.patch_size) ** 2 + 1


class Attention(nn.Module):
    """Multi-head self-attention; LoRA, if any, adds (alpha / r) B A x to q and to v (both A's in one matrix)."""

    def __init__(self, w: Workload, lora: bool):
        super().__init__()
        self.heads, self.rank, self.scale = w.heads, w.lora_rank if lora else 0, w.lora_alpha / w.lora_rank
        self.qkv, self.proj = nn.Linear(w.dim, 3 * w.dim), nn.Linear(w.dim, w.dim)
        if lora:
            self.lora_a = nn.Linear(w.dim, 2 * w.lora_rank, bias=False)
            self.lora_bq, self.lora_bv = (nn.Linear(w.lora_rank, w.dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d)
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rank:
            low = self.lora_a(x)
            q = q + self.scale * self.lora_bq(low[..., : self.rank])
            v = v + self.scale * self.lora_bv(low[..., self.rank :])
        q, k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in (q, k, v))  # (B, heads, T, d / heads)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block with an exact GELU."""

    def __init__(self, w: Workload, lora: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(w.dim, eps=1e-6), nn.LayerNorm(w.dim, eps=1e-6)
        self.attn = Attention(w, lora)
        self.fc1, self.fc2 = nn.Linear(w.dim, w.ffn_dim), nn.Linear(w.ffn_dim, w.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """Vision transformer for grey images, LN + Linear on the class token. Only what is trained requires gradients."""

    def __init__(self, w: Workload):
        super().__init__()
        self.patch = w.patch_size
        self.patch_embed = nn.Linear(w.patch_size**2, w.dim)
        self.prefix = nn.Parameter(torch.zeros(1, w.dim))  # the class token
        self.pos_embed = nn.Parameter(torch.zeros(w.tokens, w.dim))
        self.blocks = nn.Sequential(*(Block(w, b in w.lora_blocks) for b in range(w.depth)))
        self.norm, self.linear = nn.LayerNorm(w.dim), nn.Linear(w.dim, 10)
        if w.lora_blocks:
            for name, p in self.named_parameters():
                p.requires_grad_("lora" in name or name.startswith(("norm", "linear")))

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 10)
        p, side = self.patch, images.shape[-1] // self.patch
        x = images.view(-1, side, p, side, p).transpose(2, 3).reshape(-1, side * side, p * p)
        x = torch.cat((self.prefix.expand(len(x), 1, -1), self.patch_embed(x)), 1) + self.pos_embed
        return self.linear(self.norm(self.blocks(x)[:, 0]))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(images), labels)

    def trained(self) -> dict[str, Tensor]:
        """The parameters that clients train and upload, detached."""
        return {n: p.detach() for n, p in self.named_parameters() if p.requires_grad}


def conv(channels: int, width: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride, size // 2, bias=False)


def norm(width: int) -> nn.BatchNorm2d:
    """Batch norm by the statistics of the batch, always: nothing but parameters is trained and sent."""
    return nn.BatchNorm2d(width, track_running_stats=False)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions; a 1x1 convolution and norm on the shortcut where the width changes (option B)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        stride = 1 if channels == width else 2
        self.conv1, self.bn1 = conv(channels, width, 3, stride), norm(width)
        self.conv2, self.bn2 = conv(width, width), norm(width)
        self.projection = conv(channels, width, 1, stride) if stride == 2 else None
        self.projection_bn = norm(width) if stride == 2 else None

    def forward(self, z: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(z)))))
        return F.relu(y + (z if self.projection is None else self.projection_bn(self.projection(z))))


class Net(nn.Module):
    """A convnet for 32 x 32 colour images: ``stem``, ``blocks`` and ``linear``, set by a subclass."""

    loss, trained = ViT.loss, ViT.trained

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, 10)
        return self.linear(self.features(self.blocks(self.stem(images))))


class ResNet8(Net):
    """CIFAR's residual network of three stages of one block, 16, 32 and 64 channels wide."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(OrderedDict(conv=conv(3, 16), bn=norm(16), relu=nn.ReLU()))
        self.blocks = nn.Sequential(*(ResidualBlock(a, b) for a, b in pairwise([16, 16, 32, 64])))
        self.linear = nn.Linear(64, 10)

    def features(self, z: Tensor) -> Tensor:
        return z.mean((-2, -1))


class ConvNet(Net):
    """Three 3x3 convolutions without padding, each with ReLU and a 2x2 max-pool; the last map goes flat to the head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Identity()
        units = [
            OrderedDict(conv=nn.Conv2d(a, b, 3), relu=nn.ReLU(), pool=nn.MaxPool2d(2))
            for a, b in pairwise([3, 32, 64, 64])
        ]
        self.blocks = nn.Sequential(*map(nn.Sequential, units))
        self.linear = nn.Linear(64 * 2 * 2, 10)

    def features(self, z: Tensor) -> Tensor:
        return z.flatten(1)


NETS = {"resnet8": ResNet8, "convnet3_slim": ConvNet}


class Federation:
    """The shared file, read once per process: examples as float tensors, who trains when on what, initial weights."""

    def __init__(self, path: str):
        self.path = path
        with safe_open(path, "pt") as f:
            tensors = {k: f.get_tensor(k) for k in f.keys()}
            meta = json.loads(f.metadata()["workload"])
        self.workload = Workload(**{**meta, "lora_blocks": tuple(meta["lora_blocks"])})
        channels = 3 if self.workload.architecture in NETS else -1  # grey is the same in all of them
        self.mean, self.std = mean, std = tensors["mean_std"]  # of the training pixels in [0, 1], by channel
        self.images, self.test_images = (
            ((tensors[k].float() / 255 - mean) / std).expand(-1, channels, -1, -1).contiguous(memory_format=LAYOUT)
            for k in ("images", "test_images")
        )
        self.labels, self.test_labels = tensors["labels"].long(), tensors["test_labels"].long()
        self.sampled = tensors["sampled"].tolist()  # [round][position] -> client
        self.rows = tensors["rows"].long()  # (rounds, sampled clients, examples): rows of images in training order
        self.initial = {k.removeprefix("initial/"): v for k, v in tensors.items() if k.startswith("initial/")}

    def model(self) -> ViT | Net:
        """The global model before the first round."""
        model = ViT(self.workload) if self.workload.architecture == "vit" else NETS[self.workload.architecture]()
        model.load_state_dict(self.initial)
        return model.to(memory_format=LAYOUT)

    def client_rows(self, t: int, client: int) -> Tensor:
        """Rows of the examples of ``client`` in the order of round ``t`` = 0, 1, ...; ``ValueError`` if not sampled."""
        return self.rows[t, self.sampled[t].index(client)]

    def batches(self, t: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's mini-batches of round ``t``; the last one may be smaller."""
        for rows in self.client_rows(t, client).split(self.workload.batch_size):
            yield self.images[rows], self.labels[rows]

    def rows_of(self, client: int) -> Tensor:
        """All rows of ``client``, sorted; ``ValueError`` if no stored round samples it."""
        t = next((t for t, clients in enumerate(self.sampled) if client in clients), None)
        if t is None:
            raise ValueError(f"client {client} is in none of the {len(self.sampled)} rounds that are stored")
        return self.client_rows(t, client).sort().values

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        """The client's own part of the test set, in whose order clients follow each other."""
        n, clients = len(self.test_labels), self.workload.num_clients
        own = slice(client * n // clients, (client + 1) * n // clients)
        return self.test_images[own], self.test_labels[own]

    def train(self, model: nn.Module, t: int, client: int, drawn_to: Sequence[Tensor] | None = None) -> int:
        """One local epoch of plain SGD in place, as any user writes it; returns the number of examples.

        ``drawn_to``: parameters to which Ditto's own model is drawn.
        """
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, self.workload.lr)
        for images, labels in self.batches(t, client):
            optimizer.zero_grad()
            model.loss(images, labels).backward()
            if drawn_to is not None:
                with torch.no_grad():
                    torch._foreach_add_(
                        [p.grad for p in params], torch._foreach_sub(params, drawn_to), alpha=self.workload.mu
                    )
            optimizer.step()
        return self.workload.examples

    @torch.inference_mode()
    def accuracy(self, trained: dict[str, Tensor]) -> float:
        """Accuracy on the central test set in percent."""
        model = self.model()
        model.load_state_dict(trained, strict=False)
        answers = model(self.test_images).argmax(-1)  # as fedlib has it: batch norm reads all of them
        return 100 * (answers == self.test_labels).float().mean().item()


class System(Protocol):
    """What ``serve`` needs. Constructed: ready for the first round. Between two calls it must be idle.

    Optional: ``methods``, the workloads' methods that it knows, if not ``fedavg`` alone; ``accuracy()``, percent, for
    a model of its own, and for clients that answer with models of their own.
    """

    def __init__(self, federation: Federation): ...

    def rounds(self, first: int, n: int) -> list[float]:
        """Run rounds ``first`` .. ``first + n - 1`` (from 0) and return the seconds of each."""

    def trained(self) -> dict[str, Tensor]:
        """The global model's trained parameters under the names of ``Federation.model``."""


def serve(system_class: type) -> None:
    """Answer the harness: one command a line on standard input, one line of JSON for each on standard output.

    ``prepare`` {"version", "python"}; ``rounds n`` {"seconds": [...]}; ``accuracy`` {"accuracy"}, percent;
    ``save file`` {}, the trained tensors as safetensors; ``quit`` {}.
    """
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", 1)))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a framework prints goes to standard error
    try:
        for answer in _answers(system_class, iter(sys.stdin.readline, "")):
            print(json.dumps(answer), file=answers)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, whatever threads and processes a framework still waits for


def _answers(system_class: type, lines: Iterator[str]) -> Iterator[dict]:
    federation, done, system = Federation(sys.argv[1]), 0, None
    method, known = federation.workload.method, getattr(system_class, "methods", ("fedavg",))
    if method not in known:
        raise ValueError(f"workload: method = {method!r} is not possible here; allowed: {', '.join(known)}")
    for line in lines:
        command, _, argument = line.strip().partition(" ")
        if command == "prepare":
            system, package = system_class(federation), os.environ.get("BENCH_PACKAGE", "torch")
            told = os.environ.get("BENCH_VERSION") or f"{package} {version(package)}"
            yield {"version": told, "python": sys.version.split()[0]}
        elif command == "rounds":
            last = done + int(argument)
            if last > federation.workload.rounds:
                raise ValueError(f"round {last} was asked for, but rounds = {federation.workload.rounds} are stored")
            yield {"seconds": system.rounds(done, int(argument))}
            done = last
        elif command == "accuracy":
            own = getattr(system, "accuracy", None)  # of a model that is not a plain ViT
            yield {"accuracy": own() if own else federation.accuracy(system.trained())}
        elif command == "save":
            save_file({k: v.contiguous() for k, v in system.trained().items()}, argument)
            yield {}
        elif command == "quit":
            yield {}
            return
        else:
            raise ValueError(f"unknown command {command!r}; allowed: prepare, rounds, accuracy, save, quit")
