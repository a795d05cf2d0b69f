"""Mixtures of experts: a router sends each token to a few of many feed-forward networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.mode import is_grad_enabled
from extensor.autograd.tensor import ExTensor, wrap
from extensor.nn import init
from extensor.nn.checks import check_last_axes, check_size
from extensor.nn.container import ModuleList
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.indexing import take
from extensor.ops.joining import concatenate
from extensor.ops.matmul import linear
from extensor.ops.softmax import softmax
from extensor.ops.sort import topk

__all__ = ["MixtureOfExperts", "TopKRouter"]

_FEW_ROWS = 64
"""Up to so many, packed weights of a group are decoded on the way of its own product."""


class TopKRouter(Module):
    """Scores experts for each token and chooses the best.

    No recipe quantizes it: a token's experts should not change with its rounding.

    Args:
        width: length of each token's vector.
        count: experts.
        active: how many are chosen.
        normalize: the weights of the chosen ones sum to 1; else they are parts of the softmax over
            all experts.
        bias: whether scores have biases.
        rng: draws the weights; see `Linear`.

    Attributes:
        weight: float32 (count, width); bias: float32 (count,), or None.

    Raises:
        ValueError: for sizes below 1, or more active experts than there are.

    Source: Shazeer et al., arXiv 1701.06538, section 2.1, without its noise.

    >>> from extensor.nn.mixture import TopKRouter
    >>> weights, chosen = TopKRouter(8, count=4, active=2, rng=0)(et.ones((3, 8)))
    >>> weights.shape, chosen.shape
    ((3, 2), (3, 2))
    """

    def __init__(
        self,
        width: int,
        count: int,
        active: int,
        normalize: bool = True,
        bias: bool = False,
        rng: Seed = None,
    ) -> None:
        self.width, self.count = check_size("width", width), check_size("count", count)
        self.active, self.normalize = check_size("active", active), normalize
        if active > count:
            raise ValueError(f"active: expected at most the {count} experts, got {active}")
        generator, bound = init.as_rng(rng), 1.0 / math.sqrt(width)
        self.weight = Parameter(init.uniform((count, width), bound, generator))
        self.bias = Parameter(init.uniform((count,), bound, generator)) if bias else None

    def forward(self, x: ExTensor) -> tuple[ExTensor, ExTensor]:
        """(N, width) -> weights (N, active) and numbers of experts (N, active), best first."""
        check_last_axes("TopKRouter", x, self.width)
        scores = linear(x, self.weight, self.bias)
        if self.normalize:  # the same as dividing parts of the whole softmax by their sum
            best, chosen = self._best(scores)
            return softmax(best), chosen
        return self._best(softmax(scores))

    def _best(self, scores: ExTensor) -> tuple[ExTensor, ExTensor]:
        """`topk`; on a GPU, without gradients, in one launch that waits for nothing."""
        backend = scores.backend
        if is_grad_enabled() or not backend.groups_products:
            return topk(scores, self.active)
        best, chosen = backend.topk(scores.data, self.active)
        return wrap(best, backend), wrap(chosen, backend)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.width}, {self.count}, active={self.active}, normalize={self.normalize}"


class MixtureOfExperts(Module):
    """The weighted sum of what a token's experts give.

    Tokens are sorted by expert, each expert runs once on all of its tokens, and the results go back
    to their places. An expert without tokens does not run, and its weights get no gradient.
    Experts with a method ``run_groups(experts, rows, ends)`` are asked to run all at once, for many
    rows; None from it means one after the other. Before that, those with a method
    ``run_choices(experts, rows, weights, chosen)`` are asked for the sum itself.

    Args:
        router: chooses experts.
        experts: modules from (N, width) to (N, width), as many as the router knows.
        router_name: the attribute that holds the router, as files of weights call it.

    Attributes:
        experts: the modules.

    Raises:
        ValueError: for another number of experts; when called, for an input that is not
            (..., width).

    >>> from extensor.nn.mixture import TopKRouter
    >>> experts = et.nn.ModuleList([et.nn.FeedForward(8, 16, rng=i) for i in range(4)])
    >>> mixture = et.nn.MixtureOfExperts(TopKRouter(8, 4, active=2, rng=0), experts)
    >>> mixture(et.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self, router: TopKRouter, experts: ModuleList, router_name: str = "router"
    ) -> None:
        if len(experts) != router.count:
            raise ValueError(
                f"MixtureOfExperts: expected {router.count} experts, got {len(experts)}"
            )
        self.router_name = router_name
        setattr(self, router_name, router)
        self.experts = experts

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., width) -> the same."""
        router: TopKRouter = getattr(self, self.router_name)
        check_last_axes("MixtureOfExperts", x, router.width)
        rows = x.reshape((math.prod(x.shape[:-1]), router.width))
        weights, chosen = router(rows)
        if at_once := self._together("run_choices", math.prod(chosen.shape)):
            mixed: ExTensor | None = at_once(list(self.experts), rows, weights, chosen)
            if mixed is not None:
                return mixed.reshape(x.shape)
        numbers = np.asarray(chosen.to("cpu").data).ravel()
        order = np.argsort(numbers, kind="stable")  # tokens of one expert side by side
        ends = np.cumsum(np.bincount(numbers, minlength=router.count))
        arranged = take(rows, self._index(order // router.active, rows))
        joined = self._run(arranged, ends.tolist())
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        found = take(joined, self._index(places.reshape(chosen.shape), rows))  # (N, active, width)
        mixed = (found * weights.expand_dims(-1)).sum(axis=1)
        return mixed.reshape(x.shape)

    def _together(self, way: str, rows: int) -> Any:
        """The experts' method that runs them together; None for few rows, and if one has hooks."""
        hooked = any(expert._hooks or expert._pre_hooks for expert in self.experts)
        return None if hooked or rows <= _FEW_ROWS else getattr(self.experts[0], way, None)

    def _run(self, rows: ExTensor, ends: list[int]) -> ExTensor:
        """What each expert makes of its rows, which follow those of the one before."""
        starts = [0, *ends[:-1]]
        busy = [
            (expert, start, end)
            for expert, start, end in zip(self.experts, starts, ends, strict=True)
            if end > start or not len(rows)  # an empty batch goes through all
        ]
        experts, _, last = zip(*busy, strict=True)
        if at_once := self._together("run_groups", len(rows)):
            joined: ExTensor | None = at_once(experts, rows, last)
            if joined is not None:
                return joined
        parts = [expert(rows[start:end]) for expert, start, end in busy]
        return concatenate(parts, axis=0) if len(parts) > 1 else parts[0]

    @staticmethod
    def _index(values: Any, like: ExTensor) -> ExTensor:
        return wrap(like.backend.xp.asarray(values), like.backend)
