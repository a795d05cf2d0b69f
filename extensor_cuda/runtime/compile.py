"""Compiles CUDA C++ to cubins with NVRTC and caches them on disk.

Cubins, not PTX: PTX of a newer compiler does not load on an older driver. Compiling needs no GPU,
so a machine without one can check every architecture.

The cache is a folder of files. A file's name holds a digest of everything that decides the code.
Each file is written under a temporary name and then renamed, so that concurrent compilers never see
half a file. Each file also holds its own digest, so that a damaged one is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Source", "cache_folder", "compile_cubin", "cubin"]

_DIGEST = 32


@dataclass(frozen=True)
class Source:
    """One program: CUDA C++ text without headers, and macros as (name, value) pairs.

    ``exact`` compiles without fused multiply-add, for kernels whose bits the order of operations
    decides.
    """

    name: str
    text: str
    macros: tuple[tuple[str, str], ...] = ()
    exact: bool = True

    @classmethod
    def read(cls, path: Path, macros: Mapping[str, object]) -> Source:
        """The program in a file, with macros from a mapping."""
        pairs = tuple((name, str(value)) for name, value in sorted(macros.items()))
        return cls(path.stem, _text(path), pairs)


_INCLUDE = re.compile(r'^#include "([a-z0-9_]+/[a-z0-9_]+\.cuh)"$', re.MULTILINE)


@cache
def _text(path: Path) -> str:
    """A file's text with every ``#include "..."`` replaced by that file's text.

    An include names a family's folder and a file, ``"common/barriers.cuh"``; all families stand in
    one folder. One text decides the code, so the cache's digest needs nothing else.
    """
    text = path.read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _text(path.parents[1] / found[1]), text)


def cache_folder() -> Path:
    """The cubin cache: extensor/cubin in the user's cache folder (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "extensor" / "cubin"


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """Compile for an architecture such as ``"sm_90a"``; needs NVRTC and no GPU.

    Returns:
        The cubin, and the compiler's log with each kernel's registers, stack frame and spills.

    Raises:
        RuntimeError: if the source does not compile; the message holds the compiler's log.
    """
    import io

    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=source.name,
        arch=arch,
        std="c++17",
        fma=False if source.exact else None,
        define_macro=list(source.macros) or None,
        ptxas_options="-v",
        # One straight path of a source leaves names of the others unused.
        diag_suppress=177,
    )
    log = io.StringIO()
    try:
        code = Program(source.text, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        macros = " ".join(f"-D{name}={value}" for name, value in source.macros)
        raise RuntimeError(
            f"{source.name} for {arch} does not compile ({macros}): {error}"
        ) from error
    return bytes(code), log.getvalue()


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(part) for part in nvrtc.nvrtcVersion())


def _key(source: Source, arch: str) -> str:
    parts = (source.name, source.text, repr(source.macros), str(source.exact), arch, _compiler())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cubin(source: Source, arch: str) -> bytes:
    """The code that `compile_cubin` gives, from the disk cache where it is there.

    A folder that cannot be read or written costs time only.
    """
    path = cache_folder() / f"{source.name}-{arch}-{_key(source, arch)}.cubin"
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    code, _ = compile_cubin(source, arch)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:40])
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    return code
