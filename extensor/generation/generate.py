"""Writing tokens one after the other with a language model.

A model maps tokens (B, T) to logits (B, T, V). With a cache each token passes through the model
once; without one, all tokens pass again for each that is written. Both write the same tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from extensor.autograd.capture import capture
from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.backends import registry
from extensor.errors import CaptureError
from extensor.generation.sampling import Sampling, is_whole, sample
from extensor.nn.kv_cache import Cache, KVCache
from extensor.nn.module import Module, evaluating

__all__ = ["generate", "next_tokens", "pad_left"]

Array = np.ndarray[Any, Any]
Tokens = ExTensor | Array | Sequence[Sequence[int]]
GREEDY = Sampling()


def generate(
    model: Module,
    tokens: Tokens,
    max_new_tokens: int = 128,
    *,
    attention_mask: ExTensor | Array | None = None,
    end_tokens: Sequence[int] = (),
    cache: Cache | None = None,
    chunk: int = 512,
    **sampling: Any,
) -> ExTensor:
    """Continue each row of tokens.

    Args:
        model: a decoder; called as ``model(tokens)``, with a cache or padding also with
            ``attention_mask``, ``positions`` and ``cache``.
        tokens: whole numbers (B, T); or rows of different lengths, which are padded on their left.
        max_new_tokens: how many to write at most, 1 or more.
        attention_mask: (B, T), true for tokens and false for padding, which is on the left.
        end_tokens: tokens that end a row. A row that has ended is filled with its end token.
        cache: what the model writes keys and values to; None passes all tokens through the model
            again for each new one. A cache that is not empty holds the first of ``tokens``.
        chunk: at most so many tokens of the prompt pass through the model at once.
        sampling: fields of `Sampling`; the likeliest token is taken where they are left out.

    Returns:
        The tokens given, then n of 1 to ``max_new_tokens``, as int64 (B, T + n).

    Raises:
        ValueError: for no tokens, padding elsewhere than on the left, a cache that holds as many
            tokens as there are or more, numbers out of range, or logits that are not finite.
        TypeError: for tokens that are no whole numbers, or an unknown field of `Sampling`.

    >>> class Next(et.nn.Module):
    ...     def forward(self, tokens):
    ...         return et.ExTensor(np.eye(8, dtype=np.float32)[(tokens.numpy() + 1) % 8])
    >>> import numpy as np
    >>> et.generate(Next(), [[1, 2, 3]], max_new_tokens=4).tolist()
    [[1, 2, 3, 4, 5, 6, 7]]
    """
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected 1 or more, got {max_new_tokens!r}")
    rows, mask = _checked(tokens, attention_mask)
    ends = np.array(sorted(end_tokens), np.int64)
    written, done = [rows], np.zeros(len(rows), bool)
    device = tokens.device if isinstance(tokens, ExTensor) else None
    steps = next_tokens(
        model, rows, attention_mask=mask, cache=cache, chunk=chunk, how=Sampling(**sampling),
        device=device,
    )  # fmt: skip
    with contextlib.closing(steps):
        for new in itertools.islice(steps, max_new_tokens):
            column = np.where(done, written[-1][:, -1], new)  # an ended row repeats its end token
            written.append(column[:, None])
            done |= np.isin(column, ends)
            if done.all():
                break
    out = ExTensor.from_numpy(np.concatenate(written, axis=1))
    return out if device is None else out.to(device)


def next_tokens(
    model: Module,
    tokens: Tokens,
    *,
    attention_mask: ExTensor | Array | None = None,
    cache: Cache | None = None,
    chunk: int = 512,
    how: Sampling = GREEDY,
    context: int | None = None,
    device: str | None = None,
) -> Generator[Array, None, None]:
    """The tokens that follow, one step after the other, without an end.

    Args:
        model: see `generate`; it is in evaluation mode until the iterator is closed.
        tokens: see `generate`.
        attention_mask: see `generate`.
        cache: see `generate`.
        chunk: see `generate`.
        how: how tokens are chosen.
        context: without a cache, the model sees the last so many tokens only; None, all.
        device: where the model computes; None, where its first parameter is.

    Yields:
        The next token of each row, as int64 (B,).

    Raises:
        ValueError, TypeError: as `generate`.

    >>> class Next(et.nn.Module):
    ...     def forward(self, tokens):
    ...         return et.ExTensor(np.eye(8, dtype=np.float32)[(tokens.numpy() + 1) % 8])
    >>> import itertools, numpy as np
    >>> from extensor.generation import next_tokens
    >>> [int(t[0]) for t in itertools.islice(next_tokens(Next(), [[1]]), 3)]
    [2, 3, 4]
    """
    rows, mask = _checked(tokens, attention_mask)
    if not is_whole(chunk) or chunk < 1:
        raise ValueError(f"chunk: expected 1 token or more, got {chunk!r}")
    if cache is not None and cache.length >= rows.shape[1]:
        raise ValueError(
            f"cache: expected fewer tokens in it than the {rows.shape[1]} given, got "
            f"{cache.length}; make a cache for each text"
        )
    how.seeds(len(rows))
    if device is None:
        device = next((p.device for p in model.parameters()), "cpu")
    return _steps(model, rows, mask, cache, how, (chunk, context, device))


def _steps(
    model: Module,
    rows: Array,
    mask: Array | None,
    cache: Cache | None,
    how: Sampling,
    limits: tuple[int, int | None, str],
) -> Generator[Array, None, None]:
    chunk, context, device = limits
    decode = None
    if mask is None and cache is not None and getattr(model, "recordable", False):
        decode = _NextToken(model, cache, device)
    real = np.ones(rows.shape, bool) if mask is None else mask
    seen = [row[kept] for row, kept in zip(rows, real, strict=True)]
    with evaluating(model):
        for step in itertools.count():
            if cache is None:
                start = max(0, rows.shape[1] - context) if context else 0
                part = None if mask is None else mask[:, start:]
                scores = _scores(model, rows[:, start:], part, None, device)
            elif decode is not None and rows.shape[1] - cache.length == 1 and decode.is_repeatable:
                scores = decode(rows[:, -1:])
            else:
                scores = _extend(model, rows, mask, cache, (chunk, device))
            token = sample(scores, seen, how, step)
            yield token
            rows = np.concatenate([rows, token[:, None]], axis=1)
            seen = [np.append(old, one) for old, one in zip(seen, token, strict=True)]
            if mask is not None:
                mask = np.concatenate([mask, np.ones((len(rows), 1), bool)], axis=1)


class _NextToken:
    """The logits after one more token of each row, repeated without the model's Python."""

    def __init__(self, model: Module, cache: Cache, device: str) -> None:
        self.cache, self.device = cache, device
        self.model = model
        self.step = capture(self.run)
        self.capacity = 0
        self.is_captured = True

    @property
    def is_repeatable(self) -> bool:
        """Whether the device repeats the step: a CPU; a GPU whose kernel appends to the cache."""
        cache, device = self.cache, self.device
        return device == "cpu" or (
            self.is_captured
            and isinstance(cache, KVCache)
            and cache.can_replay(registry.get(device))
        )

    def run(self, tokens: ExTensor) -> ExTensor:
        """Tokens (B, 1) -> logits (B, V), by the model's Python."""
        logits: ExTensor = self.model(tokens, cache=self.cache)[:, -1]
        return logits

    def __call__(self, tokens: Array) -> Array:
        """Tokens (B, 1) -> logits (B, V)."""
        if self.device != "cpu" and isinstance(self.cache, KVCache):
            if self.cache.capacity != self.capacity:  # its memory has moved
                self.step.close()
            self.capacity = self.cache.capacity
        given = ExTensor.from_numpy(tokens).to(self.device)
        with no_grad():
            try:
                logits = self.step(given)
            except CaptureError as error:  # the cache has not counted the token yet
                if self.device == "cpu":
                    raise
                warnings.warn(f"generate: Python computes each token, since {error}", stacklevel=2)
                self.step.close()
                self.is_captured = False
                logits = self.run(given)
        found: Array = logits.to("cpu").to("float32").numpy()
        return found


