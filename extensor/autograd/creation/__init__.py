"""The creation functions: ``et.zeros`` is ``ExTensor.zeros``.

For a blocked dtype the values are made in float32 and then quantized.
"""

from __future__ import annotations

from extensor.autograd.creation.arguments import Seed, ShapeLike, as_data, as_shape
from extensor.autograd.creation.foreign import ForeignMethods, share_writes
from extensor.autograd.creation.like import LikeMethods
from extensor.autograd.node import Tensor

__all__ = ["CreationMethods", "Seed", "ShapeLike", "as_data", "as_shape", "share_writes"]


class CreationMethods(LikeMethods[Tensor], ForeignMethods[Tensor]):
    """The creation functions, as class methods.

    All take ``dtype`` (float32 if not given), ``device`` (EXTENSOR_DEVICE, and the CPU
    without it) and ``requires_grad``.
    """

    __slots__ = ()
