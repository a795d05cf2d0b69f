"""The command line: ``extensor doctor | formats | quantize | inspect | tune``.

Commands print tables made from the rows and counters that the library itself uses. A problem with a
file is reported in one line on standard error, with exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from extensor.cli.doctor import doctor
from extensor.cli.files import inspect, quantize, read_tensors
from extensor.cli.formats import (
    dialect_sheet,
    element_sheet,
    format_sheet,
    formats,
    layout_sheet,
    scale_sheet,
)
from extensor.cli.sheet import CommandError, Sheet
from extensor.cli.tune import tune

__all__ = [
    "Sheet", "dialect_sheet", "doctor", "element_sheet", "format_sheet", "formats", "inspect",
    "layout_sheet", "main", "quantize", "read_tensors",
    "scale_sheet", "tune",
]  # fmt: skip

COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "formats": formats,
    "quantize": quantize,
    "inspect": inspect,
    "tune": tune,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for a wrong argument or a file that cannot be used."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=argv, prog="extensor")
    except CommandError as error:
        print(f"extensor: {error}", file=sys.stderr)
        return 2
    return 0
