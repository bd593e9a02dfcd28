"""What can be cut in width: checked before any compute, in the words of the method that asks."""

from ..models.backbone import Spec
from .jobs import Setting

CUTTABLE = ("full", "frozen", "lora", "pa", "sa", "ssf")  # fine-tuning modes whose tensors name their axes


def check_cuttable(method: str, setting: Setting, e) -> None:
    """Raise ``ValueError`` if ``e``'s backbone or fine-tuning mode has parameters whose axes are not named."""
    if e.finetune not in CUTTABLE:
        raise ValueError(f"{method}: finetune = {e.finetune!r} cannot be cut in width; allowed: {', '.join(CUTTABLE)}")
    if reason := uncut(setting.spec):
        raise ValueError(f"{method}: backbone = {e.backbone!r} cannot be cut in width: {reason}")


def uncut(spec: Spec) -> str:
    """Why a backbone of shape ``spec`` cannot be cut in width; empty if it can."""
    if getattr(spec, "centred", False):
        return "its exits read a class token standardised by constants of the whole width; *.stream and *.mean are not"
    return getattr(spec, "not_cut", "")
