"""What a user calls with an argument of another kind is refused in one sentence, before any compute."""

import math
from pathlib import Path

import pytest

import fedlib
from fedlib_lab.report.plots import plot_learning_curves
from fedlib_lab.runs.callbacks import Callback, EarlyStopping
from fedlib_lab.runs.record import Run
from tests.helpers.stored import ONE, run_path, small

E = small("depthfl", rounds=1)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: fedlib.run(E, callbacks=Callback()), "callbacks = .*: expected Iterable, got Callback"),
        (lambda: fedlib.run(E, callbacks=[Callback]), "callbacks: one of them = .*: expected Callback, got type"),
        (lambda: fedlib.run(E, callbacks=[len]), "callbacks: one of them = .*: expected Callback, got builtin"),
        (lambda: fedlib.run(E, callbacks=[EarlyStopping()]), "EarlyStopping: evaluate_on = 'test' would choose"),
        (lambda: fedlib.run(E, on_round=3), "on_round = 3: expected Callable, got int"),
        (lambda: EarlyStopping(patience="a"), "EarlyStopping: patience = 'a': expected int, got str"),
        *((lambda p=p: EarlyStopping(patience=p), f"EarlyStopping: patience = {p!r}") for p in (0, -1, True, 1.5, math.nan, None)),
        (lambda: EarlyStopping(metric="acc"), "EarlyStopping: metric = 'acc' is not possible; .*allowed: accuracy, ensemble"),
        (lambda: EarlyStopping(metric=["accuracy"]), "EarlyStopping: metric = ..accuracy.. is not possible"),
        *((lambda x=x: EarlyStopping(least=x), f"EarlyStopping: least = {x!r}") for x in ("a", True, math.nan, None)),
        *((lambda o=o: fedlib.sweep({"a": E}, o), "sweep: over = .* allowed: lists by field") for o in ({}, [], None, "lr", [3], {3: [1]})),
        *((lambda o=o: fedlib.sweep({"a": E}, o), "sweep: lr = .*; allowed: a list") for o in ({"lr": 3}, {"lr": None})),
        (lambda: fedlib.sweep({"a": E}, {"lr": []}), r"sweep: lr = \[\]; allowed: a list of one value or more"),
        (lambda: fedlib.sweep({"a": E}, {"seed": [1]}), "sweep: 'seed' cannot be chosen, .*; allowed: every other field"),
        (lambda: fedlib.run_all([E], callbacks=len), "callbacks = .*: expected Iterable, got builtin"),
        (lambda: fedlib.run_all(3), "run_all takes several experiments"),
        *((lambda a=a: fedlib.run(E, accept=a), f"accept = '{a}' is not possible; .*allowed: backbone, data") for a in (3, True)),
        *((lambda s=s: fedlib.run(E, checkpoint_seconds=s), f"checkpoint_seconds = {s!r}") for s in ("a", None, True)),
        *((lambda s=s: fedlib.run_all([E], checkpoint_seconds=s), f"checkpoint_seconds = {s!r}") for s in ("a", None)),
        *((lambda s=s: fedlib.verify(Run(E, Path(), {}, []), tolerance=s), f"verify: tolerance = {s!r}") for s in ("a", -1.0, math.nan)),
        (lambda: fedlib.runs_frame(words=3), "words = 3: expected Iterable, got int"),
        (lambda: plot_learning_curves([[]]), "curves = .*: expected Mapping, got list"),
        (lambda: fedlib.sweep({"a": "reefl"}, {"lr": [0.1]}), "sweep: row 'a' = 'reefl': expected Experiment, got str"),
        (lambda: fedlib.save_model(Run(E, Path(), {}, []), True), "save_model: budget = True: expected int, got bool"),
        (lambda: fedlib.Execution(workers=10**9), "workers = 1000000000 must be at least 1 and at most 1024"),
        (lambda: fedlib.recipe(3), "recipe = 3: expected str, got int"),
        (lambda: fedlib.extend("reefl", rounds=9), "'reefl' is not an Experiment"),
        (lambda: fedlib.save_model(E, 0), "save_model: run = Experiment.*: expected Run, got Experiment"),
        (lambda: fedlib.sweep([E], {"lr": [0.1]}), "sweep: rows = .*: expected Mapping, got list"),
        (lambda: fedlib.build_federation(E.replace(backbone="resnet5O")), "'resnet5O' is unknown; did you mean 'resnet56'. allowed: the kit's"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_in_one_sentence(call, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    with pytest.raises(ValueError, match=sentence) as refused:
        call()
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert not run_path(E).exists()


def test_one_word_is_a_word_and_not_its_letters(tmp_path):
    done = fedlib.run(E, ONE, tmp_path, progress=False)
    assert list(fedlib.runs_frame(tmp_path, "depthfl")["run"]) == [done.path.name]
    assert fedlib.runs_frame(tmp_path, "lfd").empty
