"""``extensor tune``: measure from which size on each kernel is faster on this GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet

__all__ = ["tune"]

MODULE = "extensor_cuda.matmul.tuning"


def tune(
    plot: Annotated[Path | None, arg(metavar="FILE.svg")] = None,
    sizes: tuple[int, ...] = (),
    hadamard: Annotated[Path | None, arg(metavar="FILE.svg")] = None,
) -> None:
    """Measure from which size on this GPU's kernels are faster, and keep the table for training.

    For an H100 or H200; takes about a minute and prints everything at the end. Square products of
    bfloat16 values are timed in CUDA graphs, quantizing included, as in a captured training step:
    by the tensor-core kernels, and by cupy in float32. From then on a layer uses a kernel where its
    product is at least as large (M N K) as the smallest one that the kernel won. Without the table
    that is 2^30. Operands keep their bits; sums may change within the kernels' bounds. The table is
    a file, named at the end. Delete it to have the default again.

    The same products in plain bfloat16 stand beside them to compare with, and decide nothing.

    Args:
        plot: An SVG file for the curves; their numbers go to a JSON file of the same name.
        sizes: Sides of the cubes to measure, 16 or more; 128 to 4096 where left out.
        hadamard: Also measure what Hadamard transforms cost layers of growing width; an SVG file.
    """
    if any(size < 16 for size in sizes):
        raise CommandError(f"--sizes: expected sides of 16 or more, got {min(sizes)}")
    for name, file in (("--plot", plot), ("--hadamard", hadamard)):
        if file is not None and not (file.suffix == ".svg" and file.parent.is_dir()):
            raise CommandError(f"{name}: expected an .svg file in a folder that exists, got {file}")
    try:
        module = importlib.import_module(MODULE)
        path, timings, costs = module.tune(plot, sizes or module.SIZES, hadamard)
    except (RuntimeError, ImportError, MemoryError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error

    def milliseconds(*seconds: float) -> tuple[str, ...]:
        return tuple(f"{each * 1e3:.4f}" for each in seconds)

    def size_of(least: dict[str, int], path: str) -> str:
        return "never" if least[path] == module.NEVER else f"{least[path]:,}"

    plain = module.of_bf16(timings)
    against = {(t.path, t.size): (*milliseconds(t.other), f"{t.ratio:.3f}x") for t in plain}
    products = tuple(
        (
            *(module.label(t.path), str(t.size)),
            *(*milliseconds(t.ours, t.other), f"{t.ratio:.3f}x"),
            *against.get((t.path, t.size), ("", "")),
        )
        for t in timings
    )
    taken, quicker = module.crossovers(timings), module.crossovers(plain)
    least = tuple(
        (module.label(one), size_of(taken, one), size_of(quicker, one) if one in quicker else "")
        for one in taken
    )
    named = ("path (recipe)", "size", "ours, ms", "cupy, ms", "ratio", "bf16, ms", "ratio")
    sheets = [
        Sheet("Products", named, products),
        Sheet(
            f"Quicker from (M N K); the first column decides, kept in {path}",
            ("path (recipe)", "than cupy", "than bf16"),
            least,
        ),
    ]
    if costs:
        columns = ("recipe", "width", "without, ms", "with, ms", "ratio")
        rows = tuple(
            (t.path, str(t.size), *milliseconds(t.ours, t.other), f"{t.ratio:.3f}x") for t in costs
        )
        sheets.append(Sheet("Hadamard transforms", columns, rows))
    show(sheets)
