"""What importing extensor.torch asks of torch."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
require = importlib.import_module("extensor.torch.require")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("found", ["2.10.1", "1.13.0+cpu"])
def test_an_old_torch_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    with pytest.raises(ImportError, match=rf"torch 2\.11 or newer, got {re.escape(found)}; pip"):
        require.load_torch()


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cu130", "3.0.0a0"])
def test_a_new_torch_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    assert require.load_torch() is torch


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(require.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'extensor\[torch\]'"):
        require.load_torch()


def test_the_minimum_is_that_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    minimum = ".".join(map(str, require.MINIMUM))
    assert project["optional-dependencies"]["torch"] == [f"torch>={minimum}"]
    assert f"torch {minimum}\nor newer" in (ROOT / "docs/how-to/torch.md").read_text("utf-8")
