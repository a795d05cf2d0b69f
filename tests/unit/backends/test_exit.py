"""The interpreter may end while threads are inside the core."""

from __future__ import annotations

import subprocess
import sys

DAEMONS = """
import threading, time
import numpy as np
import extensor as et

x = et.from_numpy(np.ones((256, 256), np.float32))

def work():
    while True:
        x @ x
        x.to_mxfp4()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""


def test_a_daemon_thread_inside_the_core_does_not_abort_the_exit() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", DAEMONS], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
