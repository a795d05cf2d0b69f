"""What config.json says of blocked weights, in the terms of the program that reads them.

Sources: compressed-tensors' QuantizationConfig; modelopt.torch.export's hf_quant_config.json;
transformers' FineGrainedFP8Config and Mxfp4Config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extensor.io.stored.rows import WeightLayout
from extensor.quant.spec import QuantSpec

__all__ = ["hf_quant_config", "quantization_config"]

_MODELOPT = {"nvfp4": "NVFP4", "fp8_e4m3": "FP8"}
_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "fp8_e4m3": "float-quantized",
}


def quantization_config(
    layout: WeightLayout, blocked: Mapping[str, QuantSpec], kept: Sequence[str]
) -> dict[str, Any]:
    """``quantization_config`` of config.json.

    Args:
        layout: of the weights.
        blocked: the modules that hold blocked weights, each with its spec.
        kept: linear modules that do not.

    Returns:
        A dictionary that JSON takes.
    """
    if layout.program == "compressed-tensors":
        return _compressed_tensors(blocked, kept)
    if layout.program == "modelopt":
        return {"quant_method": "modelopt", **hf_quant_config(layout, kept)["quantization"]}
    if layout.program == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(kept),
        }
    if layout.program == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}
    return {"quant_method": layout.program, "layout": layout.name}


def hf_quant_config(layout: WeightLayout, kept: Sequence[str]) -> dict[str, Any]:
    """Model-Optimizer's hf_quant_config.json.

    Args:
        layout: one of Model-Optimizer's.
        kept: linear modules without blocked weights.

    Returns:
        The file's contents.
    """
    size = {"group_size": 16} if layout.spec.format == "nvfp4" else {}
    details = {
        "quant_algo": _MODELOPT[layout.spec.format],
        "kv_cache_quant_algo": None,
        **size,
        "exclude_modules": list(kept),
    }
    return {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": details}


def _compressed_tensors(blocked: Mapping[str, QuantSpec], kept: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for module, spec in blocked.items():
        form, weights = _weights(spec)
        key = repr((form, weights))
        rows[key] = (form, weights)
        groups.setdefault(key, []).append(module)
    one = len(groups) == 1
    made = {
        f"group_{number}": {
            "targets": ["Linear"] if one else modules,
            "weights": rows[key][1],
            "input_activations": None,
            "output_activations": None,
            "format": rows[key][0],
        }
        for number, (key, modules) in enumerate(groups.items())
    }
    forms = {form for form, _ in rows.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": made,
        "ignore": list(kept),
    }


def _weights(spec: QuantSpec) -> tuple[str, dict[str, Any]]:
    """The format of a spec, and its QuantizationArgs."""
    row, tile = spec.row, spec.tile
    kind = "float" if row.element.is_float else "int"
    made: dict[str, Any] = {
        "num_bits": row.element.bits,
        "type": kind,
        "symmetric": spec.symmetric,
        "dynamic": False,
    }
    if row.tensor_scale:
        return _FORMATS["nvfp4"], {**made, "strategy": "tensor_group", "group_size": 16}
    if tile == "tensor":
        made["strategy"] = "tensor"
    elif tile == "channel":
        made["strategy"] = "channel"
    elif isinstance(tile, tuple) and tile[0] > 1:
        made |= {"strategy": "block", "block_structure": list(tile)}
    elif isinstance(tile, tuple):
        made |= {"strategy": "group", "group_size": tile[1]}
    return _FORMATS.get(row.name, "pack-quantized"), made
