"""Files of training: runs, checkpoints and data sets."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from ci.fuzz_models import packed, saved
from ci.fuzz_mutations import Draw, change
from extensor import models
from extensor.nn import Linear, Sequential, load_quantized, quantize_model, save_quantized
from extensor.training.config import RunConfig
from extensor.training.data import DataError
from extensor.training.data.fetch import RemoteFile, read_checked
from extensor.training.data.sources import CIFAR10, CIFAR_RECORD, EMNIST, parse_idx
from extensor.training.loop import Trainer
from extensor.training.rundir import (
    LAST,
    UsageError,
    read_config,
)
from extensor.training.runs import defaults
from extensor.training.text.tokenizers import Characters
from extensor.training.toml import read_toml, write_toml

# --- runs --------------------------------------------------------------------------------------

SMALL = {"epochs": 2, "batch_size": 16, "train_limit": 48, "test_limit": 16, "variant": "mlp"}


@functools.cache
def run_config() -> RunConfig:
    return RunConfig(**{**defaults("mlp"), **SMALL, "recipe": "mxfp4_adaptive"})


@functools.cache
def run_files() -> dict[str, bytes]:
    """What a small run leaves."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run_config(), Path(folder))
        trainer.fit()
        trainer.save(Path(folder, LAST))
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}
    lines = [json.dumps(report.as_dict()) for report in trainer.history]
    files["metrics.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
    slots = {"fprop.x": {"saturated": 0.1, "flushed": None}}
    telemetry = {"step": 1, "loss": 1.0, "layers": {"fc1": {"slots": slots, "changed": 0.5}}}
    files["telemetry.jsonl"] = 2 * (json.dumps(telemetry).encode() + b"\n")
    files["config.toml"] = write_toml(run_config().as_dict()).encode()
    files["text"] = text_checkpoint()
    return files


def text_checkpoint() -> bytes:
    config = models.config("gpt", "nano", vocab=3, context=8, layers=1, width=8, heads=2)
    model = models.build("gpt", config, np.random.default_rng(0))
    run = {"model": "gpt", "variant": "nano", "recipe": "fp32", "seed": 0, "context": 8}
    task = {"tokenizer": Characters("abc").state()}
    content = {"config": run, "task": task, "model": vars(config)}
    return saved({f"model.{k}": v for k, v in model.state_dict().items()}, content)


def metadata_mutate(content: bytes, draw: Draw) -> bytes:
    """A checkpoint with its metadata changed, its tensors as they are."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    whole = json.loads(header["__metadata__"]["extensor"])
    whole["metadata"] = change(whole["metadata"], draw)
    header["__metadata__"]["extensor"] = json.dumps(whole)
    return packed(json.dumps(header), data)


@functools.cache
def trainer_of(folder: Path) -> Trainer:
    return Trainer(run_config(), folder)


def read_run(path: Path) -> None:
    trainer = trainer_of(path.parent)
    try:
        trainer.load(path)
    except ValueError as error:  # what `train` shows as a UsageError
        raise UsageError(error) from None


def read_settings(path: Path) -> None:
    with contextlib.suppress(TypeError, ValueError):  # what the command shows as a UsageError
        RunConfig(**{**defaults("mlp"), **read_toml(path, vars(run_config()))})
    read_config(path.parent)


def quantized_seeds() -> list[bytes]:
    made = []
    model = Sequential(Linear(32, 8, rng=0))
    for scheme in ("mxfp4_weights", "int8"):
        quantized = quantize_model(model, scheme, [(et.randn(4, 32, seed=0),)])
        with tempfile.TemporaryDirectory() as folder:
            save_quantized(f"{folder}/a", quantized)
            made.append(Path(folder, "a").read_bytes())
    return made


def read_quantized(path: Path) -> None:
    load_quantized(path, Sequential(Linear(32, 8, rng=0)))


# --- data sets ---------------------------------------------------------------------------------


def idx(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))


def gzip_mutate(content: bytes, draw: Draw) -> bytes:
    inner = bytearray(gzip.decompress(content)[:100])
    at = draw.randrange(min(len(inner), 16))
    inner[at] = draw.choice((0, 1, 8, 255, draw.randrange(256)))
    made = bytearray(gzip.compress(bytes(inner) * draw.choice((1, 1, 1, 2, 1000)), mtime=0))
    if draw.random() < 0.5:
        made[draw.randrange(len(made))] = draw.randrange(256)
    return bytes(made) * draw.choice((1, 1, 1, 2))


def read_idx(path: Path) -> None:
    content = read_checked(path, RemoteFile("a", "", 16 + 60))
    parse_idx(content, None, str(path))


def read_idx_unchecked(path: Path) -> None:
    """What a file with the right checksum would do."""
    try:
        read_idx(path)
    except DataError as error:
        if "SHA-256" not in str(error):
            raise
        parse_idx(gzip.decompress(path.read_bytes()), None, str(path))


def tar_seed() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
        for name in names:
            info = tarfile.TarInfo(f"{CIFAR10.inside}/{name}")
            info.size = CIFAR_RECORD
            archive.addfile(info, io.BytesIO(bytes(CIFAR_RECORD)))
    return out.getvalue()


def tar_mutate(content: bytes, draw: Draw) -> bytes:
    """A byte of a member's header, its checksum put right."""
    made = bytearray(content)
    at = draw.choice([i for i in range(0, len(made), 512) if made[i + 257 : i + 262] == b"ustar"])
    place = at + draw.choice((draw.randrange(345), draw.randrange(124, 136), 156))
    made[place] = draw.choice((*b"0123456789xgLKSDV\0\xff\x80", draw.randrange(256)))
    made[at + 148 : at + 156] = b" " * 8
    made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


def zip_seed() -> bytes:
    out, source = io.BytesIO(), EMNIST[0]
    with zipfile.ZipFile(out, "w") as archive:
        for part in ("train", "test"):
            for stem, shape in (("images-idx3", (2, 28, 28)), ("labels-idx1", (2,))):
                name = f"gzip/emnist-{source.division}-{part}-{stem}-ubyte.gz"
                archive.writestr(name, gzip.compress(idx(shape), mtime=0))
    return out.getvalue()


def zip_mutate(content: bytes, draw: Draw) -> bytes:
    made = bytearray(content)
    at = draw.choice([m.start() for m in re.finditer(b"PK\x01\x02|PK\x03\x04|PK\x05\x06", made)])
    made[min(at + draw.randrange(4, 80), len(made) - 1)] = draw.choice(
        (0, 1, 255, draw.randrange(256))
    )
    return bytes(made)


def read_archive(source: Any) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        content = path.read_bytes()
        os.environ["XDG_CACHE_HOME"] = str(path.parent)
        file = RemoteFile(
            path.name, hashlib.sha256(content).hexdigest(), len(content), packed=False
        )
        replace(source, archive=file, system=(path.parent,), urls=()).load(download=False)
        shutil.rmtree(path.parent / "extensor", ignore_errors=True)

    return read
