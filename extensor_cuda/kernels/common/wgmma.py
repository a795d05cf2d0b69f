"""Writes Hopper's tensor core instruction, wgmma, as a CUDA function."""

from __future__ import annotations

__all__ = ["wgmma"]

_STEP = {"e4m3": 32, "e5m2": 32, "s8": 32, "bf16": 16}  # elements of K in one wgmma


def wgmma(
    a: str,
    b: str,
    n: int,
    *,
    registers: bool = False,
    transposed: tuple[bool, bool] = (False, False),
) -> str:
    """The text of a CUDA function: the wgmma of 64 x n, K of 32 bytes, on n / 2 accumulators.

    Element types are PTX's. With ``registers`` a lies in four registers of each thread, not in
    shared memory. ``transposed`` tells whether a and b lie with their rows contiguous, not K
    (16-bit types). With a in registers the function is named ``wgmma_mn_major`` where b is.
    """
    count, kind = n // 2, "s32" if a == "s8" else "f32"
    letter = "r" if a == "s8" else "f"
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    if registers:
        left, given, parameter = [f"%{count + i}" for i in range(4)], 4, "const u32 (&a)[4]"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        left, given, parameter, inputs = [f"%{count}"], 1, "u64 a", '"l"(a)'
    place = f"{{{', '.join(left)}}}" if registers else left[0]
    # After the two signs, 16-bit types say which operands in shared memory are transposed.
    majors = f"{transposed[1]:d}" if registers else f"{transposed[0]:d}, {transposed[1]:d}"
    tail = {"s8": "", "bf16": f", 1, 1, {majors}"}.get(a, ", 1, 1")
    right, more = count + given, count + given + 1
    name = "wgmma_mn_major" if registers and transposed[1] else "wgmma"
    return (
        f"__device__ __forceinline__ void {name}(Sum (&d)[{count}], {parameter}, u64 b, "
        "int more) {\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{more}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{n}k{_STEP[a]}.{kind}.{a}.{b} "\n'
        f'        "{{{sums}}}, {place}, %{right}, p{tail};\\n}}"\n'
        f'        : {operands} : {inputs}, "l"(b), "r"(more));\n}}\n'
    )
