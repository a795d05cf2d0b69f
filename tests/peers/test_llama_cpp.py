"""GGUF files that we write, run by llama.cpp: its logits differ by what it rounds, and no more.

llama.cpp rounds what it multiplies to the type beside a weight's: to 8 bits in blocks of 32 (Q8_0),
beside Q4_K, Q5_K and Q6_K in blocks of 256 (Q8_K), to float16 or bfloat16 beside these; keys,
values, queries and attention's weights to float16. An error of rounding is anything up to half a
step, one as often as another, so the expected difference is known: the model is run with such noise
on every input of a weight and of attention. Bound: the root mean square of the difference over all
logits is at most 1.3 times that of the noise. Measured: 0.83 to 1.08 times; the noise itself is
0.02 percent of the largest logit with float32 weights, 0.2 with bfloat16, 0.9 to 1.8 with 4 to 8
bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.io.stored import TARGETS
from extensor.models import decoding
from tests.peers.test_checkpoints import GGUF, TOKENS, F, tiny

HALF, BRAIN = 10, 7
"""Bits after the point of float16 and bfloat16."""
SAMPLES = 6


def noisy(x: np.ndarray, kind: int | None, rng: np.random.Generator) -> et.ExTensor:
    """Numbers with noise of half a step of their type: 7, 10 bits, or blocks of 32, 256."""
    if kind is None:
        return et.ExTensor(x)
    if kind in (32, 256):
        largest = np.abs(x.reshape(*x.shape[:-1], -1, kind)).max(-1)
        step = np.repeat(largest / 127, kind, axis=-1)
    else:
        step = np.exp2(np.floor(np.log2(np.abs(x) + 1e-30)) - kind)
    return et.ExTensor((x + step * rng.uniform(-0.5, 0.5, x.shape)).astype(F))


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with et.no_grad():
        found: np.ndarray = model(et.ExTensor(tokens)).numpy()[0]
    return found


def noise(
    model: Any, tokens: np.ndarray, kind: int | None, patch: pytest.MonkeyPatch
) -> np.ndarray:
    """What rounding makes of the logits, in several samples."""
    rng, exact = np.random.default_rng(0), logits(model, tokens)
    linear, attention = nn.Linear.forward, decoding.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, *more: Any, **options: Any) -> Any:
        q, k, v = (noisy(one.numpy(), HALF, rng) for one in (q, k, v))
        v = noisy(v.numpy(), HALF, rng)  # in place of the weights of values, float16 too
        return attention(q, k, v, *more, **options)

    with patch.context() as patched:
        patched.setattr(decoding, "scaled_dot_product_attention", attend)
        patched.setattr(
            nn.Linear, "forward", lambda self, x: linear(self, noisy(x.numpy(), kind, rng))
        )
        return np.stack([logits(model, tokens) - exact for _ in range(SAMPLES)])


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def assert_only_rounded(
    model: Any, path: Path, tokens: np.ndarray, kind: int | None, patch: pytest.MonkeyPatch
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    engine = llama_cpp.Llama(
        str(path), logits_all=True, n_ctx=64, n_threads=1, verbose=False, flash_attn=False
    )
    engine.eval(tokens[0].tolist())
    difference = engine.scores[: tokens.shape[1]] - logits(model, tokens)
    engine.close()
    expected = root_mean_square(noise(model, tokens, kind, patch))
    got = root_mean_square(difference)
    assert got <= 1.3 * expected, f"{got:.3g}, and rounding alone {expected:.3g}"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


KINDS: dict[str, int | None] = {"gguf-f32": None, "gguf-f16": HALF, "gguf-bf16": BRAIN}


@pytest.mark.parametrize("layout", [n for n in GGUF if n != "gguf-nvfp4"])
def test_logits_differ_by_rounding_alone(
    tmp_path: Path, model: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    model.save_pretrained(path, layout=layout)
    assert (TARGETS[layout].spec is None) == (layout in KINDS)
    kind = KINDS.get(layout, 256 if layout.endswith("_k") else 32)
    assert_only_rounded(et.models.from_pretrained(path), path, TOKENS, kind, monkeypatch)


def relatives() -> dict[str, Any]:
    """Tiny models of the architectures that GGUF files hold in stacks or with rotary factors."""
    from extensor.models.llama.configs import ExpertsConfig, LlamaConfig
    from extensor.nn import Rope, RopeScaling

    plain = LlamaConfig(
        vocab=64, context=64, layers=2, width=256, heads=4, kv_heads=2, head_size=64, hidden=512,
        eps=1e-5, rope=Rope(64, 1e6),
    )  # fmt: skip
    yarn = Rope(64, 150000.0, scaling=RopeScaling("yarn", 32.0, 4096, whole=False))
    mixtral = ExpertsConfig(4, 2, 512, block="block_sparse_moe", parts=("w1", "w3", "w2"))
    gpt_oss = ExpertsConfig(4, 2, 256, bias=True, alpha=1.702, limit=7.0, router="router")
    return {
        "llama": replace(plain, rope=Rope(64, 5e5, scaling=RopeScaling("llama3", 8.0, 8192))),
        "mixtral": replace(plain, experts=mixtral),
        "qwen3_moe": replace(plain, qk_norm=True, experts=ExpertsConfig(4, 2, 256)),
        "gpt_oss": replace(
            plain, hidden=256, rope=yarn, qkv_bias=True, out_bias=True, sinks=True,
            windows=(16, None), experts=gpt_oss,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe", "gpt_oss"])
def test_relatives_differ_by_rounding_alone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked experts, their router, sinks, windows and rotary scaling mean the same to both."""
    model = et.models.build("llama", relatives()[kind], np.random.default_rng(0)).eval()
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        size = 1.0 if parameter.ndim == 1 else 0.08
        parameter.data[...] = (rng.standard_normal(parameter.shape) * size).astype(F)
    path, tokens = tmp_path / "m.gguf", rng.integers(0, 64, (1, 40))
    model.save_pretrained(path, layout="gguf-f32", model_type=kind)
    read = et.models.from_pretrained(path)
    if kind == "gpt_oss":  # llama.cpp rounds YaRN's bounds, whatever the model does
        scaling = replace(relatives()[kind].rope.scaling, whole=True)
        read.model.rotary = nn.RotaryTable(replace(relatives()[kind].rope, scaling=scaling))
    assert_only_rounded(read, path, tokens, None, monkeypatch)
