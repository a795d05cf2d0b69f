"""Activations, normalizations, attention, losses and the sums that their gradients need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from extensor.backends.capture import StepCapture
from extensor.backends.protocol.core import Array
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec

__all__ = ["AttentionForward", "AttentionOptions", "NnMethods", "TokenMemory"]


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Which keys a query sees beside ``causal``, and what else its softmax sums over.

    Attributes:
        window: query t sees the last ``window`` of the keys up to t + S - T only; None, all.
        mask: bool, broadcasts to (B, H, T, S): True where a query sees a key; None, everywhere.
        sinks: a score (H,) for each head whose exponential joins the sum, without a value.
    """

    window: int | None = None
    mask: Array | None = None
    sinks: Array | None = None


@dataclass(frozen=True, eq=False)
class AttentionForward:
    """Arguments of `NnMethods.attention` and its results, which the gradient reads."""

    q: Array
    k: Array
    v: Array
    out: Array
    stats: Array
    causal: bool
    scale: float
    options: AttentionOptions | None = None


class TokenMemory(Protocol):
    """Keys and values of the tokens that a layer of a decoder has seen; see `extensor.nn.KVCache`.

    Attributes:
        length: int64 (1,) on the host, how many tokens are in use.
        place: int64 (3,) on the host: the addresses of keys and values, and their capacity, for
            kernels on the CPU that are replayed while the memory grows.
    """

    length: Array
    place: Array

    def length_in(self, capture: StepCapture) -> Array:
        """The length as each replay of a GPU's captured step finds it, int64 of shape () there."""
        ...

    @property
    def keys(self) -> Array:
        """(B, Hkv, capacity, d), contiguous."""
        ...

    @property
    def values(self) -> Array:
        """(B, Hkv, capacity, dv), contiguous."""
        ...


