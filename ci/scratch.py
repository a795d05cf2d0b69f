"""Tests on a scratch copy of the repository, with the core built there as asked for.

    python ci/scratch.py FOLDER --define SANITIZE=ON -- tests/test_every_kernel.py
    python ci/scratch.py FOLDER --replace extensor/random.py "<< 1" "<< 2" -- tests/unit/quant

The copy is brought up to date file by file, so the second build in the same folder is incremental.
What is in the repository, and what is installed, stays as it is. Arguments after ``--`` go to
pytest; without any, nothing is run. Needs cmake, ninja and pybind11 (pip has all three). Exits with
pytest's code, or with 70 where the copy cannot be made or built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("extensor", "models", "training", "tests", "ci", "docs")
LEFT_OUT = {"__pycache__", "results", "_kernels", ".so", ".pyc"}
BROKEN = 70

# An editable install's import hook would come before the copy; the assertion is for any other.
ISOLATED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, sys.argv[1])
import extensor, pytest
assert extensor.__file__.startswith(sys.argv[1]), extensor.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


class BrokenError(Exception):
    """The copy cannot be made or built; the message says why."""


def bring_up_to_date(folder: Path) -> None:
    """Make the copy's files what the repository's are, touching only those that differ."""
    copied = {Path("pyproject.toml")}
    for room in COPIED:
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and not LEFT_OUT & {*path.parts, path.suffix}:
                copied.add(path.relative_to(ROOT))
    for room in COPIED:
        for path in (folder / room).rglob("*"):
            if path.is_file() and path.suffix not in (".so", ".pyc"):
                name = path.relative_to(folder)
                if name not in copied:
                    path.unlink()
    for name in sorted(copied):
        source, target = (ROOT / name).read_bytes(), folder / name
        # A new time stamp, not the source's: the build goes by it.
        if not target.exists() or target.read_bytes() != source:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source)


def replace(folder: Path, name: str, old: str, new: str) -> None:
    """Put ``new`` for the one occurrence of ``old`` in a file of the copy."""
    text = (folder / name).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise BrokenError(f"{name}: expected one occurrence, found {text.count(old)}, of: {old}")
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")


def tool(name: str) -> str:
    """A build tool: this environment's, or the one on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise BrokenError(f"{name} was not found: pip install cmake ninja pybind11")
    return found


def build(folder: Path, defines: Sequence[str]) -> None:
    """Configure once, build what changed, and put the module into the copy's package."""
    target = folder / "build"
    if not (target / "build.ninja").exists():
        import pybind11

        command = [tool("cmake"), "-S", str(folder / "extensor" / "_core"), "-B", str(target)]
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        command += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        command += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        run_quietly([*command, *(f"-DEXTENSOR_{define}" for define in defines)])
    run_quietly([tool("cmake"), "--build", str(target)])
    built = list(target.glob("_kernels*.so"))
    if len(built) != 1:
        raise BrokenError(f"expected one module in {target}, found {len(built)}")
    shutil.copy2(built[0], folder / "extensor" / "_core")


def run_quietly(command: Sequence[str]) -> None:
    """Run a command; its output only where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokenError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Copy, replace, build, test."""
    parser = argparse.ArgumentParser(description="tests on a scratch copy of the repository")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--define", action="append", default=[], help="CMake option, NAME=VALUE")
    parser.add_argument("--no-core", action="store_true", help="build nothing; the numpy path")
    parser.add_argument("--replace", nargs=3, metavar=("FILE", "OLD", "NEW"))
    parser.add_argument("--env", action="append", default=[], help="for the tests: NAME=VALUE")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    chosen, arguments = parser.parse_args(given[:end]), given[end + 1 :]
    folder = chosen.folder.resolve()
    environment = os.environ | dict(entry.split("=", 1) for entry in chosen.env)
    try:
        bring_up_to_date(folder)
        if chosen.replace:
            replace(folder, *chosen.replace)
        if chosen.no_core:
            environment["EXTENSOR_CORE"] = "0"
        else:
            build(folder, chosen.define)
            environment["EXTENSOR_REQUIRE_CORE"] = "1"
    except BrokenError as error:
        print(error, file=sys.stderr)
        return BROKEN
    if not arguments:
        return 0
    command = [sys.executable, "-c", ISOLATED, str(folder), "-p", "no:cacheprovider"]
    command += [f"--rootdir={folder}", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
