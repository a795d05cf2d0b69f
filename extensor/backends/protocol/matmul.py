"""Matrix products: of float arrays, of block-scaled arrays, and of a recipe's operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from extensor.backends.protocol.core import Array
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = [
    "CastSpec",
    "MatmulMethods",
    "OperandSpec",
    "PackedOperand",
    "Preparation",
    "Prepared",
]


@dataclass(frozen=True)
class CastSpec:
    """How a GEMM operand that is not quantized is made: its values are rounded to a dtype, once.

    Attributes:
        dtype: "bfloat16" or "float32".
        axis: of the matrix, 0 or 1: the axis that the GEMM contracts.
    """

    dtype: str
    axis: int


OperandSpec = QuantSpec | CastSpec
"""How a matrix becomes a GEMM operand: quantized in blocks, or rounded to a float dtype."""

Prepared = list[tuple[Any, Counts | None]]
"""Operands, each with what quantizing counted; None for an operand that is not quantized."""


class Preparation(Protocol):
    """How a backend has decided to make GEMM operands from one matrix; nothing has run yet."""

    @property
    def x(self) -> Array:
        """The matrix as the operands read it: for some backends a contiguous copy."""
        ...

    @property
    def compact(self) -> bool:
        """Whether one launch makes all operands from one reading, in 16 bits a value or fewer.

        Such operands are worth keeping from the forward pass for the backward GEMM.
        """
        ...

    @property
    def batch_key(self) -> Hashable | None:
        """Preparations with equal keys can run in one launch; None: this one runs alone."""
        ...

    @property
    def path(self) -> str:
        """How the operands are made: equal words for equal operands of a matrix under a spec."""
        ...

    @property
    def keeps_second(self) -> bool:
        """Whether the second operand of `run` is what `pack` keeps, and never reads the matrix."""
        ...

    @property
    def packs_second(self) -> bool:
        """Whether `run_packing` can make both operands of two specs."""
        ...

    def run(self) -> Prepared:
        """Make the operands, in the order of the specs."""
        ...

    def run_packing(self) -> list[tuple[Any, Counts | None]]:
        """The first operand, and the second as `pack` would give it; the matrix is read once."""
        ...

    def pack(self) -> tuple[PackedOperand, Counts | None] | None:
        """The operand of the only spec as few bytes, and what `run` would count.

        None where it would take as many bytes as the matrix.
        """
        ...


class PackedOperand(Protocol):
    """A GEMM operand in the bytes that it is kept in from the forward to the backward pass."""

    @property
    def arrays(self) -> Sequence[Array]:
        """What is kept."""
        ...

    def operand(self) -> Any:
        """The operand, the same bits as `Preparation.run` makes of the matrix."""
        ...


class MatmulMethods(Protocol):
    """Products with float32 sums."""

    groups_products: bool
    """Whether `grouped_weight_only_matmul` is quicker than a product for each group."""

    def prepare(
        self,
        x: Array,
        specs: Sequence[OperandSpec],
        streams: Sequence[Stream | None],
        work: int,
        amax_state: dict[str, Any] | None = None,
    ) -> Preparation:
        """Decide how a matrix becomes operands of `product`, one for each spec.

        Args:
            x: (rows, columns), of floats.
            specs: one, or one contracted along the rows and one along the columns; all resolved
                `QuantSpec`, or all `CastSpec` of one dtype.
            streams: one per spec; None unless the spec rounds stochastically.
            work: multiplications of the product, M N K; 0 where its other operand is of another
                kind.
            amax_state: kept for this tensor from call to call. A kernel may note there what it
                wants to know beforehand, such as the largest magnitude; it changes no value.
        """
        ...

    def run_batch(self, preparations: Sequence[Preparation]) -> list[Prepared]:
        """Run several preparations with one ``batch_key`` at once."""
        ...

    def packed_operand(self, q: QuantArray, work: int) -> Any:
        """The operand that `prepare` makes of the matrix that was packed; it does not wait.

        Args:
            q: (rows, columns), blocked along the axis that the product contracts: an MX format or
                NVFP4, without a transform.
            work: as for `prepare`.
        """
        ...

    def product(
        self,
        a: Any,
        b: Any,
        dtype: str = "float32",
        bias: Array | None = None,
        fallbacks: dict[str, Any] | None = None,
    ) -> Array:
        """A b^T + bias of operands (M, K) and (N, K) from `prepare`: (M, N), summed in float32.

        The bias, float32 (N,), is added to that sum. In float32, or rounded to ``dtype``, where a
        kernel writes that. A backend whose products may fall back from FP8 to bfloat16 counts them
        in ``fallbacks``, kept from call to call: "gained" is how many since its last call.
        """
        ...

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """A b of (..., M, K) and (..., K, N), leading axes broadcasting, plus a bias (N,)."""
        ...

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray, dtype: str = "float32") -> Array:
        """A b^T of (M, K) and (N, K), both blocked along the last axis: (M, N).

        Of stacks (B, M, K) and (B, N, K) the product of each two matrices: (B, M, N). Sums are
        float32; as "bfloat16" they are rounded once.
        """
        ...

    def stored_product(self, a: QuantArray, b: QuantArray) -> Array:
        """`block_scaled_matmul` of (M, K) and (N, K) in a training step, which may be captured.

        Raises:
            ValueError: for values that the GPU's product does not hold.
        """
        ...

    def weight_only_matmul(self, x: Array, w: QuantArray, dtype: str = "float32") -> Array:
        """X w^T of a dense (M, K) and (N, K) blocked along the last axis: (M, N).

        x is float32 or bfloat16, which is multiplied as it is or widened, exactly. Sums are
        float32; as "bfloat16" they are rounded once.
        """
        ...

    def weight_only_matmuls(
        self, x: Array, weights: Sequence[QuantArray], dtype: str = "float32"
    ) -> Sequence[Array]:
        """`weight_only_matmul` of x with each of several weights.

        The results may be parts of the rows of one array.
        """
        ...

    def rebased_matmul(
        self, x: Array, spec: QuantSpec, w: QuantArray, dtype: str = "float32"
    ) -> tuple[Array, Counts]:
        """`block_scaled_matmul` of floats (M, K), quantized by a spec, and w; what was counted.

        The spec is MXFP8 that is rebased, along K.
        """
        ...

    def grouped_weight_only_matmul(
        self, x: Array, weights: Sequence[QuantArray], ends: Sequence[int]
    ) -> Array:
        """`weight_only_matmul` of each group of rows with its own weights: float32 (M, N).

        Group g has the rows of x from ``ends[g - 1]``, or 0, to ``ends[g]``, one or more, and
        weights (N, K); the last group ends with x.
        """
        ...

    def bound_weight_only(self, x: Array, w: QuantArray) -> Callable[[Array], Array]:
        """`weight_only_matmul` with w, for float32 arrays of the shape of x, chosen once."""
        ...
