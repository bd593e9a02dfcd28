"""The families of transformers' models that can be run unit by unit: where their parts are, and the axis of each layer.

A layer is named by the end of its path; its axes are (out, in) as in ``layers/linear.py``. Norms and embeddings lie on
the residual stream. Nothing of these models is written again: ``foreign.py`` runs their own layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Axes = tuple[str | None, ...]
QK, VO, OUT = ("/qk", "residual"), ("/vo", "residual"), ("residual", "/vo")
UP, DOWN = ("/ffn", "residual"), ("residual", "/ffn")
TABLE, IMAGE = (None, "residual"), (None, None, "residual")


@dataclass(frozen=True)
class Family:
    """One family, under the name that ``config.json`` has for it (``model_type``). Paths are inside its model class."""

    model: str  # class in transformers
    sizes: Mapping[str, str]  # field of ``ForeignSpec`` -> key of config.json
    stem: Mapping[str, str]  # own name -> path of what embeds
    blocks: tuple[str, ...]  # paths of the lists of layers, in the order in which they run
    axes: Mapping[str, Axes]  # by the end of a layer's path
    head_width: str  # the attention's attribute
    query: str  # the attention's layer of queries
    final: Mapping[str, str] = field(default_factory=dict)  # norms after the last layer, by list of layers
    constants: Mapping[str, object] = field(default_factory=dict)  # further keys of a model without weights
    pooler: str | None = None  # activation of a dense layer on the class token, after the last layer
    pooler_path: str | None = None  # where a checkpoint has that layer
    pooler_drops: str | None = None  # the key that says how much of its output is dropped
    targets: tuple[str, ...] = ()  # what LoRA adapts
    causal: bool = False  # does a token see only those before it?
    rotary: bool = False
    scaled: bool = True  # are scores divided by the root of the head's width?
    shares_heads: bool = False  # do layers share tensors per head (T5's positions)?
    neutral: float = 1.0  # weight of a norm that scales nothing

    def config(self, spec) -> dict:
        """``spec`` as keywords of the family's class of configurations."""
        whole = {"head_dim": spec.dim // spec.heads, "kv_heads": spec.heads}
        out = {key: whole.get(name) if (v := getattr(spec, name)) is None else v for name, key in self.sizes.items()}
        if self.two:
            out |= {"num_layers": spec.depth // 2, "num_decoder_layers": spec.depth - spec.depth // 2}
        return out | dict(self.constants)

    @property
    def two(self) -> bool:
        """Has it an encoder and a decoder?"""
        return len(self.blocks) == 2

    def sizes_in(self, config: Mapping[str, object]) -> dict[str, object]:
        """The fields of ``ForeignSpec`` that a ``config.json`` says; ``ValueError`` names keys that it lacks."""
        may = {"head_dim", "kv_heads", *(["padding"] if self.causal else [])}  # of which their family or tokenizer says
        lacking = [key for name, key in self.sizes.items() if name not in may and config.get(key) is None]
        if lacking:
            raise ValueError(f"config.json of a {config.get('model_type')} lacks {', '.join(lacking)}")
        found = {name: config.get(key) for name, key in self.sizes.items()}
        if self.two:
            found["depth"] = found["depth"] + (config.get("num_decoder_layers") or found["depth"])
        return found


COMMON = {"vocab_size": "vocab_size", "padding": "pad_token_id"}
HIDDEN = {
    "dim": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads", "ffn_dim": "intermediate_size"
}  # fmt: skip
BERT_SIZES = COMMON | HIDDEN | {"positions": "max_position_embeddings"}
CAUSAL_SIZES = BERT_SIZES | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
BERT_LAYER = {
    "self.query": QK, "self.key": QK, "self.value": VO, "attention.output.dense": OUT,
    "intermediate.dense": UP, "output.dense": DOWN, "LayerNorm": ("residual",), "word_embeddings": TABLE,
    "position_embeddings": TABLE, "token_type_embeddings": TABLE,
}  # fmt: skip
PROJECTIONS = {"q_proj": QK, "k_proj": QK, "v_proj": VO, "o_proj": OUT}


def _causal(model: str, neutral: float = 1.0, **constants) -> Family:
    """LLaMA and what is built as it: rotated queries and keys, gated feed-forward layers, RMS norms."""
    norms = {name: ("residual",) for name in ("input_layernorm", "post_attention_layernorm", "encoder")}
    layers = PROJECTIONS | norms | {"gate_proj": UP, "up_proj": UP, "down_proj": DOWN, "embed": TABLE}
    return Family(
        model, CAUSAL_SIZES, {"embed": "embed_tokens"}, ("layers",), layers | {"q_norm": (None,), "k_norm": (None,)},
        "head_dim", "q_proj", final={"encoder": "norm"}, constants=constants, targets=("q_proj", "v_proj"), causal=True,
        rotary=True, neutral=neutral,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "bert": Family(
        "BertModel", BERT_SIZES,
        {"embed": "embeddings"}, ("encoder.layer",), BERT_LAYER, "attention_head_size", "query",
        pooler="tanh", pooler_path="pooler.dense", pooler_drops="hidden_dropout_prob", targets=("query", "value"),
    ),
    "roberta": Family(
        "RobertaModel", BERT_SIZES,
        {"embed": "embeddings"}, ("encoder.layer",), BERT_LAYER, "attention_head_size", "query",
        constants={"type_vocab_size": 1, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2},
        pooler="tanh", pooler_drops="hidden_dropout_prob", targets=("query", "value"),
    ),
    "distilbert": Family(
        "DistilBertModel",
        COMMON | {
            "dim": "dim", "depth": "n_layers", "heads": "n_heads", "ffn_dim": "hidden_dim",
            "positions": "max_position_embeddings",
        },
        {"embed": "embeddings"}, ("transformer.layer",),
        {
            "q_lin": QK, "k_lin": QK, "v_lin": VO, "out_lin": OUT, "lin1": UP, "lin2": DOWN,
            "sa_layer_norm": ("residual",), "output_layer_norm": ("residual",), "LayerNorm": ("residual",),
            "word_embeddings": TABLE, "position_embeddings": TABLE,
        },
        "attention_head_size", "q_lin", pooler="relu", pooler_drops="seq_classif_dropout", targets=("q_lin", "v_lin"),
    ),
    "t5": Family(
        "T5Model",
        COMMON | {"dim": "d_model", "depth": "num_layers", "heads": "num_heads", "ffn_dim": "d_ff", "head_dim": "d_kv"},
        {"embed": "shared"}, ("encoder.block", "decoder.block"),
        {
            "SelfAttention.q": QK, "SelfAttention.k": QK, "SelfAttention.v": VO, "SelfAttention.o": OUT,
            "EncDecAttention.q": ("/cross/qk", "residual"), "EncDecAttention.k": ("/cross/qk", "residual"),
            "EncDecAttention.v": ("/cross/vo", "residual"), "EncDecAttention.o": ("residual", "/cross/vo"),
            "wi_0": UP, "wi_1": UP, "wo": DOWN, "layer_norm": ("residual",), "embed": TABLE,
            "relative_attention_bias": (None, None), "encoder": ("residual",), "decoder": ("residual",),
        },
        "key_value_proj_dim", "q",
        constants={"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "tie_word_embeddings": False},
        final={"encoder": "encoder.final_layer_norm", "decoder": "decoder.final_layer_norm"},
        targets=("q", "v"), scaled=False, shares_heads=True,
    ),
    "vit": Family(
        "ViTModel", HIDDEN | {"img_size": "image_size", "patch_size": "patch_size"},
        {"embed": "embeddings"}, ("layers",),
        PROJECTIONS | {
            "fc1": UP, "fc2": DOWN, "layernorm_before": ("residual",), "layernorm_after": ("residual",),
            "projection": ("residual", None, None, None), "embed": IMAGE, "encoder": ("residual",),
        },
        "head_dim", "q_proj", final={"encoder": "layernorm"}, targets=("q_proj", "v_proj"),
    ),
    "llama": _causal("LlamaModel", rms_norm_eps=1e-5),
    "mistral": _causal("MistralModel"),
    "qwen2": _causal("Qwen2Model"),
    "qwen3": _causal("Qwen3Model"),
    "gemma": _causal("GemmaModel", neutral=0.0),
}  # fmt: skip
