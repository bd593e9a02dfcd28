"""What shows while one works: a curve that grows, the best model beside the last."""

import os

import pytest
import torch

from fedlib import Experiment, run
from fedlib.core.storage import read_tensors
from fedlib_lab.report.explorer import LiveCurve
from fedlib_lab.runs.callbacks import EarlyStopping, KeepBest
from fedlib_lab.runs.run_paths import run_path

CODE = """
import sys
from fedlib import Experiment, run
from fedlib_lab.report.explorer import LiveCurve
e = Experiment(method="depthfl", backbone="vit_digits", pretrained=False, finetune="frozen", augment="none", num_train=80,
               num_test=40, num_clients=4, clients_per_round=2, rounds=3, evaluate_every=1)
done = run(e, folder={folder!r}, callbacks=[LiveCurve()], progress=False)
"""


def small(**changes):
    values = dict(
        method="depthfl", backbone="vit_digits", pretrained=False, finetune="full", augment="none", num_train=120,
        num_test=40, num_clients=4, clients_per_round=2, rounds=6, evaluate_every=1, test_split="like_train", lr=0.1,
    )  # fmt: skip
    return Experiment(**(values | changes))


def test_a_curve_grows_in_a_kernel_that_somebody_watches(tmp_path):
    """A display, then an update of it for every further look."""
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3", env=dict(os.environ, MPLBACKEND="agg"))
    try:
        seen = []
        reply = client.execute_interactive(CODE.format(folder=str(tmp_path)), timeout=240, output_hook=seen.append)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    pictures = [m["msg_type"] for m in seen if "image/png" in m["content"].get("data", {})]
    assert pictures == ["display_data", "update_display_data", "update_display_data"]


def test_nothing_is_drawn_where_nobody_watches(tmp_path, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: pytest.fail("drawn"))
    run(small(rounds=1), folder=tmp_path, callbacks=[LiveCurve()], progress=False)


def test_the_best_model_is_kept_beside_the_last_and_is_the_one_it_says(tmp_path):
    e = small(validation_fraction=0.3, evaluate_on="validation", lr=0.3)
    servers, stops = {}, KeepBest(folder=tmp_path)
    done = run(
        e, folder=tmp_path, callbacks=[stops], progress=False, on_round=lambda r: servers.update({r.t: r.server})
    )
    scores = {m["t"]: m["accuracy"] for m in done.metrics}
    tensors, said = read_tensors(done.path / "best.safetensors")
    best = max(scores, key=lambda t: (scores[t], -t))
    assert said["t"] == best and said["accuracy"] == scores[best] and done.accuracy == scores[6]
    assert all(torch.equal(tensors[f"params/{n}"], p) for n, p in servers[best].params.items())


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_goes_on_keeps_the_best_of_all_its_rounds(tmp_path, stop):
    e = small(validation_fraction=0.3, evaluate_on="validation", lr=0.3)
    whole = run(e, folder=tmp_path / "whole", callbacks=[KeepBest(folder=tmp_path / "whole")], progress=False)
    parts = tmp_path / "parts"
    run(e, folder=parts, callbacks=[KeepBest(folder=parts)], on_round=lambda r: r.t == stop, progress=False)
    again = run(e, folder=parts, callbacks=[KeepBest(folder=parts)], progress=False)
    assert again.metrics[-1]["accuracy"] == whole.metrics[-1]["accuracy"]
    files = [(folder / "best.safetensors") for folder in (whole.path, run_path(e, parts))]
    (a, told), (b, said) = map(read_tensors, files)
    assert said == told and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", [KeepBest, EarlyStopping])
def test_no_model_is_chosen_by_test_examples(tmp_path, kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: evaluate_on = 'test' would choose by test examples"):
        run(small(), folder=tmp_path, callbacks=[kind()], progress=False)
