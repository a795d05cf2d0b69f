"""How fields change: values that a reader may not expect, in JSON, lines and words."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Draw = random.Random
Mutate = Callable[[bytes, Draw], bytes]

NUMBERS = (0, 1, -1, 2, 7, 31, 32, 63, 64, 65, 127, 128, 255, 256, 1 << 16, 1 << 30, (1 << 31) - 1,
           1 << 31, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
           10**30)  # fmt: skip
TEXTS = ("", "w", "x\x1b[2J", "\x9b31m", "\u202egpj", "\ud800", "\0", "../up", "/etc/passwd", "NaN",
         "a" * 70, "mxfp4", "int8", "F32", "weight", "é")  # fmt: skip
PLAIN: tuple[Any, ...] = (None, True, False, 0.0, 1.5, -0.0, 1e308, 1e-320, float("inf"),
                          float("nan"), [], {}, [[]], {"a": 1}, [0], ["a"])  # fmt: skip


def odd(draw: Draw, old: Any = None) -> Any:
    """A value that a reader may not expect in place of another."""
    if isinstance(old, str) and draw.random() < 0.5:
        at = draw.randrange(len(old) + 1)
        return draw.choice((old[:at], old + draw.choice(TEXTS), old[:at] + draw.choice(TEXTS)))
    if type(old) in (int, float) and draw.random() < 0.5:
        return draw.choice((old + 1, old - 1, -old, old * 2, float(old), bool(old), str(old)))
    return draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), draw.choice(PLAIN)))


def change(value: Any, draw: Draw) -> Any:
    """JSON with one place changed: a value, a key, an entry lost, repeated or moved."""
    if isinstance(value, str) and value[:1] == "{" and draw.random() < 0.9:
        return dumps(change(json.loads(value), draw), draw)  # JSON inside JSON
    if isinstance(value, dict) and value and draw.random() < 0.93:
        key = draw.choice(list(value))
        what = draw.random()
        if what < 0.05:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.1:
            return {odd(draw, k) if k == key else k: v for k, v in value.items()}
        if what < 0.15:
            return {**value, key: value[draw.choice(list(value))]}
        return {**value, key: change(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        what = draw.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return [*value, value[at]]
        return [*value[:at], change(value[at], draw), *value[at + 1 :]]
    return odd(draw, value)


def dumps(value: Any, draw: Draw) -> str:
    """JSON, at times nested deep or with a key twice."""
    try:
        text = json.dumps(value)
    except TypeError:  # a key that is no text
        text = json.dumps(value, skipkeys=True)
    if draw.random() < 0.02:
        at = text.find(":") + 1
        return text[:at] + "[" * 5000 + "]" * 5000 + ", " + text[at:]
    if draw.random() < 0.02 and text.startswith("{") and "," in text:
        return text[:-1] + ", " + text[1 : text.index(",")] + "}"
    return text


def json_mutate(content: bytes, draw: Draw) -> bytes:
    return dumps(change(json.loads(content), draw), draw).encode("utf-8", "surrogatepass")


def lines_mutate(content: bytes, draw: Draw) -> bytes:
    lines = content.split(b"\n")
    at = draw.randrange(len(lines))
    if not lines[at] or draw.random() < 0.1:
        return b"\n".join(lines[:at] + lines[at + 1 :] + [lines[at]])
    lines[at] = json_mutate(lines[at], draw)
    return b"\n".join(lines)


def words_mutate(content: bytes, draw: Draw) -> bytes:
    """Text by its tokens: words, numbers and signs."""
    tokens = re.findall(r"\w+|\s+|[^\w\s]", content.decode("utf-8"))
    at = draw.randrange(len(tokens))
    what = draw.random()
    if what < 0.2:
        tokens[at] = ""
    elif what < 0.4:
        tokens[at] += tokens[draw.randrange(len(tokens))]
    elif what < 0.6:
        tokens[at] = tokens[draw.randrange(len(tokens))]
    elif what < 0.65:
        tokens[at] *= draw.choice((2, 50, 2000))
    else:
        tokens[at] = str(odd(draw, tokens[at]))
    return "".join(tokens).encode("utf-8", "surrogatepass")
