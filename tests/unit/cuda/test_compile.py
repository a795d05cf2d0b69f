"""Every kernel compiles for every architecture it is meant for, without spills. Needs no GPU."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from extensor.formats import FORMATS
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.dequantize import dequantize_source
from extensor_cuda.runtime.compile import Source, cache_folder, compile_cubin, cubin

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
COVERED = [name for name, row in FORMATS.items() if row.scale.name == "e8m0"] + ["nvfp4"]
SHAPES = ((256, 256, -1), (256, 256, 0), (70, 19, 0))
ROUNDINGS = (("nearest_even", 32), ("stochastic", 32), ("stochastic", 8))
SPECIAL = (
    QuantSpec("mxfp4", transform=Hadamard(64)),
    QuantSpec("nvfp4", transform=Hadamard(16), rounding="stochastic", rbits=8),
    QuantSpec("mxfp8_e4m3", tile=(32, 32)),
    QuantSpec("nvfp4", tile=(16, 16), scale_rule="four_over_six"),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    QuantSpec("nvfp4_fp8exact"),
    QuantSpec("nvfp4_fp8exact", rounding="stochastic"),
)
"""What is not said by a format and a rounding alone."""
FORMATS_OF = {
    "sm_80": ["mxfp8_e4m3", "mxfp4"],
    "sm_89": ["mxfp8_e5m2", "nvfp4"],
    "sm_90a": COVERED,
    "sm_100": ["mxfp6_e2m3", "nvfp4"],
    "sm_120": ["mxfp8_e4m3", "mxfp4"],
}


def sources(name: str, arch: str) -> list[Source]:
    made = []
    for rows, columns, axis in SHAPES:
        for rounding, rbits in ROUNDINGS if arch == "sm_90a" else ROUNDINGS[::2]:
            spec = QuantSpec(name, axis=axis, rounding=rounding, rbits=rbits)
            plan = kernels.plan_of(spec, (rows, columns))
            assert isinstance(plan, kernels.Plan)
            made.append(kernels.quantize_source(plan, "bfloat16", "codes", rows == 256, True))
        made.append(dequantize_source(plan, rows == 256))
    made.append(kernels.quantize_source(plan, "float32", "values", False, True))
    return made


@pytest.mark.parametrize("spec", SPECIAL, ids=str)
def test_special_kernels_do_not_spill(spec: QuantSpec) -> None:
    for axis in (-1, 0):
        for shape in ((256, 256), (70, 19)):
            plan = kernels.plan_of(spec.replace(axis=axis), shape)
            assert isinstance(plan, kernels.Plan)
            for out in ("codes", "values"):
                whole = kernels.is_whole(plan, 0, "bfloat16")
                source = kernels.quantize_source(plan, "bfloat16", out, whole, True)
                code, log = compile_cubin(source, "sm_90a")
                assert "warning" not in log, log
                for numbers in properties(code).values():
                    assert numbers["stack"] == 0, f"{source.macros}: {numbers}"


REGISTERS, FRAME = 0x2F, 0x11  # attributes of a cubin's .nv.info section: (kernel, number)


def properties(code: bytes) -> dict[int, dict[str, int]]:
    """Registers and stack bytes of each kernel, by symbol. Registers that spill take stack."""
    found: dict[int, dict[str, int]] = {}
    headers, size, count, names = (*struct.unpack_from("<Q", code, 40), *code_header(code))
    sections = [struct.unpack_from("<IIQQQQ", code, headers + i * size) for i in range(count)]
    strings = sections[names][4]
    for name, _, _, _, offset, length in sections:
        start = strings + name
        if code[start : code.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + length:
            form, attribute, number = struct.unpack_from("<BBH", code, at)
            at += 4
            if form == 4:  # a value of `number` bytes follows
                if attribute in (REGISTERS, FRAME):
                    symbol, value = struct.unpack_from("<II", code, at)
                    found.setdefault(symbol, {})[
                        "registers" if attribute == REGISTERS else "stack"
                    ] = value
                at += number
    assert found, "the cubin says nothing of its kernels"
    return found


def code_header(code: bytes) -> tuple[int, int, int]:
    """An ELF file's section header size, their number, and which one holds their names."""
    return struct.unpack_from("<HHH", code, 58)


def stack_bytes(log: str) -> int:
    """Of all kernels, as ptxas says; cubins for sm_100 and later hold 8 bytes more of each."""
    frames = re.findall(r"(\d+) bytes stack frame", log)
    assert frames, log
    return sum(map(int, frames))


def check_compiles(source: Source, *architectures: str) -> None:
    """No warning and no spill on any of them."""
    for arch in architectures:
        code, log = compile_cubin(source, arch)
        assert "warning" not in log.lower() and "C75" not in log, log
        assert code[:4] == b"\x7fELF" and not stack_bytes(log), f"{source.macros} for {arch}: {log}"


def test_a_spill_is_noticed() -> None:
    text = """extern "C" __global__ void __launch_bounds__(1024) f(float* x) {
        float v[96];
        for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
        for (int k = 0; k < 96; ++k) for (int i = 0; i < 96; ++i) v[i] += v[(i + k) % 96] * v[i];
        for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i];
    }"""
    code, log = compile_cubin(Source("spills", text), "sm_90a")
    (numbers,) = properties(code).values()
    assert numbers["stack"] == stack_bytes(log) > 0 and numbers["registers"] <= 64


@pytest.mark.parametrize(("arch", "name"), [(a, n) for a in ARCHITECTURES for n in FORMATS_OF[a]])
def test_no_kernel_spills(arch: str, name: str) -> None:
    for source in sources(name, arch):
        check_compiles(source, arch)


def small_source() -> Source:
    return Source(
        "probe", 'extern "C" __global__ void probe(int* x) { *x = VALUE; }\n', (("VALUE", "7"),)
    )


def test_a_cubin_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cubin(small_source(), "sm_80")
    files = list(cache_folder().iterdir())
    assert len(files) == 1 and files[0].suffix == ".cubin"

    def refuse(source: Source, arch: str) -> tuple[bytes, str]:
        raise AssertionError("compiled again")

    monkeypatch.setattr("extensor_cuda.runtime.compile.compile_cubin", refuse)
    assert cubin(small_source(), "sm_80") == first
    with pytest.raises(AssertionError, match="compiled again"):
        cubin(small_source(), "sm_90a")


def test_a_damaged_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cubin(small_source(), "sm_80")
    (file,) = cache_folder().iterdir()
    for damage in (b"", file.read_bytes()[:-1], b"x" * 100):
        file.write_bytes(damage)
        assert cubin(small_source(), "sm_80") == first
    assert list(cache_folder().iterdir()) == [file]


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cubin(small_source(), "sm_80")[:4] == b"\x7fELF"


def test_an_error_holds_the_compilers_log() -> None:
    bad = Source("bad", "__global__ void f() { undeclared = VALUE; }", (("VALUE", "1"),))
    with pytest.raises(RuntimeError, match=r"(?s)bad for sm_80.*-DVALUE=1.*undeclared"):
        compile_cubin(bad, "sm_80")
