"""Kernels: what stands in for layers' and models' own code, swapped in from outside, by name.

Neither a layer nor a model knows them: ``swap_in_`` gives a built model's blocks a class whose forward tries a kernel
first; ``layers.overrides`` holds all functions as soon as this is imported. Each runs equal to the modules it stands
for, in a test.

    products    float32 products go straight to a BLAS, without PyTorch's dispatcher (``products.py``)
    vit_block   a block of a ViT is one step of autograd (``vit_block.py``)
    graphs      on a GPU a step of local training is one launch (``repeated.py``)
    compiled    a block of a ViT is what ``torch.compile`` makes of it, for a GPU (``vit_block.compiled``)

``$FEDLIB_KERNELS`` names those that are on, separated by commas: the first two by default, none with ``0``.
"""

from torch import nn

from fedlib.layers.overrides import OVERRIDES
from fedlib.models.vit import Block

from . import products
from .repeated import repeat
from .vit_block import WrittenBlock


def swap_in_(model: nn.Module) -> nn.Module:
    """Let kernels stand in for what ``model`` has of their kind; returns it."""
    for module in model.modules():
        if type(module) is Block:
            module.__class__ = WrittenBlock
    return model


# also in a process that is sent its model
OVERRIDES.update(matmul=products.matmul, swap_in=swap_in_, begin=products.choose_products, repeat=repeat)
