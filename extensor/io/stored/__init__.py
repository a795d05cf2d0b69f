"""Checkpoints of other programs: safetensors files in folders, their layouts, and GGUF files."""

from extensor.io.stored.archive import Archive, TensorInfo, open_archive
from extensor.io.stored.certificate import (
    Conversion,
    LossyConversionError,
    TensorCertificate,
    compare,
    kind_of,
)
from extensor.io.stored.convert import WriteOptions, convert, metadata_of, write_checkpoint
from extensor.io.stored.gguf_config import gguf_metadata
from extensor.io.stored.gguf_models import as_hugging_face
from extensor.io.stored.gguf_names import GGUF_ARCHITECTURES, GgufArchitecture, gguf_name
from extensor.io.stored.requantize import mxfp4_to_nvfp4, requantize, smallest_float
from extensor.io.stored.rows import WEIGHT_LAYOUTS, Part, WeightLayout, read_weight, write_weight
from extensor.io.stored.targets import TARGETS, Target, takes_blocks

__all__ = [
    "GGUF_ARCHITECTURES", "TARGETS", "WEIGHT_LAYOUTS", "Archive", "Conversion", "GgufArchitecture",
    "LossyConversionError", "Part", "Target", "TensorCertificate", "TensorInfo", "WeightLayout",
    "WriteOptions", "as_hugging_face", "compare", "convert", "gguf_metadata", "gguf_name",
    "kind_of", "metadata_of", "mxfp4_to_nvfp4", "open_archive", "read_weight", "requantize",
    "smallest_float", "takes_blocks", "write_checkpoint", "write_weight",
]  # fmt: skip
