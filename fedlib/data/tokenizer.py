"""Tokenizers: BERT's WordPiece as MiniLM ships it, or that of a model on the hub or in a folder, read by transformers.

BERT and DistilBERT share one vocabulary with MiniLM, so their words come from the package at hand. RoBERTa, FLAN-T5 and
LLaMA have their own (``ForeignSpec.tokenizer``): byte-level or sentence pieces, each with its own marks around one text
or two. Token ids of one mean nothing to another, so caches and digests tell them apart.

Two texts in one row are marked as their tokenizer marks them. BERT's: [CLS] first [SEP] second [SEP], zeros. RoBERTa's:
<s> first </s></s> second </s>. T5's: first </s> second </s>. Where a pair is too long for the network, the longer text
is cut first, so both are always seen: that is why pairs are cut when they are read, to the network's length. BERT's
second token type is not kept: a network that wants it adds it after the first [SEP].

A tokenizer without a pad token (LLaMA's) fills short rows with its end token. A network masks that id wherever it
stands: the end of an answer is then predicted, and never read.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from ..core.hub import fail_fast, unreadable_error
from ..core.paths import minilm_file

LENGTH = 64  # tokens, [CLS] and [SEP] included; longer sentences are cut (SST-2: 1 in 13,000, AG News: 1 in 15)
PAIR_LENGTH = 128  # of two texts, where no network is named: MRPC's and STS-B's longest have 103 and 125

AT_ONCE = 1024  # rows
LONGER = "a backbone of more tokens (as minilm.128 or bert_base.384 say) reads more"
OWN_WORDS = "a backbone with a tokenizer of its own (as roberta_base.256) reads as many as its name says"


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as JSON, and the token ids that mark rows."""

    json: str
    pad_token: str
    begin: tuple[int, ...]  # before a text
    between: tuple[int, ...]  # between a question and its answer
    end: int  # of an answer

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()[:16]

    @cached_property
    def padding(self) -> int:
        """The token id that fills short rows."""
        return self.encoder().token_to_id(self.pad_token)

    @cached_property
    def rows(self) -> int:
        """How many rows a table needs that has one for every token id."""
        return 1 + max(self.encoder().get_vocab().values())

    def encoder(self, length: int | None = None):
        """Build the encoder; rows are cut and padded to ``length`` tokens, or neither."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if length is not None:
            tokenizer.enable_truncation(length)
            tokenizer.enable_padding(length=length, pad_id=self.padding, pad_token=self.pad_token)
        return tokenizer


def load_tokenizer(source: str | None, download: bool = True) -> TokenizerSpec:
    """Load the tokenizer of ``source``, a repository of the hub or a folder; None: MiniLM's.

    Raises ``ConnectionError`` if it is neither at hand nor, with ``download``, to be had, ``ImportError`` if the
    package that reads it is absent, and ``ValueError`` for one that has nothing to fill rows with, that is damaged, or
    that asks to run code of its own.
    """
    return _wordpiece(minilm_file("tokenizer.json")) if source is None else _published(source, download)


def has_tokenizer(source: str | None) -> bool:
    """Return whether ``source`` can be read without a download."""
    try:
        load_tokenizer(source, download=False)
    except (ConnectionError, ImportError, ValueError):
        return False
    return True


@lru_cache(maxsize=1)
def _wordpiece(file: Path) -> TokenizerSpec:
    json = file.read_bytes().decode()
    words = TokenizerSpec(json, "[PAD]", (), (), 0)
    begin, end = (words.encoder().token_to_id(t) for t in ("[CLS]", "[SEP]"))
    return TokenizerSpec(json, "[PAD]", (begin,), (end,), end)


@lru_cache(maxsize=8)
def _published(source: str, download: bool) -> TokenizerSpec:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        how = "pip install 'fedlib-kit[foreign]'"
        raise ImportError(f"the tokenizer of {source!r} needs transformers: {how}") from error
    try:
        with fail_fast() if download else nullcontext():
            read = AutoTokenizer.from_pretrained(source, local_files_only=not download, trust_remote_code=False)
        json = read.backend_tokenizer.to_str()
    except Exception as error:  # huggingface_hub and transformers raise many classes
        raise unreadable_error("the tokenizer", source, error, "connect once, or name a folder with a copy") from error
    if (pad := read.pad_token or read.eos_token) is None:
        why = "has neither a pad token nor an end token, so rows of unequal length cannot be read together"
        raise ValueError(f"the tokenizer of {source!r} {why}: name one (pad_token in its tokenizer_config.json)")
    begin = next((i for i in (read.cls_token_id, read.bos_token_id) if i is not None), None)
    end = next(i for i in (read.eos_token_id, read.sep_token_id, read.pad_token_id) if i is not None)
    newline = read.backend_tokenizer.encode("\n", add_special_tokens=False).ids
    between = newline if read.sep_token_id is None else [read.sep_token_id]
    return TokenizerSpec(json, pad, () if begin is None else (begin,), tuple(between), end)


def tokenise(
    rows: Sequence[str | tuple[str, str]], source: str | None = None, length: int = LENGTH, cut: list | None = None
) -> np.ndarray:
    """Encode texts or pairs as token ids int32 (N, length): their words, the marks around them, padding."""
    ids = np.empty((len(rows), length), np.int32)
    for i, e in enumerate(encode_rows(rows, source, length, cut)):
        ids[i] = e.ids
    return ids


def encode_rows(
    rows: Sequence[str | tuple[str, str]], source: str | None, length: int, cut: list | None = None
) -> Iterator:  # fmt: skip
    """Yield the `tokenizers` encoding of each row; whether it was too long is appended to ``cut``.

    It is a hundred times larger than the ids, so ``AT_ONCE`` are held.
    """
    encoder = load_tokenizer(source).encoder(length)
    for a in range(0, len(rows), AT_ONCE):
        for e in encoder.encode_batch(list(rows[a : a + AT_ONCE])):
            if cut is not None:
                cut.append(bool(e.overflowing))
            yield e


def warn_cut(where: str, cut: Sequence[bool], length: int, more: str) -> None:
    """Warn of texts that are ``cut`` to ``length`` tokens; ``more`` says what reads more of them."""
    if n := sum(cut):
        told = f"{where}: {n} of {len(cut)} texts are longer than {length} tokens and are cut"
        warnings.warn(f"{told}; {more}", stacklevel=2)


def tokenizer_key(source: str | None = None) -> dict:
    """Return what token ids depend on besides the texts and a network's length, for the cache."""
    return {"tokenizer": load_tokenizer(source).digest} | ({"length": LENGTH} if source is None else {})
