"""Finding a data file: the cache, then system places, then a download.

Nothing is trusted by its name. A file counts as found only once its bytes have the SHA-256 that the
data set's row gives; of a packed file, the decompressed bytes, because distributions compress the
same data anew. A file that is there but wrong is an error, never skipped: silently training on
something else would be worse.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import IO, TypeVar

from extensor.schema import FileError

__all__ = ["DataError", "RemoteFile", "cache_directory", "find", "find_archive"]

T = TypeVar("T")

TIMEOUT_S = 30
CHUNK = 1 << 16


class DataError(FileError, RuntimeError):
    """A data file is missing, damaged or not what it should be."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Attributes:
        name: file name; without ``.gz`` where it is ``packed``.
        sha256: SHA-256, in hexadecimal; of the decompressed bytes where it is ``packed``.
        size: number of bytes, likewise.
        packed: whether it lies on servers as ``<name>.gz``. An archive is not: its checksum is of
            the archive itself.
    """

    name: str
    sha256: str
    size: int
    packed: bool = True

    @property
    def stored(self) -> str:
        """The name it is downloaded and kept under."""
        return f"{self.name}.gz" if self.packed else self.name


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
        urls: addresses of folders that hold the file, tried in order; none, no download.
        remedy: the command that would fetch the data, for the error.
        offline: a data set of the same kind that needs no download, likewise.

    Raises:
        DataError: if a file found is damaged, or if none is found: then every place tried is named.
    """
    return _search(dataset, file, system, urls, read_checked, remedy, offline)[1]


def find_archive(
    dataset: str, file: RemoteFile, system: Sequence[Path], urls: Sequence[str], remedy: str
) -> Path:
    """Where an archive lies, its checksum checked; otherwise as `find`."""
    return _search(dataset, file, system, urls, check_archive, remedy)[0]


def _search(
    dataset: str,
    file: RemoteFile,
    system: Sequence[Path],
    urls: Sequence[str],
    check: Callable[[Path, RemoteFile], T],
    remedy: str,
    offline: str = "digits",
) -> tuple[Path, T]:
    """Find a file that passes ``check``; its path, and the result of ``check``."""
    cache = cache_directory() / dataset
    names = dict.fromkeys((file.stored, file.name))
    tried = []
    for path in (folder / name for folder in (cache, *system) for name in names):
        if path.is_file():
            return path, check(path, file)
        tried.append(f"{path}: not there")
    for url in urls:
        address = f"{url.rstrip('/')}/{file.stored}"
        target = cache / file.stored
        try:
            return target, _download(address, target, file, check)
        except (OSError, DataError) as error:
            # URLError and HTTPError are OSErrors; their text names the cause
            tried.append(f"{address}: {error}")
    places = "\n".join(f"  - {place}" for place in tried)
    raise DataError(
        f"data set {dataset!r}: {file.name} was found nowhere; tried\n{places}\n"
        f"the way out: {remedy}\n"
        f"or put {file.stored} into {cache}; or use --dataset {offline}, which needs no download"
    )


def _compare(path: Path, file: RemoteFile, size: int, digest: Callable[[], str], of: str) -> None:
    """Compare size and SHA-256.

    Raises:
        DataError: where they differ.
    """
    way_out = f"delete {path} and run again to fetch it anew"
    if size != file.size:
        once = " once decompressed" if of else ""
        raise DataError(f"{path}: expected {file.size:,} bytes{once}, got {size:,}; {way_out}")
    if (found := digest()) != file.sha256:
        raise DataError(f"{path}: expected SHA-256 {file.sha256}{of}, got {found}; {way_out}")


def check_archive(path: Path, file: RemoteFile) -> None:
    """Compare size and SHA-256 of an archive, read in chunks; errors as `read_checked`."""

    def digest() -> str:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    _compare(path, file, path.stat().st_size, digest, "")


def read_checked(path: Path, file: RemoteFile) -> bytes:
    """Decompress ``path`` (gzip where it ends in .gz) and compare size and SHA-256.

    Raises:
        DataError: if it is truncated, not gzip, or has another size or checksum.
    """
    if path.suffix == ".gz":
        with path.open("rb") as packed:
            content = unpack_gzip(packed, file.size, path)
    else:
        content = path.read_bytes() if path.stat().st_size == file.size else b""
    digest = hashlib.sha256(content).hexdigest
    size = len(content) if path.suffix == ".gz" else path.stat().st_size
    _compare(path, file, size, digest, " of the decompressed bytes")
    return content


def unpack_gzip(packed: IO[bytes], size: int, label: str | Path) -> bytes:
    """A gzip file's content; no more of it is unpacked than the expected size and one byte.

    Raises:
        DataError: if it is no complete gzip file, or unpacks to more.
    """
    way_out = f"delete {label} and run again to fetch it anew"
    try:
        with gzip.GzipFile(fileobj=packed) as stream:
            content = stream.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{label}: expected a complete gzip file, got: {error}; {way_out}"
        ) from error
    if len(content) > size:
        raise DataError(f"{label}: expected {size:,} bytes once decompressed, got more; {way_out}")
    return content


def _download(
    address: str, target: Path, file: RemoteFile, check: Callable[[Path, RemoteFile], T]
) -> T:
    """Fetch, check, and only then move into place, so that a broken download leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    path = Path(temporary)
    try:
        with (
            os.fdopen(handle, "wb") as out,
            urllib.request.urlopen(address, timeout=TIMEOUT_S) as response,
        ):
            _copy(response, out, file.name)
        result = check(path, file)
        path.replace(target)
        return result
    finally:
        path.unlink(missing_ok=True)


def _copy(response: HTTPResponse, out: IO[bytes], label: str) -> None:
    from rich.console import Console
    from rich.progress import wrap_file

    length = int(response.headers.get("Content-Length") or 0)
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    what = f"downloading {label}"
    with wrap_file(response, length, description=what, console=console, disable=quiet) as content:
        shutil.copyfileobj(content, out, CHUNK)
