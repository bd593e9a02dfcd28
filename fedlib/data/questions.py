"""Extractive questions in SQuAD's layout: rows [CLS] question [SEP] context [SEP], labels (first, last) token.

A question without an answer (SQuAD 2.0) points to the row's first token, (0, 0). Of several answers the first is the
label. Predictions are positions, people compare words: "the Panthers" and "Panthers" are one answer. So a set of
questions comes with an :class:`AnswerKey` of all that people answered, and each label with its row in the key.
Read next: ``metrics.py``.

Deviations: a context that is longer than the network's input is cut, not read in overlapping windows. An answer that
was cut off has the label (``IGNORED``, ``IGNORED``): it teaches nothing, and is hardly ever found.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.validation import shown
from .metrics import IGNORED, answer_scores
from .tokenizer import encode_rows

KEYED = {"answers": "text"}  # says of cached questions that their key lies beside them
SPAN_LENGTH = 384  # tokens where no network is named; 21 of XQuAD's 1,190 rows are longer


def read_spans(
    columns: Sequence[Sequence[str]], answers: Sequence[Mapping], length: int, where: Callable[[int], str],
    source: str | None = None, cut: list | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Read (token ids int32 (N, length), spans int64 (N, 2), offsets (N, length, 2)) of questions with answers.

    An answer is ``{"text": [...], "answer_start": [...]}``; ``ValueError`` names the row (``where(i)``) of one that its
    context does not hold. Offsets are the context's characters of each token, -1 of a token that is not of the context.
    """
    questions, contexts = columns
    rows = list(zip(questions, contexts, strict=True))
    ids, spans = np.empty((len(rows), length), np.int32), np.zeros((len(rows), 2), np.int64)
    offsets = np.full((len(rows), length, 2), -1, np.int32)
    encoded = encode_rows(rows, source, length, cut)
    for i, (e, context, answer) in enumerate(zip(encoded, contexts, answers, strict=True)):
        ids[i] = e.ids
        inside = np.array([s == 1 for s in e.sequence_ids])
        offsets[i, inside] = np.array(e.offsets)[inside]
        if not _is_answer(answer):
            allowed = "{'text': [...], 'answer_start': [...]}, as many of each"
            raise ValueError(f"{where(i)}: {shown(answer)} is no answer; allowed: {allowed}")
        if not answer["text"]:
            continue
        text, start = answer["text"][0], answer["answer_start"][0]
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise ValueError(f"{where(i)}: the context does not hold the answer {text[:80]!r} at character {start}")
        spans[i] = _token_span(offsets[i], start, start + len(text), len(context.rstrip()))
    return ids, spans, offsets


def _is_answer(answer: object) -> bool:
    if not isinstance(answer, Mapping) or not {"text", "answer_start"} <= answer.keys():
        return False
    texts, starts = answer["text"], answer["answer_start"]
    lists = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    return lists and all(isinstance(t, str) for t in texts) and all(isinstance(s, int) for s in starts)


def _token_span(offsets: np.ndarray, start: int, end: int, context_end: int) -> tuple[int, int]:
    """Return the first and last token of the context that overlap characters [start, end).

    ``IGNORED`` twice if cut off.
    """
    inside = np.flatnonzero((offsets[:, 0] >= 0) & (offsets[:, 0] < end) & (offsets[:, 1] > start))
    if not len(inside) or offsets.max() < min(end, context_end):  # the context was read up to its largest offset
        return IGNORED, IGNORED
    return inside[0], inside[-1]


@dataclass(frozen=True)
class AnswerKey:
    """Contexts, answers and tokens' places of N questions."""

    contexts: Sequence[str]  # each once
    context_of: Sequence[int]  # (N,)
    answers: Sequence[Sequence[str]]  # of each question all that people gave; none: it cannot be answered
    offsets: torch.Tensor  # (N, T, 2) first character of each token in the context and the one after its last; or -1

    def texts(self, spans: torch.Tensor, rows: torch.Tensor) -> list[str]:
        """Return the text of spans (n, 2) of the questions ``rows`` (n,); "" where an end lies outside the context."""
        rows, ends = rows.cpu(), spans.cpu().clamp(max=self.offsets.shape[1] - 1)
        start, stop = self.offsets[rows, ends[:, 0], 0].tolist(), self.offsets[rows, ends[:, 1], 1].tolist()
        found = (self.contexts[self.context_of[i]] for i in rows.tolist())
        return [c[a:b] if min(a, b) >= 0 else "" for c, a, b in zip(found, start, stop, strict=True)]

    def scores(self, spans: torch.Tensor, rows: torch.Tensor, unanswerable: bool) -> dict[str, float]:
        """Score spans (n, 2) by ``metrics.answer_scores``."""
        return answer_scores(self.texts(spans, rows), [self.answers[i] for i in rows.tolist()], unanswerable)

    def pack(self) -> dict[str, torch.Tensor]:
        """Return the key as tensors, to be kept beside the questions."""
        texts = {"contexts": self.contexts, "context_of": self.context_of, "answers": self.answers}
        written = np.frombuffer(json.dumps(texts).encode(), np.uint8).copy()
        return {"answer_texts": torch.from_numpy(written), "answer_offsets": self.offsets}


def answer_key(contexts: Sequence[str], answers: Sequence[Mapping], offsets: np.ndarray) -> AnswerKey:
    """Build the key of questions whose answers are ``{"text": [...], ...}``."""
    number, given = {c: i for i, c in enumerate(dict.fromkeys(contexts))}, [list(a["text"]) for a in answers]
    return AnswerKey(list(number), [number[c] for c in contexts], given, torch.from_numpy(offsets))


def unpack(texts: torch.Tensor, offsets: torch.Tensor) -> AnswerKey:
    """Rebuild the key from the tensors of :meth:`AnswerKey.pack`."""
    return AnswerKey(**json.loads(texts.numpy().tobytes()), offsets=offsets)
