"""Models of Hugging Face's transformers as backbones: their own layers run as units, for one client or a cohort.

A ``ForeignSpec`` names a family (``foreign_families.yaml``) and its sizes; :class:`Foreign` takes the model that
transformers builds or loads apart into a stem, units and what follows the last. Their layers know of one model, so the
members of a cohort run one after the other, each with its own rows of the stacked parameters. A layer that was cut is
told its new sizes before it runs; the scores of a narrower head are divided by the root of its own width.
Read next: ``foreign_specs.py``, ``foreign_loading.py``, ``backbone.py``.

Padding is the zero vector, as in ``bert.py``. T5's state is its encoder's tokens, then its decoder's, which reads the
input shifted by one; its exits read the decoder, as ``T5ForQuestionAnswering`` does. A class is read at the class
token, or where there is none at the last token; exits of the last unit are linear, after the family's pooler or norm.

Fine-tuned as trained (``ForeignSpec.as_trained``): layers drop what the checkpoint's config says (BERT, RoBERTa and T5
a tenth, DistilBERT's pooler a fifth, ViT and LLaMA nothing), each client from its own generator; images are normalised
as in pre-training. Backbones named ``*.plain`` drop nothing and normalise by the data's own mean and SD.

Keys and values that a group of heads shares (LLaMA's younger kin) are never cut, nor are the heads that read them.

Deviations: token type 0 everywhere, also of a pair's second sentence. FLAN-T5's language head is not used.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedlib.core.slices import Axis
from fedlib.layers.context import Context
from fedlib.layers.dropout import TokenDropout
from fedlib.models.backbone import Backbone, TokenSpec
from fedlib.models.bert import is_token
from fedlib.models.vit import head_axis

DROPPING = "fedlib"  # the name of :func:`attend_with_dropout` among transformers' ways to attend
Call = Callable[[torch.Tensor], torch.Tensor]
Places = list[tuple[dict, str, int]]  # a module's tensors, the leaf, its dimensions in one model


def shift_right(ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Shift ids (B, T) one token later behind the padding token, as T5's decoder reads them."""
    return torch.cat((torch.full_like(ids[:, :1], padding), ids[:, :-1]), 1)


class Pooler(nn.Module):
    """A dense layer on the class token, and its activation; it drops of its output, and if ``both`` of its input."""

    def __init__(self, dim: int, activation: str, drop: float = 0.0, both: bool = False):
        super().__init__()
        self.dense, self.activation = nn.Linear(dim, dim), getattr(torch, activation)
        self.dense.axes = {"weight": ("residual", "residual"), "bias": ("residual",)}
        self.drop, self.both = TokenDropout(drop), both

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return self.drop(self.activation(self.dense(self.drop(token) if self.both else token)))


