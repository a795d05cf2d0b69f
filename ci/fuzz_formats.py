"""The formats that `ci/fuzz_files.py` knows: whole files, how they change, who reads them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ci.fuzz_models import (
    TEMPLATE,
    beside,
    config_seeds,
    folder_files,
    gguf_file,
    gguf_mutate,
    npy,
    npy_mutate,
    npz_mutate,
    npz_seeds,
    read_chat,
    read_gguf,
    read_safetensors,
    read_tokenizer,
    safetensors_mutate,
    safetensors_seeds,
)
from ci.fuzz_mutations import Mutate, json_mutate, lines_mutate, words_mutate
from ci.fuzz_runs import (
    gzip_mutate,
    idx,
    metadata_mutate,
    quantized_seeds,
    read_archive,
    read_idx_unchecked,
    read_quantized,
    read_run,
    read_settings,
    run_files,
    tar_mutate,
    tar_seed,
    zip_mutate,
    zip_seed,
)
from extensor import models
from extensor.cli.files import read_tensors, tensor_files
from extensor.cli.sheet import CommandError
from extensor.generation.chat import ChatError
from extensor.generation.tokenizer import TokenizerError
from extensor.io import CheckpointError, open_archive
from extensor.io.gguf import GGUF_TYPES
from extensor.training.data import DataError
from extensor.training.data.sources import CIFAR10, EMNIST
from extensor.training.language_model import load_language_model
from extensor.training.rundir import (
    LAST,
    UsageError,
    read_epochs,
    read_result,
    read_telemetry,
)
from extensor.training.text.tokenizers import Characters, from_state
from extensor.training.text.tokenizers import TokenizerError as StateError

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        name: for the command line.
        file: the file's name.
        seeds: whole files.
        mutate: changes one field.
        read: what is judged.
        errors: how a reader may refuse a file.
        weight: share of the time and the inputs.
        prepare: writes what stands beside the file into its folder.
        names_file: whether errors must name the folder.
    """

    name: str
    file: str
    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...]
    weight: int = 1
    prepare: Callable[[Path], None] = lambda folder: None
    names_file: bool = True


OF_MODELS = (CheckpointError, FileNotFoundError, TokenizerError)
FORMATS: Mapping[str, Format] = {
    row.name: row
    for row in (
        Format("safetensors", "w.safetensors", safetensors_seeds, safetensors_mutate,
               read_safetensors, (CheckpointError,), weight=20),
        Format("gguf", "m.gguf", lambda: [gguf_file(kind) for kind in GGUF_TYPES], gguf_mutate,
               read_gguf, (CheckpointError, TokenizerError), weight=12, names_file=False),
        Format("npy", "x.npy", lambda: [npy(np.arange(6.0).reshape(2, 3)), npy(np.ones(3, ">i2"))],
               npy_mutate, read_tensors, (CommandError,), weight=20),
        Format("npz", "x.npz", npz_seeds, npz_mutate, read_tensors, (CommandError,), weight=8),
        Format("index", "model.safetensors.index.json",
               lambda: [b'{"metadata": {}, "weight_map": {"a": "model.safetensors"}}'],
               json_mutate, lambda p: (tensor_files(p), open_archive(p)),
               (CommandError, CheckpointError, FileNotFoundError), weight=6,
               prepare=beside("model.safetensors")),
        Format("config", "config.json", config_seeds, json_mutate,
               lambda p: models.from_pretrained(p.parent), OF_MODELS, weight=8, prepare=beside()),
        Format("tokenizer", "tokenizer.json", lambda: [folder_files()["tokenizer.json"]],
               json_mutate, read_tokenizer, (TokenizerError,), weight=4, prepare=beside(),
               names_file=False),
        Format("tokens", "tokenizer_config.json",
               lambda: [folder_files()["tokenizer_config.json"], b'{"chat_template": "a"}'],
               json_mutate, read_tokenizer, (TokenizerError,), weight=4, prepare=beside(),
               names_file=False),
        Format("chat", "chat_template.jinja", lambda: [TEMPLATE], words_mutate, read_chat,
               (ChatError,), weight=4, names_file=False),
        Format("result", "result.json", lambda: [run_files()["result.json"]], json_mutate,
               lambda p: read_result(p.parent), (UsageError,), weight=8),
        Format("metrics", "metrics.jsonl", lambda: [run_files()["metrics.jsonl"]], lines_mutate,
               lambda p: read_epochs(p.parent), (UsageError,), weight=10),
        Format("telemetry", "telemetry.jsonl", lambda: [run_files()["telemetry.jsonl"]],
               lines_mutate, lambda p: read_telemetry(p.parent), (UsageError,), weight=10),
        Format("toml", "config.toml", lambda: [run_files()["config.toml"]], words_mutate,
               read_settings, (UsageError,), weight=6),
        Format("resume", LAST, lambda: [run_files()[LAST]], metadata_mutate, read_run,
               (UsageError, CheckpointError), weight=4, names_file=False),
        Format("writer", LAST, lambda: [run_files()["text"]], metadata_mutate,
               load_language_model, (UsageError, CheckpointError), weight=6),
        Format("quantized", "q.safetensors", quantized_seeds, metadata_mutate, read_quantized,
               (CheckpointError, ValueError), weight=6, names_file=False),
        Format("state", "state.json", lambda: [json.dumps(Characters("abc").state()).encode()],
               json_mutate, lambda p: from_state(json.loads(p.read_text("utf-8", "replace"))),
               (StateError, json.JSONDecodeError, RecursionError), weight=6, names_file=False),
        Format("idx", "a.gz", lambda: [gzip.compress(idx((60,)) + bytes(8), mtime=0),
                                       gzip.compress(idx((3, 4, 5)), mtime=0)],
               gzip_mutate, read_idx_unchecked, (DataError,), weight=12),
        Format("tar", CIFAR10.archive.name, lambda: [tar_seed()], tar_mutate,
               read_archive(replace(CIFAR10, records=1)), (DataError,), weight=6),
        Format("zip", EMNIST[0].archive.name, lambda: [zip_seed()], zip_mutate,
               read_archive(replace(EMNIST[0], train=2, test=2)), (DataError,), weight=6),
    )
}  # fmt: skip
"""By name."""
