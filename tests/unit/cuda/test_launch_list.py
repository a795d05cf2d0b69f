"""A call's launches made again in one call, on other memory: the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends import registry
from extensor.quant.spec import QuantSpec
from extensor.random import DeviceClock, Stream
from extensor_cuda.kernels.nn import sums
from extensor_cuda.kernels.prepare import cast_bf16, quantize_operand
from extensor_cuda.matmul import fused
from extensor_cuda.matmul.fallback_count import FallbackCounter
from extensor_cuda.matmul.product import product
from extensor_cuda.runtime import launch_list
from extensor_cuda.runtime.counters import Reserve
from extensor_cuda.runtime.launch_list import LaunchList, likeness, split_by, workspace_of
from extensor_cuda.runtime.recording import Block, Launch, Recording, RepeatError, TensorMap
from tests.unit.cuda import hopper
from tests.unit.cuda.lists import Counting, Driver, Noting, recorded

pytestmark = pytest.mark.skipif(
    registry.get("cpu").core is None,  # type: ignore[attr-defined]
    reason="needs the C++ core",
)


# --- the driver's side ---


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("gap", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("more", ctypes.c_void_p * 2),
    ]


class _At:
    """An array, as far as a launch looks at it."""

    def __init__(self, ptr: int) -> None:
        self.data = self
        self.ptr = ptr


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a list gives to the driver, which refuses the third launch with error 7."""
    launches: list[Any] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
    )
    def launch(config: int, function: int, parameters: int, extra: int | None) -> int:
        given = _Config.from_address(config)
        sizes = *given.grid, *given.block, given.shared, given.stream
        attributes = [
            (given.attributes[i].id, given.attributes[i].value[0]) for i in range(given.count)
        ]
        pointers = (ctypes.c_void_p * 3).from_address(parameters)
        held = [ctypes.string_at(p, size) for p, size in zip(pointers, (128, 8, 32), strict=True)]
        launches.append((function, sizes, attributes, held))
        return 7 if len(launches) > 2 else 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def replace(tensor_map: int, address: int) -> int:
        assert tensor_map % 64 == 0
        ctypes.c_uint64.from_address(tensor_map + 8).value = address
        return 0

    found = [ctypes.cast(one, ctypes.c_void_p).value for one in (launch, replace)]
    monkeypatch.setattr(launch_list, "_functions", lambda: found)
    yield launches
    del launch, replace  # they live until here


def whole(recording: Recording, *results: Block) -> LaunchList:
    """A list of all that was recorded."""
    given = [block for block in recording.blocks if block.given]
    return LaunchList(recording, recording.launches, given, results)


def test_addresses_are_written_into_arrays_structures_and_tensor_maps(seen: list[Any]) -> None:
    recording = Recording()
    recording.given(0x1000, 256)
    y, between = recording.made(0x2000, 512), recording.made(0x3000, 1024)
    text = bytes(range(128))
    for cooperative in (False, True):
        structure = _Parameters(0x2010, 5, (0x3020, 0x9000))  # the last one's memory lasts
        parameters = TensorMap(text, 0x1010), _At(0x3000), structure
        recording.launched(11, (3, 128, 4096), cooperative, parameters)
    made = whole(recording, y)
    assert len(made) == 2 and made.workspace == between.size
    for x_at, y_at, at in ((0x100000, 0x200000, 0x300000), (16, 32, 64)):
        seen.clear()
        made(77, (x_at, y_at, at))
        a_map = text[:8] + (x_at + 0x10).to_bytes(8, "little") + text[16:]
        expected = _Parameters(y_at + 0x10, 5, (at + 0x20, 0x9000))
        held = [a_map, at.to_bytes(8, "little"), bytes(expected)]
        sizes = 3, 1, 1, 128, 1, 1, 4096, 77
        assert seen == [(11, sizes, [], held), (11, sizes, [(2, 1)], held)]


def test_a_driver_that_refuses_is_an_error_that_says_which_launch(seen: list[Any]) -> None:
    recording = Recording()
    y = recording.made(0x2000, 512)
    for _ in range(4):
        text = TensorMap(bytes(128), 0x2000)
        recording.launched(11, (3, 128, 0), False, (text, _At(0x2000), _Parameters()))
    with pytest.raises(RuntimeError, match="launch 2 of a list failed with error 7"):
        whole(recording, y)(0, [0x2000, 0])
    assert len(seen) == 3


def test_fewer_addresses_than_arrays_are_refused(seen: list[Any]) -> None:
    recording = Recording()
    recording.given(0x1000, 64)
    y = recording.made(0x2000, 512)
    recording.launched(1, (1, 1, 0), False, (_At(0x2000),))
    with pytest.raises(ValueError, match="fewer addresses"):
        whole(recording, y)(0, [1])
    assert not seen


def test_a_kernel_that_reads_what_is_gone_cannot_be_repeated() -> None:
    recording = Recording()
    recording.given(0x1000, 64, unread=True)
    with pytest.raises(RepeatError, match="not kept"):
        recording.launched(1, (1, 1, 0), False, (_At(0x1020),))


def test_arrays_of_different_times_share_the_workspace() -> None:
    recording = Recording()

    def launch() -> None:
        recording.launched(1, (1, 1, 0), False, ())

    a, b = recording.made(0, 1000), recording.made(0x10000, 100)
    launch()
    recording.freed(a)
    c = recording.made(0x20000, 600)  # where a was
    launch()
    recording.freed(b)
    d, out = recording.made(0x30000, 1024), recording.made(0x40000, 8)
    launch()
    assert out.died is None
    offsets, size = workspace_of([a, b, c, d], len(recording.launches))
    assert offsets == [0, 1024, 0, 1024] and size == 2048


