"""Two sentences in one row of token ids: [CLS] first [SEP] second [SEP], zeros (MRPC, STS-B).

Where a pair is too long for the network, the longer sentence is cut first, so both are always seen. That is why pairs
are cut when they are read, to the network's length. BERT's second token type is not kept: a network that wants it adds
it after the first [SEP].
"""

from collections.abc import Sequence

import numpy as np

from .text import wordpiece

PAIR_LENGTH = 128  # tokens where no network is named: MRPC's and STS-B's longest pairs have 103 and 125


def tokenise_pairs(first: Sequence[str], second: Sequence[str], length: int) -> np.ndarray:
    """Token ids int32 (N, length)."""
    tokenizer = wordpiece(length)
    pairs = list(zip(first, second, strict=True))
    return np.array([e.ids for e in tokenizer.encode_batch(pairs)], np.int32).reshape(-1, length)
