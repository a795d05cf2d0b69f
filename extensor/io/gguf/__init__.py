"""GGUF: its tensor types and its files."""

from extensor.io.gguf.types import GGUF_TYPES, UNREADABLE_GGUF_TYPES, GgufType, gguf_type_of

__all__ = ["GGUF_TYPES", "UNREADABLE_GGUF_TYPES", "GgufType", "gguf_type_of"]
