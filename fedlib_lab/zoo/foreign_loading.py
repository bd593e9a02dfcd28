"""Transformers' models, built without weights or loaded from a checkpoint, which must be what its name says.

Read next: ``foreign.py``, ``foreign_specs.py``.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedlib.core.hub import fail_fast, unreadable_error
from fedlib.core.rng import torch_generator
from fedlib.models.backbone import TokenSpec

from .foreign import Foreign, shift_right


def build_model(spec: TokenSpec):
    """Build transformers' model of ``spec``, with meaningless weights."""
    import transformers

    kind = getattr(transformers, spec.kind.model)
    with torch.random.fork_rng(devices=[]):  # it draws from the global generator
        return kind(kind.config_class(**spec.kind.config(spec)), **spec.kind.asked)


def load_foreign(spec: TokenSpec, seed: int = 0) -> Foreign:
    """Load ``spec``'s published weights from a folder, the local cache or the hub.

    Missing ones are drawn from ``seed``.

    Lacking may be a pooler and nothing else. ``ConnectionError`` if there are none, ``ValueError`` for weights that
    cannot be read, or are not those of ``spec``, or do not answer unit by unit as they do as a whole.
    """
    import transformers

    read = getattr(transformers, spec.kind.model).from_pretrained
    asked = {**spec.kind.asked, "use_safetensors": True, "output_loading_info": True}
    weights_in(Path(spec.source))
    spec.check_config(_read_source(spec, transformers.PretrainedConfig.get_config_dict)[0])
    model, found = _read_source(spec, partial(read, **asked))
    with torch.random.fork_rng(devices=[]):  # a pooler is drawn again below
        foreign = Foreign(spec, model.float().eval()).eval()
    lacking = {n for n in found["missing_keys"] if not n.startswith(f"{spec.kind.pooler_path}.")}
    if lacking:
        raise ValueError(f"foreign: the checkpoint {spec.source!r} lacks {', '.join(sorted(lacking))[:200]}")
    if left := sorted(n for n in found["unexpected_keys"] if any(f"{b}." in n for b in spec.kind.blocks)):
        more = f"has more layers than the {spec.depth} that its config.json says"
        raise ValueError(f"foreign: the checkpoint {spec.source!r} {more}: {', '.join(left)[:200]}")
    if spec.kind.pooler and len(found["missing_keys"]) + (spec.kind.pooler_path is None):
        foreign.drawn = tuple(f"stem.pooler.{n}" for n, _ in foreign.stem.pooler.named_parameters())
        foreign.init_(torch_generator(seed, "backbone init"), foreign.drawn)
    check_outputs(foreign, model)
    return foreign


def _read_source(spec: TokenSpec, read: Callable):
    """Return what ``read`` finds at ``spec``'s source; raise ``ValueError`` or ``ConnectionError`` if it fails."""
    try:
        with fail_fast(), torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
            return read(spec.source)
    except Exception as error:  # huggingface_hub and transformers raise many classes
        otherwise = "connect once, name a folder with a copy, or use pretrained=False"
        raise unreadable_error("the checkpoint", spec.source, error, otherwise) from error


def fetch_foreign(spec: TokenSpec) -> None:
    """Bring ``spec``'s weights onto this machine. Nothing is built: of seven billion parameters that takes minutes."""
    from huggingface_hub import snapshot_download

    if not (folder := Path(spec.source)).is_dir():
        with suppress(Exception), fail_fast():  # huggingface_hub raises many classes
            folder = Path(snapshot_download(spec.source, allow_patterns=["*.json", "model*.safetensors"]))
    if not all((folder / name).is_file() for name in weights_in(folder)):
        load_foreign(spec)  # which says what is wrong, or knows another form of them


def read_object(file: Path) -> dict:
    """Read a small JSON object; {} where there is no such file; ``ValueError`` if it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def weights_in(folder: Path) -> set[str]:
    """Return the files that hold a checkpoint's weights; ``ValueError`` for an index that names one outside ``folder``.

    A link leads outside too, unless it is the hub's cache, which links to its own blobs.
    """
    root, index = folder.resolve(), read_object(folder / "model.safetensors.index.json")
    homes = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    files = set(map(str, index.get("weight_map", {"": "model.safetensors"}).values()))
    for name in files if index else ():
        if Path(name).name != name or (folder / name).resolve().parent not in homes:
            raise ValueError(f"{folder}: model.safetensors.index.json names {name!r}, which is not in this folder")
    return files


@torch.no_grad()
def check_outputs(foreign: Foreign, model: nn.Module) -> None:
    """Raise ``ValueError`` unless a random batch through all units, one by one, ends as in ``model`` itself."""
    spec, generator = foreign.spec, torch.Generator().manual_seed(0)
    if spec.reads == "images":
        x = torch.randn(2, *spec.input_shape, generator=generator)
        expected = model(pixel_values=x).last_hidden_state
    else:
        x = torch.randint(spec.vocab_size, (2, min(12, spec.length)), generator=generator)
        x = x.where(x != spec.padding, (spec.padding or 2) - 1)
        x[1, 1 + x.shape[1] // 2 :] = spec.padding
        shifted = {"decoder_input_ids": shift_right(x, spec.padding)} if spec.streams == 2 else {}
        expected = model(input_ids=x, attention_mask=(x != spec.padding).long(), **shifted).last_hidden_state
    z = foreign.stem(x[None])[0]
    for unit in range(spec.depth):
        z = foreign.run_one(unit, z)
    tokens, real = foreign.last_tokens(spec.depth - 1, z)
    expected = expected[:, : tokens.shape[1]]  # the stem cuts what is padding in all rows
    difference = (tokens - expected)[real].abs().max()
    if not difference <= 1e-3 * expected[real].abs().max():
        why = f"foreign: the checkpoint {spec.source!r} answers otherwise unit by unit than as a whole"
        raise ValueError(f"{why} (by {difference:.2g}): a model of this kind cannot be run so")
