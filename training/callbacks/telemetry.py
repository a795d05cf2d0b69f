"""telemetry.jsonl: what low precision does to each layer while it trains, every N steps.

- Saturated and flushed shares of each operand, since the last record; of rebased ones what
  changed, too.
- The gradient beside its quantization noise. Each recorded step is run once more in float32, on the
  same batch, weights and dropout masks; the noise is the difference of the two gradients. Training
  gains little once the norm of the gradient is below about sqrt(3) times that of the noise
  (arXiv 2505.19115, section 5: sigma sqrt(d) there is the norm of the noise here).
- Each operand on a sample of its values: a histogram of its blocks' scales, its quantization noise,
  and what it would be in other formats (`training.operand_noise`). `extensor advise RUN` reads it.
- Weight oscillation, on a sample, too: the share of weights whose code changed since the last
  record, and of those that changed back the way they had come (arXiv 2203.08954, section 2.2; for
  FP4, 2502.20853).

A step whose gradients are not finite is run once more as it was, and the first layer whose values
overflow is recorded. ``recording_share`` is what the records cost, as a share of the training.

The run is not changed by being watched: the second pass leaves gradients, buffers and random bits
as they were. Without the callback nothing of this costs anything. Of a captured run the recorded
steps are made in Python, which counts as a part of the record; the others are replayed, and of
those an overflow is only noted.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from extensor.backends import registry
from extensor.nn import gemm_layers
from extensor.quant.array import QuantStats, coded_length
from extensor.quant.recipe import SLOTS
from extensor.quant.rounding import decode, unpack
from extensor.quant.spec import QuantSpec

from ..batch import Batch
from ..operand_noise import layer_operands, sample_rows
from ..probes import Probes, probed
from ..records import StepReport, finite, share
from ..rundir import TELEMETRY, read_telemetry, write_text
from .base import Callback, RunView
from .files import TensorBoard

__all__ = ["NOISE_RATIO", "Interval", "Telemetry"]

Interval = int | Literal["auto"]
"""Steps between records; "auto": as often as `SHARE` of the training's time allows."""

NOISE_RATIO = math.sqrt(3.0)
"""Below this, the gradient's norm over its noise's, quantized training gains little."""
SHARE, FIRST = 0.02, 50
"""Of "auto": what all records, the next one with them, may take of the training, and the step of
the first one."""
UNSEEN: dict[str, str | None] = {
    "layer": None, "where": "in a captured step, which is not run again",
}  # fmt: skip
OVERFLOWS = 100
"""Skipped steps that are run once more, at most."""


