"""Checkpoints of other programs: safetensors files in folders, their layouts, and GGUF files."""

from extensor.io.stored.archive import Archive, TensorInfo, open_archive
from extensor.io.stored.certificate import TensorCertificate, compare, kind_of
from extensor.io.stored.gguf_models import (
    GGUF_ARCHITECTURES,
    GgufArchitecture,
    as_hugging_face,
    gguf_metadata,
    gguf_name,
)
from extensor.io.stored.requantize import mxfp4_to_nvfp4, requantize, smallest_float
from extensor.io.stored.rows import WEIGHT_LAYOUTS, Part, WeightLayout, read_weight, write_weight

__all__ = [
    "GGUF_ARCHITECTURES", "WEIGHT_LAYOUTS", "Archive", "GgufArchitecture", "Part",
    "TensorCertificate", "TensorInfo", "WeightLayout", "as_hugging_face", "compare",
    "gguf_metadata", "gguf_name", "kind_of", "mxfp4_to_nvfp4", "open_archive", "read_weight",
    "requantize", "smallest_float", "write_weight",
]  # fmt: skip
