"""`extensor generate`, `chat` and `perplexity` with a small model in place of a file."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import extensor as et
from extensor.cli import advise_model, language, main, perplexity
from extensor.cli.language import LanguageModel
from extensor.generation import PretrainedTokenizer
from extensor.models.bert.configs import BertConfig
from extensor.nn import Module
from tests.unit.generation.decoder import VOCAB, Decoder

LETTERS = "abcdefghijklmnopqrstuvwxyz \n.,?"
TEMPLATE = "{% for m in messages %}{{ m.role[:1] }} {{ m.content }}\n{% endfor %}a "


@dataclasses.dataclass
class Config:
    layers: int = 2
    context: int = 100


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({letter: n for n, letter in enumerate(LETTERS)})
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    library.decoder = tokenizers.decoders.Fuse()
    assert len(LETTERS) == VOCAB
    model = Decoder()
    model.config = Config()
    loaded = LanguageModel(model, PretrainedTokenizer(library, (), TEMPLATE), 100)
    for module in (language, perplexity):
        monkeypatch.setattr(module, "load_language_model", lambda path: loaded)
    return model


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_generate_writes_alike_with_any_cache(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "model", "to be", "--tokens", "20"]
    text = said(capsys, *words)
    assert text.startswith("to be") and len(text) == 5 + 20 + 1
    assert said(capsys, *words, "--cache", "none") == text
    assert said(capsys, "generate", "model", "--prompt", "to be", "--tokens", "20") == text
    assert said(capsys, *words, "--seed", "1") != text
    greedy = [*words, "--temperature", "0"]
    decoder.passes.clear()
    once = said(capsys, *greedy)
    assert decoder.passes == [5] + 19 * [1]
    assert once != text and said(capsys, *greedy, "--cache", "bfloat16").startswith("to be")
    stop = once[10:12]
    assert said(capsys, *greedy, "--stop", stop) == once[: once.index(stop, 5)] + "\n"


def test_generate_says_when_the_context_is_full(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "model", "a" * 90, "--tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert len(out) == 100 + 1 and "context of 100 tokens is full" in err
    assert main(["generate", "model", "a" * 100]) == 2
    assert "the text has 100 tokens and the model's context holds 100" in capsys.readouterr().err


def test_chat_passes_each_token_through_the_model_once(
    decoder: Decoder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nwhy?\n"))
    text = said(capsys, "chat", "model", "--tokens", "4", "--temperature", "0")
    answers = text.splitlines()
    assert [len(answer) for answer in answers] == [4, 4]
    # "u hi\na " and 3 of the 4 letters; then what the second question adds to the first
    assert decoder.passes == [7, 1, 1, 1, len(f"{answers[0]}\nu why?\na "), 1, 1, 1]
    # the same as without a cache
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nwhy?\n\nnever"))
    none = said(capsys, "chat", "model", "--tokens", "4", "--temperature", "0", "--cache", "none")
    assert none == text


def test_perplexity_counts_each_token_once(
    decoder: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 3
    (tmp_path / "text").write_text(text)
    words = ["perplexity", "model", str(tmp_path / "text"), "--context", "16"]
    out = said(capsys, *words, "--stride", "5", "--batch", "3")
    match = re.match(r"perplexity ([\d.]+) ± ([\d.]+) on 134 tokens", out)
    assert match, out
    # One token after the other, with the windows spelled out.
    tokens = np.array([LETTERS.index(letter) for letter in text])
    losses = []
    for place in range(1, len(tokens)):
        start = 0 if place < 16 else 5 * math.ceil((place - 15) / 5)
        with et.no_grad():
            scores = decoder(et.ExTensor(tokens[None, start:place])).numpy()[0, -1]
        losses.append(np.log(np.exp(scores.astype(np.float64)).sum()) - scores[tokens[place]])
    expected = np.exp(np.mean(losses))
    assert float(match[1]) == pytest.approx(expected, rel=1e-4)
    error = expected * np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert float(match[2]) == pytest.approx(error, rel=1e-3)
    assert "on 29 tokens" in said(capsys, *words, "--limit", "30")
    # A scheme and a cache round what they say; float32 rounds nothing.
    values = {
        more: float(said(capsys, *words, "--stride", "5", *more).split()[1])
        for more in (("--cache", "float32"), ("--cache", "mxfp4"), ("--scheme", "mxfp4_weights"))
    }
    same, *others = values.values()
    assert same == pytest.approx(expected, rel=1e-4)
    assert all(abs(other / expected - 1.0) > 1e-3 for other in others)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "m", "a", "--prompt", "b"], "expected a text or --prompt, got both"),
        (["generate", "m", "a", "--top-p", "0"], "--top-p: expected a number above 0"),
        (["generate", "m", "a", "--repetition-penalty", "0"], "--repetition-penalty: expected"),
        (["generate", "m", "a", "--stop", ""], "--stop: expected"),
        (["generate", "m", "a", "--cache", "mxfp5"], "--cache: no cache format named 'mxfp5'"),
        (["perplexity", "m", "words", "--scheme", "mxfp5"], "no scheme named 'mxfp5'"),
        (["perplexity", "m", "words", "--cache", "mxfp5"], "no cache format named 'mxfp5'"),
        (["perplexity", "m", "nowhere"], "nowhere: no such file or folder"),
        (["perplexity", "m", "latin"], "latin: expected a text in UTF-8, got byte 0xe9 at 3;"),
        (["perplexity", "m", "empty"], "empty: expected a text of 2 tokens or more, got 0"),
        (["perplexity", "m", __file__, "--context", "101"], "at most the 100 of the model"),
        (["perplexity", "m", __file__], "encode: "),
        (["perplexity", "m", "words", "--stride", "64", "--context", "64"], "a stride of 1 to"),
    ],
)
def test_commands_that_cannot_be(
    decoder: Decoder,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words").write_text("to be or not to be")
    Path("latin").write_bytes(b"caf\xe9")
    Path("empty").touch()
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_template_does_not_chat(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bare:
        size = VOCAB

        def encode(self, text: str) -> Any:
            return np.zeros(len(text), np.int64)

        def decode(self, tokens: Any) -> str:
            return "a" * len(tokens)

    class Plain(Module):
        """A model of `extensor train gpt`: tokens are all that it takes."""

        def forward(self, tokens: et.ExTensor) -> et.ExTensor:
            return decoder(tokens)

    monkeypatch.setattr(
        language, "load_language_model", lambda path: LanguageModel(Plain(), Bare(), 8)
    )
    assert main(["chat", "model"]) == 2
    assert "model: has no chat template" in capsys.readouterr().err
    decoder.passes.clear()
    assert said(capsys, "generate", "model", "abcd", "--tokens", "6") == "abcd" + "a" * 6 + "\n"
    assert decoder.passes == [4, 5, 6, 7, 8, 8]


def test_no_tokens_are_written_where_none_are_asked_for(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "generate", "model", "ab", "--tokens", "0") == "ab\n"


def test_encoders_write_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(layers=1, width=16, hidden=16, heads=1, vocab=8, context=8)
    et.models.build("bert", config, np.random.default_rng(0)).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "a"]) == 2
    assert "a Bert model gives a vector for each token" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = et.models.build("llama", et.models.config("llama", "nano"), np.random.default_rng(0))
    model.save_pretrained(tmp_path)
    for count in (model.config.vocab, model.config.vocab + 1):  # fewer would do, too
        words = {f"w{number}": number for number in range(count)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(
            str(tmp_path / "tokenizer.json")
        )
        said = main(["generate", str(tmp_path), "w1", "--tokens", "1"])
        error = capsys.readouterr().err
        assert said == (0 if count == model.config.vocab else 2), error
    assert "its tokenizer has 66 tokens, the model's embedding 65 rows" in error


def test_advise_mixes_formats_by_what_they_do_to_the_loss(
    decoder: Decoder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=60)
    monkeypatch.setattr(advise_model, "Console", lambda stderr: terminal)
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 30)
    words = ["advise", str(tmp_path), "--text", str(tmp_path / "text"), "--formats", "mxfp4,int8"]
    found = json.loads(said(capsys, *words, "--bits", "6.5", "--json"))
    assert found["bits_per_weight"] <= 6.5
    formats = {row["format"] for row in found["layers"].values()}
    assert formats == {"mxfp4", "int8"} and found["predicted_loss_change"] > 0
    assert "gradients" in written.getvalue()  # a bar while it is measured
    assert "the mix" in said(capsys, *words)
    assert main([*words, "--bits", "4"]) == 2
    assert "--bits 4.0: choose_formats: the smallest formats take" in capsys.readouterr().err
    assert main([*words[:2], "--text", str(tmp_path / "none")]) == 2


def test_writing_imports_no_more_than_it_needs() -> None:
    """Each of these takes 1 to 9 MB of the memory of a model that writes."""
    unneeded = ("_hashlib", "extensor.distributed", "extensor.inspect", "extensor.optim",
                "numpy.random", "rich", "safetensors", "typeguard")  # fmt: skip
    code = (
        "import sys; from extensor.cli import main; import extensor.models.llama.model as m; "
        "from extensor.models import config, build; main(['generate', 'none.gguf', 'Hello']); "
        "build('llama', config('llama', 'nano'), None); "
        f"print([name for name in {unneeded} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "none.gguf: no such file or folder" in done.stderr and done.stdout == "[]\n"
