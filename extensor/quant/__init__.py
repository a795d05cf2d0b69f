"""Quantization of plain arrays: specs, the exact reference, recipes. No tensors, no gradients."""

# spec, array: how an array is quantized, and what is then stored
# reference, block_codec: the definition, which every kernel repeats bit by bit
# scale_rules, rounding: a block's scale, a value's code
# scale_encoders, codec_types: all codes and scales of a block
# nvfp4, affine, outlier, static_scale: what single formats do beside that
# hadamard, rebase: what recipes do to operands beside that
# recipe, recipes, recipe_schedule: which operand of which layer is quantized how, as data
# recipe_file: the same as TOML
# schemes: the same for models that are trained already
# recipe_state, replay: random streams and counts of a model's layers
# weight_cache, input_cache, pages: operands that several GEMMs share, and their memory
# saved, kept, round_to_odd: what is stored for backward, and its bytes
# views, corner: slices and single values without decoding the rest

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["Hadamard", "QuantArray", "QuantSpec", "QuantStats"]


def __dir__() -> list[str]:
    return sorted([*__all__, "recipe"])
