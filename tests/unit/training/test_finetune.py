"""`extensor finetune`: a small decoder learns a text on packed weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import extensor as et
from extensor.cli.language import LanguageModel
from extensor.generation import PretrainedTokenizer
from extensor.io import load_checkpoint
from extensor.training import finetune as module
from extensor.training.cli import main
from tests.unit.generation.decoder import Decoder

TEXT = "to be or not to be, that is the question. " * 60
LETTERS = "abcdefghijklmnopqrstuvwxyz \n.,?"
SMALL = ["--context", "16", "--steps", "60", "--lr", "0.02", "--test-tokens", "200"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({letter: n for n, letter in enumerate(LETTERS)})
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    monkeypatch.setattr(
        module,
        "load_language_model",
        lambda path: LanguageModel(Decoder(), PretrainedTokenizer(library), 100),
    )
    (tmp_path / "text").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize(
    ("scheme", "kind"), [("mxfp4_weights", "lora"), ("nvfp4_weights", "dora"), ("float32", "lora")]
)
def test_tuning_lowers_perplexity_and_merging_keeps_most_of_it(
    place: Path, scheme: str, kind: str
) -> None:
    words = ["finetune", "model", str(place / "text"), "--out", str(place / "out"), *SMALL]
    assert main([*words, "--scheme", scheme, "--kind", kind]) == 0
    result = json.loads((place / "out" / "finetune.json").read_text())
    before, tuned, merged = (result[name][0] for name in ("before", "tuned", "merged"))
    assert tuned < 0.6 * before and merged < 0.8 * before
    assert (merged == pytest.approx(tuned, rel=1e-4)) == (scheme == "float32")
    assert len(result["losses"]) == 60 and result["losses"][-1] < result["losses"][0]
    assert [row["path"] for row in result["weights"]] == ["layers.0", "layers.1", "head"]
    saved = load_checkpoint(place / "out" / "adapters.safetensors")
    assert saved.metadata["adapters"]["kind"] == kind
    assert {"layers.0.up", "layers.0.down"} <= saved.tensors.keys()
    # The same command in the same folder does not overwrite what is there.
    assert main(words) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kind", "lara"], "--kind: expected one of lora, dora"),
        (["--scheme", "mxfp5"], "--scheme: expected float32 or a scheme, got 'mxfp5'"),
        (["--rank", "0"], "--rank: expected 1 or more, got 0"),
        (["--context", "1"], "expected a --context of 2 or more"),
        (["--test-tokens", "-1"], "--test-tokens and --seed of 0 or more"),
        (["--seed", "-1"], "--test-tokens and --seed of 0 or more"),
        (["--lr", "0"], "and an --lr above 0"),
        (["--context", "5000"], "expected more than 5000 tokens before the held-out tenth"),
    ],
)
def test_what_cannot_be_tuned_says_why(
    place: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", "model", str(place / "text"), "--out", str(place / "out"), *flags]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (place / "out").exists()


def test_a_dequantized_model_has_the_same_values() -> None:
    model = Decoder()
    packed = et.quantize_model(model, "mxfp4_weights")
    plain = et.nn.dequantize_model(packed)
    tokens = et.ExTensor([[1, 2, 3]])
    with et.no_grad():
        same = abs(plain(tokens) - packed(tokens)).max().item()
    assert same < 1e-4 and not et.nn.packed_layers(plain)
    assert et.nn.packed_layers(packed) and all(p.requires_grad for p in plain.parameters())
