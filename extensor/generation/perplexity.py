"""Perplexity: how well a model predicts a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.nn.kv_cache import new_cache
from extensor.nn.module import Module, evaluating
from extensor.quant.spec import QuantSpec

__all__ = ["Perplexity", "token_losses"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text: exp of the mean loss of its tokens.

    Attributes:
        losses: nats of each token that was predicted, float64 (N,).

    >>> import numpy as np
    >>> from extensor.generation import Perplexity
    >>> found = Perplexity(np.log([2.0, 4.0, 2.0, 4.0]))
    >>> round(found.value, 3), round(found.standard_error, 3)
    (2.828, 0.566)
    """

    losses: Array

    @property
    def value(self) -> float:
        """Exp of the mean loss."""
        return math.exp(float(self.losses.mean()))

    @property
    def standard_error(self) -> float:
        """Of `value`: the mean loss's standard error times it, with tokens as independent draws."""
        if len(self.losses) < 2:
            return math.inf
        return self.value * float(self.losses.std(ddof=1)) / math.sqrt(len(self.losses))


def token_losses(
    model: Module,
    tokens: Array,
    context: int = 512,
    stride: int | None = None,
    batch: int = 4,
    storage: str | QuantSpec | None = None,
) -> Iterator[Array]:
    """The loss of each token of a text, given the tokens before it, batch after batch.

    The text is read in windows of ``context`` tokens that begin every ``stride`` tokens. A window
    counts the tokens that no earlier one counted, so that each token but the first is counted once,
    with ``context - stride`` tokens before it or more, except in the first window.

    Args:
        model: a decoder, tokens (B, T) to logits (B, T, V).
        tokens: whole numbers (N,), 2 or more.
        context: the length of a window, 2 or more.
        stride: from one window's start to the next; None, half of ``context``.
        batch: windows that pass through the model at once.
        storage: how keys and values are stored before attention reads them, as `KVCache` takes it;
            None leaves them as they are.

    Yields:
        Nats of the tokens that a batch of windows counts, float64; their order is the text's.

    Raises:
        ValueError: for fewer than 2 tokens, a context, stride or batch out of range, or an unknown
            storage.
        TypeError: for a storage, and a model that takes no cache.

    >>> class Even(et.nn.Module):
    ...     def forward(self, tokens):
    ...         return et.zeros((*tokens.shape, 8))
    >>> import numpy as np
    >>> from extensor.generation import Perplexity, token_losses
    >>> found = Perplexity(np.concatenate(list(token_losses(Even(), np.arange(8), context=4))))
    >>> len(found.losses), round(found.value, 6)
    (7, 8.0)
    """
    stride = max(1, context // 2) if stride is None else stride
    if context < 2 or not 1 <= stride < context or batch < 1:
        raise ValueError(
            "expected a context of 2 tokens or more, a stride of 1 to context - 1 and a batch of 1 "
            f"or more, got {context}, {stride} and {batch}"
        )
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"expected a text of 2 tokens or more, got shape {tokens.shape}")
    if storage is not None:
        new_cache(model, storage)
    return _batches(model, tokens.astype(np.int64), context, stride, (batch, storage))


def _batches(
    model: Module,
    tokens: Array,
    context: int,
    stride: int,
    how: tuple[int, str | QuantSpec | None],
) -> Iterator[Array]:
    batch, storage = how
    starts = list(range(0, max(1, len(tokens) - context + stride), stride))
    device = next((p.device for p in model.parameters()), "cpu")
    with evaluating(model):
        # The last window may be shorter than the others: it passes alone.
        whole = [start for start in starts if start + context <= len(tokens)]
        groups = [whole[i : i + batch] for i in range(0, len(whole), batch)]
        for group in [*groups, *([start] for start in starts[len(whole) :])]:
            windows = np.stack([tokens[start : start + context] for start in group])
            cache = {} if storage is None else {"cache": new_cache(model, storage)}
            with no_grad():
                logits = model(ExTensor.from_numpy(windows).to(device), **cache)
            scores = logits.to("cpu").to("float32").numpy()
            counted = []
            for start, window, rows in zip(group, windows, scores, strict=True):
                first = 1 if start == 0 else context - stride
                counted.append(_losses(rows[first - 1 : -1], window[first:]))
            yield np.concatenate(counted)


def _losses(scores: Array, targets: Array) -> Array:
    """-log softmax of the targets: (T, V) and (T,) -> float64 (T,)."""
    top = scores.max(axis=1)
    sums = np.exp(scores - top[:, None]).sum(axis=1, dtype=np.float64)
    losses: Array = np.log(sums) - (scores[np.arange(len(targets)), targets] - top)
    return losses
