"""Shapes of transformers' models, by hand or read off a checkpoint's folder, and those that the papers use, by name.

``foreign_families.yaml`` says where their parts are. Read next: ``foreign.py`` (what runs them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Self

from fedlib.core.tables import read_table
from fedlib.core.validation import check_known, shown
from fedlib.data.tokenizer import load_tokenizer
from fedlib.models.backbone import TokenSpec, shapes

from .foreign import Foreign
from .foreign_loading import build_model, read_object


@dataclass(frozen=True)
class Family:
    """A family of transformers' models that can be run unit by unit. Paths are inside its model class."""

    model: str  # class in transformers
    sizes: Mapping[str, str]  # field of ``ForeignSpec`` -> key of config.json
    embed: str  # path of what embeds
    blocks: tuple[str, ...]  # paths of the lists of layers, in the order in which they run
    axes: Mapping[str, tuple[str | None, ...]]  # by the end of a layer's path
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
    asked: Mapping[str, object] = field(default_factory=dict)  # keywords of the model's class

    def config(self, spec) -> dict:
        """Return ``spec`` as keywords of the family's class of configurations."""
        whole = {"head_dim": spec.dim // spec.heads, "kv_heads": spec.heads}
        out = {key: whole.get(name) if (v := getattr(spec, name)) is None else v for name, key in self.sizes.items()}
        if len(self.blocks) == 2:  # an encoder and a decoder
            out |= {"num_layers": spec.depth // 2, "num_decoder_layers": spec.depth - spec.depth // 2}
        return out | dict(self.constants)

    def sizes_in(self, config: Mapping[str, object]) -> dict[str, object]:
        """Read the fields of ``ForeignSpec`` from a ``config.json``; ``ValueError`` names a key that is no size."""
        may = {"head_dim", "kv_heads", *(["padding"] if self.causal else [])}  # of which their family or tokenizer says
        lacking = [key for name, key in self.sizes.items() if name not in may and config.get(key) is None]
        if lacking:
            raise ValueError(f"config.json of a {config.get('model_type')} lacks {', '.join(lacking)}")
        for key in (*self.sizes.values(), "num_decoder_layers"):
            size, layers, pads = config.get(key), key in (self.sizes["depth"], "num_decoder_layers"), "pad" in key
            least, most = int(not pads), 1000 if layers else 2**31 - 1
            if size is not None and (type(size) is not int or not least <= size <= most) and not (pads and self.causal):
                says = f"config.json of a {config.get('model_type')} says {key} = {shown(size)}"
                raise ValueError(f"{says}; allowed: a whole number from {least} to {most}")
        found: dict = {name: config.get(key) for name, key in self.sizes.items()}
        if len(self.blocks) == 2:
            found["depth"] = found["depth"] + (config.get("num_decoder_layers") or found["depth"])
        return found


FAMILIES = {
    name: Family(**said) for name, said in read_table(Path(__file__).with_name("foreign_families.yaml")).items()
}


@dataclass(frozen=True)
class ForeignSpec(TokenSpec):
    """Family, source and shape of a model of transformers; sizes in tokens (pixels of images) and features.

    :meth:`of` reads them off a checkpoint's folder. ``as_trained``: fine-tuned with the dropout of the checkpoint's
    config, images as its preprocessor normalised them; else without dropout, images by the data's own mean and SD.
    """

    family: str
    source: str | None = None  # of its weights: a repository of the hub, or a folder; None: there are none
    length: int = 128  # tokens of a row; longer ones are cut
    positions: int = 512
    vocab_size: int = 30_522
    dim: int = 768
    depth: int = 12  # units; of T5 the encoder's, then as many of the decoder
    heads: int = 12
    ffn_dim: int = 3072
    head_dim: int | None = None  # None: dim / heads
    kv_heads: int | None = None  # heads of keys and values, each shared by a group of heads; None: one a head
    padding: int | None = 0  # the token id that fills short rows
    img_size: int = 224
    patch_size: int = 16
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and SD of its images' channels in training
    own_words: bool = False  # is its tokenizer its own, though the family's is MiniLM's?
    as_trained: bool = True
    tuners: ClassVar[tuple[str, ...]] = ("lora",)
    hands_back: ClassVar[bool] = False  # exits cannot put another token in place of the one that they read
    ends_normalised: ClassVar[bool] = True  # by the family's own pooler or norm
    kind = property(lambda self: FAMILIES[self.family])
    reads = property(lambda self: "images" if self.family == "vit" else "tokens")
    causal, rotary = property(attrgetter("kind.causal")), property(attrgetter("kind.rotary"))
    shares_heads, peft_targets = property(attrgetter("kind.shares_heads")), property(attrgetter("kind.targets"))

    def __post_init__(self):
        check_known([self.family], FAMILIES, "foreign: family = {} is unknown")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"foreign: dim = {self.dim} does not divide among heads = {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"foreign: heads = {self.heads} are no equal groups for kv_heads = {self.kv_heads}")
        if self.reads == "tokens" and self.padding is None:
            why = f"foreign: {self.source or self.family} has no pad token, so rows of unequal length"
            raise ValueError(f"{why} cannot be read together; name one (pad_token_id in its config.json)")
        if self.reads == "tokens" and self.length > self.usable:
            raise ValueError(f"foreign: length = {self.length} exceeds the {self.usable} positions of the model")

    @classmethod
    def of(cls, folder: Path, length: int | None = None) -> Self:
        """Read the spec from a checkpoint's ``folder`` and its ``config.json``; by default 128 tokens, or all it has.

        ``ValueError`` for a kind of model that is not known here, for keys that are missing, and where nothing says
        what words mean.
        """
        config = read_object(folder / "config.json")
        family = str(config.get("model_type"))
        check_known([family], FAMILIES, f"{folder}: model_type = {{}} is unknown")
        found: dict = {"family": family, "source": str(folder)} | FAMILIES[family].sizes_in(config)
        if family == "vit":
            seen = read_object(folder / "preprocessor_config.json")
            mean, sd = (_three_channels(folder, key, seen.get(key, (0.5,) * 3)) for key in ("image_mean", "image_std"))
            return cls(**found, pixels=(mean, sd) if seen.get("do_normalize", True) else ((0.0,) * 3, (1.0,) * 3))
        own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
        if not own and found["vocab_size"] != cls.vocab_size:
            raise ValueError(f"{folder} holds no tokenizer, and its {found['vocab_size']} words are not BERT's")
        if own and FAMILIES[family].causal:  # whose padding no layer knows of
            found["padding"] = load_tokenizer(str(folder), download=False).padding
        spec = cls(**found, length=1, own_words=own)
        return replace(spec, length=length or min(cls.length, spec.usable))

    def build(self) -> Foreign:
        """Build a backbone of this shape, without weights."""
        return Foreign(self, build_model(self))

    def check_config(self, config: Mapping[str, object]) -> None:
        """Raise ``ValueError`` if the ``config.json`` of its weights says otherwise, or asks for what is not built."""
        of, causal = f"foreign: the config.json of {self.source!r} says", self.kind.causal
        if config.get("model_type") != self.family:
            why = f"{of} model_type = {config.get('model_type')!r},"
            raise ValueError(f"{why} and family = {self.family!r} is asked for")
        whole = {"head_dim": self.dim // self.heads, "kv_heads": self.heads}
        for name, there in self.kind.sizes_in(config).items():
            here = getattr(self, name)
            here, there = (whole.get(name) if x is None else x for x in (here, there))
            if here != there and not (name == "padding" and causal):
                raise ValueError(f"{of} {self.kind.sizes[name]} = {there}, and {name} = {here} is asked for")
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if window and self.length > window:
            raise ValueError(f"{of} sliding_window = {window}, which length = {self.length} exceeds")

    @property
    def usable(self) -> int:
        """Tokens that have a position: RoBERTa never uses the first ones."""
        return self.positions - (self.padding + 1 if self.family == "roberta" else 0)

    @property
    def tokenizer(self) -> str | None:
        """What its words come from: its source; None: MiniLM's tokenizer, which BERT and DistilBERT share."""
        return None if self.family in ("bert", "distilbert", "vit") and not self.own_words else self.source

    @property
    def grouped(self) -> bool:
        """Do heads share keys and values? Then attention is never cut."""
        return self.kv_heads is not None and self.kv_heads < self.heads

    @property
    def num_patches(self) -> int:
        """Tokens beside the first."""
        return (self.img_size // self.patch_size) ** 2 if self.reads == "images" else self.length - 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.img_size, self.img_size) if self.reads == "images" else (self.length,)

    @property
    def streams(self) -> int:
        """Sequences in the state: T5 has two."""
        return len(self.kind.blocks)


def _three_channels(folder: Path, key: str, found: object) -> tuple[float, ...]:
    """Return the mean or SD of three channels; ``ValueError`` for what can be neither."""
    if isinstance(found, (list, tuple)) and len(found) == 3 and all(type(x) in (int, float) for x in found):
        if all(x > 0 if key == "image_std" else x == x for x in found):
            return tuple(found)
    said = f"{folder}/preprocessor_config.json says {key} = {shown(found)}"
    raise ValueError(f"{said}; allowed: three numbers, of image_std above 0")


FOREIGN: dict[str, ForeignSpec] = shapes(ForeignSpec)
FOREIGN |= {f"{name}.plain": replace(s, as_trained=False) for name, s in FOREIGN.items() if s.source}
FOREIGN |= {f"{name}.384": replace(s, length=384) for name, s in FOREIGN.items() if s.source and s.reads == "tokens"}
