"""What can be cut in width: checked before any compute, in the words of the method that asks."""

from ..core.experiment import Experiment
from ..models.backbone import Spec
from .jobs import Setting

CUTTABLE = ("full", "frozen", "lora", "pa", "sa", "ssf")  # fine-tuning modes whose tensors name their axes


def check_cuttable(method: str, setting: Setting, e: Experiment, least: float = 1.0) -> None:
    """Raise ``ValueError`` if ``e``'s backbone or fine-tuning mode has parameters whose axes are not named.

    And, once there are axes, if a share ``least`` of a residual stream is one feature, which a norm makes a constant.
    """
    if e.finetune not in CUTTABLE:
        raise ValueError(f"{method}: finetune = {e.finetune!r} cannot be cut in width; allowed: {', '.join(CUTTABLE)}")
    if reason := uncut(setting.spec):
        raise ValueError(f"{method}: backbone = {e.backbone!r} cannot be cut in width: {reason}")
    features = setting.axes["residual"].size if "residual" in setting.axes else 0
    if 0 < least * features <= 1 < features:
        raise ValueError(
            f"{method}: {least:.3g} of the {features} features of backbone = {e.backbone!r} is one, which a norm makes "
            f"a constant; allowed: above {1 / features:.3g}"
        )


def uncut(spec: Spec) -> str:
    """Why a backbone of shape ``spec`` cannot be cut in width; empty if it can."""
    if spec.centred:
        return "its exits read a class token standardised by constants of the whole width; *.stream and *.mean are not"
    if spec.rotary:
        return "its queries and keys are rotated in pairs by position"
    return spec.not_cut
