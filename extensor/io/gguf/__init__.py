"""GGUF: its tensor types, its files, and its models in Hugging Face's terms."""

from extensor.io.gguf.container import GgufFile, Texts, Typed, write_gguf
from extensor.io.gguf.types import GGUF_TYPES, UNREADABLE_GGUF_TYPES, GgufType, gguf_type_of

__all__ = [
    "GGUF_TYPES", "UNREADABLE_GGUF_TYPES", "GgufFile", "GgufType", "Texts", "Typed",
    "gguf_type_of", "write_gguf",
]  # fmt: skip
