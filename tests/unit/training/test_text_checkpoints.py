"""Language models' checkpoints with either tokenizer: writing with them, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extensor.io import load_checkpoint, save_checkpoint
from extensor.training.cli import main
from extensor.training.rundir import LAST

TEXT = "to be, or not to be: that is the question. " * 40
KINDS = {
    "char": ["--weights", "mxint8"],
    "bpe": ["--tokenizer", "bpe", "--vocab-size", "270", "--weights", "bfloat16"],
}
RUN = [
    *("--epochs", "1", "--epoch-steps", "8", "--batch-size", "2", "--context", "8"),
    *("--test-limit", "4", "--warmup-epochs", "0.2"),
]  # fmt: skip


@pytest.fixture(params=KINDS)
def run(request: Any, tmp_path: Path, one_text: Callable[[str], None]) -> tuple[str, Path]:
    """The kind of tokenizer, and the folder of a finished run on one sentence."""
    if request.param == "bpe":
        pytest.importorskip("tokenizers")
    one_text(TEXT)
    assert main(["gpt", *RUN, *KINDS[request.param], "--out", str(tmp_path / "run")]) == 0
    return request.param, tmp_path / "run"


def test_a_run_writes_from_its_folder_or_its_file(
    run: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder = run
    result = json.loads((folder / "result.json").read_text())
    assert result["perplexity"] > 1 and result["test_tokens"] == 4 * 8
    written = []
    for place in (folder, folder / LAST):
        capsys.readouterr()
        assert main(["generate", str(place), "--prompt", "to be", "--tokens", "9"]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] and written[0].startswith("to be")
    if kind == "bpe":  # every text has bytes
        assert main(["generate", str(folder), "--prompt", "Zoo \U0001f600", "--tokens", "2"]) == 0


def _tokenizer(change: Callable[[dict[str, Any], str], None]) -> Callable[..., None]:
    def damage(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        state = metadata["task"]["tokenizer"]
        change(state, "json" if state["kind"] == "bpe" else "letters")

    return damage


def _cut(state: dict[str, Any], part: str) -> None:
    state[part] = state[part][: len(state[part]) // 2]


def _other_kind(state: dict[str, Any], part: str) -> None:
    state["kind"] = "char" if part == "json" else "bpe"


DAMAGE: dict[str, tuple[Callable[..., None], str, str]] = {
    "cut tokenizer": (_tokenizer(_cut), "got one of", "the state is cut off"),
    "other kind": (_tokenizer(_other_kind), "under 'json', got None", "under 'letters', got None"),
    "unknown kind": (_tokenizer(lambda s, _: s.update(kind="bep")), "no tokenizer named 'bep'", ""),
    "no text": (_tokenizer(lambda s, part: s.update({part: 3})), "got 3; the state is", ""),
    "no tokenizer": (lambda m, _: m["task"].pop("tokenizer"), "no tokenizer named 'None'", ""),
    "another vocabulary": (
        lambda m, _: m["model"].update(vocab=300), "a tokenizer of the model's 300 tokens", "",
    ),
    "no variant": (lambda m, _: m["config"].pop("variant"), "expected variant", ""),
    "unknown recipe": (lambda m, _: m["config"].update(recipe="mxfp5"), "named 'mxfp5'; did", ""),
    "no weights": (lambda _, t: t.pop("model.norm.weight"), "norm.weight: ", ""),
    "unknown weights": (lambda m, _: m["config"].update(weights="int9"), "named 'int9'", ""),
    "other weights": (lambda m, _: m["config"].update(weights="float32"), "expected float32", ""),
    "no run": (lambda m, _: m.pop("config"), "got one that holds no run", ""),
}  # fmt: skip


def test_damaged_checkpoints_are_refused(
    run: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder = run
    for name, (damage, char, bpe) in DAMAGE.items():
        checkpoint = load_checkpoint(folder / LAST)
        damage(checkpoint.metadata, checkpoint.tensors)
        save_checkpoint(tmp_path / "bad.safetensors", checkpoint.tensors, checkpoint.metadata)
        capsys.readouterr()
        assert main(["generate", str(tmp_path / "bad.safetensors"), "--tokens", "1"]) == 2, name
        said = capsys.readouterr().err
        assert (bpe if kind == "bpe" and bpe else char) in said and "the way out: " in said, name


def test_a_run_does_not_go_on_with_another_tokenizer(
    run: tuple[str, Path], one_text: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """As many tokens, but of another text: only the tokenizers tell."""
    _, folder = run
    (folder / "result.json").unlink()
    other = TEXT.translate(str.maketrans("tb", "TB"))
    one_text(other)
    assert main(["gpt", "--out", str(folder), "--resume"]) == 2
    assert "got one of another tokenizer; the way out: shakespeare as" in capsys.readouterr().err
