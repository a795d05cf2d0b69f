"""Whether a structure that is sent to a kernel lies as the kernel reads it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

__all__ = ["check_fields"]

_TYPES = """typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
"""


def check_fields(
    text: str, name: str, sent: type[ctypes.Structure], compiler: str, folder: Path
) -> None:
    """Compare structure ``name`` of a kernel's text, by a C++ compiler, with the one of ctypes."""
    start = text.index(f"struct {name} {{")
    struct = text[start : text.index("};", start) + 2]
    names = [field[0] for field in sent._fields_]
    shown = "".join(f'std::printf("%zu ", offsetof({name}, {each}));' for each in names)
    program = folder / "fields.cpp"
    program.write_text(
        f"#include <cstddef>\n#include <cstdio>\n{_TYPES}{struct}\nint main() {{ {shown} "
        f'std::printf("%zu", sizeof({name})); }}\n'
    )
    subprocess.run([compiler, "-w", str(program), "-o", str(folder / "fields")], check=True)
    found = subprocess.run([folder / "fields"], check=True, capture_output=True, text=True).stdout
    offsets = [getattr(sent, each).offset for each in names]
    assert [int(n) for n in found.split()] == [*offsets, ctypes.sizeof(sent)]
