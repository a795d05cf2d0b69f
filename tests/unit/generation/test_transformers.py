"""Greedy continuations of small random models are those of transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.generation import pad_left
from extensor.models.architectures import ARCHITECTURES
from extensor.nn import new_cache
from tests.unit.models.test_architectures import ours, theirs

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9, 3, 2]]


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2 window"])
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    peer, tensors = theirs(case, tmp_path)
    row = ARCHITECTURES[case.partition(" ")[0]]
    config = row.config_from_hf(peer.config.to_dict())
    model = ours(row, config, tensors).eval()
    tokens, mask = pad_left(ROWS)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    expected = peer.generate(
        torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask), pad_token_id=0, **options
    ).numpy()
    assert len(np.unique(expected[:, 8:])) > 3
    for chunk in (3, 512):
        made = et.generate(model, ROWS, 12, cache=new_cache(model), chunk=chunk)
        assert made.numpy().tolist() == expected.tolist(), chunk
    assert et.generate(model, ROWS, 12).numpy().tolist() == expected.tolist()
    end = int(expected[0, 12])
    ended = peer.generate(
        torch.from_numpy(tokens[:1]), pad_token_id=end, **{**options, "eos_token_id": end}
    ).numpy()
    assert et.generate(model, ROWS[:1], 12, end_tokens=[end]).tolist() == ended.tolist()
