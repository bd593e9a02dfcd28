"""The families of transformers' models that can be run unit by unit: where their parts are, and the axis of each layer.

A layer is named by the end of its path; its axes are (out, in) as in ``layers/linear.py``. Norms and embeddings lie on
the residual stream. Nothing of these models is written again: ``foreign.py`` runs their own layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Axes = tuple[str | None, ...]
QK, VO, OUT = ("/qk", "residual"), ("/vo", "residual"), ("residual", "/vo")
UP, DOWN = ("/ffn", "residual"), ("residual", "/ffn")
TABLE, IMAGE = (None, "residual"), (None, None, "residual")


@dataclass(frozen=True)
class Family:
    """One family. Paths are those inside its model class, ``config`` turns a ``ForeignSpec`` into its keywords."""

    model: str  # class in transformers
    config: Callable[[object], dict]
    stem: Mapping[str, str]  # own name -> path of what embeds
    blocks: tuple[str, ...]  # paths of the lists of layers, in the order in which they run
    axes: Mapping[str, Axes]  # by the end of a layer's path
    head_width: str  # the attention's attribute
    query: str  # the attention's layer of queries
    final: Mapping[str, str] = field(default_factory=dict)  # norms after the last layer, by list of layers
    pooler: str | None = None  # activation of a dense layer on the class token, after the last layer
    pooler_path: str | None = None  # where a checkpoint has that layer
    targets: tuple[str, ...] = ()  # what LoRA adapts
    causal: bool = False  # does a token see only those before it?
    rotary: bool = False
    scaled: bool = True  # are scores divided by the root of the head's width?
    shares_heads: bool = False  # do layers share tensors per head (T5's positions)?


def _bert(s) -> dict:
    return dict(
        vocab_size=s.vocab_size, hidden_size=s.dim, num_hidden_layers=s.depth, num_attention_heads=s.heads,
        intermediate_size=s.ffn_dim, max_position_embeddings=s.positions, pad_token_id=s.padding,
    )  # fmt: skip


def _roberta(s) -> dict:
    return _bert(s) | dict(type_vocab_size=1, layer_norm_eps=1e-5, bos_token_id=0, eos_token_id=2)


def _distilbert(s) -> dict:
    return dict(
        vocab_size=s.vocab_size, dim=s.dim, n_layers=s.depth, n_heads=s.heads, hidden_dim=s.ffn_dim,
        max_position_embeddings=s.positions, pad_token_id=s.padding,
    )  # fmt: skip


def _t5(s) -> dict:
    return dict(
        vocab_size=s.vocab_size, d_model=s.dim, d_kv=s.head_dim or s.dim // s.heads, d_ff=s.ffn_dim,
        num_layers=s.depth // 2, num_decoder_layers=s.depth - s.depth // 2, num_heads=s.heads,
        feed_forward_proj="gated-gelu", pad_token_id=s.padding, decoder_start_token_id=s.padding,
        tie_word_embeddings=False,
    )  # fmt: skip


def _vit(s) -> dict:
    return dict(
        hidden_size=s.dim, num_hidden_layers=s.depth, num_attention_heads=s.heads, intermediate_size=s.ffn_dim,
        image_size=s.img_size, patch_size=s.patch_size,
    )  # fmt: skip


def _llama(s) -> dict:
    return dict(
        vocab_size=s.vocab_size, hidden_size=s.dim, num_hidden_layers=s.depth, num_attention_heads=s.heads,
        num_key_value_heads=s.heads, intermediate_size=s.ffn_dim, max_position_embeddings=s.positions,
        pad_token_id=s.padding, rms_norm_eps=1e-5,
    )  # fmt: skip


BERT_LAYER = {
    "self.query": QK, "self.key": QK, "self.value": VO, "attention.output.dense": OUT,
    "intermediate.dense": UP, "output.dense": DOWN, "LayerNorm": ("residual",), "word_embeddings": TABLE,
    "position_embeddings": TABLE, "token_type_embeddings": TABLE,
}  # fmt: skip
PROJECTIONS = {"q_proj": QK, "k_proj": QK, "v_proj": VO, "o_proj": OUT}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "BertModel", _bert, {"embed": "embeddings"}, ("encoder.layer",), BERT_LAYER, "attention_head_size", "query",
        pooler="tanh", pooler_path="pooler.dense", targets=("query", "value"),
    ),
    "roberta": Family(
        "RobertaModel", _roberta,
        {"embed": "embeddings"}, ("encoder.layer",), BERT_LAYER, "attention_head_size", "query",
        pooler="tanh", targets=("query", "value"),
    ),
    "distilbert": Family(
        "DistilBertModel", _distilbert, {"embed": "embeddings"}, ("transformer.layer",),
        {
            "q_lin": QK, "k_lin": QK, "v_lin": VO, "out_lin": OUT, "lin1": UP, "lin2": DOWN,
            "sa_layer_norm": ("residual",), "output_layer_norm": ("residual",), "LayerNorm": ("residual",),
            "word_embeddings": TABLE, "position_embeddings": TABLE,
        },
        "attention_head_size", "q_lin", pooler="relu", targets=("q_lin", "v_lin"),
    ),
    "t5": Family(
        "T5Model", _t5, {"embed": "shared"}, ("encoder.block", "decoder.block"),
        {
            "SelfAttention.q": QK, "SelfAttention.k": QK, "SelfAttention.v": VO, "SelfAttention.o": OUT,
            "EncDecAttention.q": ("/cross/qk", "residual"), "EncDecAttention.k": ("/cross/qk", "residual"),
            "EncDecAttention.v": ("/cross/vo", "residual"), "EncDecAttention.o": ("residual", "/cross/vo"),
            "wi_0": UP, "wi_1": UP, "wo": DOWN, "layer_norm": ("residual",), "embed": TABLE,
            "relative_attention_bias": (None, None), "encoder": ("residual",), "decoder": ("residual",),
        },
        "key_value_proj_dim", "q", final={"encoder": "encoder.final_layer_norm", "decoder": "decoder.final_layer_norm"},
        targets=("q", "v"), scaled=False, shares_heads=True,
    ),
    "vit": Family(
        "ViTModel", _vit, {"embed": "embeddings"}, ("layers",),
        PROJECTIONS | {
            "fc1": UP, "fc2": DOWN, "layernorm_before": ("residual",), "layernorm_after": ("residual",),
            "projection": ("residual", None, None, None), "embed": IMAGE, "encoder": ("residual",),
        },
        "head_dim", "q_proj", final={"encoder": "layernorm"}, targets=("q_proj", "v_proj"),
    ),
    "llama": Family(
        "LlamaModel", _llama, {"embed": "embed_tokens"}, ("layers",),
        PROJECTIONS | {
            "gate_proj": UP, "up_proj": UP, "down_proj": DOWN, "input_layernorm": ("residual",),
            "post_attention_layernorm": ("residual",), "embed": TABLE, "encoder": ("residual",),
        },
        "head_dim", "q_proj", final={"encoder": "norm"}, targets=("q_proj", "v_proj"), causal=True, rotary=True,
    ),
}  # fmt: skip
