"""Leaving early over stored answers: by hand, and what it costs."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.engine.evaluation import served_parts
from fedlib.engine.leaving import first_confident
from fedlib_lab.report.clients import adaptive_curve, adaptive_inference, served_macs, spread_out


def logits_of(*confidences):
    """Two classes: each entry (predicted class, confidence) as logits."""
    rows = [[(np.log(p), np.log(1 - p)) if c == 0 else (np.log(1 - p), np.log(p)) for c, p in e] for e in confidences]
    return torch.tensor(rows, dtype=torch.float32)


def test_early_exit_by_hand():
    # 3 exits, 3 examples of class 0
    logits = logits_of([(0, 0.9), (1, 0.8), (1, 0.6)], [(0, 0.9), (0, 0.7), (1, 0.6)], [(1, 0.9), (0, 0.9), (0, 0.6)])
    assert first_confident(logits.softmax(-1).amax(-1), 0.75).tolist() == [0, 0, 2]
    labels, macs = torch.zeros(3, dtype=torch.long), [10, 20, 30]
    rows = adaptive_curve(logits, labels, macs, (0.0, 0.75, 0.85, 1.0))[:4]
    # threshold 0: all leave at exit 1, one of three right; 0.75: right, wrong, right; 0.85: exits 1, 3, 3, all right
    assert [round(r["accuracy"], 2) for r in rows] == [33.33, 66.67, 100.0, 66.67]
    assert [r["macs"] for r in rows] == pytest.approx([10, 50 / 3, 70 / 3, 30])
    assert rows[2]["share"] == pytest.approx([1 / 3, 0, 2 / 3])


def test_who_answers_with_numbers_does_not_leave_early():
    """Of similarities every exit had an accuracy of 0, at every threshold."""
    e = Experiment(
        dataset="stsb", backbone="bert_micro", pretrained=False, num_exits=3, augment="none", partition="iid"
    )
    with pytest.raises(ValueError, match="dataset = 'stsb': its labels are no classes, so no example leaves by its"):
        adaptive_inference(e)


@pytest.mark.parametrize("asked, told", [
    ([50], "thresholds = 50.0 must be at least 0 and at most 1"), ([float("nan")], "thresholds = nan: expected a finite"),
    (0.5, "thresholds = 0.5: expected a list"), (["half"], "thresholds = 'half': expected float, got str"),
])  # fmt: skip
def test_a_threshold_is_a_share_and_is_refused_before_any_compute(asked, told, monkeypatch):
    """At 50 (for 50 %) and at NaN every example went to the last exit."""
    monkeypatch.setattr("fedlib_lab.report.clients.load_trained", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match=f"^{told}"):
        adaptive_inference(Experiment(), asked)


def test_where_nobody_s_leaving_is_known_no_number_stands_for_it():
    """The mean exit stood in a column of early leaving where clients hold different exits. Of a single one it is right."""
    row = {
        "column": "a",
        "variant": "v",
        "clients": 70.0,
        "clients_sd": 3.0,
        "leaving": {},
        "client_exits": [60.0, 80.0],
    }
    kept = row | {"leaving": {"0.9": {"accuracy": 75.0, "sd": 2.0, "share": [0.5, 0.5]}}}
    frame = pd.DataFrame([row, kept, row | {"client_exits": [70.0]}, row | {"leaving": np.nan, "client_exits": np.nan}])
    found = spread_out(frame, "left", {"a": 0.9})
    assert found.clients.isna().tolist() == [True, False, False, False]
    assert found.clients[1:].tolist() == [75.0, 70.0, 70.0]


def test_costs_of_exits_increase_and_every_exit_is_a_point_of_its_own():
    logits = logits_of([(0, 0.9), (1, 0.8)], [(0, 0.9), (0, 0.7)])
    labels = torch.zeros(2, dtype=torch.long)
    assert adaptive_curve(logits, labels, [10, 20], ()) == [
        {"exit": 1, "accuracy": 50.0, "macs": 10.0}, {"exit": 2, "accuracy": 100.0, "macs": 20.0},
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"a later exit must cost more: \[20, 10\]"):
        adaptive_curve(logits, labels, [20, 10], (0.5,))


def test_an_exit_costs_what_was_served_not_what_a_client_of_its_level_holds(tiny):
    """ResNet-20 whole, as the server answers with it, exits of three convolutions after blocks 6, 7, 8 and of none.

    By hand, in thousands of MACs: stem 442; a block of 16, 32, 64 channels 4,719 each; the two that narrow 3,539 and
    a projection of 131; exits 7,078 each of 64 channels on 8 x 8 pixels, 32 on 16 x 16 likewise; a classifier's 0.64.
    """
    f = build_federation(
        tiny.replace(method="scalefl", backbone="resnet20", finetune="full", finetune_options={}, rounds=1)
    )
    assert [u + 1 for u in f.setting.exit_units] == [6, 7, 8, 9]
    plain, narrowing, early = 2 * 2_359_296, 1_179_648 + 2_359_296 + 131_072, 3 * 2_359_296
    after = 442_368 + np.cumsum([*[plain] * 3, narrowing, plain, plain, narrowing, plain, plain])
    exits = np.cumsum([early + 320, early + 640, early + 640, 640])
    want = after[5:] + exits
    assert served_macs(f, f.server) == want.tolist()
    assert (want / 1e6).round(1).tolist() == [34.8, 45.5, 57.3, 62.0]


def test_an_example_that_goes_on_pays_for_every_model_that_it_starts_again_with(tiny):
    f = build_federation(tiny.replace(method="inclusivefl"))
    own = [f.setting.measure.macs(p) for p in served_parts(f, f.server)]
    assert served_macs(f, f.server) == np.cumsum(own).tolist()
