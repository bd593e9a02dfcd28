"""Extractive questions in SQuAD's layout: rows [CLS] question [SEP] context [SEP], labels (first, last) token.

A question without an answer (SQuAD 2.0) points to the row's first token, (0, 0). Of several answers the first is the
label, and all of them are what predictions are compared with, as text (``answers.py``).

Deviations: a context that is longer than the network's input is cut, not read in overlapping windows. An answer that
was cut off has the label (``IGNORED``, ``IGNORED``): it teaches nothing, and is hardly ever found.
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token ids int32 (N, length), spans int64 (N, 2), offsets (N, length, 2)) of (questions, contexts) and answers.

    An answer is ``{"text": [...], "answer_start": [...]}``; ``ValueError`` names the row (``where(i)``) of one that its
    context does not hold. Offsets are the context's characters of each token, -1 of a token that is not of the context.
    """
    questions, contexts = columns
    encoded = words_of(source).encoder(length).encode_batch(list(zip(questions, contexts, strict=True)))
    spans = np.zeros((len(encoded), 2), np.int64)
    offsets = np.full((len(encoded), length, 2), -1, np.int32)
    for i, (e, context, answer) in enumerate(zip(encoded, contexts, answers, strict=True)):
        inside = np.array([s == 1 for s in e.sequence_ids])
        offsets[i, inside] = np.array(e.offsets)[inside]
        if not answer["text"]:
            continue
        text, start = answer["text"][0], answer["answer_start"][0]
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise ValueError(f"{where(i)}: the context does not hold the answer {text[:80]!r} at character {start}")
        spans[i] = _token_span(offsets[i], start, start + len(text), len(context.rstrip()))
    return np.array([e.ids for e in encoded], np.int32).reshape(-1, length), spans, offsets


def _token_span(offsets: np.ndarray, start: int, end: int, context_end: int) -> tuple[int, int]:
    """First and last token of the context that overlap characters [start, end); ``IGNORED`` twice where cut off."""
    inside = np.flatnonzero((offsets[:, 0] >= 0) & (offsets[:, 0] < end) & (offsets[:, 1] > start))
    if not len(inside) or offsets.max() < min(end, context_end):  # the context was read up to its largest offset
        return IGNORED, IGNORED
    return inside[0], inside[-1]
