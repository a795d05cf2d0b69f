"""Do the CUDA kernels still compile to the same machine code? Needs NVRTC, and no GPU.

Run it before and after a change that should move or rename text only:

    python ci/cubins.py record before.json         in a checkout without the change
    python ci/cubins.py record after.json          in a checkout with it
    python ci/cubins.py compare before.json after.json

``record`` runs the tests that compile kernels (those with the ``nvrtc`` fixture) and writes down
the SHA-256 of each cubin that they make, and of its machine code alone, which a renamed kernel
leaves as it was. ``compare`` lists the machine code that AFTER lacks, with the registers, the stack
and the bytes before and after. It exits 1 if any machine code of BEFORE is missing in AFTER.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = "extensor_cuda.runtime.compile", "extensor_cuda.jit"
"""Modules that may hold `compile_cubin`; the first that exists is used."""
Compile = Callable[[Any, str], tuple[bytes, str]]
_LENGTH = struct.Struct("<Q")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]')
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")


def preprocessed(source: Any, arch: str) -> str:
    """The program's tokens for an architecture, without comments and macros."""
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    number = re.sub(r"\D", "", arch)  # sm_90a: 90
    command = ("c++", "-E", "-P", "-x", "c++", f"-D__CUDA_ARCH__={number}0", "-")
    done = subprocess.run(
        command, input=macros + source.text, capture_output=True, text=True, check=True
    )
    text = re.sub(r'"\s+"', "", done.stdout)  # adjacent string literals are one
    return " ".join(_TOKEN.findall(text))


def figures(log: str) -> dict[str, list[int]]:
    """Registers, bytes of stack and bytes of spills of each kernel, from ptxas's log."""
    found: dict[str, list[int]] = {}
    for part in re.split(r"(?=Compiling entry function)", log)[1:]:
        name, used, stack = (rule.search(part) for rule in (_ENTRY, _USED, _STACK))
        if name and used and stack:
            found[name[1]] = [int(used[1]), int(stack[1]), int(stack[2])]
    return found


def machine_code(cubin: bytes) -> str:
    """SHA-256 of the sections of code and constants of a cubin (a 64-bit ELF file), names apart."""
    table, entry, count, names = struct.unpack_from("<Q10x3H", cubin, 0x28)
    headers = [struct.unpack_from("<I12x8x2Q", cubin, table + i * entry) for i in range(count)]
    strings = headers[names][1]
    kept = []
    for name, offset, size in headers:
        start = strings + name
        if cubin[start : cubin.index(0, start)].startswith((b".text.", b".nv.constant")):
            kept.append(hashlib.sha256(cubin[offset : offset + size]).digest())
    return hashlib.sha256(b"".join(sorted(kept))).hexdigest()


class Recorder:
    """A pytest plugin: runs the tests that compile, and notes every cubin."""

    def __init__(self, root: Path, cache: Path | None) -> None:
        self.root, self.cache = root, cache
        self.test = ""
        self.programs: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Put the recording in the compiler's place."""
        for name in COMPILERS:
            try:
                jit = importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            compiler: Any = jit
            if not Path(str(jit.__file__)).is_relative_to(self.root):
                raise SystemExit(f"expected the compiler of {self.root}, got {jit.__file__}")
            compile_cubin = compiler.compile_cubin
            if self.cache is not None:
                compile_cubin = cached(compile_cubin, self.cache)
            compiler.compile_cubin = partial(self.record, compile_cubin)
            return
        raise SystemExit("no module holds compile_cubin")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that compile."""
        items[:] = [item for item in items if "nvrtc" in item.fixturenames]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Note which test runs."""
        self.test = item.nodeid

    def record(self, compile_cubin: Compile, source: Any, arch: str) -> tuple[bytes, str]:
        """Compile, and note the digest."""
        code, log = compile_cubin(source, arch)
        key = f"{self.test}#{self.counts[self.test]}@{arch}"
        self.counts[self.test] += 1
        self.programs[key] = {
            "source": source.name,
            "macros": dict(source.macros),
            "sha256": hashlib.sha256(code).hexdigest(),
            "code": machine_code(code),
            "bytes": len(code),
            "kernels": figures(log),
        }
        return code, log


@cache
def version() -> str:
    """NVRTC's."""
    from cuda.bindings import nvrtc

    return ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])


