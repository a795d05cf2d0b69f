"""``extensor convert``: a checkpoint in another program's layout, with a certificate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, TextColumn
from tyro.conf import Positional, arg

from extensor.cli.printing import show
from extensor.cli.sheet import CommandError, Sheet, natural
from extensor.errors import unknown_name
from extensor.generation.exchange import convert_tokenizer
from extensor.io import stored
from extensor.io.stored import TARGETS, Conversion, TensorCertificate
from extensor.schema import printable

__all__ = ["convert"]


def convert(
    source: Annotated[Positional[Path], arg(metavar="IN")],
    target: Annotated[Positional[Path], arg(metavar="OUT")],
    layout: str,
    only_lossless: bool = False,
    dense_dtype: str | None = None,
    shard_gb: float = 5.0,
) -> None:
    """Write a checkpoint in another program's layout, with a certificate of every weight.

    IN is a Hugging Face folder, a .safetensors file or a GGUF file; OUT a folder, a .safetensors
    file, or for GGUF layouts a .gguf file. An OUT that exists is replaced at the end. What became
    of each weight, proved by comparing every value, is printed and written to certificate.json.
    The last table says which kind of weight grew or shrank.
    `extensor formats --layouts` lists the layouts.

    example: extensor convert SmolLM2.gguf smollm2-nvfp4 --layout compressed-tensors-nvfp4

    Args:
        source: The checkpoint to read.
        target: What to write.
        layout: A name from `extensor formats --layouts`, such as modelopt-nvfp4 or gguf-q4_1.
        only_lossless: Refuse, and write nothing, unless every value stays equal.
        dense_dtype: Cast what the layout does not store in blocks, such as the embedding, to
            bfloat16, float16 or float32. Without it each keeps its dtype, and a packed one is
            decoded to the smallest of them that holds every value.
        shard_gb: Size at which safetensors files are cut, in units of 1e9 bytes.
    """
    if layout not in TARGETS:
        raise CommandError(unknown_name("layout", layout, TARGETS))
    if not shard_gb > 0:
        raise CommandError(f"--shard-gb: expected a number above 0, got {shard_gb}")
    try:
        to_gguf = TARGETS[layout].container == "gguf"
        files, metadata, notes = convert_tokenizer(source, to_gguf)
        console = Console(stderr=True)
        columns = TextColumn("{task.description}")
        hidden = not console.is_terminal
        with Progress(columns, console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task("")
            done = stored.convert(
                source,
                target,
                layout,
                only_lossless=only_lossless,
                dense_dtype=dense_dtype,
                shard_bytes=int(shard_gb * 1e9),
                files=files,
                metadata=metadata,
                progress=lambda name: bar.update(task, description=printable(name)),
            )
    except ValueError as error:
        raise CommandError(str(error)) from None
    show([_sheet(f"{source} -> {target}", done), _kinds(done)])
    for note in [*notes, *done.notes, *_grown(layout, dense_dtype, done)]:
        print(f"note: {printable(note)}")
    if done.dropped:
        print(printable(f"note: not in this layout, left out: {', '.join(done.dropped)}"))


def _sheet(title: str, done: Conversion) -> Sheet:
    rows = [_row(c) for c in sorted(done.certificates, key=lambda c: natural(c.name))]
    exact = sum(c.lossless for c in done.certificates)
    before = sum(c.nbytes_before for c in done.certificates)
    after = sum(c.nbytes_after for c in done.certificates)
    summary = f"{exact} of {len(rows)} lossless"
    rows.append(("all", "", str(before), "", str(after), summary, "", ""))
    columns = ("tensor", "from", "bytes", "to", "bytes", "SQNR dB", "largest error", "blocks")
    return Sheet(title, columns, tuple(rows))


def _kinds(done: Conversion) -> Sheet:
    """How many bytes weights of one kind were and are, the largest first."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for c in done.certificates:
        kind = sizes.setdefault((c.before, c.after), [0, 0, 0])
        for place, more in enumerate((1, c.nbytes_before, c.nbytes_after)):
            kind[place] += more
    rows = [
        (before, after, str(count), str(old), str(new), f"{new / old:.2f}" if old else "-")
        for (before, after), (count, old, new) in sorted(
            sizes.items(), key=lambda item: -item[1][2]
        )
    ]
    total_before = sum(c.nbytes_before for c in done.certificates)
    total_after = sum(c.nbytes_after for c in done.certificates)
    ratio = f"{total_after / total_before:.2f}" if total_before else "-"
    count = str(len(done.certificates))
    rows.append(("all", "", count, str(total_before), str(total_after), ratio))
    columns = ("from", "to", "weights", "bytes before", "bytes after", "after / before")
    return Sheet("by kind of weight", columns, tuple(rows))


def _grown(layout: str, dense_dtype: str | None, done: Conversion) -> list[str]:
    """Why weights became larger, and the way out."""
    grown = [c for c in done.certificates if c.nbytes_after > c.nbytes_before]
    if not grown or TARGETS[layout].layout is None or dense_dtype is not None:
        return []
    worst = max(grown, key=lambda c: c.nbytes_after - c.nbytes_before)
    more = f" (and {len(grown) - 1} more)" if len(grown) > 1 else ""
    return [
        f"{worst.name}{more} grew from {worst.nbytes_before / 1e6:.1f} MB of {worst.before} to "
        f"{worst.nbytes_after / 1e6:.1f} MB of {worst.after}: {layout} keeps embeddings and heads "
        "out of blocks, and this dtype is the smallest that holds every value. The way out: "
        "--dense-dtype bfloat16 rounds them to 2 bytes; --layout extensor keeps them packed"
    ]


def _row(c: TensorCertificate) -> tuple[str, ...]:
    sizes = str(c.nbytes_before), str(c.nbytes_after)
    if c.lossless:
        return c.name, c.before, sizes[0], c.after, sizes[1], "lossless", "", ""
    noise = f"{c.sqnr_db:.2f}" if math.isfinite(c.sqnr_db) else "NaN or Inf"
    changed = f"{c.blocks} of {c.of_blocks}"
    return c.name, c.before, sizes[0], c.after, sizes[1], noise, f"{c.max_error:.3g}", changed
