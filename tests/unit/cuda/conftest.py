"""What the CUDA tests need, and why they are skipped where it is missing."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest

from ci import cubins
from extensor.backends import registry
from extensor_cuda.runtime import compile as compiling
from extensor_cuda.runtime import driver
from tests.unit.cuda import fake, fake_backend
from tests.unit.cuda.emulator import COMPILER, Cupy, Emulated, Emulator

if not isinstance(compiling.compile_cubin, partial):  # `ci/cubins.py` records what is compiled
    compiling.compile_cubin = cubins.cached(
        compiling.compile_cubin, compiling.cache_folder().with_name("compiled-by-tests")
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compiles, so that `-m nvrtc` selects it."""
    for item in items:
        if "nvrtc" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nvrtc)


@pytest.fixture(scope="session")
def cuda() -> Any:
    """The CUDA backend; skips with the backend's own words where there is none."""
    try:
        return registry.get("cuda")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def hopper_gpu(cuda: Any) -> Any:
    """The CUDA backend on a GPU that has wgmma."""
    if (found := cuda.xp.cuda.Device().compute_capability) != "90":
        pytest.skip(f"the GPU has compute capability {found}; wgmma is of 90 (H100, H200) alone")
    return cuda


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler."""
    if COMPILER is None:
        pytest.skip("kernels are emulated by a C++ compiler, and no c++ is on the PATH")
    return COMPILER


EMULATED = compiling.cache_folder().with_name("emulated-by-tests")


@pytest.fixture(scope="session")
def emulator(compiler: str) -> Emulator:
    """Kernels on the CPU, each compiled once."""
    return Emulator(EMULATED)


@pytest.fixture(params=["emulated", "on a GPU"])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend with the training kernels: the CUDA one, or its methods on the CPU."""
    if request.param == "on a GPU":
        return request.getfixturevalue("cuda")
    for module in fake_backend.TRAINING:
        monkeypatch.setattr(module, "launch", request.getfixturevalue("emulator"))
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 2)
    return Emulated("emulated", Cupy())


@pytest.fixture(scope="session")
def fake_launch(compiler: str) -> fake.FakeLaunch:
    """Kernels on the CPU, which a capture lists."""
    return fake.FakeLaunch(EMULATED)


@pytest.fixture(params=["fake", "on a GPU"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend, on a GPU or on numpy, as device "cuda"."""
    if request.param == "on a GPU":
        return request.getfixturevalue("cuda")
    return fake_backend.install(monkeypatch, request.getfixturevalue("fake_launch"))


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skips where the compiler of the extra nvrtc is not installed."""
    for name in ("cuda.core", "cuda.bindings.nvrtc"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{name} is not installed; pip install 'extensor[nvrtc]'")
    from cuda.bindings import nvrtc as library

    try:  # the module may be there without the library that it loads
        library.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC does not load ({error}); pip install 'extensor[nvrtc]'")
