"""Tensor parallel blocks: each rank holds some heads and hidden values, and norms of some tokens.

Of a pair of Linear layers the first is split by its outputs (columns of x w^T), the second by its
inputs (rows): so each rank computes its heads, or its hidden values, without the others. Between
pairs each rank has some of the tokens. They are gathered before a pair, and the ranks' products
summed and scattered after it.

    (B, T / R, W) -> norm, gather -> (B, T, W) -> both layers -> sum, scatter -> (B, T / R, W)

Sources: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section
4.2.2. What keeps its bits: docs/adr/0025-tensor-parallel-blocks.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.sequence import cut_sequence, gather_sequence, reduce_scatter_sequence
from extensor.nn import Linear, Module, ModuleList, Parameter, TransformerBlock
from extensor.quant.recipe import SLOTS
from extensor.quant.spec import REBASE_TILE, QuantSpec

__all__ = ["ParallelBlock", "TensorParallel"]

Part = tuple[int, int]
"""First index and length of what a rank holds of an axis."""


class ParallelBlock(Module):
    """A `TransformerBlock` of which each rank holds a part; names of parameters stay.

    Args:
        block: holds this rank's weights already.
        ranks: the communicator.
        first: whether its input is whole, the same on all ranks.
        last: whether its output shall be.

    >>> from extensor.distributed import LocalCommunicator
    >>> from extensor.distributed.tensor_parallel import ParallelBlock
    >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
    >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
    >>> ParallelBlock(block, LocalCommunicator(), True, True)(et.zeros((2, 10, 64))).shape
    (2, 10, 64)
    """

    feeds_layers = ("norm1", "norm2")

    def __init__(
        self, block: TransformerBlock, ranks: Communicator, first: bool, last: bool
    ) -> None:
        self.norm1, self.attention = block.norm1, block.attention
        self.norm2, self.feed_forward = block.norm2, block.feed_forward
        self._ranks, self._first, self._last = ranks, first, last

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: this rank's tokens, (B, T / R, width)."""
        ranks = self._ranks
        if self._first:
            x = cut_sequence(x, ranks)
        for norm, pair in ((self.norm1, self.attention), (self.norm2, self.feed_forward)):
            x = x + reduce_scatter_sequence(pair(gather_sequence(norm(x), ranks)), ranks)
        return gather_sequence(x, ranks, partial=False) if self._last else x


