"""`extensor doctor`: what an installation has and lacks."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import numpy as np
import pytest

import extensor
from extensor import config
from extensor.backends import registry
from tests.unit.cli.commands import run


def test_doctor_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "doctor")
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) <= 10
    for said in (extensor.__version__, np.__version__, "C++ core", "device cuda", "extra train"):
        assert said in text
    assert "--all" in text and "quantized_conv2d" not in text


def test_doctor_names_packages_that_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "missing: jinja2; pip install 'extensor[train]'" in run(capsys, "doctor")


def test_doctor_shows_everything_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "doctor", "--all")
    assert np.__version__ in text
    for flag in config.FLAGS.values():
        assert flag.name in text
    for device in registry.BACKENDS:
        assert f" {device} " in text
    methods = [
        name
        for name, _ in inspect.getmembers(registry.Backend, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert methods
    for method in methods:
        assert f" {method} " in text


def doctor(before: str = "", **environment: str) -> str:
    """What `extensor doctor` says in a process of its own, after some statements."""
    code = f"{before}\nfrom extensor.cli import main; raise SystemExit(main(['doctor']))"
    command = [sys.executable, "-c", code]
    env = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "300", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [("0", "EXTENSOR_CORE=0"), ("yes", "EXTENSOR_CORE: expected 0 or 1, got 'yes'")],
)
def test_doctor_says_why_the_core_is_not_used(value: str, said: str) -> None:
    assert said in doctor(EXTENSOR_CORE=value)


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({}, "no c++, g++ or clang++ is on the PATH: install a C++20 compiler"),
        ({"CXX": "missing++"}, "CXX=missing++ is not there"),
        ({"CXX": sys.executable}, f"{sys.executable} is here: install again"),
    ],
)
def test_doctor_says_what_a_core_would_need(environment: dict[str, str], path: str) -> None:
    text = doctor("import sys; sys.modules['extensor._core._kernels'] = None", **environment)
    assert "not used: the C++ core is not built" in text and path in text


def test_doctor_does_not_import_other_devices() -> None:
    code = (
        "import json, sys; from extensor.cli import main; main(['doctor']); "
        "print(json.dumps(['cupy' in sys.modules, 'extensor_cuda.backend' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False]
