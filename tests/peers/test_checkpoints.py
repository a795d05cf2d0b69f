"""Checkpoints that we write, read by the programs they are for, and theirs read by us.

transformers (with compressed-tensors) loads a tiny model that `save_pretrained` wrote and must give
our logits. Both add float32 terms in other orders, over two layers: the bound is 2e-4 of the
largest logit. `test_llama_cpp.py` has the bound for llama.cpp.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.io.stored import TARGETS
from extensor.models.architectures import ARCHITECTURES
from tests.unit.models.test_architectures import batch_of, settings

F = np.float32
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def transformers() -> Any:
    torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers is not installed")


def tiny() -> Any:
    """A Llama of two layers with random weights."""
    import extensor.models as models
    from extensor.models.architectures import architecture_of

    row = architecture_of(SIZES)
    made = models.build(row.model, row.config_from_hf(SIZES), np.random.default_rng(0)).eval()
    rng = np.random.default_rng(1)
    for _, parameter in made.named_parameters():
        size = 1.0 if parameter.ndim == 1 else 0.08
        parameter.data[...] = (rng.standard_normal(parameter.shape) * size).astype(F)
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def logits(model: Any) -> np.ndarray:
    with et.no_grad():
        return model(et.ExTensor(TOKENS)).numpy()[0]


def theirs(folder: Path, **more: Any) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = transformers().AutoModelForCausalLM
        loaded = cls.from_pretrained(folder, dtype=torch().float32, **more).eval()
        with torch().no_grad():
            return loaded(torch().tensor(TOKENS)).logits[0].float().numpy()


def assert_near(got: np.ndarray, expected: np.ndarray, share: float = 2e-4) -> None:
    bound = share * np.abs(expected).max()
    assert np.abs(got - expected).max() <= bound, (np.abs(got - expected).max(), bound)


@pytest.mark.parametrize("layout", ["float32", "bfloat16", "float16"])
def test_transformers_reads_dense_folders(tmp_path: Path, model: Any, layout: str) -> None:
    model.save_pretrained(tmp_path / "m", layout=layout)
    ours = et.models.from_pretrained(tmp_path / "m")
    assert_near(theirs(tmp_path / "m"), logits(ours))


@pytest.mark.parametrize(
    "layout", [name for name in TARGETS if name.startswith("compressed-tensors")]
)
def test_transformers_with_compressed_tensors(tmp_path: Path, model: Any, layout: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model.save_pretrained(tmp_path / "m", layout=layout)
    ours = et.models.from_pretrained(tmp_path / "m")
    assert ours.model.layers[0].mlp.up_proj.weight.is_blocked
    config = transformers().CompressedTensorsConfig(dequantize=True)
    share = 2e-2 if "fp4" in layout else 2e-4  # its FP4 weights are decoded in bfloat16
    assert_near(theirs(tmp_path / "m", quantization_config=config), logits(ours), share)


@pytest.mark.parametrize("layout", ["deepseek-fp8"])
def test_transformers_with_fine_grained_fp8(tmp_path: Path, model: Any, layout: str) -> None:
    model.save_pretrained(tmp_path / "m", layout=layout)
    ours = et.models.from_pretrained(tmp_path / "m")
    config = transformers().FineGrainedFP8Config(dequantize=True)
    assert_near(theirs(tmp_path / "m", quantization_config=config), logits(ours), 2e-2)


def test_gpt_oss_blocks_as_transformers_decodes_them() -> None:
    """Its experts' blocks and scales, permuted and decoded in bfloat16, which holds MXFP4."""
    transformers()
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from extensor.io.stored import WEIGHT_LAYOUTS, write_weight
    from extensor.quant import QuantSpec
    from extensor.quant.reference import dequantize, quantize

    w = (
        np.random.default_rng(0).standard_normal((2, 64, 96)).astype(F)
    )  # (experts, inputs, outputs)
    q = quantize(w, QuantSpec("mxfp4", axis=-2))[0]
    parts = write_weight(WEIGHT_LAYOUTS["gpt-oss-mxfp4"], q)
    blocks, scales = (torch().tensor(parts[suffix][2]) for suffix in ("_blocks", "_scales"))
    assert tuple(blocks.shape) == (2, 96, 2, 16)
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch().bfloat16)
    assert np.array_equal(decoded.float().numpy(), dequantize(q))


