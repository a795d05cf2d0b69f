"""Generation: the same tokens with and without a cache, in any batch, in chunks of any size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.generation import next_tokens, pad_left
from extensor.nn.kv_cache import KVCache
from tests.unit.generation.decoder import VOCAB, Decoder

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9, 3, 2]]
DRAWS = [{}, {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7}]


def alone(model: Decoder, row: list[int], **options: Any) -> list[int]:
    """A row continued by itself, all tokens passed again for each new one."""
    return et.generate(model, [row], 12, **options).numpy()[0, len(row) :].tolist()


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_cache_batch_and_chunks_do_not_change_the_tokens(draws: dict[str, Any], chunk: int) -> None:
    model = Decoder()
    expected = [alone(model, row, **draws) for row in ROWS]
    tokens = et.generate(model, ROWS, 12, cache=KVCache(2, capacity=4), chunk=chunk, **draws)
    assert tokens.numpy()[:, 8:].tolist() == expected
    assert et.generate(model, ROWS, 12, **draws).numpy()[:, 8:].tolist() == expected
    assert len({tuple(row) for row in expected}) == 3
    # One pass of the prompt in chunks, then one token at a time.
    model.passes.clear()
    et.generate(model, ROWS, 3, cache=KVCache(2), chunk=chunk)
    prompt = {1: [1] * 8, 3: [3, 3, 2], 512: [8]}[chunk]
    assert model.passes == [*prompt, 1, 1]


@pytest.mark.parametrize("storage", ["bfloat16", "mxfp8_e4m3", "nvfp4", "mxfp4"])
def test_a_quantized_cache_gives_the_same_tokens_in_any_batch_and_chunks(storage: str) -> None:
    model = Decoder()
    made = {
        chunk: et.generate(model, ROWS, 12, cache=KVCache(2, 4, storage), chunk=chunk).numpy()
        for chunk in (1, 3, 512)
    }
    for row, tokens in enumerate(ROWS):
        one = et.generate(model, [tokens], 12, cache=KVCache(2, 4, storage)).numpy()
        for found in made.values():
            assert found[row, 8:].tolist() == one[0, len(tokens) :].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_cache_of_windows_gives_the_same_tokens(chunk: int) -> None:
    model = Decoder(window=3)
    expected = [alone(model, row) for row in ROWS]
    assert expected != [alone(Decoder(), row) for row in ROWS]
    cache = KVCache(2, capacity=2, windows=[3, 3])
    made = et.generate(model, ROWS, 12, cache=cache, chunk=chunk)
    assert made.numpy()[:, 8:].tolist() == expected


def test_left_padding_is_what_the_mask_says() -> None:
    model = Decoder()
    tokens, mask = pad_left(ROWS, pad=11)
    made = et.generate(model, et.ExTensor(tokens), 5, attention_mask=mask)
    assert made.dtype is et.int64 and made.shape == (3, 13)
    assert made.numpy()[:, 8:].tolist() == [alone(model, row)[:5] for row in ROWS]
    # The numbers in the padding do not count.
    again = et.generate(model, np.where(mask, tokens, 0), 5, attention_mask=mask)
    assert again.numpy()[:, 8:].tolist() == made.numpy()[:, 8:].tolist()


def test_a_row_that_has_ended_repeats_its_end_token() -> None:
    model = Decoder()
    first, second = alone(model, ROWS[0]), alone(model, ROWS[2])
    end = first[2]
    assert end not in first[:2]
    made = et.generate(model, [ROWS[0][:7], ROWS[2]], 6, end_tokens=[end])
    row = alone(model, ROWS[0][:7])[:6]
    place = row.index(end) if end in row else 5
    assert made.numpy()[0, 7:].tolist() == [*row[: place + 1], *[row[place]] * (5 - place)]
    if end not in second[:6]:
        assert made.numpy()[1, 7:].tolist() == second[:6]
    assert et.generate(model, [ROWS[0]], 12, end_tokens=[end]).shape == (1, 8 + 3)


def test_a_cache_that_holds_the_start_is_gone_on_from() -> None:
    model, cache = Decoder(), KVCache(2)
    first = et.generate(model, [ROWS[0]], 4, cache=cache)
    assert cache.length == 8 + 3  # the last token has not passed through the model
    longer = [*first.tolist()[0], 2, 2]
    model.passes.clear()
    made = et.generate(model, [longer], 4, cache=cache).tolist()[0]
    assert model.passes == [3, 1, 1, 1]
    assert made[14:] == alone(model, longer)[:4]
    with pytest.raises(ValueError, match="expected fewer tokens in it than the 8 given, got 17"):
        et.generate(model, [ROWS[0]], 4, cache=cache)


def test_the_model_sees_no_more_than_its_context_and_keeps_its_mode() -> None:
    model = Decoder().train()
    steps = next_tokens(model, [ROWS[0]], context=4)
    found = [int(next(steps)[0]) for _ in range(3)]
    assert not model.training and model.passes == [4, 4, 4]
    steps.close()
    assert model.training
    row = list(ROWS[0])
    for token in found:
        assert token == alone(model, row[-4:])[0]
        row.append(token)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": []}, ValueError, "expected tokens"),
        ({"tokens": [[1.5]]}, TypeError, "expected whole numbers as tokens, got float64"),
        ({"tokens": [[1], []]}, ValueError, "expected rows of 1 token or more"),
        ({"tokens": [1, 2]}, ValueError, r"expected tokens \(B, T\)"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected 1 or more, got 0"),
        ({"chunk": 0}, ValueError, "chunk: expected 1 token or more"),
        ({"attention_mask": np.ones((1, 3))}, ValueError, r"expected shape \(1, 2\)"),
        ({"attention_mask": np.array([[1, 0]])}, ValueError, "padding on the left only"),
        ({"seed": (1, 2)}, ValueError, "one for each of 1 rows"),
        ({"top_q": 1}, TypeError, "top_q"),
    ],
)
def test_what_cannot_be_generated_says_why(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        et.generate(Decoder(), **{"tokens": [[1, 2]], **change})


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = Decoder()
    model.load_state_dict({**model.state_dict(), "head.bias": np.full(VOCAB, np.nan, np.float32)})
    with pytest.raises(ValueError, match="expected finite scores"):
        list(itertools.islice(next_tokens(model, [[1]]), 1))
