"""Files of tensors and models: safetensors, GGUF, numpy, folders, tokenizers, templates."""

from __future__ import annotations

import functools
import io
import json
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from ci.fuzz_mutations import NUMBERS, TEXTS, Draw, change, dumps, odd, words_mutate
from extensor import models
from extensor.formats import FORMATS as BLOCK_FORMATS
from extensor.generation.chat import render_chat
from extensor.generation.exchange import gguf_vocabulary
from extensor.generation.tokenizer import PretrainedTokenizer
from extensor.io import CheckpointError, load_checkpoint, open_archive, save_checkpoint
from extensor.io.gguf import GGUF_TYPES
from extensor.io.gguf.container import Typed, write_gguf
from extensor.io.safetensors_format import write
from extensor.io.stored import as_hugging_face
from extensor.quant import QuantSpec

# --- safetensors -------------------------------------------------------------------------------


def container(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    write(out, tensors, metadata)
    return out.getvalue()


def saved(tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/a", tensors, metadata)
        return Path(folder, "a").read_bytes()


def safetensors_seeds() -> list[bytes]:
    x = et.randn(3, 40, seed=0)
    made = [saved({"w": x.quantize(QuantSpec(name)).data}) for name in BLOCK_FORMATS]
    for spec in (
        QuantSpec("int4", symmetric=False, tile=(1, 8)),
        QuantSpec("int4", minimum=True, tile=(1, 32), super_block=256),
        QuantSpec("mxfp4", transform=et.quant.Hadamard(16), axis=0),
        QuantSpec("fp8_e4m3", tile=(128, 128)),
    ):
        made.append(saved({"w": x.quantize(spec).data, "b": np.ones(3, bool)}, {"a": [1, "x"]}))
    codes, scales = np.zeros((4, 16), np.uint8), np.ones((4, 1), np.uint8)
    made.append(container({"a_blocks": np.zeros((2, 4, 1, 16), np.uint8),
                           "a_scales": np.zeros((2, 4, 1), np.uint8)}, {}))  # fmt: skip
    made.append(container({"a.weight_packed": codes, "a.weight_scale": scales}, {"format": "pt"}))
    made.append(
        container(
            {
                "a.weight_packed": np.zeros((4, 4), np.int32),
                "a.weight_scale": np.ones((4, 1), np.float32),
                "a.weight_shape": np.array([4, 32]),
            },
            {},
        )
    )
    fp8 = np.zeros((4, 8), np.uint8).view("u1")
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]},
        "a.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [32, 36]},
        "b.weight": {"dtype": "F4", "shape": [2, 32], "data_offsets": [36, 68]},
        "b.weight_scale": {"dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [68, 70]},
    }
    made.append(packed(dumps(header, Draw(1)), fp8.tobytes() + bytes(38)))
    return made