class Telemetry(Callback):
    """Appends a line every ``every`` steps; a resumed run first drops lines it will write again.

    After a resume the first record has no oscillation: the codes before it are not kept.

    Args:
        every: steps between records, 1 or more, or "auto": the first after `FIRST` steps, then
            whenever all, with one more as long as their mean, take no more than `SHARE` of the
            training's time.
        board: also gets the figures, if given.
    """

    whole_batches = True

    def __init__(self, every: Interval, board: TensorBoard | None = None) -> None:
        if every != "auto" and (not isinstance(every, int) or every < 1):
            raise ValueError(
                f"telemetry: expected 1 or more steps between records or 'auto', got {every!r}"
            )
        self.every, self.board = every, board
        self._counts: tuple[int, dict[tuple[str, str], QuantStats]] = (0, {})
        self._buffers: list[tuple[Any, Any]] = []
        self._gradients: dict[str, dict[str, float | None]] = {}
        self._codes: dict[str, Any] = {}
        self._directions: dict[str, Any] = {}
        self._operands: dict[str, dict[str, Any]] = {}
        self._batch: Batch | None = None
        self._seen = 0  # the step of that batch
        self._begun = 0.0
        self._scale = 1.0
        self._overflows = 0
        self._spent = _Spent()
        self._first, self._next, self._records = 0, 0, 0

    def on_start(self, run: RunView) -> None:
        path, done = run.out / TELEMETRY, run.position.step
        records = read_telemetry(run.out) if done else []
        kept = [_line(record) for record in records if record["step"] <= done]
        write_text(path, "".join(kept))
        self._scale = run.scaler.current_scale
        self._spent = _Spent(run.position.seconds)
        self._first, self._records = done, 0
        self._next = self._after(done, run.position.seconds)
        self._remember_buffers(run, done + 1)

    def sees_step(self, step: int) -> bool:
        return self._due(step) or self._due(step + 1)

    def sees_gradients(self, step: int) -> bool:
        return self._due(step)

    def on_gradients(self, run: RunView, batch: Batch) -> None:
        self._batch, self._seen = batch, run.position.step + 1
        if self._due(self._seen):
            counted: AbstractContextManager[None] = nullcontext() if run.graph else self._spent
            with counted:
                self._gradients = self._compare_gradients(run, batch)

    def on_step(self, run: RunView, report: StepReport) -> None:
        if report.skipped and self._overflows < OVERFLOWS:
            self._overflows += 1
            found = self._find_overflow(run) if self._seen == report.step else UNSEEN
            self._write(run, {"step": report.step, "loss": report.loss, "lr": report.lr,
                              "overflow": found, "layers": {}})  # fmt: skip
        self._scale = report.loss_scale
        if self._due(report.step):
            if run.graph:  # all of the step in Python
                self._spent.seconds += time.perf_counter() - self._begun
            before = self._spent.seconds  # what the step's own seconds hold
            with self._spent:
                self._write_record(run, report, self._spent.share(run.position.seconds, before))
            self._records += 1
            self._next = self._after(report.step, run.position.seconds)
        self._remember_buffers(run, report.step + 1)

    def _write_record(self, run: RunView, report: StepReport, cost: float | None) -> None:
        slots = self._slots(run, report.epoch)
        total = self._gradients.pop("", {})
        layers: dict[str, dict[str, Any]] = {}
        for path, _ in gemm_layers(run.model):
            layers[path] = {
                **self._gradients.get(path, {}),
                **self._oscillation(run, path),
                "slots": slots.get(path, {}),
                **({"operands": found} if (found := self._operands.get(path)) else {}),
            }
        record = {
            "step": report.step,
            "epoch": report.epoch,
            "loss": report.loss,
            "lr": report.lr,
            "per_second": report.per_second,
            **total,
            "recording_share": cost,
            "layers": layers,
        }
        self._write(run, record)
        if self.board is not None:
            self.board.add("telemetry", report.step, total)
            for path, values in layers.items():
                self.board.add(f"telemetry/{path}", report.step, _flat(values))

    def _write(self, run: RunView, record: dict[str, Any]) -> None:
        with (run.out / TELEMETRY).open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def _due(self, step: int) -> bool:
        return step == self._next

    def _after(self, step: int, seconds: float) -> int:
        """The step of the record after a step, when the training has taken so long."""
        if self.every != "auto":
            return (step // self.every + 1) * self.every
        if step == self._first:
            return step + FIRST
        a_step = self._spent.training(seconds) / (step - self._first)
        planned = self._spent.seconds * (self._records + 1) / self._records
        return max(step + 1, self._first + math.ceil(planned / (SHARE * a_step)))

    # --- operands -------------------------------------------------------------------------------

    def _slots(self, run: RunView, epoch: int) -> dict[str, dict[str, dict[str, Any]]]:
        """Shares by layer and slot since the last record; counts begin anew with an epoch."""
        now = dict(run.quant.telemetry)
        before = self._counts[1] if self._counts[0] == epoch else {}
        self._counts = (epoch, now)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (path, slot), stats in sorted(now.items(), key=lambda row: SLOTS.index(row[0][1])):
            old = before.get((path, slot), QuantStats())
            count = stats.count - old.count
            found.setdefault(path, {})[slot] = {
                "saturated": share(stats.saturated - old.saturated, count),
                "flushed": share(stats.flushed - old.flushed, count),
            }
            operand = run.quant.layers[path].operand(slot)
            if isinstance(operand, QuantSpec) and operand.rebased:
                changed = stats.rebase_changed - old.rebase_changed
                found[path][slot]["rebase_changed"] = share(changed, count)
        return found

    # --- gradients ------------------------------------------------------------------------------

    def _remember_buffers(self, run: RunView, step: int) -> None:
        """Copy the buffers before a step to be recorded: its forward pass will change them."""
        self._buffers = _buffers(run) if self._due(step) else []
        self._begun = time.perf_counter()

    def _compare_gradients(self, run: RunView, batch: Batch) -> dict[str, dict[str, float | None]]:
        """Norms of gradient and noise by layer, and of everything under the empty path."""
        grads = {path: p.grad for path, p in run.model.named_parameters()}
        exact = self._float_gradients(run, batch) if _rounds(run) else grads
        found: dict[str, list[Any]] = {}
        for path, grad in grads.items():
            other = exact[path]
            if grad is None or other is None:
                continue
            mine, theirs = grad.float().data, other.float().data
            with np.errstate(invalid="ignore", over="ignore"):
                parts = theirs, mine - theirs
            found[path] = [grad.backend.square_sum_multi_tensor([part]) for part in parts]
        sums: dict[str, list[float]] = {"": [0.0, 0.0]}
        for path, squares in found.items():  # read once all are launched
            for name in ("", path.rpartition(".")[0]):
                row = sums.setdefault(name, [0.0, 0.0])
                row[0], row[1] = row[0] + float(squares[0]), row[1] + float(squares[1])
        return {path: _norms(*row) for path, row in sums.items()}

    def _float_gradients(self, run: RunView, batch: Batch) -> dict[str, Any]:
        """The step's gradients without rounding; leaves everything as it was."""
        model = run.model
        grads = [(p, p.grad) for p in model.parameters()]
        contexts = [(layer, layer.quant) for _, layer in gemm_layers(model)]
        after = _buffers(run)
        try:
            _restore(self._buffers)
            for layer, _ in contexts:
                layer.quant = None
            probes = self._pass(run, batch)
            self._operands = {
                path: layer_operands(layer, probes.inputs[path], g, run.quant.layers[path])
                for path, layer in gemm_layers(model)
                if (g := probes.gradient(path)) is not None
            }
            return {path: p.grad for path, p in model.named_parameters()}
        finally:
            _restore(after)
            for layer, context in contexts:
                layer.quant = context
            for parameter, grad in grads:
                parameter.grad = grad

    def _pass(self, run: RunView, batch: Batch, scale: float = 1.0) -> Probes:
        """Forward and backward of a batch, as they are now, into new gradients."""
        for parameter in run.model.parameters():
            parameter.grad = None
        with probed(dict(gemm_layers(run.model))) as probes:
            for part in run.micro_batches.run(run.micro_batches.divide(batch)):
                loss = run.forward(part.batch, run.config.label_smoothing)[2]
                (loss * (part.weight * scale)).backward()
        return probes

    def _find_overflow(self, run: RunView) -> dict[str, str | None]:
        """The first layer of a skipped step whose values are not finite; the weights are as then.

        The step's random bits are drawn again; dropout masks are those of the next step.
        """
        assert self._batch is not None
        counts, buffers = dict(run.quant.telemetry), _buffers(run)
        grads = [(p, p.grad) for p in run.model.parameters()]
        step = run.quant.step
        try:
            run.quant.step = run.position.step - 1
            probes = self._pass(run, self._batch, self._scale)
            named = list(run.model.named_parameters())
            passes = (
                ("output", list(probes.outputs.items())),
                ("gradient of the output", [(p, probes.gradient(p)) for p in probes.zeros][::-1]),
                ("gradient of a weight", [(p.rpartition(".")[0], w.grad) for p, w in named][::-1]),
            )
            for place, tensors in passes:
                for path, tensor in tensors:
                    if tensor is not None and not tensor.backend.all_finite(tensor.data):
                        return {"layer": path, "where": place}
            return {"layer": None, "where": "between the layers"}
        finally:
            run.quant.step = step
            run.quant.load_telemetry(counts)
            _restore(buffers)
            for parameter, grad in grads:
                parameter.grad = grad

    # --- weights --------------------------------------------------------------------------------

    def _oscillation(self, run: RunView, path: str) -> dict[str, float]:
        """Shares of codes that changed since the last record, and that changed back.

        Codes are of a sample of the weight, under scales of the sample: those of a whole row or
        tensor, such as NVFP4's, may differ from the layer's.
        """
        layer = run.quant.layers[path]
        spec = layer.operand("fprop.w")
        if not isinstance(spec, QuantSpec) or spec.row.outliers:
            return {}
        weight = dict(gemm_layers(run.model))[path].weight
        matrix = weight.detach().dequantize().data.reshape(weight.shape[0], -1)
        rows = sample_rows(matrix, spec, weight.backend)
        spec = spec.replace(axis=1, rounding="nearest_even").resolve(2)
        q, _ = registry.get("cpu").quantize(rows, spec)
        element = spec.row.element
        codes = decode(unpack(q.codes, element.bits, coded_length(spec, q.shape)), element)
        before, self._codes[path] = self._codes.get(path), codes
        if before is None:
            return {}
        turn = np.sign(codes - before).astype(np.int8)
        last = self._directions.get(path, np.zeros_like(turn))
        self._directions[path] = np.where(turn != 0, turn, last)
        return {
            "changed": float((turn != 0).mean()),
            "turned": float(((turn != 0) & (turn == -last)).mean()),
        }


class _Spent:
    """Seconds spent inside, beside the training's own clock, which counts them too."""

    def __init__(self, training: float = 0.0) -> None:
        self.seconds, self._training, self._counted = 0.0, training, 0.0
        self._begun = training

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start

    def training(self, seconds: float) -> float:
        """What the training itself has taken, by its own clock; at least a microsecond."""
        return max(seconds - self._begun - self.seconds, 1e-6)

    def share(self, training: float, spent: float) -> float | None:
        """Of the training since the last call; None without any."""
        mine, whole = spent - self._counted, training - self._training
        self._training, self._counted = training, spent
        return mine / (whole - mine) if whole > mine else None


def _rounds(run: RunView) -> bool:
    """Whether any operand of the recipe is not float32."""
    layers = run.quant.layers.values()
    return any(layer.operand(slot) != "float32" for layer in layers for slot in SLOTS)


def _buffers(run: RunView) -> list[tuple[Any, Any]]:
    return [(buffer, buffer.data.copy()) for buffer in run.model.buffers()]


def _restore(buffers: list[tuple[Any, Any]]) -> None:
    for buffer, data in buffers:
        buffer.data = data.copy()


def _norms(square: float, noise: float) -> dict[str, float | None]:
    gradient, noise = math.sqrt(square), math.sqrt(noise)
    ratio = gradient / noise if noise else math.inf
    return {
        "gradient_norm": finite(gradient),
        "noise_norm": finite(noise),
        "gradient_over_noise": finite(ratio),
    }


def _flat(values: dict[str, Any]) -> dict[str, float | None]:
    """Flatten one layer's record: a name for each figure, those of its slots included."""
    flat = {name: value for name, value in values.items() if not isinstance(value, dict)}
    for slot, operand in values.get("operands", {}).items():
        flat[f"{slot}/noise"] = operand["noise"]["now"]
    for slot, shares in values["slots"].items():
        flat |= {f"{slot}/{name}": value for name, value in shares.items()}
    return flat


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
