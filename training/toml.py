"""Flat TOML: a run's settings in a file, keys as names of flags or of fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from extensor.errors import unknown_name
from extensor.schema import SchemaError, check, parse_toml, toml_string

__all__ = ["parse_flat_toml", "read_toml", "write_toml"]


def write_toml(values: Mapping[str, Any], header: str = "") -> str:
    """Flat TOML text of strings, numbers and booleans (None is left out)."""
    lines = [f"# {line}" for line in header.splitlines()]
    lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value) if isinstance(value, bool) else repr(value)
    if value.endswith("\n") and all(line.isprintable() for line in value.split("\n")):
        # Text of several lines stays readable; only these two have a meaning inside it.
        escaped = value.replace("\\", "\\\\").replace('"""', '""\\"')
        return f'"""\n{escaped}"""'
    return toml_string(value)


def parse_flat_toml(content: bytes) -> dict[str, Any]:
    """A flat TOML document of strings, numbers and booleans.

    Raises:
        SchemaError: for another.
    """
    found: dict[str, Any] = check(parse_toml(content), dict[str, bool | int | float | str])
    return found


def read_toml(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """Read flat TOML; keys may be written with - or _.

    Raises:
        ValueError: if the file is missing, is not TOML, or has a key that is not ``known``; near
            ones are listed.
    """
    try:
        content = parse_flat_toml(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except SchemaError as error:
        raise ValueError(f"--config {path}: {error}") from error
    names, values = set(known), {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"--config {path}: {unknown_name('setting', key, names)}")
        values[name] = value
    return values
