"""Checkpoints that all ranks write at once: a folder with a file for each rank, and an index.

The index, written last, decides: it names the files of one save. A save writes files of new names
beside the old ones, and deletes those when the new index is on the disk. So whenever a rank dies,
the index names the files of the last complete save. The layout is Hugging Face's
(``model.safetensors.index.json``), which `et.load` reads whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extensor.distributed.communicator import Communicator
from extensor.io.atomic import remove_leftovers, replacing
from extensor.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from extensor.io.safetensors_format import CheckpointError

__all__ = ["load_sharded", "save_sharded", "share_of"]

INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"save-(\d+)-\d{5}-of-\d{5}\.safetensors")


def share_of(tensors: Mapping[str, Any], ranks: Communicator) -> dict[str, Any]:
    """The tensors that this rank writes, of a set that all ranks have: as many bytes as the others.

    Args:
        tensors: by name, the same names and sizes on all ranks.
        ranks: the communicator.

    Returns:
        A part of them; the ranks' parts make up the whole.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.checkpoint import share_of
    >>> list(share_of({"w": et.ones(2)}, LocalCommunicator()))
    ['w']
    """
    loads = [0] * ranks.size
    mine = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        rank = loads.index(min(loads))
        loads[rank] += tensors[name].nbytes
        if rank == ranks.rank:
            mine[name] = tensors[name]
    return mine


def save_sharded(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any],
    ranks: Communicator,
) -> None:
    """Write this rank's tensors, and with all ranks' the checkpoint, all or nothing.

    Args:
        folder: the same on all ranks, on a file system that all of them see. It is made where it is
            not there; the checkpoint in it is replaced.
        tensors: whole tensors that no other rank writes: `share_of` those that all ranks have.
        metadata: JSON as of `save_checkpoint`; that of rank 0 counts.
        ranks: the communicator.

    Raises:
        ValueError: on all ranks, if two ranks write a tensor of the same name. The folder's
            checkpoint is then as it was.
        OSError: on all ranks, if a tensor or file of one cannot be written; likewise.

    >>> import tempfile
    >>> from extensor.distributed import LocalCommunicator, load_sharded, save_sharded
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_sharded(folder, {"w": et.ones((4, 64)).to_mxfp4()}, {"step": 3},
    ...                  LocalCommunicator())
    ...     load_sharded(folder).metadata, et.load(folder)["w"].dtype
    ({'step': 3}, extensor.mxfp4)
    """
    path = Path(folder)
    number = ranks.broadcast_object(_next_number(path) if ranks.rank == 0 else None)
    name = f"save-{number}-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
    error: Exception | None = None
    names: list[str] = []
    try:
        save_checkpoint(path / name, tensors)
        names = sorted(load_names(path / name))
    except (OSError, TypeError, ValueError) as found:
        error = found
    told = ranks.all_gather_object((name, names, None if error is None else str(error)))
    owners: dict[str, str] = {}
    twice: list[str] = []
    for file, written, _ in told:
        twice += [each for each in written if each in owners]
        owners |= dict.fromkeys(written, file)
    failed = [f"rank {rank}: {message}" for rank, (_, _, message) in enumerate(told) if message]
    if failed or twice:
        (path / name).unlink(missing_ok=True)
        if failed:
            raise OSError("; ".join(failed)) from error
        raise ValueError(f"expected each tensor of one rank, got {sorted(set(twice))[:5]} of two")
    message = None
    if ranks.rank == 0:
        message = _publish(path, owners, dict(metadata))
    if (message := ranks.broadcast_object(message)) is not None:
        (path / name).unlink(missing_ok=True)
        raise OSError(message)
    if ranks.rank == 0:
        for old in path.iterdir():
            found_old = _FILE.fullmatch(old.name)
            if found_old and int(found_old.group(1)) < number:
                old.unlink()


def load_names(path: Path) -> list[str]:
    """The names of the arrays in a file, as its header has them."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return [name for name in json.loads(file.read(length)) if name != "__metadata__"]


def _next_number(path: Path) -> int:
    """The number of the next save; what killed ones left goes."""
    path.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    found = (_FILE.fullmatch(each.name) for each in path.iterdir())
    return max((int(match.group(1)) for match in found if match), default=0) + 1


def _publish(path: Path, owners: dict[str, str], metadata: dict[str, Any]) -> str | None:
    """Write the index; returns what failed."""
    content = {"metadata": {"extensor": metadata}, "weight_map": owners}
    try:
        text = json.dumps(content, allow_nan=False)
        with replacing(path / INDEX) as file:
            file.write(text.encode())
    except (OSError, TypeError, ValueError) as error:
        return f"{path / INDEX}: {error}"
    return None


def load_sharded(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint that any number of ranks wrote; every rank reads all of it.

    Args:
        folder: as `save_sharded` got it.

    Returns:
        All tensors by name, and the metadata.

    Raises:
        FileNotFoundError: if there is no index: no save was ever complete.
        CheckpointError: if a file is damaged, or does not hold what the index says.

    >>> import tempfile
    >>> from extensor.distributed import LocalCommunicator, load_sharded, save_sharded
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_sharded(folder, {"w": et.ones(2)}, {}, LocalCommunicator())
    ...     list(load_sharded(folder).tensors)
    ['w']
    """
    path = Path(folder)
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        owners, metadata = index["weight_map"], index["metadata"]["extensor"]
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: expected {INDEX}: no save here is complete") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX}: not an index: {error!r}") from None
    tensors: dict[str, Any] = {}
    for name in sorted(set(owners.values())):
        expected = sorted(key for key, file in owners.items() if file == name)
        if sorted(load_names(path / name)) != expected:
            raise CheckpointError(f"{path / name}: expected the tensors that {INDEX} names")
        tensors |= load_checkpoint(path / name).tensors
    return Checkpoint(tensors, metadata)
