"""`extensor ptq RUN`: a trained model under many schemes of post-training quantization.

Each scheme quantizes the run's checkpoint, with calibration inputs from its training data, and is
judged on its test data: the run's metric, the bytes of what is stored, and each layer's error on
the inputs that the float32 model gives it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from extensor import ExTensor
from extensor.inspect import compare_layers
from extensor.nn import Module, cast_weights, packed_layers, quantize_model, save_quantized
from extensor.quant.schemes import get_scheme

from .evaluation import evaluate
from .loop import Trainer, open_run
from .ptq_report import LayerResult, SchemeResult, write_results
from .records import finite
from .rundir import UsageError
from .tasks import Metric

__all__ = ["PtqArgs", "ptq"]

SCHEMES = (
    "int8,int8_percentile,int8_mse,int8_weights,int4_g32,int4_g128,int4_a8,fp8_tensor,fp8_channel,"
    "fp8_block8,fp8_block32,fp8_block128,mxfp8,mxfp6,mxint8,mxfp4,mxfp4_weights,nvfp4,nvfp4_4over6,"
    "nvfp4_weights"
)
LAYER_BATCH = 200
"""Test inputs that the layers are compared on."""
CALIBRATION_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class PtqArgs:
    """Flags of `ptq`: the run to quantize, and how."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, such as runs/lenet-digits-fp32-s0."""
    schemes: str = SCHEMES
    """Schemes, separated by commas; any name listed above."""
    calibration: int = 256
    """Training images (or windows of text) that choose the range of static activations."""
    keep: str = ""
    """Layers to leave in float32, separated by commas: paths with wildcards, or roles such as
    @first and @last. A scheme keeps a language model's head by itself."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for ptq.json, ptq.md and ptq.png; by default ptq in the run's folder."""
    save: bool = False
    """Also write every quantized model, as SCHEME.safetensors."""

    def __post_init__(self) -> None:
        if self.calibration < 1:
            raise UsageError(f"--calibration: expected 1 or more inputs, got {self.calibration}")
        try:
            for name in self.names:
                get_scheme(name)
        except ValueError as error:
            raise UsageError(f"--schemes: {error}") from error
        if not self.names or len(set(self.names)) < len(self.names):
            raise UsageError(f"--schemes: expected each scheme once, got {self.schemes!r}")

    @property
    def names(self) -> list[str]:
        """The schemes' names."""
        return [name.strip() for name in self.schemes.split(",") if name.strip()]

    @property
    def kept(self) -> list[str]:
        """The layers that stay in float32."""
        return [name.strip() for name in self.keep.split(",") if name.strip()]

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.out if self.out is not None else self.run / "ptq"


def ptq(args: PtqArgs, console: Console) -> None:
    """Quantize a run under each scheme, evaluate the results, print and write them.

    Raises:
        UsageError: if the folder holds no run with a checkpoint, or a scheme does not fit.
        CheckpointError: if the checkpoint is damaged.
        DataError: if the data set is missing or damaged.
    """
    trainer = open_run(args.run)
    float_model = trainer.fresh_model()
    float_model.load_state_dict(trainer.model.state_dict())
    cast_weights(float_model, "float32")
    metric, config = trainer.task.metric, trainer.config
    calibration = calibration_set(trainer, args.calibration)
    batch = next(trainer.task.test(min(LAYER_BATCH, trainer.task.eval_batch)))
    inputs = ExTensor.from_numpy(batch.inputs).to(config.device)
    dense = _result(trainer, "float32", "the run's weights as they are", float_model)
    rows: list[SchemeResult] = []
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        try:
            made = quantize_model(float_model, name, calibration, args.kept)
        except ValueError as error:
            raise UsageError(f"{args.run}: {name}: {error}") from error
        result = _result(trainer, name, get_scheme(name).doc, made)
        rows.append(_with_errors(result, made, float_model, inputs, dense, metric))
        console.print(f"{name:<16} {metric.show((result.value or math.nan) / metric.scale)}")
        if args.save:
            save_quantized(args.folder / f"{name}.safetensors", made, {"run": config.as_dict()})
    seen = f"{sum(len(x) for (x,) in calibration)} training {trainer.task.inputs}"
    settings = {"seen": seen, "calibration": args.calibration, "keep": args.kept}
    write_results(args.folder, config, metric, [dense, *rows], settings, console)


def calibration_set(trainer: Trainer, count: int) -> list[tuple[ExTensor, ...]]:
    """The first inputs of the run's training order, as they are without augmentation.

    Raises:
        UsageError: if there are fewer.
    """
    config = trainer.config
    task = type(trainer.task)(dataclasses.replace(config, augment="none"))
    parts, left = [], count
    for batch in task.training(1, 0):
        parts.append(batch.inputs[:left])
        left -= len(parts[-1])
        if left == 0:
            break
    if left:
        raise UsageError(
            f"--calibration: expected at most the {count - left} training {task.inputs} of an "
            f"epoch, got {count}"
        )
    whole = np.concatenate(parts)
    cuts = range(0, count, CALIBRATION_BATCH)
    return [
        (ExTensor.from_numpy(whole[i : i + CALIBRATION_BATCH]).to(config.device),) for i in cuts
    ]


def nbytes(model: Module) -> int:
    """Bytes of every parameter and buffer, a shared one once."""
    tensors = [t for _, t in model.named_parameters()] + [t for _, t in model.named_buffers()]
    return sum(t.nbytes for t in tensors)


def _result(trainer: Trainer, name: str, doc: str, model: Module) -> SchemeResult:
    """A model's metric, loss and perplexity on the test data, and its bytes."""
    trainer.model = model
    scores, metric = evaluate(trainer), trainer.task.metric
    value = finite(float(getattr(scores, metric.key)))
    return SchemeResult(
        scheme=name,
        doc=doc,
        value=None if value is None else metric.scale * value,
        gap=0.0,
        loss=finite(scores.loss),
        perplexity=scores.perplexity,
        nbytes=nbytes(model),
        bits_per_weight=32.0,
        sqnr_db=None,
        layers=[],
    )


def _with_errors(
    result: SchemeResult,
    made: Module,
    reference: Module,
    inputs: ExTensor,
    dense: SchemeResult,
    metric: Metric,
) -> SchemeResult:
    """A scheme's result with its gap to the float32 model, and each layer's error beside it."""
    *rows, output = compare_layers(made, reference, inputs, isolated=True).rows
    by_path = {row.layer: row for row in rows}
    layers = []
    for path, layer in packed_layers(made).items():
        weight, row = vars(layer)["weight"], by_path[path]
        errors = finite(row.cosine), _decibels(row.sqnr_db), row.saturated, row.flushed
        layers.append(LayerResult(path, row.kind, weight.size, weight.nbytes, *errors))
    value, before = result.value, dense.value
    return dataclasses.replace(
        result,
        gap=None if value is None or before is None else metric.difference(value, before),
        bits_per_weight=8 * sum(r.nbytes for r in layers) / sum(r.weights for r in layers),
        sqnr_db=_decibels(output.sqnr_db),
        layers=layers,
    )


def _decibels(value: float) -> float | None:
    """Decibels as JSON: an exact layer counts as 200 dB, NaN becomes None."""
    return finite(min(value, 200.0))
