"""Two sentences in one row of token ids, marked as their tokenizer marks them (MRPC, STS-B).

BERT's: [CLS] first [SEP] second [SEP], zeros. RoBERTa's: <s> first </s></s> second </s>. T5's: first </s> second </s>.

Where a pair is too long for the network, the longer sentence is cut first, so both are always seen. That is why pairs
are cut when they are read, to the network's length. BERT's second token type is not kept: a network that wants it adds
it after the first [SEP].
"""

from collections.abc import Sequence

import numpy as np

from .tokenizer import words_of

PAIR_LENGTH = 128  # tokens where no network is named: MRPC's and STS-B's longest pairs have 103 and 125


def tokenise_pairs(first: Sequence[str], second: Sequence[str], length: int, source: str | None = None) -> np.ndarray:
    """Token ids int32 (N, length)."""
    encoded = words_of(source).encoder(length).encode_batch(list(zip(first, second, strict=True)))
    return np.array([e.ids for e in encoded], np.int32).reshape(-1, length)
