"""Broken and hostile folders of runs, settings and data sets: one line, exit code 2."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extensor import models
from extensor.io import load_checkpoint, save_checkpoint
from extensor.training.cli import main
from extensor.training.data import DataError
from extensor.training.data.corpora import Corpus
from extensor.training.data.fetch import RemoteFile, read_checked
from extensor.training.data.sources import EMNIST
from extensor.training.rundir import LAST, METRICS, RESULT
from tests.unit.training import conftest
from tests.unit.training.test_archives import keep

SMALL = ["mlp", "--epochs", "2", "--batch-size", "16", "--lr", "0.02"]
SMALL += ["--train-limit", "96", "--test-limit", "60", "--recipe", "mxfp4_adaptive"]
TEXT_RUN = ["gpt", "--epochs", "1", "--epoch-steps", "2", "--batch-size", "2", "--context", "8"]
TEXT_RUN += ["--test-limit", "4", "--warmup-epochs", "0.2"]
SPACE = 1 << 26
LINE = b'{"epoch": 1}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main([*SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a language model."""
    patch = pytest.MonkeyPatch()
    text = "to be, or not to be: that is the question. " * 40
    patch.setattr(conftest.encoded, "load_dataset", lambda name: Corpus.of(name, [text]))
    folder = tmp_path_factory.mktemp("text") / "run"
    assert main([*TEXT_RUN, "--out", str(folder)]) == 0
    patch.undo()
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in finished.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def one_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 2) -> str:
    capsys.readouterr()
    assert main(words) == code, words
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


