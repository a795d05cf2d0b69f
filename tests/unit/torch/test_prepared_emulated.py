"""Passes that are launched as a list, on the emulator: CPU tensors stand for a GPU's."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extensor.backends import registry
from extensor.random import DeviceClock
from extensor_cuda.backend import CudaBackend
from extensor_cuda.kernels.nn import elementwise, sums
from extensor_cuda.kernels.prepare import cast_bf16, quantize_operand
from extensor_cuda.matmul import tuned
from extensor_cuda.runtime.recording import RECORDING, Recording, RepeatError
from tests.unit.cuda import hopper
from tests.unit.cuda.conftest import EMULATED
from tests.unit.cuda.emulator import COMPILER, Cupy, Device, Emulator
from tests.unit.cuda.lists import Driver

torch = pytest.importorskip("torch")
ext = pytest.importorskip("extensor.torch")

from extensor.torch import arrays, layer, operators, products  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is not None, reason="test_prepared runs on cupy itself"
    ),
    pytest.mark.skipif(
        COMPILER is None or registry.get("cpu").core is None,  # type: ignore[attr-defined]
        reason="needs a C++ compiler and the C++ core",
    ),
]
_SPACE = 1 << 30


class Memory:
    """cupy.cuda.UnownedMemory and MemoryPointer: an address, and what it belongs to."""

    def __init__(self, address: Any, size: Any = 0, owner: Any = None, device: int = 0) -> None:
        self.of = address if isinstance(address, Memory) else None
        self.address, self.size, self.owner = address, size, owner


def array_at(shape: Any, dtype: Any, pointer: Memory) -> Device:
    """cupy.ndarray of given memory, which it keeps."""
    memory: Any = pointer.of or pointer
    memory.__array_interface__ = {
        "version": 3, "typestr": "|u1", "data": (memory.address, False),
        "shape": (max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1),),
    }  # fmt: skip
    held = np.asarray(memory)[: int(np.prod(shape)) * np.dtype(dtype).itemsize]
    return held.view(Device).view(dtype).reshape(shape)


class Allocating(Cupy):
    """The emulator's array module; what is made in a recording comes from cupy's allocator."""

    allocator: Any = None

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Of something odd, or of an address."""
        if self.allocator is None:
            return super().empty(shape, dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return array_at(shape, dtype, self.allocator(size))

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Any:
        """A kernel of cupy's."""
        if self.allocator is not None:
            raise RepeatError("cupy's own kernel")
        return super().zeros(shape, dtype)


class Stream(nullcontext[None]):
    """cupy.cuda.Stream."""

    ptr = 0

    def __init__(self, non_blocking: bool) -> None:
        super().__init__()


class Place:
    """What `on_device` gives for a pass that runs as it is."""

    capturing = False

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def to_array(self, tensor: Any) -> Any:
        return arrays.to_array(tensor).view(Device)

    def clock(self, tensor: Any) -> DeviceClock:
        return DeviceClock(self.to_array(tensor))

    def unread(self, shape: Any, dtype: Any) -> Any:
        return self.to_array(torch.zeros(1, dtype=dtype).expand(shape))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which passes were launched as a list; layers run on the emulated GPU."""
    emulator, xp = Emulator(EMULATED), Allocating()
    hopper.install(monkeypatch, emulator)
    Driver(monkeypatch, emulator, [cast_bf16, sums, elementwise], [quantize_operand])
    backend = CudaBackend(xp)

    @contextmanager
    def using_allocator(allocate: Any) -> Iterator[None]:
        xp.allocator = allocate
        yield
        xp.allocator = None

    cupy: Any = sys.modules["cupy"]
    cupy.ndarray = array_at
    cupy.cuda.runtime.free = lambda pointer: None
    cupy.cuda.UnownedMemory = cupy.cuda.MemoryPointer = Memory
    cupy.cuda.using_allocator, cupy.cuda.Stream = using_allocator, Stream
    cupy.cuda.memory = SimpleNamespace(
        _get_thread_local_allocator=None, _set_thread_local_allocator=None
    )
    for name, answer in (
        ("isCurrentStreamCapturing", False), ("getDevice", None), ("getCurrentRawStream", 0),
    ):  # fmt: skip
        found = f"_cuda_{name}"
        monkeypatch.setattr(torch._C, found, lambda *a, answer=answer: answer, raising=False)
    for name in ("cuda", "prepared"):
        monkeypatch.delitem(sys.modules, f"extensor.torch.{name}", raising=False)
    prepared: Any = importlib.import_module("extensor.torch.prepared")
    space = mmap.mmap(-1, _SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = np.frombuffer(space, np.uint8).ctypes.data

    @contextmanager
    def recorded(recording: Recording, stream: int) -> Iterator[None]:
        RECORDING.recording = recording
        yield
        RECORDING.recording = None

    counters = SimpleNamespace(take=lambda n: np.zeros(n, np.uint64).view(Device))
    monkeypatch.setattr(prepared, "first_address", lambda device: first)
    monkeypatch.setattr(prepared, "recorded", recorded)
    monkeypatch.setattr(prepared.cuda, "counts_of", lambda device: counters)
    monkeypatch.setattr(prepared.cuda, "backend", lambda: backend)
    monkeypatch.setattr(prepared.cuda, "OnStream", nullcontext)  # has counters ready
    monkeypatch.setattr(layer, "to_array", Place(backend).to_array)
    passes: list[str] = []

    def run(body: Any, call: Any, tensors: Any, kind: Any = None) -> Any:
        made = prepared.run(kind, call, tensors, body)
        passes.append("" if made is None else kind[0])
        if made is not None:
            return made
        found = [None if a is None else np.array(a) for a in body(call, Place(backend))]
        return [None if a is None else arrays.to_tensor(a) for a in found]

    monkeypatch.setattr(products, "_run", run)
    monkeypatch.setattr(
        operators,
        "_saves",
        lambda x, w: (
            operators.saved.INPUT * w.requires_grad | operators.saved.WEIGHT * x.requires_grad
        ),
    )
    reading = operators.read_clock
    monkeypatch.setattr(
        operators, "read_clock", lambda c, layer, as_number=False: reading(c, layer)
    )
    with tuned.always():
        yield passes
    for name in ("cuda", "prepared"):
        sys.modules.pop(f"extensor.torch.{name}", None)
        if hasattr(sys.modules["extensor.torch"], name):
            delattr(sys.modules["extensor.torch"], name)


def steps(recipe: str, kinds: int) -> tuple[list[Any], dict[Any, Any], Any]:
    """Results and gradients of passes, some before the weight is written, and what they counted."""
    sys.modules["extensor.torch.prepared"]._KINDS = kinds  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = ext.Linear(128, 64, dtype=torch.bfloat16, recipe=recipe, seed=1, index=3)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(7):
        x = torch.randn(96, 128, dtype=torch.bfloat16)
        if step == 3:
            with torch.no_grad():
                model.weight.mul_(0.5)
        if step == 5:  # E5M2 does not hold it
            x *= 2.0 ** torch.linspace(-60, 30, 128)
        x.requires_grad_()
        out = model(x)
        out.backward(torch.randn_like(out))
        found += [out.detach().clone(), x.grad]
        if step % 2:
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found, dict(ext.telemetry(model)), model


@pytest.mark.parametrize("recipe", ["mxfp4_all", "mxfp8_rebased"])
def test_a_layers_passes_have_the_bits_of_those_that_are_not_prepared(
    recipe: str, used: list[str]
) -> None:
    found, counts, model = steps(recipe, 16)
    prepared = [one for one in model.quant_layer.prepared.values() if not isinstance(one, str)]
    assert len(prepared) == 2, model.quant_layer.prepared
    assert used[2:] == ["forward", "backward"] * 6
    used.clear()
    expected, its_counts, _ = steps(recipe, 0)
    assert not any(used)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    for slot, its in its_counts.items():
        if slot[1].endswith(".w"):  # counted where it is quantized: in all passes but 5
            assert (counts[slot].count, its.count) == (6 * 128 * 64, 7 * 128 * 64)
        else:
            assert counts[slot] == its, slot


def test_a_compiled_pass_keeps_nothing(used: list[str]) -> None:
    """All that compiled code makes belongs to torch's CUDA graphs."""
    model = ext.Linear(128, 64, dtype=torch.bfloat16, recipe="mxfp4_all", index=3)
    x, clock = torch.randn(96, 128, dtype=torch.bfloat16), torch.tensor(0)
    found = []
    for keep in (False, False, False, True, False, True):
        call = products.Pass(model.quant_layer, clock, torch.bfloat16, keep, ())
        out, _ = products.LINEAR.forward(call, x, model.weight.detach(), None)
        found.append(out)
        (made,) = model.quant_layer.prepared.values()
        assert isinstance(made, str) or bool(made._kept.operands) == (len(found) > 3)
    assert used == ["", *["forward"] * 5]
    assert all(torch.equal(out, found[0]) for out in found)


def test_a_weight_that_is_its_own_input_is_not_taken_for_it_later(used: list[str]) -> None:
    """A list tells its tensors apart by where they lie: one that comes twice is not recorded."""

    def results(kinds: int) -> list[Any]:
        sys.modules["extensor.torch.prepared"]._KINDS = kinds  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = ext.Linear(128, 128, dtype=torch.bfloat16, recipe="mxfp8_rebased", index=3)
        given = [model.weight] * 2 + [torch.randn(128, 128).bfloat16() for _ in range(3)]
        return [model(x.requires_grad_()).detach() for x in given]

    found = results(16)
    assert used == ["", "", "forward", "forward", "forward"]
    for got, wanted in zip(found, results(0), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_passes_of_several_shapes_keep_a_weights_operands_once(used: list[str]) -> None:
    model = ext.Linear(128, 64, False, dtype=torch.bfloat16, recipe="mxfp8_rebased", index=3)
    given = [torch.randn(rows, 128).bfloat16() for rows in (96, 160, 32)]
    found = [[model(x).detach() for _ in range(3)] for x in given]
    passes = [one for one in model.quant_layer.prepared.values() if not isinstance(one, str)]
    assert len(passes) == 3 and all(one._kept is passes[0]._kept for one in passes)
    assert sum(one._runs_of_weight.count for one in passes) == 1
    assert all(torch.equal(out, three[0]) for three in found for out in three)
    with torch.no_grad():
        model.weight.mul_(2)
    assert all(torch.equal(model(x), 2 * out[0]) for x, out in zip(given, found, strict=True))
    assert sum(one._runs_of_weight.count for one in passes) == 2


def test_a_result_that_does_not_lie_in_order_is_not_recorded(used: list[str]) -> None:
    prepared: Any = sys.modules["extensor.torch.prepared"]
    layer_of_model = ext.Linear(32, 32, recipe="mxfp8_rebased").quant_layer
    call = products.Pass(layer_of_model, None, torch.bfloat16, True, ())

    def body(call: Any, place: Any) -> list[Any]:
        return [place.backend.xp.empty((4, 8), np.float32).T]

    weight = torch.ones(32, 32)
    assert all(prepared.run(("forward",), call, (weight,), body) is None for _ in range(3))
    assert list(layer_of_model.prepared.values()) == ["a result that is no array of its own"]


def test_a_weight_is_forgotten_while_another_thread_prepares_a_pass() -> None:
    handle = ext.Linear(32, 32).quant_layer

    class Forgetting:
        def forget_weight(self) -> None:
            handle.prepared["another"] = "ran once"

    handle.prepared["one"] = Forgetting()
    handle.forget_weight()
    assert list(handle.prepared) == ["one", "another"]
