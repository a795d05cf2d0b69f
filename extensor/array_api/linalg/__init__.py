"""The standard's extension `linalg`: matrix products, decompositions, inverses and norms."""

from __future__ import annotations

from extensor.array_api.linalg import decomposition, matrix, norm, products
from extensor.array_api.linalg.decomposition import *
from extensor.array_api.linalg.matrix import *
from extensor.array_api.linalg.norm import *
from extensor.array_api.linalg.products import *
from extensor.ops.matmul import matmul, outer, tensordot

__all__ = ["matmul", "outer", "tensordot"]
__all__ += decomposition.__all__ + matrix.__all__ + norm.__all__ + products.__all__