def packed(header: str, data: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def safetensors_mutate(content: bytes, draw: Draw) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    what = draw.random()
    if what < 0.1 and data:
        at = draw.randrange(len(data))
        return packed(json.dumps(header), data[:at] + draw.randbytes(4) + data[at + 4 :])
    if what < 0.15:
        return packed(json.dumps(header), data[: draw.randrange(len(data) + 1)])
    if what < 0.5:
        return packed(dumps(change(header, draw), draw), data)
    return packed(dumps(consistent(header, draw), draw), data)


def consistent(header: dict[str, Any], draw: Draw) -> Any:
    """One tensor's shape or dtype changed so that its bytes stay the same."""
    names = [name for name in header if name != "__metadata__"]
    if not names or ("__metadata__" in header and draw.random() < 0.5):
        return {**header, "__metadata__": change(header["__metadata__"], draw)}
    name = draw.choice(names)
    entry = dict(header[name])
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    dtype, wide = draw.choice((("U8", 1), ("F32", 4), ("I32", 4), ("BOOL", 1), ("F8_E4M3", 1),
                               ("F4", 0.5), ("F16", 2), ("I64", 8), ("F8_E8M0", 1)))  # fmt: skip
    if size % wide == 0:
        count = int(size / wide)
        rows = draw.choice([n for n in (1, 2, 3, 4, count or 1) if count % n == 0])
        entry["shape"] = draw.choice(([count], [rows, count // rows], [1] * 5 + [count]))
        entry["dtype"] = dtype
    return {**header, name: entry}


def read_safetensors(path: Path) -> None:
    try:
        load_checkpoint(path)
    except CheckpointError:
        dict(open_archive(path))  # other layouts, too
        raise
    dict(open_archive(path))


# --- GGUF --------------------------------------------------------------------------------------


def gguf_file(kind: str = "F32") -> bytes:
    rng = np.random.default_rng(0)
    row, flat = GGUF_TYPES[kind], GGUF_TYPES["F32"]
    width = row.values if row.values > 8 else 8
    shapes = {"token_embd": (4, width), "output_norm": (width,), "blk.0.attn_norm": (width,),
              "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width),
              "blk.0.attn_k": (width, width), "blk.0.attn_v": (width, width),
              "blk.0.attn_output": (width, width), "blk.0.ffn_gate": (width, width),
              "blk.0.ffn_up": (width, width),
        "blk.0.ffn_down": (width, width)}  # fmt: skip
    shapes = shapes if width <= 32 else {"token_embd": (1, width)}
    plan = {
        f"{name}.weight": (row if len(shape) == 2 else flat, shape)
        for name, shape in shapes.items()
    }
    contents = [(name, rng.integers(0, 60, r.nbytes(s)).astype(np.uint8))
                for name, (r, s) in plan.items()]  # fmt: skip
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 8,
        "llama.embedding_length": width, "llama.feed_forward_length": width,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
        "general.alignment": Typed(4, 32), "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 3], np.int32),
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    if kind != "F32":
        metadata |= {"tokenizer.ggml.model": "llama",
                     "tokenizer.ggml.scores": np.zeros(4, np.float32)}  # fmt: skip
    out = io.BytesIO()
    write_gguf(out, metadata, plan, contents)
    return out.getvalue()


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(content: bytes) -> list[bytes]:
    """The fields of a whole file: magic, numbers and texts in turn, then the rest."""
    fields, at = [], 0

    def take(size: int) -> bytes:
        nonlocal at
        fields.append(content[at : at + size])
        at += size
        return fields[-1]

    def number(size: int) -> int:
        return int.from_bytes(take(size), "little")

    def value(kind: int) -> None:
        if kind == 8:
            take(number(8))
        elif kind == 9:
            inner, count = number(4), number(8)
            for _ in range(min(count, 100)):
                value(inner)
        else:
            take(SIZES[kind])

    take(4), take(4)
    tensors, values = number(8), number(8)
    for _ in range(min(values, 100)):
        take(number(8))
        value(number(4))
    for _ in range(min(tensors, 100)):
        take(number(8))
        for _ in range(min(number(4), 8)):
            number(8)
        take(4), take(8)
    fields.append(content[at:])
    return fields


def gguf_mutate(content: bytes, draw: Draw) -> bytes:
    fields = gguf_fields(content)
    at = draw.randrange(len(fields))
    old, what = fields[at], draw.random()
    if what < 0.05:
        fields[at] = b""
    elif what < 0.1:
        fields[at] *= 2
    elif what < 0.2:
        fields[at] = fields[draw.randrange(len(fields) - 1)]
    elif len(old) in (4, 8) and what < 0.8:
        small = int.from_bytes(old, "little")
        new = draw.choice((*NUMBERS, small + 1, small - 1, small * 2, *range(13)))
        fields[at] = (new % (1 << 8 * len(old))).to_bytes(len(old), "little")
    elif old:
        text = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
        fields[at] = (text * (len(old) // max(len(text), 1) + 1))[: len(old)]
    return b"".join(fields)


def read_gguf(path: Path) -> None:
    archive = open_archive(path)
    dict(archive)
    list(as_hugging_face(archive))
    models.from_pretrained(path)
    PretrainedTokenizer.from_gguf(archive.metadata)


# --- numpy -------------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npy_mutate(content: bytes, draw: Draw) -> bytes:
    length = int.from_bytes(content[8:10], "little")
    text = words_mutate(content[10 : 10 + length], draw)
    if draw.random() < 0.1:
        return content[: draw.randrange(len(content))]
    head = bytes([*content[:6], draw.choice((1, 1, 1, 1, 2, 3, 4)), 0])
    return head + (len(text) % 65536).to_bytes(2, "little") + text + content[10 + length :]


def npz_mutate(content: bytes, draw: Draw) -> bytes:
    out = io.BytesIO()
    warnings.simplefilter("ignore")  # of zipfile, about names that it has twice
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            inner = old.read(member)
            name = member.filename if draw.random() < 0.8 else str(odd(draw, member.filename))
            way = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            changed = npy_mutate(inner, draw) if draw.random() < 0.7 else inner
            new.writestr(name.encode("utf-8", "replace").decode(), changed, way)
    made = bytearray(out.getvalue())
    if draw.random() < 0.5:  # a field of a local header or of the directory
        at = draw.choice([m.start() for m in re.finditer(b"PK\x01\x02|PK\x03\x04", made)])
        at += draw.randrange(4, 46)
        if at < len(made):
            made[at] = draw.randrange(256)
    return bytes(made)


def npz_seeds() -> list[bytes]:
    out = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, a=np.arange(6.0).reshape(2, 3), b=np.float32(1))
        out.append(file.getvalue())
    return out


# --- models' folders, tokenizers and templates -------------------------------------------------


@functools.cache
def folder_files() -> dict[str, bytes]:
    """A model of one layer with a tokenizer, by file name."""
    config = replace(models.config("llama", "nano"), layers=1, width=8, heads=2, kv_heads=1,
                     head_size=4, hidden=8, vocab=4, rope=et.nn.Rope(4))  # fmt: skip
    model = models.build("llama", config, np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["</s>"])
    files["tokenizer.json"] = library.to_str().encode()
    files["tokenizer_config.json"] = json.dumps(
        {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": "a"}]}
    ).encode()
    files["generation_config.json"] = b'{"eos_token_id": [3]}'
    return files


def beside(*names: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        for name, content in folder_files().items():
            if name in names or not names:
                (folder / name).write_bytes(content)

    return prepare


def config_seeds() -> list[bytes]:
    llama = json.loads(folder_files()["config.json"])
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    experts = {
        "model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    }  # fmt: skip
    gpt2 = {
        "model_type": "gpt2", "vocab_size": 4, "n_positions": 8, "n_embd": 8, "n_layer": 1,
        "n_head": 2, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    bert = {
        "model_type": "bert", "vocab_size": 4, "max_position_embeddings": 8, "hidden_size": 8,
        "type_vocab_size": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
    }  # fmt: skip
    groups = {"g": {"weights": {"block_structure": [1, 1]}}}
    block = {"quantization_config": {"weight_block_size": [128, 128], "config_groups": groups}}
    more = llama, llama | {"rope_scaling": scaling}, llama | experts, llama | block, gpt2, bert
    return [json.dumps(values).encode() for values in more]


def read_tokenizer(path: Path) -> None:
    made = PretrainedTokenizer.from_pretrained(path.parent)
    made.encode("ab a")
    gguf_vocabulary(path.parent)


def read_chat(path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    render_chat(text, messages, bos_token="<s>", tools=None)


TEMPLATE = b"""{% set ns = namespace(n=0) %}{% for m in messages %}
{% if loop.index0 % 2 == 0 and m['role'] != 'user' %}{{ raise_exception('order') }}{% endif %}
{{ '<|' + m.role + '|>' }}{{ m.content | trim }}{% set ns.n = ns.n + 1 %}{% endfor %}
{{ ns.n * 2 }}{{ messages | tojson(indent=2) }}{%- generation %}{{ bos_token * 3 }}
{{ "%s" % ns.n }}{{ range(3) | list }}{% endgeneration %}{{ strftime_now("%Y")[0] }}
{% if add_generation_prompt %}{{ "x" | upper | replace("X", "y") }}{% endif %}"""
