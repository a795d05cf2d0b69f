"""What is installed: the build backend's own wheel and source archive, made without compiling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import extensor
from extensor.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = """
import sys
from scikit_build_core.build import {hook}
print({hook}(sys.argv[1], {{"wheel.cmake": "false"}}))
"""

pytest.importorskip("scikit_build_core", reason="the build backend; it is in the extra test")


def built(hook: str, folder: Path) -> Path:
    """What a hook of the build backend makes; without CMake, so that nothing is compiled."""
    command = [sys.executable, "-c", BUILD.format(hook=hook), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *words: str) -> str:
    """Standard output of Python in a folder, which finds the wheel's extensor only."""
    # Without `site`, whose .pth file of an editable install puts the checkout first.
    command = [sys.executable, "-S", "-P", *words]
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    path = os.pathsep.join(dict.fromkeys([str(installed), *libraries]))
    env = {**os.environ, "PYTHONPATH": path, "EXTENSOR_REQUIRE_CORE": "0"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources(folder: str, *suffixes: str) -> set[str]:
    paths = (ROOT / folder).rglob("*")
    return {p.relative_to(ROOT).as_posix() for p in paths if p.suffix in suffixes}


def test_the_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"extensor", "extensor_cuda"}
    parts = sources("models", ".py") | sources("training", ".py", ".html", ".css", ".npz")
    expected = {f"extensor/{name}" for name in parts}
    expected |= sources("extensor", ".py", ".typed") - {"extensor/_core/rows.py"}
    expected |= sources("extensor_cuda", ".py", ".cu", ".cuh")
    expected |= {"extensor/py.typed"}
    assert len(expected) > 350
    assert names == expected


def test_an_editable_install_adds_the_checkout_only(tmp_path: Path) -> None:
    with zipfile.ZipFile(built("build_editable", tmp_path)) as file:
        (pth,) = [name for name in file.namelist() if name.endswith(".pth")]
        folders = set(file.read(pth).decode().splitlines())
    assert {line for line in folders if not line.startswith("import ")} <= {str(ROOT)}


def test_the_source_archive_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(built("build_sdist", tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    parts = sources("extensor", ".py", ".cpp", ".hpp", ".txt") | sources("models", ".py")
    parts |= sources("training", ".py", ".html", ".css", ".npz") | sources("tests", ".py", ".hpp")
    assert parts | {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff"} <= names


def test_metadata_says_what_the_sources_say(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        texts = {name.rpartition("/")[2]: name for name in file.namelist() if "dist-info" in name}
        metadata = Parser().parsestr(file.read(texts["METADATA"]).decode())
        scripts = file.read(texts["entry_points.txt"]).decode()
    assert metadata["Name"] == "extensor"
    assert metadata["Version"] == extensor.__version__
    assert "extensor = extensor.cli:main" in scripts.replace("=extensor.", "= extensor.")
    assert metadata.get_all("Classifier") and metadata["Keywords"] and metadata["Author"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [extensor.__version__]


def test_the_compiler_of_kernels_is_of_versions_that_were_tried() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert "extensor[nvrtc]" in extras["cuda13"]
    assert all(">=" in package and ",<" in package for package in extras["nvrtc"])
    for requirement in extras["cuda13"]:
        assert "nvrtc" not in requirement or requirement == "extensor[nvrtc]"


def test_extras_are_those_that_messages_name() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {name: sorted(row.values()) for name, row in EXTRAS.items()} == {
        name: sorted(extras[name]) for name in EXTRAS
    }


def test_an_installed_extensor_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    words = ("compare", "mlp", "--recipes", "fp32,mxfp4", "--seeds", "1", "--epochs", "1")
    small = ("--train-limit", "64", "--test-limit", "60", "--out", "here")
    run(installed, tmp_path, "-m", "extensor.cli", *words, *small)
    assert (tmp_path / "here" / "compare.md").is_file()
    (result,) = tmp_path.glob("here/**/*mxfp4-s0/result.json")
    run(installed, tmp_path, "-m", "extensor.cli", "report", str(result.parent))
    assert "<html" in (result.parent / "report.html").read_text(encoding="utf-8")
    listed = run(installed, tmp_path, "-m", "extensor.training", "--help")
    assert "usage: extensor train MODEL" in listed


def test_an_installed_extensor_has_one_folder(installed: Path, tmp_path: Path) -> None:
    code = "import extensor; print(len(extensor.__path__), *extensor.models.names())"
    count, *names = run(installed, tmp_path, "-c", code).split()
    assert count == "1" and names == extensor.models.names()


def test_a_checkout_has_each_module_under_one_name() -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = ['lenet', '--help']\n"
        "try: runpy.run_module('training', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('models', 'training')))\n"
        "print('extensor.training.loop' in sys.modules, 'extensor.models' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["['training']", "True True"]
