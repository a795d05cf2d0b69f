"""Low-rank adapters: tune a model whose own weights stay as they are, packed or not.

The gradient of a packed weight's product is a product with its decoded values, which are made for
one layer at a time and dropped after it. So tuning holds the packed weights, the adapters with
their optimizer state, the activations, and one decoded weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from extensor.autograd.creation import Seed
from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.nn import init
from extensor.nn.checks import check_size
from extensor.nn.dropout import Dropout
from extensor.nn.linear import Linear
from extensor.nn.module import Module
from extensor.nn.parameter import Buffer, Parameter
from extensor.ops.elementwise import sqrt
from extensor.ops.matmul import linear
from extensor.ops.quantize import dequantize

__all__ = ["DoRA", "LoRA", "MergedWeight", "add_adapters", "merge_adapters"]


class LoRA(Module):
    """A frozen linear layer plus a trained product of two thin matrices.

    y = base(x) + (alpha / rank) up(down(x)), with ``up`` zero at first.

    Args:
        base: its weight and bias are frozen; the weight may be in blocks.
        rank: length between the two matrices.
        alpha: scale of what is added, times the rank; None, twice the rank.
        dropout: probability that an input of the added part is zeroed in training.
        rng: draws ``down``, uniform in +-1 / sqrt(K).

    Attributes:
        down: (rank, K). up: (N, rank).

    Raises:
        TypeError: if ``base`` is no `Linear`.
        ValueError: for a rank below 1, or a dropout outside [0, 1).

    Source: Hu et al., arXiv 2106.09685, section 4.1; on packed weights, arXiv 2305.14314.

    >>> base = et.nn.Linear(64, 32, rng=0)
    >>> layer = et.nn.LoRA(base, rank=4, rng=1)
    >>> x = et.randn(2, 64, seed=0)
    >>> bool((layer(x) == base(x)).all()), layer.down.size + layer.up.size
    (True, 384)
    """

    def __init__(
        self,
        base: Linear,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        rng: Seed = None,
    ) -> None:
        if not isinstance(base, Linear):
            raise TypeError(f"{type(self).__name__}: expected a Linear, got {type(base).__name__}")
        self.rank = check_size("rank", rank)
        self.scale = 2.0 if alpha is None else alpha / rank
        generator, bound = init.as_rng(rng), 1.0 / math.sqrt(base.in_features)
        self.base = base.requires_grad_(False)
        self.down = Parameter(init.uniform((rank, base.in_features), bound, generator))
        self.up = Parameter(np.zeros((base.out_features, rank), np.float32))
        self.dropout = Dropout(dropout, generator)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., K) -> (..., N)."""
        y: ExTensor = self.base(x)
        return y + self._added(x)

    def _added(self, x: ExTensor) -> ExTensor:
        return linear(linear(self.dropout(x), self.down), self.up) * self.scale

    def merged(self) -> ExTensor:
        """The weight that does alone what base and adapter do together.

        Returns:
            Float32 (N, K).

        >>> layer = et.nn.LoRA(et.nn.Linear(64, 32, rng=0), rank=4, rng=1)
        >>> bool((layer.merged() == layer.base.weight).all())
        True
        """
        with no_grad():
            return dequantize(self.base.weight) + self.up @ self.down * self.scale

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"rank={self.rank}, scale={self.scale:g}"


