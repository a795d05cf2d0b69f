"""Shapes of Llama and its relatives: one record says how a model of the family differs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from extensor.nn import Rope, RopeScaling

__all__ = ["CONFIGS", "ExpertsConfig", "LlamaConfig"]


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layers.

    Attributes:
        count: experts of a layer.
        active: how many each token is sent to.
        hidden: the hidden width of each.
        normalize: the weights of a token's experts sum to 1; else they are parts of the softmax
            over all experts.
        bias: whether router and experts have biases.
        alpha, limit: of `extensor.gated_silu`; a limit makes it gpt-oss's clipped form.
        block, router, parts: names of the modules, which files of weights follow.
    """

    count: int
    active: int
    hidden: int
    normalize: bool = True
    bias: bool = False
    alpha: float = 1.0
    limit: float | None = None
    block: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count or self.hidden < 1:
            raise ValueError(
                f"experts: expected 1 to {self.count} active experts and a hidden width, got {self}"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder of the Llama family.

    Attributes:
        vocab: how many tokens there are.
        context: the longest sequence.
        layers: blocks.
        width: length of each token's vector.
        heads: query heads.
        kv_heads: key and value heads, a divisor of ``heads``.
        head_size: length of each head.
        hidden: width of the feed-forward layers.
        eps: added to the mean square in the norms.
        rope: how positions turn queries and keys.
        tied: whether the head shares the embedding's weights.
        qkv_bias, out_bias, mlp_bias: whether the projections have biases.
        qk_norm: RMSNorm of each query and key head before it turns, as in Qwen3.
        sinks: a learned score of each head that attends to nothing, as in gpt-oss.
        windows: of each layer the number of tokens that it sees, None for all; () for all layers.
        experts: in place of the feed-forward layers; None for none.
        dense: numbers of the layers that have a feed-forward layer in spite of ``experts``.
    """

    vocab: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    eps: float
    rope: Rope
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    windows: tuple[int | None, ...] = ()
    experts: ExpertsConfig | None = None
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.vocab, self.context, self.layers, self.width, self.heads, self.kv_heads)
        if min(*sizes, self.head_size, self.hidden) < 1:
            raise ValueError(f"Llama: expected sizes of 1 or more, got {self}")
        if self.heads % self.kv_heads:
            raise ValueError(f"Llama: expected heads a multiple of kv_heads, got {self}")
        if self.rope.size > self.head_size:
            raise ValueError(
                f"Llama: expected at most {self.head_size} turned components, got {self.rope.size}"
            )
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"Llama: expected a window for each of {self.layers} layers, got {self.windows}"
            )


_LLAMA3 = RopeScaling("llama3", factor=8.0, context=8192)
_GPT_OSS = RopeScaling("yarn", factor=32.0, context=4096, whole=False)

_LLAMA_3_8B = LlamaConfig(
    vocab=128256, context=131072, layers=32, width=4096, heads=32, kv_heads=8, head_size=128,
    hidden=14336, eps=1e-5, rope=Rope(128, 500000.0, scaling=_LLAMA3),
)  # fmt: skip
_QWEN3_30B = LlamaConfig(
    vocab=151936, context=40960, layers=48, width=2048, heads=32, kv_heads=4, head_size=128,
    hidden=6144, eps=1e-6, rope=Rope(128, 1e6), qk_norm=True,
    experts=ExpertsConfig(count=128, active=8, hidden=768),
)  # fmt: skip


def _plain(layers: int, width: int, hidden: int) -> LlamaConfig:
    """A small model to train from scratch: heads of 64, as many for keys, the head tied."""
    heads = width // 64
    return LlamaConfig(
        vocab=8192, context=512, layers=layers, width=width, heads=heads, kv_heads=heads,
        head_size=64, hidden=hidden, eps=1e-5, rope=Rope(64), tied=True,
    )  # fmt: skip


CONFIGS = {
    "smollm2-135m": LlamaConfig(
        vocab=49152, context=8192, layers=30, width=576, heads=9, kv_heads=3, head_size=64,
        hidden=1536, eps=1e-5, rope=Rope(64, 100000.0), tied=True,
    ),
    "nano": LlamaConfig(
        vocab=65, context=256, layers=2, width=64, heads=4, kv_heads=2, head_size=16, hidden=128,
        eps=1e-5, rope=Rope(16),
    ),
    "llama-2-7b": LlamaConfig(
        vocab=32000, context=4096, layers=32, width=4096, heads=32, kv_heads=32, head_size=128,
        hidden=11008, eps=1e-5, rope=Rope(128),
    ),
    "llama-3.1-8b": _LLAMA_3_8B,
    "mistral-7b": LlamaConfig(
        vocab=32000, context=32768, layers=32, width=4096, heads=32, kv_heads=8, head_size=128,
        hidden=14336, eps=1e-5, rope=Rope(128), windows=(4096,) * 32,
    ),
    "qwen2-7b": LlamaConfig(
        vocab=152064, context=131072, layers=28, width=3584, heads=28, kv_heads=4, head_size=128,
        hidden=18944, eps=1e-6, rope=Rope(128, 1e6), qkv_bias=True,
    ),
    "qwen3-8b": replace(
        _QWEN3_30B, layers=36, width=4096, kv_heads=8, hidden=12288, experts=None
    ),
    "qwen3-30b-a3b": _QWEN3_30B,
    "mixtral-8x7b": LlamaConfig(
        vocab=32000, context=32768, layers=32, width=4096, heads=32, kv_heads=8, head_size=128,
        hidden=14336, eps=1e-5, rope=Rope(128, 1e6),
        experts=ExpertsConfig(
            count=8, active=2, hidden=14336, block="block_sparse_moe", parts=("w1", "w3", "w2")
        ),
    ),
    "gpt-oss-20b": LlamaConfig(
        vocab=201088, context=131072, layers=24, width=2880, heads=64, kv_heads=8, head_size=64,
        hidden=2880, eps=1e-5, rope=Rope(64, 150000.0, scaling=_GPT_OSS), qkv_bias=True,
        out_bias=True, sinks=True, windows=(128, None) * 12,
        experts=ExpertsConfig(
            count=32, active=4, hidden=2880, bias=True, alpha=1.702, limit=7.0, router="router"
        ),
    ),
    # By the weights of their blocks.
    "0.4m": _plain(2, 128, 384),
    "3m": _plain(4, 256, 704),
    "10m": _plain(6, 384, 1024),
    "30m": _plain(6, 640, 1728),
    "98m": _plain(8, 1024, 2752),
}  # fmt: skip
"""The variants; the first is the default."""