class TensorParallel:
    """Splits a model's transformer blocks among ranks, and puts its weights together again.

    The model is changed: each `TransformerBlock` in a `ModuleList` keeps this rank's part of the
    weights. Embeddings, head and the last norm stay whole and are computed alike on all ranks.
    Apply a recipe before: blocks of formats must not cross ranks. A part in NVFP4 has a tensor
    scale of its own. A second layer's bias is rank 0's.

    Args:
        model: has its blocks in a `ModuleList`, such as `extensor.models` "gpt".
        ranks: the communicator.

    Attributes:
        split: names of parameters of which this rank has a part.
        elsewhere: names of parameters that this rank lacks: biases of second layers, which are
            rank 0's.

    Raises:
        ValueError: if there are no blocks, if ranks do not divide heads or hidden values, or a
            block of a format would cross ranks; also for scales of whole tensors or channels.

    >>> from extensor.distributed import run_ranks
    >>> from extensor.distributed.tensor_parallel import TensorParallel
    >>> def program(ranks):
    ...     attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
    ...     block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
    ...     model = et.nn.Sequential(et.nn.ModuleList([block]))
    ...     TensorParallel(model, ranks)
    ...     return dict(model.named_parameters())["0.0.attention.qkv.weight"].shape
    >>> run_ranks(2, program)
    [(96, 64), (96, 64)]
    """

    def __init__(self, model: Module, ranks: Communicator) -> None:
        self.model, self.ranks = model, ranks
        self._parts: dict[int, tuple[int, list[list[Part]]]] = {}
        self._norms: list[Parameter] = []
        self._operands: dict[str, str] = {}
        places = list(_blocks(model))
        if not places:
            raise ValueError(
                "TensorParallel: expected TransformerBlocks in a ModuleList, got none in "
                f"{type(model).__name__}"
            )
        for path, _, block in places:  # all of them are checked before one is changed
            for name, layer, axis, every in _layers(block, ranks.size):
                _check_blocks(f"{path}.{name}", layer, axis, every)
                self._operands[f"{path}.{name}"] = "xw" if axis else "wg"
        before = {name for name, _ in model.named_parameters()}
        for _, (blocks, index), block in places:
            self._split(block)
            last = index == len(blocks) - 1
            setattr(blocks, str(index), ParallelBlock(block, ranks, index == 0, last))
        self.split = frozenset(
            name for name, param in model.named_parameters() if id(param) in self._parts
        )
        self.elsewhere = frozenset(before - {name for name, _ in model.named_parameters()})

    def _split(self, block: TransformerBlock) -> None:
        size, rank = self.ranks.size, self.ranks.rank
        for _, layer, axis, every in list(_layers(block, size)):
            weight = layer.weight
            layer.weight = self._part(weight, axis, every)
            bias = layer.bias
            if axis == 0:
                layer.out_features //= size
                layer.bias = None if bias is None else self._part(bias, 0, every)
            else:
                layer.in_features //= size
                if rank:
                    layer.bias = None
        block.attention.heads //= size
        block.attention.kv_heads //= size
        for norm in (block.norm1, block.norm2):
            self._norms += [param for _, param in norm.named_parameters()]

    def _part(self, param: Any, axis: int, every: list[list[Part]]) -> Parameter:
        values = _take(param.data, axis, every[self.ranks.rank], param.backend.xp)
        made = Parameter(values, device=param.device)
        self._parts[id(made)] = axis, every
        return made

    def divides(self, path: str, slot: str) -> bool:
        """Whether each rank has a part of a layer's operand; else all have the same.

        Args:
            path: of the layer.
            slot: of a recipe, such as ``"fprop.x"``.

        Returns:
            True for weights of split layers, outputs' gradients of first layers and inputs of
            second ones.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        >>> model = et.nn.Sequential(et.nn.ModuleList([block]))
        >>> parallel = TensorParallel(model, LocalCommunicator())
        >>> parallel.divides("0.0.attention.qkv", "fprop.x")
        False
        """
        return slot[-1] in self._operands.get(path, "")

    def finish(self) -> None:
        """Sum the norms' gradients, of which each rank has its tokens' alone, after backward.

        If a gradient of any rank is not finite, all gradients of all ranks become NaN. All ranks
        call this together.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        >>> model = et.nn.Sequential(et.nn.ModuleList([block]))
        >>> TensorParallel(model, LocalCommunicator()).finish()
        """
        grads = [p.grad.data for p in self._norms if p.grad is not None]
        if not grads or self.ranks.size == 1:
            return
        xp = self._norms[0].backend.xp
        flat = xp.concatenate([grad.reshape(-1) for grad in grads])
        self.ranks.all_reduce(flat).wait()
        start = 0
        for param in self._norms:
            if param.grad is not None:
                end = start + param.size
                param.grad = wrap(flat[start:end].reshape(param.shape), param.backend)
                start = end
        grads = [p.grad.data for p in self.model.parameters() if p.grad is not None]
        finite = self._norms[0].backend.all_finite_multi_tensor(grads)
        bad = np.array([int(not all(finite))])
        self.ranks.all_reduce(bad, "max").wait()
        if bad[0]:
            for grad in grads:
                grad[...] = np.nan

    def state_dict(self) -> dict[str, Array]:
        """The whole model's weights, on all ranks, which call this together.

        Returns:
            Host arrays by name, as the model that was not split has them.

        >>> from extensor.distributed import run_ranks
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> def program(ranks):
        ...     attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        ...     block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        ...     model = et.nn.Sequential(et.nn.ModuleList([block]))
        ...     return TensorParallel(model, ranks).state_dict()["0.0.attention.qkv.weight"].shape
        >>> run_ranks(2, program)
        [(192, 64), (192, 64)]
        """
        return self.whole({name: p.data for name, p in self.model.named_parameters()})

    def whole(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Put arrays of the parameters' shapes together: weights, gradients or an optimizer's.

        Args:
            tensors: this rank's, by the name of the parameter.

        Returns:
            Host arrays of the whole parameters' shapes, on all ranks, which call this together.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        >>> model = et.nn.Sequential(et.nn.ModuleList([block]))
        >>> parallel = TensorParallel(model, LocalCommunicator())
        >>> parallel.whole({"0.0.norm1.weight": model[0][0].norm1.weight.data}).keys()
        dict_keys(['0.0.norm1.weight'])
        """
        params = dict(self.model.named_parameters())
        host = {
            name: wrap(array, params[name].backend).to("cpu").numpy()
            for name, array in tensors.items()
        }
        return self.gather(host)

    def gather(
        self, host: Mapping[str, Any], of: Callable[[str], str] = lambda key: key
    ) -> dict[str, Any]:
        """Join the ranks' parts of split parameters; all else is as rank 0 has it.

        All ranks call this together.

        Args:
            host: this rank's arrays and other values, on the host.
            of: gives the name of the parameter that a key belongs to.

        Returns:
            Whole arrays by key, the same on all ranks.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        >>> model = et.nn.Sequential(et.nn.ModuleList([block]))
        >>> TensorParallel(model, LocalCommunicator()).gather({"step": 3})
        {'step': 3}
        """
        params = dict(self.model.named_parameters())
        split = {key for key in host if of(key) in self.split}
        rank = self.ranks.rank
        everyone = self.ranks.all_gather_object(
            {key: value for key, value in host.items() if rank == 0 or key in split}
        )
        found = dict(everyone[0])  # the second layers' biases, too, which are rank 0's
        for key in split:
            axis, every = self._parts[id(params[of(key)])]
            found[key] = _join([each[key] for each in everyone], axis, every)
        return found

    def cut(
        self, whole: Mapping[str, Any], of: Callable[[str], str] = lambda key: key
    ) -> dict[str, Any]:
        """This rank's part of what `gather` gave: of loaded weights or an optimizer's state.

        Args:
            whole: values by key.
            of: as for `gather`.

        Returns:
            Values by key, arrays of split parameters cut; without keys of `elsewhere`.

        >>> from extensor.distributed import LocalCommunicator
        >>> from extensor.distributed.tensor_parallel import TensorParallel
        >>> attention = et.nn.MultiheadAttention(64, heads=4, rng=0)
        >>> block = et.nn.TransformerBlock(attention, et.nn.FeedForward(64, 256, rng=1))
        >>> model = et.nn.Sequential(et.nn.ModuleList([block]))
        >>> TensorParallel(model, LocalCommunicator()).cut({"step": 3})
        {'step': 3}
        """
        params = dict(self.model.named_parameters())
        found = {}
        for key, value in whole.items():
            name = of(key)
            if (name or key.removeprefix("step.")) in self.elsewhere:  # a parameter's own step
                continue
            if name in self.split and value.shape == self._whole_shape(params[name]):
                axis, every = self._parts[id(params[name])]
                value = _take(value, axis, every[self.ranks.rank], np)
            found[key] = value
        return found

    def _whole_shape(self, param: Parameter) -> tuple[int, ...]:
        axis, every = self._parts[id(param)]
        length = sum(n for parts in every for _, n in parts)
        return (*param.shape[:axis], length, *param.shape[axis + 1 :])


def _blocks(model: Module) -> Iterator[tuple[str, tuple[ModuleList, int], TransformerBlock]]:
    """Path, place and block of each transformer block that stands in a list of them."""
    for path, module in model.named_modules():
        if isinstance(module, ModuleList):
            for index, block in enumerate(module):
                if isinstance(block, TransformerBlock):
                    yield f"{path}.{index}", (module, index), block


def _layers(
    block: TransformerBlock, size: int
) -> Iterator[tuple[str, Linear, int, list[list[Part]]]]:
    """The Linear layers: name, layer, axis of the weight that is split, each rank's parts of it.

    Raises:
        ValueError: if the ranks do not divide the heads or the hidden values.
    """
    attention, feed = block.attention, block.feed_forward
    heads, kv_heads, one = attention.heads, attention.kv_heads, attention.head_size
    if heads % size or kv_heads % size:
        raise ValueError(
            f"TensorParallel: expected heads that {size} ranks divide, got {heads} heads and "
            f"{kv_heads} of keys and values"
        )
    hidden = feed.down.in_features
    if hidden % size:
        raise ValueError(
            f"TensorParallel: expected hidden values that {size} ranks divide, got {hidden}"
        )
    groups = feed.up.out_features // hidden  # 2: a gate and a value side by side
    yield "attention.qkv", attention.qkv, 0, _even([heads * one] + [kv_heads * one] * 2, size)
    yield "attention.out", attention.out, 1, _even([heads * one], size)
    yield "feed_forward.up", feed.up, 0, _even([hidden] * groups, size)
    yield "feed_forward.down", feed.down, 1, _even([hidden], size)


def _even(segments: Sequence[int], size: int) -> list[list[Part]]:
    """For each rank its equal part of each segment of an axis."""
    starts = np.cumsum([0, *segments[:-1]]).tolist()
    return [
        [(start + rank * (n // size), n // size) for start, n in zip(starts, segments, strict=True)]
        for rank in range(size)
    ]


def _take(array: Array, axis: int, parts: list[Part], xp: Any) -> Array:
    index = xp.concatenate([xp.arange(start, start + length) for start, length in parts])
    return xp.ascontiguousarray(xp.take(array, index, axis=axis))


def _join(arrays: list[Array], axis: int, every: list[list[Part]]) -> Array:
    """The whole array of host parts, as `_take` cut them."""
    index = np.concatenate(
        [np.arange(start, start + length) for parts in every for start, length in parts]
    )
    joined = np.concatenate(arrays, axis=axis)
    return np.take(joined, np.argsort(index), axis=axis)


def _check_blocks(name: str, layer: Linear, axis: int, every: list[list[Part]]) -> None:
    """Refuse a split through the blocks of a format that the layer's recipe uses.

    Raises:
        ValueError: naming the layer and the blocks.
    """
    if layer.quant is None:
        return
    unit = 1
    for slot in SLOTS:
        spec = layer.quant.operand(slot)
        if isinstance(spec, QuantSpec):
            unit = math.lcm(unit, _unit(name, slot, spec))
    crossing = [n for parts in every for part in parts for n in part if n % unit]
    if crossing:
        raise ValueError(
            f"TensorParallel: {name}: expected each rank's part of axis {axis} in whole blocks of "
            f"{unit}, got one of {crossing[0]}; the way out: fewer ranks, or wider heads"
        )


def _unit(name: str, slot: str, spec: QuantSpec) -> int:
    """How many neighbouring values depend on each other when they are quantized."""
    tile = spec.row.tile if spec.tile is None else spec.tile
    if not isinstance(tile, tuple) or spec.statistic == "running":
        raise ValueError(
            f"TensorParallel: {name}: {slot}: expected scales of blocks, got {spec}, whose scale "
            "spans ranks; the way out: MX, NVFP4 or FP8 blocks"
        )
    transform = 1 if spec.transform is None else spec.transform.size
    return math.lcm(*tile, transform, REBASE_TILE if spec.rebased else 1)
