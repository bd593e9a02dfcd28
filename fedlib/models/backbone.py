"""What a backbone is: a stem and units that run one at a time for K clients. Only it looks inside its state ``z``."""

from typing import Literal, Protocol

import torch
from torch import nn


class Spec(Protocol):
    """Shape of a backbone: all that is known before any weight exists."""

    depth: int
    input_shape: tuple[int, ...]
    reads: Literal["images", "tokens"]
    own_modes: tuple[str, ...]

    def feature(self, unit: int) -> tuple[int, ...]:
        """What an exit after ``unit`` sees of one example: (d,) or (C, H, W)."""

    def numbers(self, examples: int) -> tuple[int, int]:
        """Numbers in the widest activation of ``examples`` examples, and in all that autograd keeps of them."""

    def build(self) -> "Backbone": ...


class Backbone(nn.Module):
    """Units that run one at a time for K clients, whose stacked parameters may differ (``layers/linear.py``)."""

    spec: Spec
    stem: nn.Module  # (K, B, *input_shape) -> z

    def replace(self, z, unit: int, feature: torch.Tensor):
        """z with ``feature`` in place of what the exits saw after ``unit`` (ReeFL, Eq. 4)."""
        raise TypeError(f"exits of {type(self).__name__} read maps: there is no token to hand back")