def test_what_reads_the_weight_alone_is_a_list_of_its_own() -> None:
    recording = Recording()
    w, x = recording.given(0x1000, 64), recording.given(0x2000, 64)

    def launch(*addresses: int) -> Launch:
        recording.launched(1, (1, 1, 0), False, [_At(address) for address in addresses])
        return recording.launches[-1]

    found = [recording.made(0x3000 + 0x1000 * i, 64) for i in range(5)]
    of_x = launch(0x2000, 0x3000)
    of_w = launch(0x1000, 0x4000, 0x9000)  # the last one's memory lasts
    of_that = launch(0x4000, 0x5000)
    of_both = launch(0x3000, 0x5000, 0x6000)
    again = launch(0x1000, 0x3000, 0x7000)  # writes only if x says so
    first, rest, kept = split_by(recording, w, [found[3]])
    assert first == [of_w, of_that] and rest == [of_x, of_both, again]
    assert kept == [found[2]]
    assert split_by(recording, w, [found[1]])[2] == [found[1], found[2]]
    assert split_by(recording, x, [])[0] == [of_x]


# --- on the emulator ---


def passed(w: Any, x: Any, bias: Any, clock: Any, states: Any, counter: Any, xp: Any) -> list[Any]:
    """A layer's forward product under MXFP4, and the sums of its columns."""
    spec = QuantSpec("mxfp4", axis=1, rounding="stochastic").resolve(2)
    specs, of_w = [spec, spec.replace(axis=0)], QuantSpec("mxfp4", axis=1).resolve(2)
    drawn = DeviceClock(clock)
    streams = [Stream(7, 0, 3, slot, column=slot > 0, clock=drawn) for slot in (0, 1)]
    (a, _), (columns, _) = fused.run(x, specs, streams, xp, states[0])
    ((b, _),) = fused.run(w, [of_w], [None], xp, states[1])
    out = product(a, b, "bfloat16", xp, bias, counter)
    return [out, columns.buffer, sums.column_sums(out, xp)]


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch, emulator: Any) -> Any:
    """The emulated GPU's array module."""
    hopper.install(monkeypatch, emulator)
    Driver(monkeypatch, emulator, [cast_bf16, sums], [quantize_operand])
    return Noting()


def case(seed: int, wide: bool, xp: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((128, 256)) * np.exp2(rng.integers(-30, 30, (128, 1)) if wide else 0)
    w, bias = rng.standard_normal((96, 256)), rng.standard_normal(96).astype(np.float32)
    clock = np.array(3 + seed + (seed << 32), np.uint64)
    x, w = (a.astype(ml_dtypes.bfloat16) for a in (x, w))
    return tuple(xp.asarray(a) for a in (w, x, bias, clock))


def test_a_list_has_the_bits_of_the_call_that_it_was_made_of(xp: Any) -> None:
    states: list[dict[str, Any]] = [{}, {}]
    counter = FallbackCounter(Reserve(xp))
    passed(*case(0, False, xp), states, counter, xp)  # makes what lasts
    given, counts = case(1, False, xp), Counting()
    with recorded(given, counts) as recording:
        results = passed(*given, states, counter, xp)
        blocks = [recording.block_at(array.data.ptr) for array in results]
    returned = [block for block in blocks if block is not None]
    first, rest, kept = split_by(recording, recording.blocks[0], returned)
    assert len(first) == 1 and len(rest) > 4 and len(kept) == 1
    of_w = LaunchList(recording, first, recording.blocks[:1], kept)
    others = LaunchList(recording, rest, [*recording.blocks[:4], *kept], returned)
    for seed, wide in ((2, False), (3, True), (4, False)):
        given = case(seed, wide, xp)
        own = [{"amax": state["amax"].copy()} for state in states]
        direct, before = FallbackCounter(Reserve(xp)), counter.count
        expected = passed(*given, own, direct, xp)
        outs = [xp.empty(array.shape, array.dtype) for array in expected]
        operands = [xp.empty(block.size, np.uint8) for block in kept]
        spaces = [xp.empty(one.workspace + 512, np.uint8) for one in (of_w, others)]
        at = [space.data.ptr + -space.data.ptr % 512 for space in spaces]
        addresses = [array.data.ptr for array in (*given, *operands, *outs)]
        of_w(0, [addresses[0], *(array.data.ptr for array in operands), at[0]])
        others(0, [*addresses, at[1]])
        for got, wanted in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
        # A wide tensor does not fit, and the next is scaled by the wide one's largest value.
        assert counter.count - before == direct.count == int(seed > 2)
        for state, its in zip(states, own, strict=True):
            np.testing.assert_array_equal(state["amax"], its["amax"])


def test_launches_are_alike_where_addresses_alone_differ() -> None:
    def recorded_at(start: int, number: int = 3, kept: int = 0) -> Any:
        recording = Recording()
        blocks = [recording.given(start, 64), *(recording.made(start + n, 64) for n in (128, 256))]
        more = (ctypes.c_void_p * 2)(start + 8, 0)
        arguments = _At(start + 128), _At(7 * start), np.int64(number)
        recording.launched(5, (1, 32, 0), False, arguments)
        parameters = _Parameters(start + 256, 4, more)
        recording.launched(6, (1, 32, 0), False, (parameters,))
        return likeness(recording.launches, blocks[1 + kept : 2 + kept])

    assert recorded_at(4096) == recorded_at(8192)
    assert recorded_at(4096) != recorded_at(8192, number=4)
    assert recorded_at(4096) != recorded_at(8192, kept=1)  # of two of one size, the other
