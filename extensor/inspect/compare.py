"""Comparing a low-precision model's activations with a reference's, layer by layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.inspect.noise import decibels
from extensor.inspect.table import Table
from extensor.nn.module import Hook, Module, PreHook, evaluating
from extensor.nn.recipe import gemm_layers
from extensor.notebook import card, table
from extensor.quant.array import QuantStats
from extensor.quant.recipe_state import RecipeState

__all__ = ["LayerComparison", "LayerRow", "compare_layers"]

OUTPUT = "(output)"
"""The name of the model itself among its layers."""


@dataclass(frozen=True)
class LayerRow:
    """Comparison of one layer's output with the reference's, over all its calls.

    Attributes:
        layer: its path; ``"(output)"`` for the model's own output.
        kind: its class.
        cosine: of the angle between the two outputs as vectors; two zeros count as equal.
        mse: mean squared difference.
        sqnr_db: 10 log10(sum reference^2 / sum difference^2), decibels; infinite if equal.
        saturated: the share of the forward operands' values that did, 0 to 1; None for a layer that
            quantizes nothing.
        flushed: the share that became zero, likewise.

    >>> model = et.nn.Linear(8, 8, rng=0)
    >>> row = et.compare_layers(model, model, et.ones((2, 8))).rows[-1]
    >>> row.layer, row.kind, row.mse
    ('(output)', 'Linear', 0.0)
    """

    layer: str
    kind: str
    cosine: float
    mse: float
    sqnr_db: float
    saturated: float | None
    flushed: float | None


@dataclass(frozen=True)
class LayerComparison:
    """The result of `compare_layers`.

    Attributes:
        rows: in the order the layers ran; the model's output last.

    >>> model = et.nn.Sequential(et.nn.Linear(8, 8, rng=0))
    >>> comparison = et.compare_layers(model, model, et.ones((2, 8)))
    >>> [row.layer for row in comparison.rows]
    ['0', '(output)']
    """

    rows: tuple[LayerRow, ...]

    def as_table(self) -> Table:
        """The rows as text, which ``str()`` of the comparison prints.

        Returns:
            A table with a row for each layer.

        >>> model = et.nn.Linear(8, 8, rng=0)
        >>> et.compare_layers(model, model, et.ones((2, 8))).as_table().columns
        ('layer', 'kind', 'cosine', 'MSE', 'SQNR dB', 'saturated', 'flushed')
        """
        columns = ("layer", "kind", "cosine", "MSE", "SQNR dB", "saturated", "flushed")
        return Table(
            columns,
            tuple(
                (
                    row.layer,
                    row.kind,
                    f"{row.cosine:.6f}",
                    f"{row.mse:.3e}",
                    f"{row.sqnr_db:.2f}",
                    "-" if row.saturated is None else f"{row.saturated:.3%}",
                    "-" if row.flushed is None else f"{row.flushed:.3%}",
                )
                for row in self.rows
            ),
        )

    def __repr__(self) -> str:
        worst = min(self.rows, key=lambda row: row.sqnr_db, default=None)
        lowest = f", lowest {worst.sqnr_db:.2f} dB in {worst.layer!r}" if worst else ""
        return f"LayerComparison({len(self.rows)} rows{lowest})"

    def _repr_html_(self) -> str:
        whole = self.as_table()
        return card("Layers beside the reference", (), table(whole.columns, whole.rows))

    def __str__(self) -> str:
        return str(self.as_table())


def compare_layers(
    model: Module,
    reference: Module,
    batch: ExTensor | tuple[ExTensor, ...],
    *,
    isolated: bool = False,
) -> LayerComparison:
    """Run both models on a batch and compare the outputs of each layer.

    Layers are the modules with GEMMs or parameters of their own, and the model itself. Errors
    accumulate through the model, as in use. Both models run in evaluation mode without gradients.
    They are left as they were, telemetry and random streams included.

    Args:
        model: usually with a recipe applied.
        reference: the same architecture with the same weights, in high precision.
        batch: the model's input; a tuple, its inputs.
        isolated: run each layer on the inputs of the reference's layer, so that its row shows only
            its own error. The model's output is still that of a whole run.

    Returns:
        A row for each layer; ``print`` shows a table.

    Raises:
        ValueError: if the models have different layers, or a layer gives other shapes or runs
            another number of times; for an empty batch.
        TypeError: if ``batch`` is no tensor or tuple of tensors.

    >>> model = et.nn.Sequential(et.nn.Linear(64, 64, rng=0), et.nn.Linear(64, 8, rng=1))
    >>> quantized = et.quantize_model(model, "nvfp4")
    >>> comparison = et.compare_layers(quantized, model, et.randn(16, 64, seed=0))
    >>> [(row.layer, row.sqnr_db > 10) for row in comparison.rows]
    [('0', True), ('1', True), ('(output)', True)]
    """
    inputs = batch if isinstance(batch, tuple) else (batch,)
    if not inputs or not all(isinstance(x, ExTensor) for x in inputs):
        raise TypeError(f"batch: expected an ExTensor or a tuple of them, got {batch!r:.80}")
    if any(not x.size for x in inputs):
        raise ValueError(
            f"batch: expected values to compare, got shapes {[x.shape for x in inputs]}; nothing "
            "would look perfect"
        )
    layers, others = _layers(model), _layers(reference)
    if layers.keys() != others.keys():
        only = sorted(layers.keys() ^ others.keys())
        raise ValueError(
            f"compare_layers: expected two models with the same layers, got {only} in one only; "
            "build the reference like the model"
        )
    with no_grad(), evaluating(model), evaluating(reference):
        outputs: dict[str, list[np.ndarray[Any, Any]]] = {path: [] for path in others}
        given: dict[str, list[tuple[Any, ...]]] = {}
        with (
            _hooked(others, lambda path, array: outputs[path].append(array)),
            _listening(others if isolated else {}, given),
        ):
            reference(*inputs)
        sums = {path: _Sums(path, outputs[path]) for path in layers}
        order: dict[str, None] = {}

        def take(path: str, array: np.ndarray[Any, Any]) -> None:
            order[path] = None
            sums[path].add(array)

        with _own_telemetry(model) as telemetry:
            if isolated:
                del given[OUTPUT]
                for path, calls in given.items():
                    with _hooked({path: layers[path]}, take):
                        for args in calls:
                            layers[path](*args)
                counts = telemetry()
            with _hooked({OUTPUT: model} if isolated else layers, take):
                model(*inputs)
            if not isolated:
                counts = telemetry()
    for path in layers:
        sums[path].check_done()
    rows = [sums[path].row(type(layers[path]).__name__, counts.get(path)) for path in order]
    return LayerComparison(tuple(rows))


class _Sums:
    """Running sums over one layer's calls."""

    def __init__(self, path: str, reference: list[np.ndarray[Any, Any]]) -> None:
        self.path = path
        self.reference = reference
        self.calls = self.count = 0
        self.dot = self.square = self.reference_square = self.error = 0.0

    def add(self, array: np.ndarray[Any, Any]) -> None:
        if self.calls == len(self.reference):
            raise ValueError(
                f"compare_layers: {self.path}: expected {self.calls} outputs as the reference has, "
                "got more"
            )
        expected = self.reference[self.calls]
        if array.shape != expected.shape:
            raise ValueError(
                f"compare_layers: {self.path}: expected an output of shape {expected.shape} as the "
                f"reference has, got {array.shape}"
            )
        self.calls += 1
        self.count += array.size
        with np.errstate(invalid="ignore"):  # infinities show as such in the figures
            self.dot += float((array * expected).sum())
            self.square += float((array * array).sum())
            self.reference_square += float((expected * expected).sum())
            self.error += float(((array - expected) ** 2).sum())

    def check_done(self) -> None:
        if self.calls != len(self.reference):
            raise ValueError(
                f"compare_layers: {self.path}: expected {len(self.reference)} outputs as the "
                f"reference has, got {self.calls}"
            )

    def row(self, kind: str, stats: QuantStats | None) -> LayerRow:
        saturated = flushed = None
        if stats is not None and stats.count:
            saturated, flushed = stats.saturated / stats.count, stats.flushed / stats.count
        return LayerRow(
            self.path,
            kind,
            self._cosine(),
            self.error / max(self.count, 1),
            decibels(self.reference_square, self.error),
            saturated,
            flushed,
        )

    def _cosine(self) -> float:
        if self.square == self.reference_square == 0.0:
            return 1.0
        if self.square == 0.0 or self.reference_square == 0.0:
            return 0.0
        return self.dot / (math.sqrt(self.square) * math.sqrt(self.reference_square))


