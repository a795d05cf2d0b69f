"""Programs for Hopper on the CPU: their own source, with what is assembly replaced (hopper.hpp).

Shows how operands, scales, groups and results are placed, which barrier waits for what, and what
the epilogue does; not what a GPU's memory model, asynchronous copies or accumulator do.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor_cuda.kernels.gemm import block_scales
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from tests.unit.cuda.emulator import Cupy, Emulator

HEADER = Path(__file__).parent / "hopper.hpp"
STATEMENTS = {
    "st.async": "*to = v, brought(barrier, 4);",
    '"=r"(raw[k / 2])': "raw[k / 2] = to_bf16x2(y[1], y[0]);",
    "prmt.b32": "bytes = sign_bytes(a, b);",
    "cp.async.ca.shared.global": "std::memcpy(table + i, from + at, 4);",
    "cp.async.cg.shared.global [": "cp_async<16>(to, from, inside);",
    '"cp.async.wait_all;"': ";",
    "bar.sync %0, 128;": "named_barrier(warpgroup + 1, 128);",
    "stmatrix": "(void)to, put_transposed("
    "epilogue_tile, column, row / 8, pairs, lane, swizzled_offset);",
    '"=r"(pair) : "f"(high)': "pair = to_bf16x2(high, low);",
    '"=r"(pairs[i]) : "f"(high)': "pairs[i] = to_bf16x2(high, low);",
    "lop3.b32": "d = (a & mask) | (b & ~mask);",
    "ex2.approx": "y = std::exp2(x);",
    "cvt.f32.f16": "v = of_float16(raw & 0xFFFF);",
    "max.NaN.f32": "m = a != a || b != b ? NAN : std::fmax(a, b);",
    "fma.rn.bf16x2": "d = fma_bf16x2(a, b, c);",
    "max.NaN.bf16x2": "d = choose_pair<true>(a, b);",
    "min.bf16x2": "d = choose_pair<false>(a, b);",
    "set.le.u32.bf16x2": "d = pair_at_most(x & 0x7FFF7FFFu, most);",
    "abs.bf16x2": "d = a & 0x7FFF7FFFu;",
    "bulk_group [%0": "tma_store_2d(map, column, row, from);",
}
"""Assembly that does something here, and what stands for it."""
NOTHING = (
    "mul.wide.u32",  # in parts that are not compiled here
    "cvt.rn.satfinite",  # likewise
    "rcp.approx",
    '"+r"(raw[',
    "fence",
    "nanosleep",
    "setmaxnreg",
    "bar.",
    "wgmma.",
    "bulk.wait_group",
    "commit_group",
)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?u8 raw_memory\[\];")
_CLUSTER = re.compile(r"void \w+_CLUSTER_DIMS ")
KINDS = {"e4m3": 0, "e5m2": 1, "s8": 2, "bf16": 0}


CODES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "s8": np.int8,
}


def values(codes: Any, kind: str) -> np.ndarray:
    """What codes mean, float64."""
    return np.ascontiguousarray(np.asarray(codes)).view(CODES[kind]).astype(np.float64)


def _without_assembly(text: str) -> str:
    """Each asm statement replaced; a new one that nothing stands for is an error."""
    while (start := text.find("asm ")) >= 0 or (start := text.find("asm(")) >= 0:
        at = text.index("(", start)
        depth, quoted = 0, False
        while True:
            letter = text[at]
            if letter == '"':
                quoted = not quoted
            elif not quoted:
                depth += {"(": 1, ")": -1}.get(letter, 0)
                if depth == 0:
                    break
            at += 1
        statement, end = text[start:at], text.index(";", at) + 1
        known = [code for words, code in STATEMENTS.items() if words in statement]
        assert known or any(words in statement for words in NOTHING), statement
        text = text[:start] + (known[0] if known else ";") + text[end:]
    return text


def _without_device(text: str) -> str:
    """What is for a GPU's compiler alone left out: the emulator has its own."""
    lines, depth, kept = [], 0, True
    for line in text.splitlines():
        if depth == 0 and line.startswith("#ifdef __CUDA_ARCH__"):
            depth, kept = 1, False
            continue
        if depth:
            depth += line.startswith("#if") - line.startswith("#endif")
            if depth == 0 or (depth == 1 and line.startswith("#else")):
                kept = True
                continue
        if kept:
            lines.append(line)
    return "\n".join(lines)


