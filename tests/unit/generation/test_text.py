"""Streams of text: whole characters, stop strings, end tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from extensor.generation import stream_text


class Bytes:
    """A token is a byte; 256 and up are special and write nothing."""

    size = 260

    def encode(self, text: str) -> Any:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Any) -> str:
        return bytes(int(t) for t in tokens if t < 256).decode("utf-8", "replace")


TEXT = "naïve 東京 \U0001f600 e\u0301 done"


def pieces(tokens: Any, **options: Any) -> list[str]:
    return list(stream_text(tokens, Bytes(), 99, **options))


def test_a_piece_never_splits_a_character() -> None:
    found = pieces(TEXT.encode())
    assert "".join(found) == TEXT
    assert len(found) == len(TEXT) and not any("\ufffd" in piece for piece in found)


def test_bytes_that_are_no_text_come_out_at_the_latest_at_the_end() -> None:
    assert "".join(pieces(b"a\xf0\x9fb\xe6")) == b"a\xf0\x9fb\xe6".decode("utf-8", "replace")


def test_every_way_to_cut_gives_the_same_text() -> None:
    for stop in (["dode"], ["京 x", " \U0001f600x"], ["e\u0301 done!"]):
        assert "".join(pieces(TEXT.encode(), stop=stop)) == TEXT


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["京"], "naïve 東"),
        (["done", " 東京"], "naïve"),
        (["n"], ""),
        (["ve", "ïve"], "na"),  # both end at once; the text ends where the earlier one begins
        (["aabaaac"], TEXT),
    ],
)
def test_the_text_ends_before_a_stop_string(stop: list[str], expected: str) -> None:
    found = pieces(TEXT.encode(), stop=stop)
    assert "".join(found) == expected and all(found)


def test_a_stop_string_that_repeats_its_own_start_is_found() -> None:
    assert "".join(pieces(b"xaabaabaaac", stop=["aabaaac"])) == "xaab"


def test_end_tokens_and_the_limit_end_the_text() -> None:
    tokens = [*b"ab", 256, *b"cd", 257, *b"e"]
    assert "".join(pieces(tokens)) == "abcde"
    assert "".join(pieces(tokens, end_tokens=[257])) == "abcd"
    endless = itertools.cycle(b"ab")
    assert "".join(stream_text(endless, Bytes(), 5)) == "ababa"
    assert next(endless) == ord("b")  # no token more than asked for was taken


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="got an empty one"):
        pieces(b"a", stop=[""])
