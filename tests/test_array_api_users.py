"""What scipy and scikit-learn make of tensors, through the array standard: `array_api.users`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="pip install scikit-learn")
ROOT = Path(__file__).resolve().parent.parent


def test_scipy_and_scikit_learn_compute_on_tensors() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.array_api.users"],
        cwd=ROOT, env=os.environ | {"SCIPY_ARRAY_API": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    wrong = {name: error for name, error in json.loads(ran.stdout).items() if error}
    assert not wrong, wrong
