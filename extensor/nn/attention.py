"""Multi-head self-attention, with grouped queries and rotary position embedding."""

from __future__ import annotations

import math

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import compute_dtype
from extensor.nn.checks import check_size
from extensor.nn.linear import Linear
from extensor.nn.module import Module
from extensor.ops.arguments import tensors_only
from extensor.ops.attention import packed_attention, scaled_dot_product_attention
from extensor.ops.rotary import rotary_embedding

__all__ = ["MultiheadAttention", "rotate"]


def rotate(x: ExTensor, base: float) -> ExTensor:
    """Rotary position embedding: rotate each vector by angles proportional to its position.

    Components i and i + d/2 of the vector at position t are rotated, as a pair, by the angle
    t base^(-2i/d). The dot product of two rotated vectors then depends on their distance only.

    Args:
        x: (..., T, d) with d even.
        base: above 0; 10000 in the paper.

    Returns:
        The same shape and dtype; 16-bit floats are computed in float32 and rounded once.

    Raises:
        ValueError: for an odd d.

    Source: Su et al., arXiv 2104.09864, section 3.2.2, with the halves paired as in GPT-NeoX.

    >>> from extensor.nn.attention import rotate
    >>> rotate(et.ones((2, 2)), base=10000.0).numpy().round(4)
    array([[ 1.    ,  1.    ],
           [-0.3012,  1.3818]], dtype=float32)
    """
    *_, length, size = x.shape
    if size % 2:
        raise ValueError(f"rotate: expected vectors of even length, got {size}")
    # Angles in float64 on the host, so that they are the same on every device.
    angle = np.arange(length)[:, None] * base ** (-2.0 * np.arange(size // 2) / size)
    wide = compute_dtype(x.dtype)
    cos, sin = (ExTensor.from_numpy(f(angle)).astype(wide).to(x.device) for f in (np.cos, np.sin))
    return rotary_embedding(x, cos, sin)


class MultiheadAttention(Module):
    """Self-attention with several heads (arXiv 1706.03762, section 3.2.2).

    Args:
        width: length of each token's vector, a multiple of ``heads``.
        heads: query heads, each width / heads long.
        kv_heads: key and value heads, a divisor of ``heads`` (grouped-query attention,
            arXiv 2305.13245); None, as many as ``heads``.
        causal: whether a token sees only itself and those before it.
        rotary: base of the rotary position embedding, such as 10000; None for none.
        bias: whether the projections have biases.
        rng: draws the initial weights; see `Linear`.

    Attributes:
        qkv: Linear that gives the queries of all heads, then the keys, then the values.
        out: Linear from the heads, side by side, to the width.

    Raises:
        ValueError: for sizes that do not go together; when called, for an input that is not
            (..., T, width), or holds no tokens.

    >>> attention = et.nn.MultiheadAttention(width=64, heads=4, kv_heads=2, causal=True, rng=0)
    >>> attention(et.zeros((8, 10, 64))).shape
    (8, 10, 64)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        rotary: float | None = None,
        bias: bool = True,
        rng: Seed = None,
    ) -> None:
        self.width, self.heads = check_size("width", width), check_size("heads", heads)
        self.kv_heads = heads if kv_heads is None else check_size("kv_heads", kv_heads)
        if width % heads:
            raise ValueError(
                f"MultiheadAttention: expected a width that is a multiple of the heads, got width "
                f"{width} and {heads} heads"
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"MultiheadAttention: expected heads that are a multiple of kv_heads, got {heads} "
                f"and {kv_heads}"
            )
        self.head_size = width // heads
        if rotary is not None and (not 0.0 < rotary < math.inf or self.head_size % 2):
            raise ValueError(
                "MultiheadAttention: rotary: expected a base above 0 and heads of even length, got "
                f"{rotary!r} and {self.head_size}"
            )
        self.causal, self.rotary = causal, rotary
        projected = (heads + 2 * self.kv_heads) * self.head_size
        self.qkv = Linear(width, projected, bias, rng)
        self.out = Linear(width, width, bias, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., T, width) -> the same."""
        tensors_only("MultiheadAttention", x)
        if x.ndim < 2 or x.shape[-1] != self.width or not x.shape[-2]:
            raise ValueError(
                f"MultiheadAttention: expected an input of shape (..., T, {self.width}) with "
                f"T of 1 or more, got {x.shape}"
            )
        projected = self.qkv(x)
        if self.rotary is None:
            return self.out(
                packed_attention(projected, self.heads, self.kv_heads, causal=self.causal)
            )
        all_heads = self.heads + 2 * self.kv_heads
        split = projected.reshape((*x.shape[:-1], all_heads, self.head_size)).swapaxes(-2, -3)
        q = rotate(split[..., : self.heads, :, :], self.rotary)
        k = rotate(split[..., self.heads : self.heads + self.kv_heads, :, :], self.rotary)
        v = split[..., self.heads + self.kv_heads :, :, :]
        mixed = scaled_dot_product_attention(q, k, v, causal=self.causal)
        width = mixed.shape[-3] * mixed.shape[-1]
        return self.out(mixed.swapaxes(-2, -3).reshape((*x.shape[:-1], width)))

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return (
            f"{self.width}, heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"rotary={self.rotary}"
        )
