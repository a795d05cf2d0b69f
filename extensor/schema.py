"""What is read from disk is checked before it is used: the policy of every reader.

1. Schema: JSON, TOML and headers have exactly the expected types; a bool is no int, and a float no
   length (`check`, `record`, `parse_json`, `read_json`).
2. Sizes: what a header claims is compared with the bytes of the file before anything is allocated,
   and packed files are unpacked up to the expected size only. Each reader does this by itself.
3. Content: values in range, indices inside their axes.

A fault is the reader's own error. It names the file, what was expected and what was found, with
everything escaped that a terminal would obey (`FileError`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "FileError", "SchemaError", "check", "parse_json", "parse_toml", "printable", "read_json",
    "record", "toml_string",
]  # fmt: skip

T = TypeVar("T")

_NAMES = {type(None): "null", float: "a number", int: "a whole number", str: "text", bool: "a bool"}
_SHOWN = 60


class SchemaError(ValueError):
    """A value that is not of the expected type; the text says where it stands."""


class FileError(Exception):
    r"""Base of readers' errors: the text is escaped, since files may name things as they like.

    Args:
        text: what was expected and what was found, with the file's path.

    Example:
        >>> from extensor.schema import FileError
        >>> print(FileError("w.safetensors: no tensor named \x1b[2J"))
        w.safetensors: no tensor named \x1b[2J
    """

    def __init__(self, text: object) -> None:
        super().__init__(printable(str(text)))


def printable(text: str) -> str:
    r"""Text that a terminal shows as it is: control and bidirectional characters are escaped.

    Args:
        text: any text; its line breaks stay.

    Returns:
        The same with `repr`'s escapes for what is not printable, such as C0 and C1 control
        characters, directional marks and lone surrogates.

    Example:
        >>> from extensor.schema import printable
        >>> print(printable("a\x1b[31mb\u202ec"))
        a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def parse_json(content: bytes | str) -> Any:
    """A JSON document: each key of an object once, no NaN and no Infinity.

    Args:
        content: text, or its bytes in UTF-8.

    Returns:
        The value.

    Raises:
        SchemaError: for what is no such document, or nested too deep.

    Example:
        >>> from extensor.schema import parse_json
        >>> parse_json(b'{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ...
        extensor.schema.SchemaError: expected each key once, got 'a' twice
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        if "\\u" in text:  # half a pair of surrogates is no text, and no library takes it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except SchemaError:
        raise
    except RecursionError:
        raise SchemaError("expected JSON, got lists or objects nested too deep") from None
    except UnicodeEncodeError:
        raise SchemaError(r"expected text in strings, got half a pair of \u escapes") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are
        raise SchemaError(f"expected JSON in UTF-8, got: {error}") from None


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """A TOML document.

    Args:
        content: text, or its bytes in UTF-8; a byte order mark is skipped.

    Returns:
        The table.

    Raises:
        SchemaError: for what is no such document, or nested too deep.

    Example:
        >>> from extensor.schema import parse_toml
        >>> parse_toml(b"epochs = 3")
        {'epochs': 3}
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return tomllib.loads(text)
    except RecursionError:
        raise SchemaError("expected TOML, got arrays or tables nested too deep") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise SchemaError(f"expected TOML, got: {error}") from None


def toml_string(text: str) -> str:
    r"""A text as TOML writes it, in quotes and on one line.

    Args:
        text: any.

    Returns:
        TOML.

    Example:
        >>> from extensor.schema import toml_string
        >>> print(toml_string("two\nlines"))
        "two\nlines"
    """
    # A JSON string without escaped letters is a TOML one, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_json(path: Path, expected: Any, error: type[Exception]) -> Any:
    """A JSON file, checked.

    Args:
        path: the file.
        expected: as in `check`.
        error: what a fault is raised as.

    Returns:
        The value.

    Raises:
        OSError: if the file cannot be read.

    Example:
        >>> import tempfile, pathlib
        >>> from extensor.schema import read_json
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "a.json"
        ...     written = path.write_text('{"epochs": 3}')
        ...     read_json(path, dict[str, int], ValueError)
        {'epochs': 3}
    """
    try:
        return check(parse_json(path.read_bytes()), expected)
    except SchemaError as fault:
        raise error(f"{path}: {fault}") from None


def check(value: Any, expected: Any, at: str = "") -> Any:
    """Refuse a value that is not exactly of a type.

    Args:
        value: as JSON or TOML give it: None, bool, int, float, str, list or dict.
        expected: one of those types, `list[...]`, `dict[str, ...]`, a union, a `Literal`, a
            TypedDict (further keys are allowed) or `Any`. An int is a float here, a bool is no
            int, and a float is finite.
        at: the value's place, for the error.

    Returns:
        The value.

    Raises:
        SchemaError: naming the first place that differs.

    Example:
        >>> from extensor.schema import check
        >>> check({"shape": [4.9, 64]}, dict[str, list[int]])
        Traceback (most recent call last):
        ...
        extensor.schema.SchemaError: shape[0]: expected a whole number, got 4.9
    """
    if expected is Any:
        return value
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return _check_union(value, inner, at)
    if origin is typing.Literal:
        good = any(type(value) is type(name) and value == name for name in inner)
    elif typing.is_typeddict(expected):
        return _check_keys(value, expected, at)
    elif origin is list:
        if good := type(value) is list:
            for number, item in enumerate(value):
                check(item, inner[0], f"{at}[{number}]")
    elif origin is dict:
        if good := type(value) is dict:
            for key, item in value.items():
                check(item, inner[1], _join(at, key))
    elif expected is float:
        good = type(value) in (int, float) and math.isfinite(value)
    else:
        good = type(value) is (type(None) if expected is None else expected)
    if not good:
        raise _differs(value, _name(expected), at)
    return value


def record(cls: type[T], values: Any, at: str = "") -> T:
    """Make a dataclass of a table: its fields, of exactly its types.

    Args:
        cls: a dataclass whose fields have types that `check` knows.
        values: the table; fields with a default may be missing.
        at: its place, for the error.

    Returns:
        The record.

    Raises:
        SchemaError: for a missing or an unknown field, or one of another type.

    Example:
        >>> from extensor.quant import QuantStats
        >>> from extensor.schema import record
        >>> record(QuantStats, {"count": True})
        Traceback (most recent call last):
        ...
        extensor.schema.SchemaError: count: expected a whole number, got True
    """
    check(values, dict[str, Any], at)
    hints = _hints(typing.cast(Any, cls))
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    missing = (dataclasses.MISSING,) * 2
    needed = {
        name
        for name, field in fields.items()
        if field.init and (field.default, field.default_factory) == missing
    }
    if lost := sorted(needed - values.keys()):
        raise SchemaError(f"{_prefix(at)}expected {', '.join(lost)}, got no such entry")
    if more := sorted(values.keys() - fields.keys()):
        raise SchemaError(f"{_prefix(at)}expected {', '.join(fields)}, got {more[0]!r}")
    for name, value in values.items():
        check(value, hints[name], _join(at, name))
    return cls(**values)


def _check_union(value: Any, kinds: tuple[Any, ...], at: str) -> Any:
    """One of several types; a fault inside a list or a table is told as that."""
    fault = None
    for kind in kinds:
        try:
            return check(value, kind, at)
        except SchemaError as error:
            if isinstance(value, (list, dict)) and not str(error).startswith(f"{_prefix(at)}exp"):
                fault = error
    raise fault or _differs(value, " or ".join(map(_name, kinds)), at)


def _check_keys(value: Any, expected: Any, at: str) -> Any:
    if type(value) is not dict:
        raise _differs(value, "a table", at)
    hints = _hints(expected)
    lost = [key for key, kind in hints.items() if key not in value and not _may_lack(kind)]
    if lost:
        raise SchemaError(f"{_prefix(at)}expected {', '.join(lost)}, got no such entry")
    for key, kind in hints.items():
        if key in value:
            inner = typing.get_args(kind)[0] if _may_lack(kind) else kind
            check(value[key], inner, _join(at, key))
    return value


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _may_lack(kind: Any) -> bool:
    # `__required_keys__` is wrong where annotations are strings.
    return typing.get_origin(kind) is typing.NotRequired


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = names.most_common(1)[0][0]
        raise SchemaError(f"expected each key once, got {twice!r:.80} twice")
    return table


def _no_constant(name: str) -> None:
    raise SchemaError(f"expected finite numbers, got {name}")


def _differs(value: Any, expected: str, at: str) -> SchemaError:
    # The text of a long list is not made: it may be as long as the file.
    small = not isinstance(value, (list, dict, str)) or len(value) < _SHOWN
    flat = small and not any(isinstance(v, (list, dict, str)) for v in _items(value))
    shown = repr(value) if flat else f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        shown = repr(value[:_SHOWN])
    return SchemaError(f"{_prefix(at)}expected {expected}, got {shown:.{2 * _SHOWN}}")


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _prefix(at: str) -> str:
    return f"{at}: " if at else ""


def _join(at: str, key: object) -> str:
    text = str(key)[:_SHOWN]
    return f"{at}.{text}" if at else text


def _name(expected: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is list:
        return "a list"
    if origin is dict or typing.is_typeddict(expected):
        return "a table"
    if expected is None:
        return "null"
    return _NAMES.get(expected, getattr(expected, "__name__", str(expected)))