def cached(compile_cubin: Compile, folder: Path) -> Compile:
    """The compiler, but programs whose text remained the same come from a folder.

    What counts is what the preprocessor leaves: a comment or another name of a macro compiles
    nothing anew, another architecture or version of NVRTC does.
    """

    def compiled(source: Any, arch: str) -> tuple[bytes, str]:
        try:
            text = f"{version()} {arch} {source.name} {source.exact} {preprocessed(source, arch)}"
        except (subprocess.CalledProcessError, FileNotFoundError):
            return compile_cubin(source, arch)  # it does not compile, or there is no preprocessor
        path = folder / hashlib.sha256(text.encode()).hexdigest()
        if path.exists():
            stored = path.read_bytes()
            (length,) = _LENGTH.unpack_from(stored)
            code = stored[_LENGTH.size + length :]
            return code, stored[_LENGTH.size : _LENGTH.size + length].decode()
        code, said = compile_cubin(source, arch)
        log = said.encode()
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(_LENGTH.pack(len(log)) + log + code)
        unfinished.replace(path)  # other processes see the whole file or none
        return code, said

    return compiled


def record(out: Path, root: Path, cache: Path | None, arguments: Sequence[str]) -> int:
    """Run the tests that compile in the checkout at ``root``; write the digests to ``out``."""
    out = out.resolve()
    cache = None if cache is None else cache.resolve()
    root = root.resolve()
    os.chdir(root)
    sys.path.insert(0, str(root))
    if root != ROOT:  # an editable install finds this checkout's files before those of sys.path
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
    recorder = Recorder(root, cache)
    code = pytest.main(["-q", "-p", "no:xdist", *arguments], plugins=[recorder])
    out.write_text(json.dumps(recorder.programs, indent=1, sort_keys=True), encoding="utf-8")
    cubins = len({program["sha256"] for program in recorder.programs.values()})
    print(f"{len(recorder.programs)} programs, {cubins} different cubins -> {out}")
    return int(code)


def compare(before_path: Path, after_path: Path) -> int:
    """Print the machine code that one side lacks; 1 if any of BEFORE is missing in AFTER."""
    before, after = (json.loads(path.read_text()) for path in (before_path, after_path))
    kept, old = ({program["code"] for program in side.values()} for side in (after, before))
    missing = {key: program for key, program in before.items() if program["code"] not in kept}
    new = sum(program["code"] not in old for program in after.values())
    by_source: dict[str, list[str]] = defaultdict(list)
    for key, program in missing.items():
        by_source[program["source"]].append(key)
    for source, keys in sorted(by_source.items()):
        print(f"{source}: the machine code of {len(keys)} programs of BEFORE is not in AFTER")
        for key in keys:
            print(f"  {key}")
            changed = after.get(key)
            if changed is None:
                print("    no such program in AFTER")
                continue
            was = before[key]
            print(f"    bytes {was['bytes']} -> {changed['bytes']}")
            for name, numbers in was["kernels"].items():
                print(f"    {name}: {numbers} -> {changed['kernels'].get(name)}")
    files = {program["sha256"] for program in before.values()}
    same = len(files & {program["sha256"] for program in after.values()})
    print(f"{len(before)} programs before, {len(after)} after")
    print(f"{same} of {len(files)} cubins are equal, {len(old & kept)} of {len(old)} machine codes")
    print(f"{len(missing)} programs of BEFORE have code that AFTER lacks, {new} of AFTER new code")
    return int(bool(missing))


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile, and write each cubin's SHA-256")
    recording.add_argument("out", type=Path, help="the JSON file to write")
    recording.add_argument("--root", type=Path, default=ROOT, help="the checkout (this one)")
    recording.add_argument(
        "--cache", type=Path, help="keep cubins here, by the text that remains after preprocessing"
    )
    recording.add_argument("--tests", nargs="*", default=["tests"], help="files or folders")
    recording.add_argument("-k", default="", help="only tests that match, as in pytest")
    comparing = commands.add_parser("compare", help="which cubins of BEFORE are in AFTER")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(argv)
    if given.command == "record":
        return record(
            given.out,
            given.root,
            given.cache,
            [*given.tests, *(["-k", given.k] if given.k else [])],
        )
    return compare(given.before, given.after)


if __name__ == "__main__":
    sys.exit(main())