def without_products(program: Source) -> Source:
    """A program that has Hopper's barriers and copies alone, or nothing of Hopper."""
    start = program.text.find("// Hopper's barriers")
    stop = program.text.find("// ---- after barriers", start)
    start = stop if start < 0 else start
    kinds = (
        f'typedef float Sum;\nstruct TensorMap {{ u64 words[16]; }};\n#include "{HEADER.name}"\n'
    )
    quantizes = program.text.find("constexpr u32 kMagnitude")
    at = start if quantizes < 0 else quantizes
    text = program.text[:start] + program.text[stop:] if start >= 0 else program.text
    text = text[:at] + kinds + text[at:]
    text = _without_assembly(_without_device(text) if quantizes < 0 else text)
    text = _DYNAMIC.sub("u8* raw_memory = shared_bytes;", text)
    usual = {
        "GEMM_KIND": "1",
        "GEMM_A_MN_MAJOR": "0",
        "GEMM_B_MN_MAJOR": "0",
        "A_KIND": "0",
        "B_KIND": "0",
    }
    text = _CLUSTER.sub("void ", text)
    return replace(program, text=text, macros=(*program.macros, *usual.items()))


def source_of(program: Source) -> Source:
    """The program as the emulator compiles it."""
    text = program.text
    found = re.search(r"wgmma.*\.[fs]32\.(\w+)\.(\w+) ", text)
    if found is None:
        return without_products(program)
    start, stop = text.index("__device__ __forceinline__ void wgmma("), text.index("// ---- tiles")
    text = f'{text[:start]}#include "{HEADER.name}"\n{text[stop:]}'
    text = _DYNAMIC.sub("u8* raw_memory = shared_bytes;", text)
    text = _CLUSTER.sub("void ", _without_assembly(_without_device(text)))
    kinds = (("A_KIND", str(KINDS[found[1]])), ("B_KIND", str(KINDS[found[2]])))
    usual = {
        "GEMM_KIND": "1",
        "GEMM_A_MN_MAJOR": "0",
        "GEMM_B_MN_MAJOR": "0",
    }  # of those that say nothing of it
    missing = [pair for pair in usual.items() if pair[0] not in dict(program.macros)]
    return replace(program, text=text, macros=(*program.macros, *missing, *kinds))


def _map(
    pointer: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str = "UINT8",
) -> bytes:
    item = driver.ELEMENT_BYTES[dtype]
    assert box[0] * item in (32, 64, 128) and pointer % 16 == 0
    if len(sizes) == 2:
        numbers = pointer, sizes[1], sizes[0], *strides, box[1], item, box[0] * item
        return struct.pack("<7Q", *numbers).ljust(128, b"\0")
    assert len(sizes) == 4 and item == 2 and all(step % 16 == 0 for step in strides)
    return struct.pack("<9Q", pointer, *sizes, *strides, box[2]).ljust(128, b"\0")


def install(monkeypatch: pytest.MonkeyPatch, emulator: Emulator, blocks: int = 3) -> Cupy:
    """Make `extensor_cuda.runtime.driver` load and launch here, on so many multiprocessors.

    So does what lays scales out for the programs.
    """

    def load(source: Source, kernel: str, shared: int, device: int) -> tuple[Any, None]:
        assert shared <= driver.SHARED_BYTES
        program = source_of(source)
        return (emulator, program, f"run_{kernel}"), None

    def launch(
        function: Any,
        grid: int,
        threads: int,
        shared: int,
        maps: list[bytes],
        structure: Any,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        emulator, program, name = function
        buffers = [ctypes.create_string_buffer(text, 128) for text in maps]
        addresses = [*map(ctypes.addressof, buffers), ctypes.addressof(structure)]
        given = (ctypes.c_void_p * len(addresses))(*addresses)
        if not cooperative:
            getattr(emulator.library(program), name)(given, grid, threads)
            return
        with ThreadPoolExecutor(grid) as pool:  # blocks at a time, each in a copy of the program
            for block in range(grid):
                pool.submit(getattr(emulator.copy(program, block), name), given, grid, threads)

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=lambda device: {"name": b"emulated"},
            driverGetVersion=lambda: 0,
        )
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(block_scales, "launch", emulator)
    monkeypatch.setattr(driver, "capability", lambda device: "90")
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(driver, "tensor_map", _map)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: blocks)
    monkeypatch.setattr(driver, "active_clusters", lambda *launched: blocks)
    return Cupy()
