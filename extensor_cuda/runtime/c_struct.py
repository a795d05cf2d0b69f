"""A kernel's parameter struct as a ctypes structure, read from the kernel's own text.

So the fields that Python fills in and those that the kernel reads are one list, not two.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

__all__ = ["structure"]

_TYPES = {
    "int": ctypes.c_int,
    "i64": ctypes.c_longlong,
    "u32": ctypes.c_uint,
    "u64": ctypes.c_ulonglong,
    "u8": ctypes.c_ubyte,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(r"(?:const\s+)?((?:(?:un)?signed\s+)?\w+)\s*(.+)", re.DOTALL)
_DECLARATOR = re.compile(r"(\*?)\s*(?:const\s+)?(\w+)\s*(?:\[(\d+)\])?")


@cache
def structure(text: str, name: str) -> type[ctypes.Structure]:
    """The ctypes structure of ``struct name`` in C++ text: numbers, pointers and arrays of them.

    Raises:
        ValueError: for a struct that is not there, or a field of another type.
    """
    found = re.search(rf"\bstruct {name} \{{(.*?)\n\}};", _COMMENT.sub("", text), re.DOTALL)
    if found is None:
        raise ValueError(f"structure: no struct {name} in the text")
    fields: list[tuple[str, Any]] = []
    for statement in found[1].split(";")[:-1]:
        declared = _DECLARATION.fullmatch(statement.strip())
        declarators = declared[2].split(",") if declared else [""]
        for part in declarators:
            field = _DECLARATOR.fullmatch(part.strip())
            kind: Any = None
            if field and declared:
                kind = ctypes.c_void_p if field[1] else _TYPES.get(declared[1])
            if field is None or kind is None:
                raise ValueError(f"structure: struct {name}: cannot read {statement.strip()!r}")
            fields.append((field[2], kind * int(field[3]) if field[3] else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})
