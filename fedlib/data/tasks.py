"""What a network's outputs mean: a class, a number, a span, the next token; their loss, confidence and metrics.

Outputs are (..., *out), labels (..., *label); a leading dimension of outputs that labels lack (exits) is broadcast.

| task           | out             | label                                                                        |
| -------------- | --------------- | ---------------------------------------------------------------------------- |
| Classification | (classes,)      | () int64                                                                     |
| Regression     | (1,)            | () float                                                                     |
| Span           | (T, 2)          | (3,) int64: first and last token (IGNORED: cut off), row in the answer key   |
| NextToken      | (T, vocabulary) | (T,) int64: the token that follows; IGNORED in prompts and padding           |

Read next: ``metrics.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

from . import metrics
from .metrics import IGNORED
from .questions import AnswerKey

CORRELATIONS = ("matthews", "pearson")  # metrics in percent too, but down to -100


@runtime_checkable
class Task(Protocol):
    """What outputs mean. Unless a task says otherwise they tell classes apart, or the tokens of a vocabulary."""

    reads: Literal["class", "tokens"]  # do exits see the class token alone or every token?
    metric: str  # the headline, which tables read as ``accuracy``: in percent, larger is better, as all metrics are

    def outputs(self, num_classes: int) -> int:
        """Return the outputs of a head, per token if it reads tokens. ``num_classes``: of the data.

        A vocabulary's size.
        """
        return num_classes

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each example's loss: (E, K, B, *out), (K, B, *label) -> (E, K, B)."""

    def kl(
        self, teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return KL(teacher || student) of each example, (..., *out) -> (...), softened by ``temperature``.

        It is not multiplied by temperature^2. Gradients flow into both: detach the teacher. ``labels`` say which
        positions count; None: all.
        """

    def confidence(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the prediction's probability, for early leaving: (..., *out) -> (...).

        Tokens leave one by one, (..., T).
        """
        return outputs.softmax(-1).amax(-1)

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the answer, (..., *out) -> (..., *label). It is smaller than outputs: keep answers, batch by batch."""
        return outputs.argmax(-1)

    def finite(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return which outputs can be answered by, same shape: they are numbers, and a loss of the largest is one."""
        return outputs.isfinite() & outputs.amax(-1, keepdim=True).square().isfinite()

    def score(self, predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return the metrics of N predictions by name, the headline first; NaN where undefined (``metrics.py``).

        Raises ``ValueError`` if there is no prediction.
        """
        if not len(labels):
            raise ValueError(f"{type(self).__name__}: {self.metric} of no examples is undefined")
        return self._score(predictions, labels)

    def _score(self, predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]: ...

    def measure(self, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return the metrics by name of outputs (N, *out) and labels (N, *label): :meth:`score` of :meth:`predict`."""
        return self.score(self.predict(outputs), labels)


@dataclass(frozen=True)
class Classification(Task):
    """One of C classes. ``metrics``: the headline first."""

    metrics: tuple[Literal["accuracy", "f1", "macro_f1", "matthews"], ...] = ("accuracy",)
    reads: ClassVar = "class"

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy."""
        labels = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return -outputs.log_softmax(-1).gather(-1, labels).squeeze(-1)

    def kl(self, teacher, student, labels=None, temperature=1.0):
        return _kl(teacher, student, temperature)

    def _score(self, predictions, labels):
        return {name: getattr(metrics, name)(predictions, labels) for name in self.metrics}


@dataclass(frozen=True)
class Regression(Task):
    """A number (STS-B: similarity, 0 to 5)."""

    metric: ClassVar = "pearson"
    reads: ClassVar = "class"

    def outputs(self, num_classes: int) -> int:
        return 1

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the squared error."""
        return (outputs.squeeze(-1) - labels).square()

    def kl(self, teacher, student, labels=None, temperature=1.0):
        """Return the squared difference, (...): up to a factor the KL of two Gaussians of one variance."""
        if temperature != 1:
            raise ValueError(f"temperature = {temperature}: a regression has no classes to soften; allowed: 1")
        return (student - teacher).square().squeeze(-1)

    def confidence(self, outputs: torch.Tensor) -> torch.Tensor:
        raise ValueError("a regression has no probabilities: its examples cannot leave early by confidence")

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.squeeze(-1)

    def _score(self, predictions, labels):
        return {name: getattr(metrics, name)(predictions, labels) for name in ("pearson", "spearman")}


@dataclass(frozen=True)
class Span(Task):
    """A part of the input (SQuAD): every token has a logit to be the answer's first and one to be its last.

    F1 and exact match are of the answers' text, as SQuAD's scripts compute them; those of its two versions differ
    where an answer is empty. ``key`` is the data set's, without which there is no text.
    """

    longest: int = 30  # tokens of an answer
    unanswerable: bool = False  # may a question have no answer (SQuAD 2.0)? It points to the first token
    key: AnswerKey | None = field(default=None, compare=False, repr=False)
    metric: ClassVar = "f1"
    reads: ClassVar = "tokens"

    def outputs(self, num_classes: int) -> int:
        return 2

    def finite(self, outputs: torch.Tensor) -> torch.Tensor:
        return super().finite(outputs) | (outputs == -torch.inf)  # no span starts in padding

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of first and last token. What lies beyond the input counts as ignored."""
        labels = labels[..., :2]
        labels = labels.masked_fill(labels >= outputs.shape[-2], IGNORED)
        return _cross_entropy(outputs.transpose(-1, -2), labels).mean(-1)

    def kl(self, teacher, student, labels=None, temperature=1.0):
        """Return the mean of the KLs of first and last token; labels do not matter."""
        return _kl(teacher.transpose(-1, -2), student.transpose(-1, -2), temperature).mean(-1)

    def confidence(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return p(first) p(last) of the best span."""
        return self._best(outputs.log_softmax(-2))[0].exp()

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the best span (..., 2): end not before start, at most ``longest`` tokens; of equals the shortest."""
        return self._best(outputs)[1]

    def _best(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return score (...) and position (..., 2) of the span with the largest sum of start and end."""
        start, end = outputs.unbind(-1)  # (..., T)
        best, first = (start + end).max(-1)
        last = first
        for more in range(1, min(self.longest, start.shape[-1])):
            score, at = (start[..., :-more] + end[..., more:]).max(-1)
            better = score > best
            best, first = torch.where(better, score, best), torch.where(better, at, first)
            last = torch.where(better, at + more, last)
        return best, torch.stack([first, last], -1)

    def _score(self, predictions, labels):
        if self.key is None:
            raise ValueError("Span: answers are compared as text, which takes a key (data.questions.AnswerKey)")
        return self.key.scores(predictions, labels[..., 2], self.unanswerable)


@dataclass(frozen=True)
class NextToken(Task):
    """Language modelling of answers; prompts and padding are read and not learned (SVAMP's equations).

    Measured by teacher forcing: every position sees the true tokens before it. If all of an answer's tokens, its end
    included, are then predicted, greedy generation from the prompt writes the same answer, and only then: so
    ``exact_match`` is that of greedy generation. What is not measured is whether another answer has the same value.
    """

    metric: ClassVar = "exact_match"
    reads: ClassVar = "tokens"

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy, mean over the example's own tokens; zero where it has none."""
        labels = labels[..., : outputs.shape[-2]]
        return _mean_where(labels != IGNORED, _cross_entropy(outputs, labels))

    def kl(self, teacher, student, labels=None, temperature=1.0):
        """Return the mean over the tokens that ``labels`` do not ignore."""
        kl = _kl(teacher, student, temperature)  # (..., T)
        return kl.mean(-1) if labels is None else _mean_where(labels[..., : kl.shape[-1]] != IGNORED, kl)

    def _score(self, predictions, labels):
        """Return ``exact_match`` of answers and ``accuracy`` of their tokens. What was cut off counts as missed."""
        asked = labels != IGNORED
        if not asked.any(-1).all():
            raise ValueError(f"NextToken: {(~asked.any(-1)).sum()} of {len(labels)} examples have no token to predict")
        right, seen = torch.zeros_like(asked), predictions.shape[-1]
        right[:, :seen] = predictions == labels[:, :seen]
        return {
            "exact_match": 100 * (right | ~asked).all(-1).double().mean().item(),
            "accuracy": 100 * right[asked].double().mean().item(),
        }


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, (..., C), (...) -> (...); zero where the label is ignored."""
    labels = labels.expand(logits.shape[:-1])
    nll = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return nll.masked_fill(labels == IGNORED, 0.0)


def _kl(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the KL over the last dimension, (..., C) -> (...). Logits of -inf of the teacher add nothing."""
    target, logp = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return (target.exp() * (target - logp).masked_fill(target == -torch.inf, 0.0)).sum(-1)


def _mean_where(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Average the values that ``mask`` keeps over the last dimension; zero where it keeps none."""
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


TASKS: Mapping[str, Task] = {  # by data set
    "cola": Classification(("matthews", "accuracy")),
    **dict.fromkeys(("mrpc", "qqp"), Classification(("accuracy", "f1"))),  # as RaFFM prints it: multiples of 1/408
    **dict.fromkeys(("cifar10", "cifar100", "flowers102"), Classification(("accuracy", "macro_f1"))),
    "stsb": Regression(),
    **dict.fromkeys(("squad", "xquad", "xquad_en"), Span()),
    "squad_v2": Span(unanswerable=True),
    "svamp": NextToken(),
}


def task_of(dataset: str) -> Task:
    """Return the task of a data set: what ``TASKS`` says, else classification."""
    return TASKS.get(dataset, Classification())