class NnMethods(Protocol):
    """What layers of a network compute besides products and convolutions."""

    def add(self, a: Array, b: Array) -> Array:
        """A + b, broadcasting, in float32 rounded once where both are bfloat16."""
        ...

    def add_rows(self, out: Array, index: Array, rows: Array) -> None:
        """out[index] += rows along the first axis, in place; positions that repeat add up.

        ``index`` is of whole numbers in -len(out)..len(out) - 1, (...), and rows (..., *rest).
        """
        ...

    def sum_rows(self, index: Array, rows: Array, length: int) -> tuple[Array, Array]:
        """What `add_rows` adds to ``length`` rows of zeros, without those that stay zero.

        ``index`` is as there, and rows (index.size, width). Gives int32 (length,), where each sum
        lies or -1, and the sums, (M, width) with M <= index.size.
        """
        ...

    def leading_sum(self, x: Array, axes: int) -> Array:
        """Sums over the first ``axes`` axes, in float32 for 16-bit floats: of a bias's gradient."""
        ...

    def channel_sum(self, x: Array) -> Array:
        """Sums over all but the second axis, (N, C, ...) -> (C,)."""
        ...

    def relu(self, x: Array) -> Array:
        """max(x, 0), NaN for NaN."""
        ...

    def relu_grad(self, g: Array, out: Array) -> Array:
        """G where relu's output is positive, 0 elsewhere."""
        ...

    def positive_bits(self, x: Array) -> Array:
        """Whether each value is positive, a bit a value, in bytes as ``packbits`` makes them."""
        ...

    def relu_grad_of_bits(self, g: Array, bits: Array) -> Array:
        """`relu_grad`, of the output's `positive_bits`."""
        ...

    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """X Phi(x), with the normal distribution function Phi, and Phi(x) where that is kept."""
        ...

    def gelu_and_pack(self, x: Array, spec: QuantSpec) -> tuple[QuantArray, Array] | None:
        """X in flat blocks, as `pack` gives x.reshape(-1), and gelu of x; x is read once.

        None where no kernel does both.
        """
        ...

    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """Gradient of gelu; phi is what gelu gave beside its result."""
        ...

    def gated_silu(self, gate: Array, up: Array, alpha: float, limit: float | None) -> Array:
        """The product g sigmoid(alpha g) u of arrays of one shape.

        With a limit, g is the smaller of gate and limit, and u is up within +-limit, plus 1.
        """
        ...

    def add_rms_norm(self, a: Array, b: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """The sum of arrays of one shape and dtype, rounded to it, and `rms_norm` of the sum.

        The latter is bfloat16 if sum and weight are.
        """
        ...

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """The k largest values of the last axis, the largest first, and their positions, int64.

        Of equal values the first is first; NaN is larger than all others.
        """
        ...

    def gated_silu_grad(
        self, g: Array, gate: Array, up: Array, alpha: float, limit: float | None
    ) -> tuple[Array, Array]:
        """Gradients of gated_silu in gate and up; 0 where a limit holds."""
        ...

    def rotary(self, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        """Pairs (a, b) of the last axis become (a cos - b sin, b cos + a sin).

        The tables are (..., n), n <= d / 2; their leading axes broadcast to those of x, (..., d).
        Pairs are components i and i + n, or 2i and 2i + 1 if ``interleaved``; others stay.
        """
        ...

    def softmax(self, x: Array, axis: int) -> Array:
        """exp(x) over its sum along ``axis``, which is not empty."""
        ...

    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """Gradient of softmax, whose output is ``out``."""
        ...

    def log_softmax(self, x: Array, axis: int) -> Array:
        """The logarithm of softmax, without underflow."""
        ...

    def log_softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """Gradient of log_softmax, whose output is ``out``."""
        ...

    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """-log softmax(x)[label] of rows (N, C), labels (N,) in 0..C - 1; what its gradient needs.

        The target is 1 - smoothing at the label plus smoothing / C everywhere.
        """
        ...

    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """Gradient of cross_entropy in x times ``weight``, () or (N, 1); it gave ``kept``."""
        ...

    def label_ranks(self, x: Array, labels: Array) -> Array:
        """Classes before the label in each row of scores (N, C), int32 (N,); labels as above.

        Before it come greater scores, equal ones of lower classes, and NaN. Where the label's own
        score is NaN all C come before it.
        """
        ...

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool,
        scale: float,
        options: AttentionOptions | None = None,
    ) -> tuple[Array, Array]:
        """softmax(scale q k^T) v, (B, H, T, dv), and what the gradient needs of it, (B, H, T, 2).

        q is (B, H, T, d), k (B, Hkv, S, d) and v (B, Hkv, S, dv); nothing is empty, H is a
        multiple of Hkv. If ``causal`` query t sees the keys up to t + S - T, and S >= T. A query
        that sees no key gets zeros. Kept are each row's largest score and the inverse of its sum,
        both 0 for a query that sees nothing at all.
        """
        ...

    def cached_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        memory: TokenMemory,
        scale: float,
        turn: tuple[Array, Array] | None = None,
    ) -> Array:
        """Append k and v of one token to a memory with room; attention of q to all of its tokens.

        q is (B, H, 1, d), k (B, Hkv, 1, d), v (B, Hkv, 1, dv); gives (B, H, 1, dv), on a CPU with
        the bits of `attention`. With tables (1, n), q and k are rotated first, as by `rotary`.
        ``memory.length`` does not change.
        """
        ...

    def attention_grad(
        self, g: Array, forward: AttentionForward, into: tuple[Array, Array, Array]
    ) -> None:
        """Gradients of attention in q, k and v, of what it was given and returned.

        They are written to ``into``, arrays of the inputs' shapes that may be strided.
        """
        ...

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """LayerNorm over the last axes, those of the weight; each mean and 1 / sqrt(var + eps).

        ``narrow``: the first is rounded to bfloat16.
        """
        ...

    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of layer_norm in x, weight and bias; g may be bfloat16."""
        ...

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """RMSNorm over the last axes, those of the weight; 1 / sqrt(mean(x^2) + eps) of each.

        ``narrow``: the first is rounded to bfloat16.
        """
        ...

    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """Gradients of rms_norm in x and weight; g may be bfloat16."""
        ...

    def batch_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """BatchNorm of (N, C, ...); each channel's mean and variance over count, (C,)."""
        ...

    def batch_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """Gradients of batch_norm in x, weight and bias."""
        ...

    def dropout_mask(self, draws: Array, shape: tuple[int, ...], p: float) -> Array:
        """Float32 of a shape: 0 with probability p, else 1 / (1 - p); the same on every device.

        ``draws`` is int64 (2,): the seed, and how often it was drawn from before. Value i is kept
        where the i-th word of 32 bits is p 2^32 or more, of those that numpy.random.Philox gives,
        low half first, from the key (seed, 0) and the counter (0, calls, 0, 0).
        """
        ...
