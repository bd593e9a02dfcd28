"""Answers as text: what the spans of a question's tokens say, beside what people answered (SQuAD).

Predictions are positions, people compare words: "the Panthers" and "Panthers" are one answer. So a set of questions
comes with an :class:`AnswerKey`, and each label with its row in the key. Read next: ``spans.py``, ``metrics.py``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .metrics import answer_scores

KEYED = {"answers": "text"}  # says of cached questions that their key lies beside them


@dataclass(frozen=True)
class AnswerKey:
    """Contexts, answers and tokens' places of N questions."""

    contexts: Sequence[str]  # each once
    context_of: Sequence[int]  # (N,)
    answers: Sequence[Sequence[str]]  # of each question all that people gave; none: it cannot be answered
    offsets: torch.Tensor  # (N, T, 2) first character of each token in the context and the one after its last; or -1

    def texts(self, spans: torch.Tensor, rows: torch.Tensor) -> list[str]:
        """What spans (n, 2) of the questions ``rows`` (n,) say; nothing where an end lies outside the context."""
        rows, ends = rows.cpu(), spans.cpu().clamp(max=self.offsets.shape[1] - 1)
        start, stop = self.offsets[rows, ends[:, 0], 0].tolist(), self.offsets[rows, ends[:, 1], 1].tolist()
        found = (self.contexts[self.context_of[i]] for i in rows.tolist())
        return [c[a:b] if min(a, b) >= 0 else "" for c, a, b in zip(found, start, stop, strict=True)]

    def scores(self, spans: torch.Tensor, rows: torch.Tensor, unanswerable: bool) -> dict[str, float]:
        """``metrics.answer_scores`` of spans (n, 2)."""
        return answer_scores(self.texts(spans, rows), [self.answers[i] for i in rows.tolist()], unanswerable)

    def pack(self) -> dict[str, torch.Tensor]:
        """The key as tensors, to be kept beside the questions."""
        texts = {"contexts": self.contexts, "context_of": self.context_of, "answers": self.answers}
        written = np.frombuffer(json.dumps(texts).encode(), np.uint8).copy()
        return {"answer_texts": torch.from_numpy(written), "answer_offsets": self.offsets}


def answer_key(contexts: Sequence[str], answers: Sequence[Mapping], offsets: np.ndarray) -> AnswerKey:
    """The key of questions whose answers are ``{"text": [...], ...}``."""
    number = {c: i for i, c in enumerate(dict.fromkeys(contexts))}
    given = [list(a["text"]) for a in answers]
    return AnswerKey(list(number), [number[c] for c in contexts], given, torch.from_numpy(offsets))


def unpack(texts: torch.Tensor, offsets: torch.Tensor) -> AnswerKey:
    """Inverse of :meth:`AnswerKey.pack`."""
    return AnswerKey(**json.loads(texts.numpy().tobytes()), offsets=offsets)
