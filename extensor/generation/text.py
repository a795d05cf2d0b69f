"""Text from tokens as they are written: whole characters, and an end at a stop string."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence

from extensor.generation.tokenizer import Tokenizer

__all__ = ["stream_text"]

REPLACEMENT = "\ufffd"


def stream_text(
    tokens: Iterable[int],
    tokenizer: Tokenizer,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    end_tokens: Sequence[int] = (),
    before: Sequence[int] = (),
) -> Iterator[str]:
    """The text of tokens, piece by piece, as soon as each piece is certain.

    A piece never ends within a character of several tokens, nor within what may become a stop
    string.

    Args:
        tokens: one token after the other, such as a row of `next_tokens`.
        tokenizer: turns them into text.
        max_new_tokens: how many tokens to take at most.
        stop: texts before which the text ends.
        end_tokens: tokens before which the text ends.
        before: the last tokens of what the text continues; some tokenizers drop a space without.

    Yields:
        Pieces of text, none empty.

    Raises:
        ValueError: for an empty stop string.

    >>> from extensor.generation import stream_text
    >>> class Bytes:
    ...     def decode(self, tokens):
    ...         return bytes(tokens).decode("utf-8", "replace")
    >>> list(stream_text("né, so".encode(), Bytes(), 99, stop=[" so"]))
    ['n', 'é', ',']
    """
    if not all(stop):
        raise ValueError("stop: expected texts of one character or more, got an empty one")
    held = ""
    new = itertools.takewhile(
        lambda token: token not in end_tokens, itertools.islice(tokens, max_new_tokens)
    )
    pieces = _characters(new, tokenizer, list(before[-1:]))
    with contextlib.closing(pieces):
        for piece in pieces:
            held += piece
            found = [place for text in stop if (place := held.find(text)) >= 0]
            if found:
                if held[: min(found)]:
                    yield held[: min(found)]
                return
            certain = len(held) - max((_overlap(held, text) for text in stop), default=0)
            if certain:
                yield held[:certain]
                held = held[certain:]
    if held:
        yield held


def _characters(
    tokens: Iterable[int], tokenizer: Tokenizer, kept: list[int]
) -> Generator[str, None, None]:
    """The text that each token adds to those kept, once its last character is whole."""
    written = tokenizer.decode(kept)
    for token in tokens:
        kept = [*kept, int(token)]
        text = tokenizer.decode(kept)
        if not text.endswith(REPLACEMENT) and len(text) > len(written):
            yield text[len(written) :]
            kept = kept[-1:]
            written = tokenizer.decode(kept)
    if rest := tokenizer.decode(kept)[len(written) :]:
        yield rest


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text begin a stop string."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