RESULTS: dict[str, bytes] = {
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no UTF-8": b"\xff",
    "empty": b"{}",
    "accuracy is text": b'{"accuracy": "1"}',
    "twice": b'{"accuracy": 1, "accuracy": 2}',
    "NaN": b'{"accuracy": NaN}',
}
RECORDS: dict[str, bytes] = {
    "no UTF-8": b"\xff\n",
    "lacks keys": LINE,
    "a list": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "no JSON": b"hello\n",
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_broken_result(name: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / RESULT).write_bytes(RESULTS[name])
    for words in (["report", str(copied)], ["mlp", "--out", str(copied), "--resume"]):
        assert RESULT in one_line(capsys, words)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("file", [METRICS, "telemetry.jsonl"])
def test_broken_records(
    name: str, file: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / file).write_bytes(RECORDS[name])
    assert file in one_line(capsys, ["report", str(copied)])


@pytest.mark.parametrize(
    "line", ["dataset = {a = 1}", "recipe = [1]", "lr = true", "epochs = 2.5", "out = \"a\"",
             "a = " + "[" * 100_000, "lr = nan", "model = []"],
)  # fmt: skip
def test_settings_of_other_types(
    line: str, tmp_path: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(line + "\n")
    one_line(capsys, ["mlp", "--config", str(file), "--out", str(tmp_path / "new")])
    key = line.split(maxsplit=1)[0]
    kept = [row for row in (copied / "config.toml").read_text().splitlines() if key not in row]
    (copied / "config.toml").write_text("\n".join([*kept, line]))
    (copied / RESULT).unlink()
    one_line(capsys, ["mlp", "--out", str(copied), "--resume"])
    one_line(capsys, ["report", str(copied)])


def changed(value: Any, draw: random.Random) -> Any:
    """JSON with one place changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    some = [None, True, -1, 0, 2**70, 1.5, 1e308, "", "x\x1b[2J", [], {}, [[]], {"a": 1}]
    return draw.choice(some)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("position", {"epoch": 1, "batch": 0}, "position: expected step"),
        ("position", {"epoch": 1, "batch": 0, "step": "4"}, "position.step: expected a whole"),
        ("config", {"recipe": "no_such"}, "differs in recipe"),
    ],
)
def test_a_position_or_recipe_that_cannot_be_read(
    part: str, value: Any, message: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / LAST
    (copied / RESULT).unlink()
    checkpoint = load_checkpoint(path)
    broken = value if part == "position" else {**checkpoint.metadata[part], **value}
    save_checkpoint(path, checkpoint.tensors, {**checkpoint.metadata, part: broken})
    error = one_line(capsys, ["mlp", "--out", str(copied), "--resume"])
    assert str(path) in error and message in error and "the way out" in error


@pytest.mark.parametrize("command", ["resume", "generate"])
def test_changed_metadata_of_checkpoints(
    command: str,
    finished: Path,
    writer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place of the metadata is changed: it is refused in one line, or means nothing."""
    monkeypatch.setattr("extensor.training.loop.Trainer.fit", lambda self: {})
    monkeypatch.setattr("extensor.training.train.print_summary", lambda *args: None)
    source = finished if command == "resume" else writer
    checkpoint = load_checkpoint(source / LAST)
    folder, draw = tmp_path / "run", random.Random(command)
    folder.mkdir()
    (folder / "config.toml").write_bytes((source / "config.toml").read_bytes())
    words = ["mlp", "--out", str(folder), "--resume"]
    if command == "generate":
        words = ["generate", str(folder), "--tokens", "1", "--prompt", "to"]
    for _ in range(100):
        metadata = changed(checkpoint.metadata, draw)
        if not isinstance(metadata, dict):
            continue
        save_checkpoint(folder / LAST, checkpoint.tensors, metadata)
        capsys.readouterr()
        code = main(words)
        error = capsys.readouterr().err
        assert code in (0, 2) and "\x1b" not in error, metadata
        assert code == 0 or (error.startswith("error: ") and "Traceback" not in error), metadata


@pytest.mark.parametrize("change", [{"width": 1 << 16}, {"layers": 1 << 20}, {"vocab": 1 << 40}])
def test_a_model_is_not_built_before_its_shapes_are_compared(
    change: dict[str, int], writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load_checkpoint(writer / LAST)
    checkpoint.metadata["model"] |= change
    save_checkpoint(tmp_path / "bad.safetensors", checkpoint.tensors, checkpoint.metadata)
    tracemalloc.start()
    one_line(capsys, ["generate", str(tmp_path / "bad.safetensors"), "--tokens", "1"])
    assert tracemalloc.get_traced_memory()[1] < SPACE
    tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"hidden_size": 10**9}, {"vocab_size": 2**62},
     {"num_attention_heads": 0}, {"num_key_value_heads": 10**9}, {"head_dim": 2**40},
     {"intermediate_size": 2**40}, {"hidden_size": "64"}, {"num_hidden_layers": True},
     {"rms_norm_eps": [1]}, {"tie_word_embeddings": "yes"}, {"hidden_act": {}},
     {"rope_scaling": []}, {"rope_scaling": {"rope_type": {}}}, {"model_type": ["llama"]},
     {"rope_theta": 1e400}],
)  # fmt: skip
def test_a_config_that_asks_for_more_than_the_file_holds(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = models.config("llama", "nano")
    models.build("llama", config, np.random.default_rng(0)).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    tracemalloc.start()
    one_line(capsys, ["generate", str(tmp_path), "a", "--tokens", "1"])
    assert tracemalloc.get_traced_memory()[1] < SPACE
    tracemalloc.stop()


# --- data ------------------------------------------------------------------------------------


def bomb() -> bytes:
    return gzip.compress(bytes(1 << 28), 1)


def test_a_gz_is_unpacked_up_to_its_known_size(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(bomb())
    tracemalloc.start()
    with pytest.raises(DataError, match="expected 100 bytes once decompressed, got more"):
        read_checked(path, RemoteFile("a", "", 100))
    assert tracemalloc.get_traced_memory()[1] < SPACE
    tracemalloc.stop()


def zipped(content: bytes, damage: Callable[[bytearray], None] = lambda b: None) -> bytes:
    out, source = io.BytesIO(), EMNIST[0]
    with zipfile.ZipFile(out, "w") as archive:
        for part in ("train", "test"):
            for stem in ("images-idx3", "labels-idx1"):
                archive.writestr(f"gzip/emnist-{source.division}-{part}-{stem}-ubyte.gz", content)
    made = bytearray(out.getvalue())
    damage(made)
    return bytes(made)


def encrypt(content: bytearray) -> None:
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1


def pack_otherwise(content: bytearray) -> None:
    content[8] = content[content.index(b"PK\x01\x02") + 10] = 99


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "make",
    [lambda: zipped(bomb()), lambda: zipped(b"hello"), lambda: zipped(b"", encrypt),
     lambda: zipped(b"", pack_otherwise), lambda: b"PK", lambda: b""],
)  # fmt: skip
def test_broken_zip_files_of_images(make: Callable[[], bytes], cache: Path) -> None:
    source = keep(cache, EMNIST[0], "emnist", make())
    tracemalloc.start()
    with pytest.raises(DataError):
        source.load(download=False)
    assert tracemalloc.get_traced_memory()[1] < 3 * SPACE
    tracemalloc.stop()