class DoRA(LoRA):
    """LoRA whose rows have a trained length: direction and magnitude are tuned apart.

    y = (m / norm) (base(x) + (alpha / rank) up(down(x))), where ``norm`` is the length of each row
    of the sum of the weights and ``m`` starts as that length. Gradients take ``norm`` as constant,
    as the paper's section 4.3 does. It is computed by products of thin matrices with the stored
    weight, which is decoded once, when the layer is made.

    Args:
        base: see `LoRA`.
        rank: see `LoRA`.
        alpha: see `LoRA`.
        dropout: see `LoRA`.
        rng: see `LoRA`.

    Attributes:
        magnitude: m, (N,). squares: the squared length of each row of the base's weight, (N,).

    Raises:
        TypeError, ValueError: as `LoRA`.

    Source: Liu et al., arXiv 2402.09353, equation 5 and section 4.3.

    >>> base = et.nn.Linear(64, 32, rng=0)
    >>> layer = et.nn.DoRA(base, rank=4, rng=1)
    >>> bool(abs(layer(et.ones((2, 64))) - base(et.ones((2, 64)))).max() < 1e-5)
    True
    """

    reads_weights = ("base",)

    def __init__(
        self,
        base: Linear,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        rng: Seed = None,
    ) -> None:
        super().__init__(base, rank, alpha, dropout, rng)
        with no_grad():
            values = dequantize(base.weight)
            self.squares = Buffer((values * values).sum(axis=1).data, device=values.device)
        self.magnitude = Parameter(self._norm().data, device=self.squares.device)

    def _norm(self) -> ExTensor:
        """The length of each row of the sum of the weights, (N,), without gradients.

        |w + s u D|^2 = |w|^2 + 2 s u . (D w^T) + s^2 u (D D^T) u^T, for a row w and u of ``up``.
        """
        with no_grad():
            up, down, s = self.up, self.down, self.scale
            crossed = linear(down, self.base.weight).swapaxes(0, 1)
            grown = (up * (2.0 * s * crossed + s * s * (up @ (down @ down.swapaxes(0, 1))))).sum(1)
            return sqrt(self.squares + grown)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (..., K) -> (..., N)."""
        y, bias = self.base(x), self.base.bias
        y = (y if bias is None else y - bias) + self._added(x)
        y = y * (self.magnitude / self._norm())
        return y if bias is None else y + bias

    def merged(self) -> ExTensor:
        """See :meth:`extensor.nn.LoRA.merged`."""
        with no_grad():
            return super().merged() * (self.magnitude / self._norm()).expand_dims(1)


def add_adapters(
    model: Module,
    rank: int = 8,
    alpha: float | None = None,
    match: Sequence[str] = ("*",),
    kind: type[LoRA] = LoRA,
    dropout: float = 0.0,
    rng: Seed = None,
) -> list[str]:
    """Put adapters on a model's linear layers, in place, and freeze everything else.

    The layer with the role ``head`` gets one only where a pattern is its whole path, since its
    weight is often the embedding's, too.

    Args:
        model: its linear layers may hold weights in blocks.
        rank: see `LoRA`.
        alpha: see `LoRA`.
        match: globs of the layers' paths.
        kind: `LoRA` or `DoRA`.
        dropout: see `LoRA`.
        rng: draws the adapters' initial weights.

    Returns:
        The paths of the layers that have one now.

    Raises:
        TypeError: if the model is no Module, or ``match`` one text.
        ValueError: for a pattern that matches no linear layer, or a model that is itself one. The
            model is unchanged then.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.ReLU(), et.nn.Linear(64, 8))
    >>> et.nn.add_adapters(model, rank=4, match=["0"])
    ['0']
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['0.down', '0.up']
    """
    if not isinstance(model, Module) or isinstance(match, str):
        raise TypeError(
            f"add_adapters: expected a Module and a list of globs, got {type(model).__name__} and "
            f"{match!r}"
        )
    held = {id(module.base) for module in model.modules() if isinstance(module, LoRA)}
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, Linear) and id(layer) not in held and path
    }
    chosen: dict[str, Linear] = {}
    for pattern in match:
        found = {
            path: layer
            for path, layer in layers.items()
            if fnmatchcase(path, pattern) and (layer.role != "head" or path == pattern)
        }
        if not found:
            raise ValueError(
                f"add_adapters: {pattern!r} matches no linear layer; they are {', '.join(layers)}"
            )
        chosen |= found
    generator = init.as_rng(rng)
    made = {path: kind(layer, rank, alpha, dropout, generator) for path, layer in chosen.items()}
    model.requires_grad_(False)
    for path, layer in made.items():
        layer.training = chosen[path].training
        for name, parameter in layer.named_parameters():
            parameter.requires_grad = not name.startswith("base.")
        _replace(model, path, layer)
    return list(made)


def _replace(model: Module, path: str, layer: Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(dict(model.named_modules())[owner], name, layer)


@dataclass(frozen=True)
class MergedWeight:
    """What merging an adapter did to a weight.

    Attributes:
        path: of the layer.
        format: that the merged weight is stored in.
        sqnr_db: signal over noise of the stored weight against the exact sum, in decibels;
            infinite where every value is exact.
        change_db: signal over noise of the same, with what the adapter added as the signal: below
            0, rounding lost more than the adapter had added. NaN where it added nothing.

    >>> model = et.quantize_model(et.nn.Sequential(et.nn.Linear(64, 64, rng=0)), "mxfp4_weights")
    >>> _ = et.nn.add_adapters(model, rank=4)
    >>> et.nn.merge_adapters(model)
    [MergedWeight(path='0', format='mxfp4', sqnr_db=inf, change_db=nan)]
    """

    path: str
    format: str
    sqnr_db: float
    change_db: float


def merge_adapters(
    model: Module, rounding: str = "nearest_even", seed: int = 0
) -> list[MergedWeight]:
    """Add each adapter to its layer's weight, in place, stored as the weight was.

    A packed weight is quantized again by its own spec. To nearest, small changes may round away;
    rounded stochastically, they stay in the mean.

    Args:
        model: with adapters of `add_adapters`.
        rounding: "nearest_even" or "stochastic", of packed weights.
        seed: of the random bits; each layer draws its own.

    Returns:
        What became of each weight.

    Raises:
        ValueError: for a model without adapters, or an unknown rounding. The model is unchanged
            then.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 8, rng=1))
    >>> packed = et.quantize_model(model, "mxfp4_weights")
    >>> _ = et.nn.add_adapters(packed, rank=4)
    >>> [(m.path, m.format) for m in et.nn.merge_adapters(packed)]
    [('0', 'mxfp4'), ('1', 'mxfp4')]
    """
    from extensor.inspect.noise import sqnr  # brings the optimizers, which inference does without

    if rounding not in ("nearest_even", "stochastic"):
        raise ValueError(f"rounding: expected 'nearest_even' or 'stochastic', got {rounding!r}")
    adapters = {path: module for path, module in model.named_modules() if isinstance(module, LoRA)}
    if not adapters or "" in adapters:
        raise ValueError("merge_adapters: expected a model with adapters below it, got none")
    stored = {}
    for number, (path, adapter) in enumerate(adapters.items()):
        stored[path] = _stored(adapter, rounding, seed + number)
    report = []
    for path, adapter in adapters.items():
        exact, old = adapter.merged(), dequantize(adapter.base.weight)
        values = dequantize(stored[path])
        report.append(
            MergedWeight(
                path,
                stored[path].spec.format if stored[path].is_blocked else stored[path].dtype.name,
                sqnr(exact, values),
                sqnr(exact - old, values - old) if bool((exact != old).any()) else math.nan,
            )
        )
        kind = Buffer if stored[path].is_blocked else Parameter
        adapter.base.weight = kind(stored[path].data, device=stored[path].device)
        _replace(model, path, adapter.base)
    return report


def _stored(adapter: LoRA, rounding: str, seed: int) -> ExTensor:
    """The merged weight in the format of the base's."""
    exact, weight = adapter.merged(), adapter.base.weight
    if not weight.is_blocked:
        return exact.to(weight.dtype.name)
    spec = weight.spec.replace(rounding=rounding)
    with no_grad():
        return exact.quantize(spec, seed=seed if rounding == "stochastic" else None)