def test_gpt_oss_with_packed_experts_is_that_of_transformers(tmp_path: Path) -> None:
    """A whole model whose experts are MXFP4 in the file, batched, with padding on either side."""
    name = "gpt_oss"
    sizes = settings(name) | {"hidden_size": 64, "intermediate_size": 96}
    values = transformers().AutoConfig.for_model(name, **sizes).to_dict()
    row = ARCHITECTURES[name]
    made = et.models.build(row.model, row.config_from_hf(values), np.random.default_rng(0)).eval()
    rng = np.random.default_rng(1)
    for parameter in made.parameters():
        ones = parameter.ndim == 1 and bool((parameter.data == 1).all())
        parameter.data[...] = (0.15 * rng.standard_normal(parameter.shape) + ones).astype(F)
    made.save_pretrained(tmp_path / "m", layout="gpt-oss-mxfp4")
    ours = et.models.from_pretrained(tmp_path / "m")
    for expert in ours.model.layers[1].mlp.experts:
        assert expert.down_proj.weight.dtype == expert.up_proj.weight.dtype == et.mxfp4
    config = transformers().Mxfp4Config(dequantize=True)
    peer = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", quantization_config=config, dtype=torch().float32,
        attn_implementation="eager",
    ).eval()  # fmt: skip
    for side in ("left", "right"):
        tokens, mask = batch_of(side)
        given = {"attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
        with torch().no_grad(), et.no_grad():
            expected = peer(
                torch().tensor(tokens), **{k: torch().tensor(v) for k, v in given.items()}
            )
            got = ours(et.ExTensor(tokens), attention_mask=mask).numpy()
        real = mask.astype(bool)
        assert_near(got[real], expected.logits.numpy()[real])


# --- what they write ---


def stored(folder: Path, tensors: dict[str, Any]) -> Any:
    """A file of torch tensors, opened by us."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return et.io.open_archive(folder)


SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, ""),
    "mxfp4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, ""),
    "int4": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, ""),
    "int4 asymmetric": (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        "",
    ),
    "int8 channel": ({"num_bits": 8, "type": "int", "strategy": "channel"}, ""),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_read_what_compressed_tensors_packs(tmp_path: Path, name: str) -> None:
    torch()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from extensor.quant.reference import dequantize

    args = QuantizationArgs(**SCHEMES[name][0])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rng = np.random.default_rng(4)
    w = torch().tensor(rng.standard_normal((32, 128)).astype(F))
    groups = w.reshape(32, -1, args.group_size or 128)
    state = {"weight": w}
    if name == "nvfp4":
        state["weight_global_scale"] = torch().tensor([2688.0]) / w.abs().max()
        scale = groups.abs().amax(-1) / 6 * state["weight_global_scale"]
        state["weight_scale"] = scale.to(torch().float8_e4m3fn).float()
    elif name == "mxfp4":
        state["weight_scale"] = torch().exp2(groups.abs().amax(-1).log2().floor() - 2)
    elif "asymmetric" in name:
        low, high = groups.amin(-1), groups.amax(-1)
        state["weight_scale"] = (high - low) / 15
        state["weight_zero_point"] = (
            torch().round(-8 - low / state["weight_scale"]).to(torch().int8)
        )
    else:
        state["weight_scale"] = groups.abs().amax(-1) / (7 if args.num_bits == 4 else 127)
    form = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
    compressor = BaseCompressor.get_value_from_registry(form.get(name, "pack-quantized"))
    packed = compressor.compress(dict(state), scheme)
    archive = stored(tmp_path, {f"layer.{key}": value for key, value in packed.items()})
    q = archive.read("layer.weight")
    expected = compressor.decompress(dict(packed), scheme)["weight"].float().numpy()
    values = dequantize(q)
    share = 2.0**-7 if "fp4" in name else 2.0**-22  # its FP4 is decoded in bfloat16
    assert (np.abs(values - expected) <= share * np.abs(expected)).all()
    assert np.square(values - w.numpy()).mean() < 0.02
    assert archive.infos["layer.weight"].shape == (32, 128) and set(archive.infos) == {
        "layer.weight"
    }


def test_model_optimizer_nvfp4_both_ways(tmp_path: Path, model: Any) -> None:
    torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = pytest.importorskip(
            "modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is not installed"
        )
    from extensor.io.stored import WEIGHT_LAYOUTS, write_weight
    from extensor.quant.reference import dequantize

    w = torch().tensor(np.random.default_rng(5).standard_normal((32, 64)).astype(F))
    made, scale, scale2 = qtensor.NVFP4QTensor.quantize(w, 16)
    parts = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": scale2}
    q = stored(tmp_path / "t", {f"a.{n}": p for n, p in parts.items()}).read("a.weight")
    expected = made.dequantize(
        dtype=torch().float32, scale=scale, double_scale=scale2, block_sizes={-1: 16}
    )
    assert np.allclose(dequantize(q), expected.numpy(), rtol=2.0**-22, atol=0)

    back = write_weight(WEIGHT_LAYOUTS["modelopt-nvfp4"], q)
    ours = qtensor.NVFP4QTensor((32, 64), torch().float32, torch().tensor(back[".weight"][2]))
    again = ours.dequantize(
        dtype=torch().float32,
        scale=torch().tensor(back[".weight_scale"][2]).view(torch().float8_e4m3fn),
        double_scale=torch().tensor(back[".weight_scale_2"][2]),
        block_sizes={-1: 16},
    )
    assert np.array_equal(again.numpy(), expected.numpy())
    model.save_pretrained(tmp_path / "m", layout="modelopt-nvfp4")
    said = json.loads((tmp_path / "m" / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_algo"], said["group_size"]) == ("NVFP4", 16)
    assert said["exclude_modules"] == ["lm_head"]


def test_model_optimizer_fp8_both_ways(tmp_path: Path, model: Any) -> None:
    torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = pytest.importorskip(
            "modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is not installed"
        )
    from extensor.io.stored import WEIGHT_LAYOUTS, write_weight
    from extensor.quant.reference import dequantize

    w = torch().tensor(np.random.default_rng(6).standard_normal((32, 48)).astype(F))
    made, scale = qtensor.FP8QTensor.quantize(w)
    expected = made.dequantize(dtype=torch().float32, scale=scale).numpy()
    parts = {"weight": made._quantized_data, "weight_scale": scale.reshape(())}
    q = stored(tmp_path / "t", {f"a.{n}": p for n, p in parts.items()}).read("a.weight")
    assert np.array_equal(dequantize(q), expected)

    back = write_weight(WEIGHT_LAYOUTS["modelopt-fp8"], q)
    codes = torch().tensor(back[".weight"][2]).view(torch().float8_e4m3fn)
    ours = qtensor.FP8QTensor(torch().Size((32, 48)), torch().float32, codes)
    again = ours.dequantize(dtype=torch().float32, scale=torch().tensor(back[".weight_scale"][2]))
    assert np.array_equal(again.numpy(), expected)

    done = model.save_pretrained(tmp_path / "m", layout="modelopt-fp8")
    said = json.loads((tmp_path / "m" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "FP8" and said["exclude_modules"] == ["lm_head"]
    from safetensors.torch import load_file

    name = "model.layers.1.mlp.up_proj.weight"
    file = load_file(tmp_path / "m" / "model.safetensors")
    theirs = qtensor.FP8QTensor(file[name].shape, torch().float32, file[name])
    read = et.models.from_pretrained(tmp_path / "m").model.layers[1].mlp.up_proj.weight
    scale = file[f"{name}_scale"]
    assert scale.shape == () and scale.dtype == torch().float32
    decoded = theirs.dequantize(dtype=torch().float32, scale=scale).numpy()
    assert np.array_equal(read.dequantize().numpy(), decoded)
    assert not all(c.lossless for c in done.certificates)


# --- GGUF ---

GGUF = [name for name, row in TARGETS.items() if row.container == "gguf" and row.gguf is not None]


@pytest.mark.parametrize("layout", GGUF)
def test_the_gguf_package_reads_our_files(tmp_path: Path, model: Any, layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    path = tmp_path / "m.gguf"
    model.save_pretrained(path, layout=layout)
    reader = gguf.GGUFReader(path)
    assert reader.fields["llama.block_count"].contents() == 2
    ours = et.load(path)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if f"{tensor.name.removesuffix('.weight')}.scale" in ours:
            scale = ours[f"{tensor.name.removesuffix('.weight')}.scale"].numpy()
            values = values * scale
        mine = ours[tensor.name]
        mine = mine.dequantize() if mine.is_blocked else mine
        assert np.array_equal(mine.to("float32").numpy(), values.astype(F)), tensor.name
    same = et.models.from_pretrained(path)
    assert set(dict(same.named_modules())) == set(dict(model.named_modules()))
