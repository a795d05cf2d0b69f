"""Dropout of values and of whole channels."""

from __future__ import annotations

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor, wrap
from extensor.nn import init
from extensor.nn.checks import check_images, check_probability
from extensor.nn.module import Module
from extensor.nn.parameter import Buffer
from extensor.ops.arguments import tensors_only

__all__ = ["Dropout", "Dropout2d"]


class Dropout(Module):
    """In training, zeroes each value with probability ``p`` and divides the others by 1 - p.

    The mask is a function of a seed and of the number of calls in training. Both are buffers, so
    that a run resumed from a checkpoint repeats an uninterrupted one. The mask is the same on
    every device. Each replay of a captured step draws a new one.

    Args:
        p: in [0, 1).
        rng: draws the seed; see `init.as_rng`.

    Attributes:
        draws: int64 (2,): the seed, and the calls in training so far.

    Raises:
        ValueError: for a ``p`` outside [0, 1).

    Source: Srivastava et al., JMLR 15 (2014), in the form that changes nothing in evaluation.

    >>> drop = et.nn.Dropout(p=0.5, rng=0)
    >>> drop(et.ones((8,))).tolist()
    [0.0, 2.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0]
    >>> drop.eval()(et.ones((2,))).tolist()
    [1.0, 1.0]
    """

    def __init__(self, p: float = 0.5, rng: Seed = None) -> None:
        self.p = check_probability("p", p)
        seed = int(init.as_rng(rng).integers(1 << 62))
        self.draws = Buffer(np.array([seed, 0], np.int64))

    def _mask_shape(self, x: ExTensor) -> tuple[int, ...]:
        """The shape of the mask, which is broadcast to x."""
        return x.shape

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same shape; ``x`` itself in evaluation."""
        tensors_only("Dropout", x)
        if not self.training or self.p == 0.0:
            return x
        backend, draws = self.draws.backend, self.draws.data
        mask = wrap(backend.dropout_mask(draws, self._mask_shape(x), self.p), backend)
        with no_grad():
            self.draws.assign_(draws + backend.xp.arange(2))
        mask = mask.to(x.device)
        return x * mask.astype(x.dtype) if x.dtype.is_float else x * mask

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"p={self.p}"


class Dropout2d(Dropout):
    """Zeroes whole channels of an (N, C, H, W) input; otherwise as `Dropout`.

    Args:
        p: probability of zeroing a channel, in [0, 1).
        rng: draws the seed; see `init.as_rng`.

    Raises:
        ValueError: for a ``p`` outside [0, 1); when called in training, for an input that is not
            (N, C, H, W).

    >>> et.nn.Dropout2d(p=0.5, rng=0)(et.ones((1, 4, 2, 2))).max(axis=(2, 3)).tolist()
    [[0.0, 2.0, 2.0, 2.0]]
    """

    def _mask_shape(self, x: ExTensor) -> tuple[int, ...]:
        """(N, C, 1, 1)."""
        check_images("Dropout2d", x)
        return (*x.shape[:2], 1, 1)
