"""What is said where something that CUDA takes is missing, and what the kernels cover. No GPU."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import numpy
import pytest

from extensor.backends.generic import GenericBackend
from extensor.backends.unsupported import Unsupported
from extensor.errors import CaptureError
from extensor.formats import FORMATS
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda import backend
from extensor_cuda.dispatch import Route, routed
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.runtime import memory


class DriverError(Exception):
    pass


def fake_cupy(count: int | None) -> types.ModuleType:
    """A cupy whose driver reports so many GPUs, or fails."""

    def device_count() -> int:
        if count is None:
            raise DriverError("cudaErrorInsufficientDriver")
        return count

    runtime = types.SimpleNamespace(getDeviceCount=device_count, CUDARuntimeError=DriverError)
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=runtime)
    return module


@pytest.mark.parametrize(
    ("count", "missing"), [(None, "driver.*cudaErrorInsufficientDriver"), (0, "finds no GPU")]
)
def test_no_gpu_names_what_is_missing(
    count: int | None, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count))
    with pytest.raises(RuntimeError, match=rf"{missing}.*pip install 'extensor\[cuda13\]'"):
        backend.make_backend()


def test_no_cupy_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"cupy cannot be imported.*extensor\[cuda13\]"):
        backend.make_backend()


def test_the_backend_module_loads_neither_cupy_nor_cuda() -> None:
    code = (
        "import sys, extensor_cuda.backend; "
        "assert not {'cupy', 'cuda', 'cuda.core', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_blocked_format_has_a_plan_or_a_reason() -> None:
    for name, row in FORMATS.items():
        plan = kernels.plan_of(QuantSpec(name), (64, 64))
        covered = row.scale.name == "e8m0" or row.tensor_scale
        assert isinstance(plan, kernels.Plan) == bool(covered), name
        if row.tensor_scale:
            assert isinstance(
                kernels.plan_of(QuantSpec(name), (64, 64), decoding=True), kernels.Plan
            )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec("mxfp4", tile=(16, 16), transform=Hadamard(16)), "Hadamard"),
        (QuantSpec("mxfp4", tile=(16, 32)), "tile"),
        (QuantSpec("mxfp4", tile=(1, 24)), "tile"),
        (QuantSpec("mxfp4", statistic="percentile"), "percentile"),
        (QuantSpec("nvfp4", tile=(1, 32), scale_rule="four_over_six"), "four_over_six"),
        (QuantSpec("mxfp4", axis=5), "axis"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_covered_has_a_reason(spec: QuantSpec, reason: str) -> None:
    plan = kernels.plan_of(spec, (64, 64))
    assert isinstance(plan, Unsupported) and reason in plan.reason


def test_vectors_are_used_only_where_they_fit() -> None:
    whole = {
        ((64, 64), -1): True,
        ((64, 70), -1): False,
        ((256, 64), 0): True,
        ((70, 64), 0): False,
    }
    whole |= {((256, 66), 0): False}
    for (shape, axis), expected in whole.items():
        plan = kernels.plan_of(QuantSpec("mxfp4", axis=axis), shape)
        assert isinstance(plan, kernels.Plan)
        assert kernels.is_whole(plan, 4096, "bfloat16") is expected, shape
        assert not kernels.is_whole(plan, 4098, "bfloat16")
    for columns, expected in ((48, True), (40, False)):
        plan = kernels.plan_of(QuantSpec("mxfp4", tile=(32, 32)), (70, columns))
        assert isinstance(plan, kernels.Plan)
        assert kernels.is_whole(plan, 4096, "bfloat16") is expected, columns
        assert not kernels.is_whole(plan, 4098, "bfloat16")


def test_a_fork_after_cuda_started_raises() -> None:
    """The child's array module is replaced, whatever it was; numpy stands for cupy here."""
    code = """
import os, numpy
from extensor_cuda.backend import CudaBackend
backend = CudaBackend(numpy)
os.register_at_fork(after_in_child=backend.refuse_after_fork)
child = os.fork()
if not child:
    try:
        backend.xp.zeros(3)
    except RuntimeError as error:
        os._exit(0 if "forked after CUDA started" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert backend.xp.zeros(3).shape == (3,)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_out_of_memory_names_the_bytes() -> None:
    class OutOfMemoryError(MemoryError):
        pass

    def malloc(size: int) -> int:
        if size > 100:
            raise OutOfMemoryError
        return size

    errors = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    runtime = types.SimpleNamespace(memGetInfo=lambda: (100, 1000))
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(memory=errors, runtime=runtime))
    pool = types.SimpleNamespace(malloc=malloc)
    with pytest.raises(MemoryError, match="requested 101 bytes, 100 of 1000 are free"):
        memory.allocate(cupy, pool, 101)
    assert memory.allocate(cupy, pool, 100) == 100


def test_the_dispatch_table_has_every_method_with_a_kernel() -> None:
    methods = {name for name in dir(GenericBackend) if callable(getattr(GenericBackend, name))}
    assert backend.ROUTES.keys() <= methods
    overridden = {
        name
        for name in methods
        if getattr(backend.CudaBackend, name) is not getattr(GenericBackend, name)
        and not name.startswith("__")
    }
    # Services need the backend itself.
    services = {
        "matmul", "memory_log", "new_graph", "product", "raising", "reads_stored", "run_batch"
    }  # fmt: skip
    assert overridden == backend.ROUTES.keys() | services


def test_a_method_is_chosen_once_and_falls_back_with_its_arguments() -> None:
    seen: list[Any] = []

    def choose(xp: Any, x: Any, axis: int) -> Any:
        seen.append((x, axis))
        return (lambda: "kernel") if axis else Unsupported("no kernel for axis 0")

    def fall_back(owner: Any, gap: Unsupported, x: Any, axis: int) -> str:
        return f"{gap.reason}, {x}"

    method = routed("softmax", Route(choose, fallback=fall_back))
    cuda = backend.CudaBackend(numpy)
    assert method(cuda, 7, axis=1) == "kernel" and seen == [(7, 1)]
    assert method(cuda, 8, axis=0) == "no kernel for axis 0, 8" and seen[1:] == [(8, 0)]


@pytest.mark.parametrize("name", ["pack", "quantize"])
def test_a_capture_refuses_what_the_host_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "current_capture", object)
    fall_back: Any = backend.ROUTES[name].fallback
    gap = Unsupported("no kernel for it")
    with pytest.raises(CaptureError, match="mxfp4 operands on the CPU .no kernel for it"):
        fall_back(backend.CudaBackend(numpy), gap, numpy.ones((2, 32)), QuantSpec("mxfp4"))
