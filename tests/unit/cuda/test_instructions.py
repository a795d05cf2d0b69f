"""The machine code has the instructions that the kernels are written for. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda.kernels.attention import attention, cached
from extensor_cuda.kernels.gemm import block_scales
from extensor_cuda.kernels.gemm.config import gemm_source
from extensor_cuda.kernels.optim import optimizer
from extensor_cuda.kernels.prepare import quantize_operand
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.weight_only import w4w8a16_sm90_wgmma
from extensor_cuda.matmul import partition
from extensor_cuda.matmul.partition import configure
from extensor_cuda.runtime.compile import Source, compile_cubin

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture(scope="session")
def disassembler(nvrtc: None) -> str:
    """The path of nvdisasm."""
    places = [shutil.which("nvdisasm")]
    if (found := importlib.util.find_spec("nvidia")) is not None:
        for folder in found.submodule_search_locations or ():
            places += map(str, Path(folder).glob("*/bin/nvdisasm"))
    for place in places:
        if place:
            return place
    pytest.skip("nvdisasm is not installed; pip install nvidia-cuda-nvdisasm")


def listing(source: Source, disassembler: str, folder: Path) -> str:
    """A program in Hopper's instructions."""
    path = folder / "code.cubin"
    path.write_bytes(compile_cubin(source, "sm_90a")[0])
    done = subprocess.run([disassembler, str(path)], check=True, capture_output=True, text=True)
    return re.sub(r"/\*[0-9a-f]+\*/", "", done.stdout)


def instructions(source: Source, disassembler: str, folder: Path) -> Counter[str]:
    """How often each instruction of Hopper stands in a program."""
    text = listing(source, disassembler, folder)
    return Counter(re.findall(r"^\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b", text, re.MULTILINE))


def starting(found: Counter[str], start: str) -> int:
    return sum(count for name, count in found.items() if name.startswith(start))


@pytest.mark.parametrize(("kind", "meant"), [("e5m2", "QGMMA"), ("bf16", "HGMMA")])
def test_products_run_on_wgmma_and_bulk_copies(
    kind: str, meant: str, disassembler: str, tmp_path: Path
) -> None:
    source = gemm_source(configure(kind, 8192, 8192, "bfloat16"))
    found = instructions(source, disassembler, tmp_path)
    assert starting(found, meant) and starting(found, "UTMALDG")
    assert not starting(found, "HMMA") and not starting(found, "QMMA")  # the slower ones
    assert not starting(found, "LDL") and not starting(found, "STL")


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_quantizers_read_and_write_vectors(name: str, disassembler: str, tmp_path: Path) -> None:
    plan = kernels.plan_of(QuantSpec(name), (256, 256))
    assert isinstance(plan, kernels.Plan)
    source = kernels.quantize_source(plan, "bfloat16", "codes", True, False)
    found = instructions(source, disassembler, tmp_path)
    assert starting(found, "LDG.E.128")
    assert starting(found, "STG.E.128" if name == "mxfp8_e4m3" else "STG.E.64")
    assert bool(starting(found, "F2FP.SATFINITE.E4M3")) == (name == "mxfp8_e4m3")
    assert not starting(found, "LDL")


@pytest.mark.parametrize(("name", "options"), [("nvfp4", 2), ("nvfp4_fp8exact", 4)])
def test_searches_round_in_two_instructions(
    name: str, options: int, disassembler: str, tmp_path: Path
) -> None:
    """An addition with a limit and a mask, for each of a block's 16 values under each option.

    Of a thread's two blocks: versions of the compiler differ in whether they unroll the loop.
    """
    rule = "four_over_six" if name == "nvfp4" else "least_error"
    plan = kernels.plan_of(QuantSpec(name, scale_rule=rule), (256, 256))
    assert isinstance(plan, kernels.Plan)
    source = kernels.quantize_source(plan, "bfloat16", "codes", True, False)
    found = instructions(source, disassembler, tmp_path)
    assert starting(found, "VIADDMNMX") >= 16 * options
    assert not starting(found, "LDL") and not starting(found, "STL")


def test_operands_are_fetched_without_registers(disassembler: str, tmp_path: Path) -> None:
    spec = QuantSpec("mxfp4", axis=1, scale_rule="rceil").resolve(2)
    source = quantize_operand.fused_source(spec, "bfloat16", True, True, False)
    found = instructions(source, disassembler, tmp_path)
    assert starting(found, "LDGSTS.E") and starting(found, "PRMT") and starting(found, "STG.E.128")
    assert not starting(found, "LDL")


