"""Checkpoints of other programs: safetensors files in folders, their layouts, and GGUF files."""

from extensor.io.stored.archive import Archive, TensorInfo, open_archive
from extensor.io.stored.rows import WEIGHT_LAYOUTS, Part, WeightLayout, read_weight, write_weight

__all__ = [
    "WEIGHT_LAYOUTS", "Archive", "Part", "TensorInfo", "WeightLayout", "open_archive",
    "read_weight", "write_weight",
]  # fmt: skip