def _extend(
    model: Module, rows: Array, mask: Array | None, cache: Cache, limits: tuple[int, str]
) -> Array:
    """Pass the tokens that the cache lacks through the model in chunks; the last one's logits."""
    chunk, device = limits
    while cache.length < rows.shape[1]:
        end = min(cache.length + chunk, rows.shape[1])
        seen = None if mask is None else mask[:, :end]
        scores = _scores(model, rows[:, cache.length : end], seen, cache, device)
    return scores


def _scores(
    model: Module, rows: Array, mask: Array | None, cache: Cache | None, device: str
) -> Array:
    """The logits (B, V) of each row's last token."""
    more: dict[str, Any] = {} if cache is None else {"cache": cache}
    if mask is not None:
        places = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, mask.shape[1] - rows.shape[1] :]
        more["attention_mask"] = ExTensor.from_numpy(mask).to(device)
        more["positions"] = ExTensor.from_numpy(places.astype(np.int64)).to(device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        more["logits_to_keep"] = 1  # the head of a long prompt is most of a small model's work
    with no_grad():
        logits = model(ExTensor.from_numpy(rows).to(device), **more)[:, -1]
    found: Array = logits.to("cpu").to("float32").numpy()
    return found


def pad_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Array, Array]:
    """Rows of different lengths as one array, padded on the left.

    Args:
        rows: tokens of each row.
        pad: the number that fills.

    Returns:
        int64 (B, T) and bool (B, T), true for tokens.

    Raises:
        ValueError: for no rows, or an empty one.

    >>> from extensor.generation import pad_left
    >>> pad_left([[1, 2, 3], [4]])[0].tolist()
    [[1, 2, 3], [0, 0, 4]]
    """
    if not len(rows) or not all(len(row) for row in rows):
        raise ValueError(f"expected rows of 1 token or more, got {[len(row) for row in rows]}")
    length = max(len(row) for row in rows)
    tokens = np.full((len(rows), length), pad, np.int64)
    mask = np.zeros((len(rows), length), bool)
    for place, row in enumerate(rows):
        tokens[place, length - len(row) :] = row
        mask[place, length - len(row) :] = True
    return tokens, mask