def test_an_optimizers_step_reads_vectors(disassembler: str, tmp_path: Path) -> None:
    found = instructions(optimizer.source(), disassembler, tmp_path)
    # Addresses come from a table, so that they are generic ones.
    assert starting(found, "LD.E.128") and starting(found, "ST.E.128")
    assert not starting(found, "LDL")


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "mxfp8_e4m3"])
@pytest.mark.parametrize("states", ["bfloat16", "mxfp8_e4m3"])
def test_narrow_states_are_moved_with_vectors(
    states: str, weights: str, disassembler: str, tmp_path: Path
) -> None:
    found = instructions(optimizer.source(states, weights), disassembler, tmp_path)
    assert starting(found, "LD.E.128") and starting(found, "STG.E.128")
    assert not starting(found, "LDL") and not starting(found, "STL")


@pytest.mark.parametrize("d", attention.HEADS)
@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_attention_runs_on_wgmma_and_bulk_copies(
    kernel: str, d: int, disassembler: str, tmp_path: Path
) -> None:
    found = instructions(attention.source(kernel, d), disassembler, tmp_path)
    products = 2 if kernel == "attention" else 3 if kernel == "attention_grad_q" else 4
    assert starting(found, "HGMMA") >= products * 4
    assert starting(found, "UTMALDG.4D") and starting(found, "UTMASTG.4D")
    assert not starting(found, "HMMA") and starting(found, "MUFU.EX2")
    assert not starting(found, "LDL") and not starting(found, "STL")
    assert not starting(found, "ATOM") and not starting(found, "RED")  # one order of sums


@pytest.mark.parametrize("d", attention.HEADS)
def test_attention_takes_exponentials_beside_its_products(
    d: int, disassembler: str, tmp_path: Path
) -> None:
    """Between the wait for the scores and the one for the product before."""
    text = listing(attention.source("attention", d), disassembler, tmp_path)
    begin = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", text)
    assert begin
    end = text.index("WARPGROUP.DEPBAR.LE gsb0, 0x0", begin.end())
    assert text.count("MUFU.EX2", begin.end(), end) >= 64


@pytest.mark.parametrize("d", attention.HEADS)
@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_what_stays_in_registers_is_not_overwritten(
    kernel: str, d: int, disassembler: str, tmp_path: Path
) -> None:
    """Ptxas 13.0 gave a tile that each turn of a loop multiplies rounded scores' registers."""
    text = listing(attention.source(kernel, d), disassembler, tmp_path)
    left = re.findall(r"HGMMA\S+ R\d+, R(\d+), gdesc\[\w+\](\.tnspB)?", text)
    tile, rounded = (
        {int(first) + i for first, turned in left if bool(turned) == way for i in range(4)}
        for way in (False, True)
    )
    assert rounded and not tile & rounded
    assert bool(tile) == (kernel == "attention_grad_q" and d == 128)


def overwritten(text: str) -> list[str]:
    """Instructions that write registers from which a wgmma that is not waited for may yet read."""
    flying: list[set[int]] = []
    begun: set[int] = set()
    found = []
    for line in text.splitlines():
        if product := re.search(r"HGMMA\S+ R\d+, R(\d+), gdesc", line):
            begun |= {int(product[1]) + i for i in range(4)}
            if "gsb0" in line:
                flying, begun = [*flying, begun], set()
        elif waited := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", line):
            flying = flying[len(flying) - int(waited[1]) :] if int(waited[1]) else []
        elif write := re.match(r"\s*(?:@!?U?P\d+\s+)?(?!ST|RED)([A-Z][\w.]*) R(\d+)\b", line):
            wide = 4 if ".128" in write[1] else 2 if re.search(r"\.64|WIDE", write[1]) else 1
            written = {int(write[2]) + i for i in range(wide)}
            if written & set().union(begun, *flying):
                found.append(line.strip())
    return found


INT4, INT8 = QuantSpec("int4", axis=1), QuantSpec("int8", axis=1)


