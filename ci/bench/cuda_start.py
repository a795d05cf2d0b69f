"""How long LeNet-5's kernels take to compile on a GPU, and to load when they have been compiled.

    python ci/bench/cuda_start.py

Two processes after each other train three steps of LeNet-5 (batch 256), in float32 and mxfp4, with
empty caches of compiled kernels and then with what the first left. Seconds in the compiler and
loader of `extensor_cuda.runtime`, and of the whole first step, which includes cupy's own
kernels. Needs a GPU and the extra ``cuda13``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from typing import Any

from ci.bench.contest import write_gpu


def timed() -> dict[str, float]:
    """In a process of its own: the steps, and what of their time were kernels being made ready."""
    import numpy as np

    import extensor as et
    from extensor.backends.registry import get
    from extensor.models.lenet.configs import LeNetConfig
    from extensor.models.lenet.model import build
    from extensor.nn.recipe import apply_recipe
    from extensor.optim import SGD
    from extensor_cuda.runtime import launch

    spent = {"kernels": 0.0, "ready_seconds": 0.0}
    ready = launch._function.__wrapped__

    def counted(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = ready(*arguments)
        spent["ready_seconds"] += time.perf_counter() - start
        spent["kernels"] += 1
        return found

    launch._function = lru_cache(maxsize=1024)(counted)
    xp = get("cuda").xp
    xp.zeros(1)  # starts CUDA
    start, rng = time.perf_counter(), np.random.default_rng(0)
    images = et.from_numpy(rng.standard_normal((256, 1, 28, 28)).astype("float32"), device="cuda")
    labels = et.from_numpy(rng.integers(0, 10, 256), device="cuda")
    for recipe in ("fp32", "mxfp4"):
        model = build(LeNetConfig(), np.random.default_rng(1)).to("cuda")
        apply_recipe(model, recipe)
        optimizer = SGD(model.named_parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss = et.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    xp.cuda.runtime.deviceSynchronize()
    return spent | {"steps_seconds": time.perf_counter() - start}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().inner:
        print(json.dumps(timed()))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        places = {"XDG_CACHE_HOME": folder, "CUPY_CACHE_DIR": f"{folder}/cupy"}
        places["CUDA_CACHE_PATH"] = f"{folder}/driver"
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, __file__, "--inner"],
                env=os.environ | places,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            rows.append({"start": name} | json.loads(done.stdout.splitlines()[-1]))
            print(*(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in rows[-1].items()))
    from extensor.backends.registry import get

    write_gpu("cuda-start", rows, get("cuda").xp)


if __name__ == "__main__":
    main()
