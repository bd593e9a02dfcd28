"""Tasks: losses against plain PyTorch, metrics against numbers worked out by hand, and degenerate inputs."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedlib.data.tasks import (
    IGNORED,
    TASKS,
    Classification,
    NextToken,
    Regression,
    Span,
    Task,
    task_of,
)
from fedlib.methods.losses import Batch, cross_entropies, kl_to_teacher

E, K, B, T = 3, 2, 5, 7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def batch(outputs, labels):
    return Batch(outputs, labels, torch.full((K, B), 1 / B), torch.ones(E, K))


# --- losses


def test_cross_entropy_is_bit_equal_to_that_of_the_exits():
    outputs, labels = randn(E, K, B, 10), randint(10, K, B)
    both = batch(outputs, labels)
    losses = Classification().losses(outputs, labels)
    assert losses.shape == (E, K, B)
    assert torch.equal((losses * both.weights).sum(-1) * both.held, cross_entropies(both))
    torch.testing.assert_close(losses[1, 0], F.cross_entropy(outputs[1, 0], labels[0], reduction="none"))


def test_kl_of_classes_is_bit_equal_to_that_of_the_exits_and_zero_for_the_teacher():
    outputs, teacher = randn(E, K, B, 10), torch.tensor([2, 0])
    both = batch(outputs, randint(10, K, B))
    chosen = outputs[teacher, torch.arange(K)].detach()
    kl = Classification().kl(chosen, outputs, temperature=3.0)
    p, q = (chosen / 3).log_softmax(-1), (outputs / 3).log_softmax(-1)
    assert torch.equal(kl, (p.exp() * (p - q)).sum(-1))
    assert torch.equal(((kl * both.weights).sum(-1) * both.held).sum(0) * 9.0, kl_to_teacher(both, teacher, 3.0))
    assert not kl[2, 0].any() and not kl[0, 1].any() and kl[0, 0].all()


def test_squared_error():
    outputs = torch.tensor([[[[1.0], [4.0]]], [[[2.0], [0.0]]]])  # E = 2, K = 1, B = 2
    labels = torch.tensor([[3.0, 4.0]])
    assert Regression().losses(outputs, labels).tolist() == [[[4.0, 0.0]], [[1.0, 16.0]]]
    assert Regression().kl(outputs[1], outputs).tolist() == [[[1.0, 16.0]], [[0.0, 0.0]]]


def test_span_loss_is_the_mean_of_both_ends_and_skips_what_was_cut_off():
    outputs, labels = randn(E, K, B, T, 2), randint(T, K, B, 2)
    labels[0, 0], labels[0, 1] = IGNORED, torch.tensor([3, T])  # no answer in the input; it ends beyond it
    losses = Span().losses(outputs, labels)
    start, end = (F.cross_entropy(outputs[1, 1, :, :, i], labels[1, :, i], reduction="none") for i in (0, 1))
    torch.testing.assert_close(losses[1, 1], (start + end) / 2)
    assert losses.shape == (E, K, B) and not losses[:, 0, 0].any()
    torch.testing.assert_close(losses[2, 0, 1], F.cross_entropy(outputs[2, 0, 1, :, 0], labels[0, 1, 0]) / 2)


def test_next_token_loss_is_the_mean_over_an_examples_own_tokens():
    outputs, labels = randn(E, K, B, T, 11), randint(11, K, B, T + 2)  # labels of a longer row than the net reads
    labels[..., :2], labels[0, 0] = IGNORED, IGNORED
    losses = NextToken().losses(outputs, labels)
    assert losses.shape == (E, K, B) and not losses[:, 0, 0].any()
    wanted = F.cross_entropy(outputs[2, 1, 3], labels[1, 3, :T], ignore_index=IGNORED)
    torch.testing.assert_close(losses[2, 1, 3], wanted)


def test_no_gradient_reaches_ignored_positions():
    outputs, labels = randn(E, K, B, T, 11).requires_grad_(), randint(11, K, B, T)
    labels[..., :4] = IGNORED
    NextToken().losses(outputs, labels).sum().backward()
    assert not outputs.grad[..., :4, :].any() and outputs.grad[..., 4:, :].abs().min() > 0


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_of_tokens_and_spans(temperature):
    teacher, student = randn(K, B, T, 6, seed=1), randn(E, K, B, T, 6)
    labels = randint(6, K, B, T)
    labels[..., :3], labels[0, 0] = IGNORED, IGNORED
    kl = NextToken().kl(teacher, student, labels, temperature)
    p, q = (teacher[1, 2] / temperature).softmax(-1), (student[0, 1, 2] / temperature).softmax(-1)
    by_token = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(kl[0, 1, 2], by_token[3:].mean())
    assert not kl[:, 0, 0].any()
    torch.testing.assert_close(NextToken().kl(teacher, student, temperature=temperature)[0, 1, 2], by_token.mean())

    ends = Span().kl(teacher[..., :2], student[..., :2], temperature=temperature)
    p, q = ((x[..., :2] / temperature).softmax(-2) for x in (teacher[1, 2], student[0, 1, 2]))
    torch.testing.assert_close(ends[0, 1, 2], (p * (p / q).log()).sum(0).mean())


def test_kl_where_tokens_are_masked_with_minus_infinity():
    teacher, student = randn(B, T, 2, seed=1), randn(B, T, 2)
    whole = Span().kl(teacher[:, :4], student[:, :4])
    teacher[:, 4:], student[:, 4:] = -math.inf, -math.inf
    student.requires_grad_()
    masked = Span().kl(teacher, student)
    torch.testing.assert_close(masked, whole)
    masked.sum().backward()
    assert student.grad.isfinite().all()


def test_a_regression_refuses_what_it_has_not():
    with pytest.raises(ValueError, match="temperature = 3.0: a regression has no classes to soften"):
        Regression().kl(randn(B, 1), randn(B, 1), temperature=3.0)
    with pytest.raises(ValueError, match="cannot leave early by confidence"):
        Regression().confidence(randn(B, 1))


# --- predictions and confidence


def test_confidence_is_the_probability_of_the_prediction():
    outputs = randn(B, 4)
    p = outputs.softmax(-1)
    torch.testing.assert_close(Classification().confidence(outputs), p[range(B), outputs.argmax(-1)])
    assert NextToken().confidence(randn(B, T, 9)).shape == (B, T)
    spans = randn(E, B, T, 2)
    first, last = Span().predict(spans)[1, 2].tolist()
    p = spans[1, 2].softmax(0)
    torch.testing.assert_close(Span().confidence(spans)[1, 2], p[first, 0] * p[last, 1])


@pytest.mark.parametrize("longest", [1, 3, 100])
def test_the_best_span_of_all_that_are_allowed(longest):
    outputs = randn(50, T, 2, seed=longest)
    for (start, end), (first, last) in zip(outputs.transpose(1, 2), Span(longest).predict(outputs).tolist(), strict=True):  # fmt: skip
        allowed = [(i, j) for i in range(T) for j in range(i, min(T, i + longest))]
        assert (first, last) == max(allowed, key=lambda ij: start[ij[0]] + end[ij[1]])


def test_of_equal_spans_the_shortest_and_first():
    assert Span().predict(torch.zeros(1, T, 2)).tolist() == [[0, 0]]


def greedy(model, prompt, n):
    """n tokens of greedy generation from a ``model`` of (tokens so far) -> logits."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(ids).argmax()))
    return ids[len(prompt) :]


