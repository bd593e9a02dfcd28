"""Word problems with the equation that solves them (SVAMP): next-token prediction after a prompt.

Rows are begin question between equation end padding: [CLS] question [SEP] equation [SEP] zeros of BERT's words; of
LLaMA's <s>, a new line and </s>. The label of position t is the token at t + 1 where that belongs
to the equation or ends it, and ``tasks.IGNORED`` elsewhere. The equation is written as the set writes it: ``- number0
number1`` with numbers in the order of the text, or ``( 8.0 - 3.0 )``.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fedlib.data.metrics import IGNORED
from fedlib.data.tokenizer import load_tokenizer


def read_equations(
    columns: Sequence[Sequence[str]], equations: Sequence[str], length: int, where: Callable[[int], str],
    source: str | None = None, cut: list[bool] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Read (token ids int32 (N, length), next tokens int64 (N, length)); columns of text are read one after another.

    Of a problem that is too long the beginning is left out, as the question stands at its end. ``ValueError`` names the
    row (``where(i)``) of an equation that leaves nothing of a question.
    """
    words, cut = load_tokenizer(source), [] if cut is None else cut
    tokenizer, marks = words.encoder(), len(words.begin) + len(words.between) + 1
    problems = [" ".join(texts) for texts in zip(*columns, strict=True)]
    encode = lambda texts: [e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)]  # noqa: E731
    ids = np.full((len(problems), length), words.padding, np.int32)
    following = np.full(ids.shape, IGNORED, np.int64)
    for i, (problem, equation) in enumerate(zip(encode(problems), encode(equations), strict=True)):
        left = length - marks - len(equation)
        if left < 1 or not equation:
            raise ValueError(f"{where(i)}: an equation of {len(equation)} tokens does not fit into {length}")
        cut.append(len(problem) > left)
        row = [*words.begin, *problem[-left:], *words.between, *equation, words.end]
        ids[i, : len(row)] = row
        # the prompt's last token predicts the equation's first
        following[i, len(row) - len(equation) - 2 : len(row) - 1] = row[-len(equation) - 1 :]
    return ids, following
