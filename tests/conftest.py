"""Options of the whole suite.

`--device cuda` runs it with every tensor on the GPU, unless a test asks for another.
`--parallel-threads 8` (the plugin pytest-run-parallel) runs each test in eight threads at once.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from types import FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine an example takes any time; what a test does not end in, pytest-timeout ends.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

pytest.register_assert_rewrite("tests.array_api", "tests.kernels")

PROCESS_WIDE = (
    "forced(", "set_gemm_level(", "set_threads(", "tracemalloc.", "gc.disable(", "setrlimit(",
    "subprocess.", "threading.active_count(", "parse_train(", 'PRIMITIVES["exp"] = ',
    "MonkeyPatch.context(",
)  # fmt: skip
"""What a test body may not do while another thread runs it: these are the process's.

Processes started eight at a time would only wait for each other, past their deadlines; what
`parse_train` calls, tyro, caches types without a lock.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where tensors are made")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device is not None:
        os.environ["EXTENSOR_DEVICE"] = device


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``host`` are of the CPU's memory or kernels and stay there."""
    device = item.config.getoption("--device")
    if device is not None:
        os.environ["EXTENSOR_DEVICE"] = "cpu" if item.get_closest_marker("host") else device


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: Any) -> None:
    """One thread for tests that switch what belongs to the process; see PROCESS_WIDE."""
    function = inspect.unwrap(getattr(item, "function", None) or (lambda: None))
    threads = item.config.getoption("parallel_threads", "1")  # the plugin's, where there is one
    if str(threads) != "1" and (switch := process_wide(function)):
        item.add_marker(pytest.mark.thread_unsafe(reason=f"{switch}...) is process-wide"))


@cache
def process_wide(function: FunctionType) -> str:
    """What of PROCESS_WIDE a function, or a function that it names, does; empty for nothing."""
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    texts = [inspect.getsource(part) for part in (function, *filter(inspect.isfunction, named))]
    return next((switch for switch in PROCESS_WIDE if any(switch in t for t in texts)), "")