def _layers(model: Module) -> dict[str, Module]:
    owners = {path.rpartition(".")[0] for path, _ in model.named_parameters()}
    owners |= {path for path, _ in gemm_layers(model)}  # a weight may be shared, or packed
    layers = {path: module for path, module in model.named_modules() if path and path in owners}
    return {**layers, OUTPUT: model}


@contextlib.contextmanager
def _hooked(layers: dict[str, Module], take: Any) -> Iterator[None]:
    """Call ``take(path, array)`` with every output of every layer, as float64 on the host."""

    def hook(path: str) -> Hook:
        def called(_: Module, output: Any) -> None:
            for tensor in _tensors(output):
                dense = tensor.dequantize() if tensor.is_blocked else tensor
                take(path, dense.numpy().astype(np.float64))

        return called

    with contextlib.ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.callback(layer.register_forward_hook(hook(path)))
        yield


def _tensors(output: Any) -> Iterator[ExTensor]:
    if isinstance(output, ExTensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)


@contextlib.contextmanager
def _listening(
    layers: dict[str, Module], given: dict[str, list[tuple[Any, ...]]]
) -> Iterator[None]:
    """Store the positional arguments of every call of every layer, in order."""

    def hook(path: str) -> PreHook:
        return lambda _, args: given.setdefault(path, []).append(args)

    with contextlib.ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(hook(path)))
        yield


@contextlib.contextmanager
def _own_telemetry(model: Module) -> Iterator[Callable[[], dict[str, QuantStats]]]:
    """Count forward operands by layer, apart from the recipe's own telemetry."""
    places = [(path, layer, layer.quant) for path, layer in gemm_layers(model)]
    before = [(path, layer, context) for path, layer, context in places if context is not None]
    states: dict[str, RecipeState] = {}
    for path, layer, context in before:
        states[path] = replace(context.state, _counts={})
        layer.quant = replace(context, state=states[path])

    def counts() -> dict[str, QuantStats]:
        totals = {path: sum(s.telemetry.values(), QuantStats()) for path, s in states.items()}
        return {path: total for path, total in totals.items() if total.count}

    try:
        yield counts
    finally:
        for _, layer, context in before:
            layer.quant = context
