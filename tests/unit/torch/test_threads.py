"""The C++ core's loops run on torch's threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
threads = pytest.importorskip("extensor.torch.threads")

SCRIPT = """
import os, signal
import torch
import extensor.torch as ext
from extensor.backends import registry

torch.set_num_threads(2)
x = torch.randn(2048, 2048)
torch.mm(x, x)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
pack = lambda: ext.to_blocked(x, "mxfp4").codes.numpy().tobytes()
codes = pack()
assert count() == before, "a second pool"

pid = os.fork()  # the child has no OpenMP threads to wait for
if not pid:
    signal.alarm(20)
    os._exit(pack() != codes)
assert os.waitpid(pid, 0)[1] == 0, "the child"

before = count()  # OpenBLAS has ended its threads in the fork
registry.get("cpu").core.use_openmp(0)
assert pack() == codes
assert count() == before + 1, "the core's own thread"
"""


@pytest.mark.skipif(
    not (threads.share_threads() and os.path.isdir("/proc/self/task")),
    reason="needs the C++ core, torch on GNU's OpenMP, and Linux to count threads",
)
def test_a_layer_starts_no_threads_of_its_own() -> None:
    environment = {**os.environ, "EXTENSOR_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
