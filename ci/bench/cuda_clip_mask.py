"""Quantizing with a clip mask on a GPU beside quantizing without: events, in turns, medians.

    python ci/bench/cuda_clip_mask.py [--rounds N]

Rows, and rows with columns, of 8192 x 8192 in bfloat16 and float32, beside the mask's share of the
bytes that are read and written without it. A last line for each size is the gradient that a mask
lets through, beside a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ci.bench import gpu
from extensor.quant.spec import Hadamard, QuantSpec

SIZE = 8192
SPECS = {
    "mxfp4 floor": QuantSpec("mxfp4"),
    "mxfp4 quest, Hadamard-32": QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32)),
    "mxfp8 floor": QuantSpec("mxfp8_e4m3", scale_rule="floor"),
    "nvfp4": QuantSpec("nvfp4"),
}


def main() -> None:
    """Measure and print."""
    chosen = gpu.options(__doc__, rounds=20).parse_args()
    backend = gpu.cuda()
    xp = backend.xp
    with gpu.on_torchs_stream(backend):
        for dtype in (torch.bfloat16, torch.float32):
            x = gpu.as_cupy(gpu.normal(SIZE, SIZE, dtype=dtype), xp)
            for name, spec in SPECS.items():
                rows, columns = spec.replace(axis=1).resolve(2), spec.replace(axis=0).resolve(2)
                both = (rows, columns)
                calls: dict[str, Callable[..., Any]] = {
                    "rows": partial(backend.quantize, x, rows),
                    "rows, mask": partial(backend.quantize_clipped, x, rows),
                    "both": partial(backend.quantize_rowwise_columnwise, x, both),
                    "both, mask": partial(backend.quantize_rowwise_columnwise_clipped, x, both),
                }
                timed = {title: gpu.fixed(call) for title, call in calls.items()}
                took = gpu.milliseconds(timed, chosen.rounds)
                bits = spec.row.bits_per_element()
                for number, way in enumerate(("rows", "both"), 1):
                    more = took[f"{way}, mask"] / took[way] - 1
                    share = 1 / (8 * x.itemsize + number * bits)
                    print(
                        f"{x.dtype} {name}, {way}: {took[way]:.4f} ms, with a mask {more:+.1%}; it "
                        f"is {share:.1%} of the bytes"
                    )
        g, transform = gpu.as_cupy(gpu.normal(SIZE, SIZE, dtype=torch.float32), xp), Hadamard(32)
        mask = xp.full((SIZE, SIZE // 8), 255, dtype=xp.uint8)
        took = gpu.milliseconds(
            {
                "copy": gpu.fixed(g.copy),
                "through": gpu.fixed(backend.straight_through, g, mask, transform, SIZE),
            },
            chosen.rounds,
        )
        print(f"straight_through {took['through']:.4f} ms, a copy {took['copy']:.4f} ms")


if __name__ == "__main__":
    main()
