"""Tokens of an archive's text: kept, found again, and used where the archive is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from extensor.training.data import DATASETS, DataError
from extensor.training.data.corpora import Corpus
from extensor.training.text import encoded as module
from extensor.training.text.encoded import EncodedCorpus, TokenFile, encode_corpus, encode_dataset
from extensor.training.text.tokenizers import BytePairs

TEXT = "".join(f"int value_{n} = {n};\n" for n in range(500))
FILE = TokenFile("linux_source", "bpe", 300)


def same(a: EncodedCorpus, b: EncodedCorpus) -> bool:
    return (
        a.tokenizer.state() == b.tokenizer.state()
        and np.array_equal(a.train, b.train)
        and np.array_equal(a.test, b.test)
    )


def test_a_large_text_is_cut_after_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    whole = BytePairs.train(TEXT, 300).encode(TEXT)
    monkeypatch.setattr(module, "LARGE", len(TEXT))
    monkeypatch.setattr(module, "PIECE", 700)
    found = encode_corpus(Corpus("linux_source", TEXT, TEXT[:99]), "bpe", 300)
    assert np.array_equal(found.train, whole)  # a cut after a line end changes no token here
    assert found.tokenizer.decode(found.test) == TEXT[:99]


def test_an_archives_tokens_are_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    archive: list[str | None] = ["linux-source-6.1-100"]
    loads: list[str] = []

    def load(download: bool) -> Corpus:
        if archive[0] is None:
            raise DataError("no archive")
        loads.append(archive[0])
        return Corpus("linux_source", TEXT + archive[0], TEXT[:50])

    row = replace(DATASETS["linux_source"], load=load, source=lambda: archive[0])
    monkeypatch.setitem(DATASETS, "linux_source", row)
    first = encode_dataset(FILE)
    again = encode_dataset(FILE)
    assert same(first, again) and len(loads) == 1 and again.train.dtype == np.uint16
    assert encode_dataset(replace(FILE, vocab_size=280)).tokenizer.size == 280
    assert len(encode_dataset(replace(FILE, limit=9000)).train) < len(first.train)
    archive[0] = "linux-source-6.1-101"  # another archive, though the file is there
    other = encode_dataset(FILE)
    assert not same(first, other) and len(loads) == 4
    archive[0] = None  # a machine that has the file alone
    assert same(encode_dataset(FILE), other)
    FILE.path.write_bytes(FILE.path.read_bytes()[:-9])
    with pytest.raises(DataError, match="no archive"):
        encode_dataset(FILE)
