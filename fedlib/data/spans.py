"""Extractive questions in SQuAD's layout: rows [CLS] question [SEP] context [SEP], labels (first, last) token.

A question without an answer (SQuAD 2.0) points to [CLS], (0, 0). Of several answers the first is the label.

Deviations: a context that is longer than the network's input is cut, not read in overlapping windows. An answer that
was cut off has the label (``IGNORED``, ``IGNORED``): it teaches nothing, and no prediction is right.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .tasks import IGNORED
from .tokenizer import words_of

SPAN_LENGTH = 384  # tokens where no network is named; 21 of XQuAD's 1,190 rows are longer


def read_spans(
    columns: Sequence[Sequence[str]],
    answers: Sequence[Mapping],
    length: int,
    where: Callable[[int], str],
    source: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(token ids int32 (N, length), spans int64 (N, 2)) of (questions, contexts) and their answers.

    An answer is ``{"text": [...], "answer_start": [...]}``; ``ValueError`` names the row (``where(i)``) of one that its
    context does not hold.
    """
    questions, contexts = columns
    encoded = words_of(source).encoder(length).encode_batch(list(zip(questions, contexts, strict=True)))
    spans = np.zeros((len(encoded), 2), np.int64)
    for i, (e, context, answer) in enumerate(zip(encoded, contexts, answers, strict=True)):
        if not answer["text"]:
            continue
        text, start = answer["text"][0], answer["answer_start"][0]
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise ValueError(f"{where(i)}: the context does not hold the answer {text[:80]!r} at character {start}")
        spans[i] = _token_span(e, start, start + len(text), len(context.rstrip()))
    return np.array([e.ids for e in encoded], np.int32).reshape(-1, length), spans


def _token_span(encoding, start: int, end: int, context_end: int) -> tuple[int, int]:
    """First and last token of the context that overlap characters [start, end); ``IGNORED`` twice where cut off."""
    tokens = [(t, o) for t, (s, o) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True)) if s == 1]
    inside = [t for t, (a, b) in tokens if a < end and b > start]
    seen = tokens[-1][1][1] if tokens else 0  # the context was read up to this character
    if not inside or seen < min(end, context_end):
        return IGNORED, IGNORED
    return inside[0], inside[-1]