class Stem(nn.Module):
    """What embeds, and every norm or pooler after the last unit: all that belongs to no unit."""

    def __init__(self, spec: TokenSpec, model: nn.Module):
        super().__init__()
        kind, said = spec.kind, model.config
        self.spec, self.places, self.context = spec, [], Context()
        self.embed = model.get_submodule(kind.embed)
        self.final = nn.ModuleDict({name: model.get_submodule(path) for name, path in kind.final.items()})
        outer = getattr(getattr(model, "encoder", None), "dropout", None)  # T5 drops before its units and after them
        self.outer = TokenDropout(outer.p if spec.as_trained and outer is not None else 0.0)
        self.answers = TokenDropout(getattr(said, "qa_dropout", 0.0) if spec.as_trained else 0.0)
        drop = getattr(said, "classifier_dropout", None) or getattr(said, kind.pooler_drops or "", 0.0)
        how = spec.dim, kind.pooler, drop if spec.as_trained else 0.0, spec.family == "roberta"
        self.pooler = Pooler(*how) if kind.pooler else None
        if kind.pooler_path:
            self.pooler.dense.load_state_dict(model.get_submodule(kind.pooler_path).state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embed inputs (K, B, *input_shape) -> z (K, B, T, d)."""
        if self.spec.reads == "images":
            return self.each_member(self.places, x, lambda x: (set_sizes_(self, self.spec), self.embed(x))[1])
        ids, two = x.long(), self.spec.streams == 2
        exporting = torch.compiler.is_exporting()  # a graph is of one length
        if ids.device.type == "cpu" and not two and not exporting:  # without what is padding in every row of the batch
            real = (ids != self.spec.padding).flatten(0, 1).any(0).nonzero()
            ids = ids[..., : 1 + int(real.max()) if len(real) else 1]

        def embed(ids: torch.Tensor) -> torch.Tensor:
            set_sizes_(self, self.spec)
            z = self.embed(ids) * (ids != self.spec.padding).unsqueeze(-1)
            return self.outer(torch.cat((z, self.embed(shift_right(ids, self.spec.padding))), 1) if two else z)

        return self.each_member(self.places, ids, embed)

    def each_member(self, places: Places, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Apply ``call`` to each member's x (B, ...) with its rows of the stacked tensors.

        Once to all if none is stacked.
        """
        stacked = [(own, leaf, p, p.unbind(0)) for own, leaf, dims in places if (p := own[leaf]).dim() > dims]
        context, out = self.context, []
        try:
            if not stacked:
                context.members = range(len(x))
                return call(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            for i in range(len(x)):
                context.members = range(i, i + 1)
                for own, leaf, _, rows in stacked:
                    own[leaf] = rows[i]
                out.append(call(x[i]))
        finally:
            context.members = None
            for own, leaf, p, _ in stacked:
                own[leaf] = p
        return torch.stack(out)


class Foreign(Backbone):
    """A model of transformers taken apart."""

    def __init__(self, spec: TokenSpec, model: nn.Module):
        if spec.as_trained:
            use_kit_dropout_(model, spec.kind)
        lists = [model.get_submodule(path) for path in spec.kind.blocks]
        super().__init__(spec, Stem(spec, model), (layer for layers in lists for layer in layers))
        self.context, self.of_stem = Context(), self.stem.places
        self.split = len(lists[0])  # where T5's decoder begins
        self.rotary = model.rotary_emb if spec.rotary else None
        name_axes_(self, spec)

    def axis(self, name: str, size: int) -> Axis:
        axis = head_axis(name, size, self.spec.heads)
        return replace(axis, permutable=False) if self.spec.rotary and name.endswith("/qk") else axis

    def init_(self, generator: torch.Generator, names: Container[str] | None = None) -> "Foreign":
        """Initialise all, or ``names``: matrices and tables N(0, 0.02), norms that scale nothing, biases 0."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                if names is not None and name not in names:
                    continue
                if p.dim() > 1:
                    p.normal_(0, 0.02, generator=generator)
                else:
                    p.fill_(0.0 if name.endswith("bias") else self.spec.kind.neutral)
        return self

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.stem.each_member(self._places(unit), z, partial(self.run_one, unit))
        return self.stem.each_member(self.of_stem, z, partial(self._seen, unit)), z if on == len(z) else z[:on]

    def _places(self, unit: int) -> Places:
        """Return the tensors that ``unit`` reads: of T5 also the first unit's positions, which all share."""
        first = 0 if unit < self.split else self.split
        shared = self.of_block[first] if self.spec.shares_heads and unit != first else []
        return [*self.of_block[unit], *shared, *self.of_stem]

    def run_one(self, unit: int, z: torch.Tensor) -> torch.Tensor:
        """Run ``unit`` on one model's z (B, T, d)."""
        block, kind = self.blocks[unit], self.spec.kind
        set_sizes_(block, self.spec, self.context.whole_heads)
        if self.spec.streams == 2:
            return self._t5_unit(unit, block, z)
        mask = None
        if self.spec.reads == "tokens":
            mask, z = score_bias(is_token(z), kind.causal, z.dtype), z * is_token(z).unsqueeze(-1)
        if not kind.rotary:
            return _tensor(block(z, mask)) * (1 if mask is None else is_token(z).unsqueeze(-1))
        at = torch.arange(z.shape[1], device=z.device)[None]
        out = block(z, attention_mask=mask, position_embeddings=self.rotary(z, position_ids=at), position_ids=at)
        return _tensor(out) * is_token(z).unsqueeze(-1)

    def _t5_unit(self, unit: int, block: nn.Module, z: torch.Tensor) -> torch.Tensor:
        """Run an encoder's or decoder's unit on z (B, 2T, d): the encoder's tokens, then the decoder's."""
        source, target = z.chunk(2, 1)
        real, t = is_token(source), source.shape[1]
        first = self.blocks[0 if unit < self.split else self.split].layer[0].SelfAttention
        bias = first.compute_bias(t, t, device=z.device)
        set_sizes_(self.stem, self.spec)
        if unit < self.split:
            source = _tensor(block(source, score_bias(real, False, z.dtype), bias))
            source = self.stem.outer(self.stem.final["encoder"](source)) if unit == self.split - 1 else source
            return torch.cat((source * real.unsqueeze(-1), target), 1)
        causal = score_bias(torch.ones_like(real), True, z.dtype)
        return torch.cat((source, _tensor(block(target, causal, bias, source, score_bias(real, False, z.dtype)))), 1)

    def last_tokens(self, unit: int, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens (B, T, d) that exits read of one model's z after ``unit``, and their mask."""
        tokens, real, final = z, is_token(z), self.stem.final
        if self.spec.streams == 2:
            source, target = z.chunk(2, 1)
            real, tokens = is_token(source), target if unit >= self.split else source
        if unit == self.spec.depth - 1 and len(final):
            tokens = self.stem.outer(final["decoder" if "decoder" in final else "encoder"](tokens))
        return tokens, real

    def _seen(self, unit: int, z: torch.Tensor) -> torch.Tensor:
        """Return what exits see of one model's z: (B, d), or (B, T, d) where they read all tokens."""
        set_sizes_(self.stem, self.spec)
        last = unit == self.spec.depth - 1
        tokens, real = self.last_tokens(unit, z)
        if self.reads_all:
            return (self.stem.answers(tokens) if last else tokens) * real.unsqueeze(-1)
        if self.spec.causal or self.spec.streams == 2:
            at = (real * torch.arange(real.shape[1], device=z.device)).amax(1)
            return tokens[torch.arange(len(tokens), device=z.device), at]
        return self.stem.pooler(tokens[:, 0]) if last and self.stem.pooler is not None else tokens[:, 0]

    @property
    def reads_all(self) -> bool:
        return self.__dict__.get("_reads_all", False)

    @reads_all.setter
    def reads_all(self, value: bool) -> None:
        self.__dict__["_reads_all"] = value
        self.stem.pooler = None if value else self.stem.pooler  # a pooler is of the class token


def _tensor(out) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


# --- what their layers are told before they run: their sizes, the names of their axes, what to drop


def set_sizes_(module: nn.Module, spec: TokenSpec, whole_heads: bool = False) -> None:
    """Set the sizes that the layers of ``module`` keep to those of the tensors in place: of norms and heads."""
    kind = spec.kind
    for m in module.modules():
        if isinstance(m, nn.LayerNorm):
            m.normalized_shape = tuple(m.weight.shape)
        elif hasattr(m, kind.head_width) and hasattr(m, kind.query):
            full = spec.head_dim or spec.dim // spec.heads
            width = full if whole_heads else getattr(m, kind.query).weight.shape[0] // spec.heads
            setattr(m, kind.head_width, width)
            if kind.scaled:
                m.scaling = width**-0.5


def use_kit_dropout_(model: nn.Module, kind) -> None:
    """Replace every dropout of ``model``, attention's too, by the kit's at its own rate."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(DROPPING, attend_with_dropout)
    AttentionMaskInterface.register(DROPPING, sdpa_mask)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(m, name, TokenDropout(child.p))
        if hasattr(m, kind.query):
            rate = next(r for name in ("attention_dropout", "dropout") if (r := getattr(m, name, None)) is not None)
            m.drop = rate if isinstance(rate, nn.Module) else TokenDropout(rate)
            m.config._attn_implementation = DROPPING


def attend_with_dropout(module, query, key, value, attention_mask, scaling=None, position_bias=None, **unused):
    """Attend, (B, heads, T, d), dropping probabilities by ``module.drop``.

    Without dropout by transformers' own code.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    context = module.drop.context
    if not module.drop.p or not context.training or context.generators is None:
        told = {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **told)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    scores = sum((x for x in (position_bias, attention_mask) if x is not None), scores)
    return (module.drop(scores.softmax(-1)) @ value).transpose(1, 2), None


def name_axes_(backbone: nn.Module, spec: TokenSpec) -> None:
    """Give every layer with parameters the names of its axes; ``ValueError`` for one that the family does not know."""
    kind, whole = spec.kind, ("/qk", "/vo") if spec.grouped else ()
    for path, m in backbone.named_modules():
        leaves = [leaf for leaf, p in m._parameters.items() if p is not None]
        if not leaves or hasattr(m, "axes"):
            continue
        known = [key for key in kind.axes if path == key or path.endswith(f".{key}")]
        if not known:
            raise ValueError(f"foreign: {kind.model} has a layer {path!r} whose axes are not known")
        axes = tuple(None if axis in whole else axis for axis in kind.axes[max(known, key=len)])
        m.axes = {leaf: axes[: m._parameters[leaf].dim()] for leaf in leaves}


def score_bias(real: torch.Tensor, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to attention's scores: (B, 1, 1, T), or (B, 1, T, T) if ``causal``."""
    allowed = real[:, None, None]
    if causal:
        t = real.shape[1]
        allowed = allowed & torch.ones(t, t, dtype=torch.bool, device=real.device).tril()
    return torch.zeros(allowed.shape, dtype=dtype, device=real.device).masked_fill(~allowed, torch.finfo(dtype).min)
