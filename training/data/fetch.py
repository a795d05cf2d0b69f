"""Finding a data file: the cache, then system places, then a download.

Nothing is trusted by its name. A file counts as found only once its decompressed bytes have the
SHA-256 that the data set's row gives; the checksum is of the decompressed bytes because
distributions compress the same data anew. A file that is there but wrong is an error, never
skipped: silently training on something else would be worse.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DataError", "RemoteFile", "cache_directory", "find"]

TIMEOUT_S = 30
CHUNK = 1 << 16


class DataError(RuntimeError):
    """A data file is missing, damaged or not what it should be."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Attributes:
        name: file name without ``.gz``.
        sha256: SHA-256 of the decompressed bytes, in hexadecimal.
        size: number of decompressed bytes.
    """

    name: str
    sha256: str
    size: int


def cache_directory() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/extensor``, else ``~/.cache/extensor``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "extensor"


def find(
    dataset: str,
    file: RemoteFile,
    system: Sequence[Path],
    urls: Sequence[str],
    remedy: str,
    offline: str = "digits",
) -> bytes:
    """The decompressed bytes of one file of a data set.

    Looks in the cache directory, then in ``system``, then downloads from ``urls`` into the cache.

    Args:
        dataset: the data set's name; its folder in the cache.
        file: name, checksum and size.
        system: folders to look in after the cache.
        urls: addresses of folders that hold ``<name>.gz``, tried in order.
        remedy: the command that would fetch the data, for the error.
        offline: a data set of the same kind that needs no download, likewise.

    Raises:
        DataError: if a file found is damaged, or if none is found: then every place tried is named.
    """
    cache = cache_directory() / dataset
    tried = []
    for folder in (cache, *system):
        for path in (folder / f"{file.name}.gz", folder / file.name):
            if path.is_file():
                return read_checked(path, file)
            tried.append(f"{path}: not there")
    for url in urls:
        address = f"{url.rstrip('/')}/{file.name}.gz"
        try:
            return _download(address, cache / f"{file.name}.gz", file)
        except (OSError, DataError) as error:
            # URLError and HTTPError are OSErrors; their text names the cause
            tried.append(f"{address}: {error}")
    places = "\n".join(f"  - {place}" for place in tried)
    raise DataError(
        f"data set {dataset!r}: {file.name} was found nowhere; tried\n{places}\n"
        f"the way out: {remedy}\n"
        f"or put {file.name}.gz into {cache}; or use --dataset {offline}, which needs no download"
    )


def read_checked(path: Path, file: RemoteFile) -> bytes:
    """Decompress ``path`` (gzip where it ends in .gz) and compare size and SHA-256.

    Raises:
        DataError: if it is truncated, not gzip, or has another size or checksum.
    """
    way_out = f"delete {path} and run again to fetch it anew"
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: wanted a complete gzip file, got: {error}; {way_out}") from error
    if len(content) != file.size:
        raise DataError(
            f"{path}: wanted {file.size:,} bytes once decompressed, got {len(content):,}; {way_out}"
        )
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(
            f"{path}: wanted SHA-256 {file.sha256} of the decompressed bytes, got {digest}; "
            f"{way_out}"
        )
    return content


def _download(address: str, target: Path, file: RemoteFile) -> bytes:
    """Fetch, check, and only then move into place, so that a broken download leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".gz")
    path = Path(temporary)
    try:
        with (
            os.fdopen(handle, "wb") as out,
            urllib.request.urlopen(address, timeout=TIMEOUT_S) as response,
        ):
            _copy(response, out, file.name)
        content = read_checked(path, file)
        path.replace(target)
        return content
    finally:
        path.unlink(missing_ok=True)


def _copy(response: object, out: object, label: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    length = response.headers.get("Content-Length")  # type: ignore[attr-defined]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"downloading {label}", total=int(length) if length else None)
        while chunk := response.read(CHUNK):  # type: ignore[attr-defined]
            out.write(chunk)  # type: ignore[attr-defined]
            bar.advance(task, len(chunk))