def _checked(tokens: Tokens, attention_mask: ExTensor | Array | None) -> tuple[Array, Array | None]:
    """Tokens (B, T) and their mask, None where nothing is padded.

    Raises:
        ValueError, TypeError: for tokens or a mask that cannot be used.
    """
    listed = not isinstance(tokens, (ExTensor, np.ndarray)) and not any(map(is_whole, tokens))
    ragged = listed and len({len(row) for row in tokens}) > 1
    if ragged and attention_mask is not None:
        raise ValueError("attention_mask: rows of different lengths are padded here; leave it out")
    if ragged:
        return pad_left(tokens)  # type: ignore[arg-type]
    rows = tokens.to("cpu").numpy() if isinstance(tokens, ExTensor) else np.asarray(tokens)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"expected tokens (B, T), one or more in each row, got shape {rows.shape}")
    if rows.dtype.kind not in "iu":
        raise TypeError(f"expected whole numbers as tokens, got {rows.dtype}")
    rows = rows.astype(np.int64)
    if attention_mask is None:
        return rows, None
    mask = attention_mask
    mask = mask.to("cpu").numpy() if isinstance(mask, ExTensor) else np.asarray(mask)
    if mask.shape != rows.shape:
        raise ValueError(f"attention_mask: expected shape {rows.shape}, got {mask.shape}")
    mask = mask.astype(bool)
    if not mask[:, -1].all() or (np.diff(mask.astype(np.int8), axis=1) < 0).any():
        raise ValueError(
            "attention_mask: expected padding on the left only, so that each row ends with a "
            "token; `extensor.generation.pad_left` pads so"
        )
    return rows, None if mask.all() else mask
