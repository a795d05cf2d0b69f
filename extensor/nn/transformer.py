"""The transformer block and its feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.errors import unknown_name
from extensor.nn.attention import MultiheadAttention
from extensor.nn.checks import check_size
from extensor.nn.linear import Linear
from extensor.nn.module import Module
from extensor.nn.norm import LayerNorm, RMSNorm
from extensor.ops.activation import gelu, swiglu

__all__ = ["FeedForward", "TransformerBlock"]

NORMS: Mapping[str, Callable[[int, bool], Module]] = MappingProxyType(
    {
        "layer": lambda width, bias: LayerNorm(width, bias=bias),
        "rms": lambda width, _: RMSNorm(width),
    }
)
ACTIVATIONS: Mapping[str, tuple[int, Callable[[ExTensor], ExTensor]]] = MappingProxyType(
    {"gelu": (1, gelu), "swiglu": (2, swiglu)}
)
"""By name: how many times the hidden width the function takes, and the function."""


class FeedForward(Module):
    """Two Linear layers around an activation, on each token by itself.

    Args:
        width: of input and output.
        hidden: width between them.
        activation: "gelu", or "swiglu": the first layer then gives gate and value side by side, and
            the hidden values are silu(gate) value (arXiv 2002.05202, eq. 6).
        bias: whether the layers have biases.
        rng: draws the initial weights.

    Raises:
        ValueError: for sizes below 1 or an unknown activation; when called, for an input that is
            not (..., width).

    >>> et.nn.FeedForward(64, 256, "swiglu", rng=0)(et.zeros((2, 10, 64))).shape
    (2, 10, 64)
    """

    def __init__(
        self, width: int, hidden: int, activation: str = "gelu", bias: bool = True, rng: Seed = None
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(unknown_name("activation", activation, ACTIVATIONS))
        self.activation = activation
        times, self._function = ACTIVATIONS[activation]
        self.up = Linear(width, times * check_size("hidden", hidden), bias, rng)
        self.down = Linear(hidden, width, bias, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., width) -> the same."""
        return self.down(self._function(self.up(x)))

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"activation={self.activation!r}"


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): the pre-norm block.

    Args:
        width: length of each token's vector.
        heads: query heads; see `MultiheadAttention`.
        kv_heads: key and value heads; None, as many as ``heads``.
        hidden: width inside the feed-forward layers; None, four times ``width``.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        activation: see `FeedForward`.
        causal: whether a token sees only itself and those before it.
        rotary: base of the rotary position embedding; None for none.
        bias: whether the Linear layers and LayerNorm have biases.
        rng: draws the initial weights.

    Raises:
        ValueError: for sizes that do not go together or an unknown name; when called, for an input
            that is not (..., T, width).

    Source: GPT-2 (Radford et al. 2019, section 2.3); arXiv 2002.04745 on where the norm stands.

    >>> block = et.nn.TransformerBlock(64, heads=4, norm="rms", causal=True, rotary=10000.0, rng=0)
    >>> block(et.zeros((2, 10, 64))).shape
    (2, 10, 64)
    """

    feeds_layers = ("norm1", "norm2")

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden: int | None = None,
        norm: str = "layer",
        activation: str = "gelu",
        causal: bool = False,
        rotary: float | None = None,
        bias: bool = True,
        rng: Seed = None,
    ) -> None:
        if norm not in NORMS:
            raise ValueError(unknown_name("norm", norm, NORMS))
        self.norm1 = NORMS[norm](width, bias)
        self.attention = MultiheadAttention(
            width, heads, kv_heads, causal=causal, rotary=rotary, bias=bias, rng=rng
        )
        self.norm2 = NORMS[norm](width, bias)
        hidden = 4 * width if hidden is None else hidden
        self.feed_forward = FeedForward(width, hidden, activation, bias, rng)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., T, width) -> the same."""
        x = x + self.attention(self.norm1(x))
        out: ExTensor = x + self.feed_forward(self.norm2(x))
        return out