@pytest.mark.parametrize("tokens", [17, 40, 64])
@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("mxfp4", axis=1),
        INT4.replace(tile="channel", symmetric=False),
        INT4.replace(tile=(1, 128), symmetric=False),
        INT8,
        INT8.replace(tile=(1, 256), scale_dtype="float16", symmetric=False),
    ],
    ids=lambda spec: f"{spec.format}-{spec.tile}",
)
def test_decoded_weights_stay_until_they_are_multiplied(
    spec: QuantSpec, tokens: int, disassembler: str, tmp_path: Path
) -> None:
    w = reference.quantize(np.ones((64, 512), np.float32), spec.resolve(2))[0]
    made = partition.wgmma_schedule(*w.shape, tokens, "bfloat16", spec.row.element.bits)
    source = w4w8a16_sm90_wgmma.source(w, tokens, "bfloat16", "bfloat16", made)
    text = listing(source, disassembler, tmp_path)
    # E2M1's at once, and for large scales
    assert text.count("HGMMA") == (8 if spec.format.startswith("int") else 16)
    turns = loop(text) * 2
    assert not overwritten(text) and not overwritten(turns)
    assert overwritten(re.sub(r".*WARPGROUP\.DEPBAR\.LE gsb0, 0x0.*", "", turns))
    assert overwritten(re.sub(r".*WARPGROUP\.DEPBAR.*", "", text))
    assert "LDGSTS.E.BYPASS" in text and "HMMA" not in text


def loop(text: str) -> str:
    """The innermost loop that holds all products."""
    first, last = text.index("HGMMA"), text.rindex("HGMMA")
    for branch in re.finditer(r"BRA `\((\.L\w+)\)", text[last:]):
        begin = text.index(f"\n{branch[1]}:")
        if begin < first:
            return text[begin : last + branch.end()]
    raise AssertionError("no loop")


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32)), "bfloat16"),
        (QuantSpec("mxfp8_e4m3", scale_rule="floor"), "bfloat16"),
        (QuantSpec("mxfp4"), "float32"),
    ],
)
def test_a_clip_mask_is_two_instructions_a_value(
    spec: QuantSpec, dtype: str, disassembler: str, tmp_path: Path
) -> None:
    """And a few for each chunk of 16: no division finds its place. Values are not kept for it, so
    that as many blocks of four-bit codes share a multiprocessor."""
    plan = kernels.plan_of(spec.replace(axis=1).resolve(2), (64, 512))
    assert isinstance(plan, kernels.Plan), plan
    totals, blocks = [], []
    for extra in ((), kernels.MASKED):
        source = kernels.quantize_source(plan, dtype, "codes", True, True, extra)
        totals.append(sum(instructions(source, disassembler, tmp_path).values()))
        chunks = int(dict(source.macros)["QUANT_THREAD_CHUNKS"])
        used = re.search(r"Used (\d+) registers", compile_cubin(source, "sm_90a")[1])
        assert used is not None
        blocks.append(65536 // (-(-int(used[1]) // 8) * 8 * kernels.THREADS))
    assert totals[1] - totals[0] <= 48 * chunks
    assert blocks[1] >= blocks[0] or spec.row.element.bits == 8


EARLY = ("block_scales", "gemm_sm90", "w4w8a16_sm90_wgmma")
"""Modules that launch by programmatic dependent launch."""


def early(module: str) -> list[tuple[Source, str]]:
    """The programs that a module launches so, and their kernels."""
    spec, shape, types = QuantSpec("mxfp4", axis=1).resolve(2), (1024, 1024), ("bfloat16",) * 2
    if module == "block_scales":
        return [(block_scales.source(), module)]
    if module == "gemm_sm90":
        return [(gemm_source(configure("e4m3", *shape, "bfloat16", blocks=(1, 4))), "gemm")]
    w = reference.quantize(np.zeros(shape, np.float32), spec)[0]
    schedule = partition.wgmma_schedule(*shape, 32, "bfloat16", 4)
    return [(w4w8a16_sm90_wgmma.source(w, 32, *types, schedule), module)]


@pytest.mark.parametrize("module", EARLY)
def test_what_starts_early_waits_and_sees_what_was_written(
    module: str, disassembler: str, tmp_path: Path
) -> None:
    """No global memory before the wait, and no loads that need not see what others write."""
    for source, kernel in early(module):
        _, _, code = listing(source, disassembler, tmp_path).partition(f".text.{kernel}:")
        code, _, _ = code.partition("//--------------------- .text.")
        before, waits, after = code.partition("ACQBULK")
        assert waits, source
        memory = r"\b(LDG|STG|LD|ST|ATOM|ATOMG|RED|LDGSTS|UTMALDG|UBLKCP|UBLKPF)\b"
        assert re.findall(memory, after) and not re.findall(memory, before), source
        assert not re.findall(r"\bLDG\.\S*CONSTANT", after), source


def test_every_early_start_is_checked() -> None:
    folder = Path(cached.__file__).parents[1]
    assert {path.stem for path in folder.rglob("*.py") if "pdl=" in path.read_text()} == {*EARLY}