def test_exact_match_under_teacher_forcing_is_that_of_greedy_generation():
    def model(ids):  # any function of the past
        return randn(3, seed=sum((i + 1) * x for i, x in enumerate(ids)))

    prompt, generated = [1, 0], greedy(model, [1, 0], 3)
    answers = [generated, [generated[0], (generated[1] + 1) % 3, generated[2]]]
    ids = torch.tensor([[*prompt, *a, 0] for a in answers])  # one token of padding
    labels = torch.tensor([[IGNORED, *a, IGNORED, IGNORED] for a in answers])  # at each position the token that follows
    outputs = torch.stack([torch.stack([model(row[: i + 1]) for i in range(6)]) for row in ids.tolist()])
    assert NextToken().measure(outputs[:1], labels[:1]) == {"exact_match": 100.0, "accuracy": 100.0}
    got = NextToken().measure(outputs, labels)
    assert got["exact_match"] == 50.0 and got["accuracy"] < 100


def test_answers_beyond_the_input_count_as_missed():
    labels = torch.tensor([[IGNORED, 1, 2]])
    assert NextToken().score(torch.tensor([[0, 1]]), labels) == {"exact_match": 0.0, "accuracy": 50.0}
    with pytest.raises(ValueError, match="1 of 2 examples have no token to predict"):
        NextToken().score(torch.zeros(2, 3), torch.tensor([[IGNORED, 1, 2], [IGNORED] * 3]))


@pytest.mark.parametrize("task", [Classification(), Regression(), Span(), NextToken()], ids=lambda t: type(t).__name__)
def test_metrics_of_no_examples_are_refused(task):
    with pytest.raises(ValueError, match=f"{task.metric} of no examples is undefined"):
        task.score(torch.zeros(0, 2), torch.zeros(0, 2))


# --- the registry


def test_every_task_names_its_headline_and_its_width():
    for name, task in TASKS.items():
        assert isinstance(task, Task) and task.reads in ("class", "tokens")
        assert task.outputs(7) == {"stsb": 1, "squad": 2, "squad_v2": 2, "xquad": 2, "xquad_en": 2}.get(name, 7)
    assert {n: t.metric for n, t in TASKS.items()} == {
        "cola": "matthews", "mrpc": "accuracy", "qqp": "accuracy", "stsb": "pearson", "squad": "f1", "squad_v2": "f1",
        "xquad": "f1", "xquad_en": "f1", "svamp": "exact_match", "cifar10": "accuracy", "cifar100": "accuracy",
        "flowers102": "accuracy",
    }  # fmt: skip
    assert (
        task_of("squad_v2").unanswerable
        and task_of("tiny_imagenet") == Classification()
        and task_of("cifar100").metrics == ("accuracy", "macro_f1")
    )
    assert task_of("a/folder") == Classification()
    assert hash(task_of("stsb")) == hash(Regression())
