"""Tokens of a large text, and the tokenizer it teaches: kept, and found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from extensor.training.text import encoded as module
from extensor.training.text.encoded import encoded, learnt
from extensor.training.text.tokenizers import BytePairs, Characters


def test_a_large_text_is_encoded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    text = "".join(f"int value_{n} = {n};\n" for n in range(500))
    tokenizer = BytePairs.train(text, 300)
    whole = tokenizer.encode(text)
    assert np.array_equal(encoded(tokenizer, text), whole) and not cache.exists()
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "PIECE", 700)
    first = encoded(tokenizer, text)
    assert first.dtype == np.int64 and tokenizer.decode(first) == text
    assert np.array_equal(first, whole)  # a cut after a line end changes no token here
    (kept,) = (cache / "tokens").iterdir()
    assert np.load(kept).dtype == np.uint16
    monkeypatch.setattr(BytePairs, "encode", lambda self, text: pytest.fail("encoded again"))
    assert np.array_equal(encoded(tokenizer, text), whole)
    assert np.array_equal(
        encoded(Characters.train(text, 0), text), Characters.train(text, 0).encode(text)
    )
    assert len(list((cache / "tokens").iterdir())) == 2  # another tokenizer, another file


def test_a_large_text_teaches_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    text = "".join(f"int value_{n} = {n};\n" for n in range(500))
    state = learnt("bpe", text, 300).state()
    assert state == BytePairs.train(text, 300).state() and not cache.exists()
    monkeypatch.setattr(module, "LARGE", 1000)
    assert learnt("bpe", text, 300).state() == state
    assert learnt("bpe", text, 280).size == 280  # another vocabulary, another file
    with monkeypatch.context() as patch:
        patch.setattr(BytePairs, "train", lambda *args: pytest.fail("learnt again"))
        assert learnt("bpe", text, 300).state() == state
    for kept in (cache / "tokens").iterdir():
        kept.write_bytes(kept.read_bytes()[:-9])
    assert learnt("bpe", text, 300).state() == state
