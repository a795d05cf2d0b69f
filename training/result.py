"""The result of a run: as JSON, and as a summary on the terminal."""

from __future__ import annotations

import dataclasses
import platform
import resource
import statistics
import sys
from importlib import metadata
from typing import Any

from rich.console import Console

from extensor import ExTensor
from extensor.inspect import LayerComparison, SlotHealth, compare_layers, health_table, slot_health
from extensor.nn import apply_recipe

from .callbacks import RunView
from .callbacks.progress import percent
from .evaluation import evaluate
from .rundir import BEST, METRICS, RESULT, checkpoint_in
from .tables import known_mean

__all__ = ["build_result", "compare_with_float32", "peak_rss_mb", "print_summary", "slot_healths"]

HEALTH_BATCH, HEALTH_LABELS = 200, 4096
"""Inputs of a comparison with float32, and labels of texts; every layer's outputs are read."""


def peak_rss_mb() -> float:
    """The process's largest resident memory so far, in 10**6 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def build_result(run: RunView) -> dict[str, Any]:
    """Everything result.json says: plain JSON, None for what is not finite.

    ``loss`` and ``accuracy`` are of the test data after the last epoch; ``best_accuracy`` is of the
    test data after ``best_epoch``, which has the best ``best_by`` (None without validation data).
    ``diverged`` is None, or says why: the loss is not finite, gradients stayed so, or nothing was
    learnt.
    """
    config, history, task = run.config, run.history, run.task
    scores = run.scores if run.scores is not None else evaluate(run)
    last, best = history[-1], task.metric.best(history) if task.validates else None
    diverged = run.diverged
    if diverged is None and last.test_loss is None:
        diverged = "the test loss is not finite"
    if diverged is None:
        diverged = task.stuck(scores)
    seconds = [e.seconds for e in history]
    return {
        "model": config.model,
        "variant": config.variant,
        "recipe": config.recipe,
        "recipe_name": run.quant.recipe.name,
        "dataset": config.dataset,
        "seed": config.seed,
        "device": config.device,
        "accuracy": scores.accuracy,
        "top3": scores.accuracy_k,
        "loss": last.test_loss,
        "train_loss": last.train_loss,
        "train_accuracy": last.train_accuracy,
        "val_loss": last.val_loss,
        "val_accuracy": last.val_accuracy,
        "best_accuracy": None if best is None else best.test_accuracy,
        "best_epoch": None if best is None else best.epoch,
        "best_by": None if best is None else task.metric.chosen_by,
        "diverged": diverged,
        "stopped_early": run.stop_reason,
        "epochs": len(history),
        "steps": run.position.step,
        "skipped_steps": run.position.skipped,
        "saturated": known_mean([e.saturated for e in history]),
        "flushed": known_mean([e.flushed for e in history]),
        "seconds": run.position.seconds,
        "seconds_per_epoch": statistics.fmean(seconds),
        "unit": task.unit,
        "per_second": statistics.fmean(e.per_second for e in history),
        "waited": statistics.fmean(e.waited for e in history),
        "optimizer_bytes": run.optimizer.nbytes,
        "peak_rss_mb": peak_rss_mb(),
        "health": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in run.health],
        "parameters": run.parameter_count,
        **scores.details(),
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _version(name) for name in ("extensor", "numpy", "ml_dtypes")},
        },
    }


def slot_healths(run: RunView) -> tuple[SlotHealth, ...]:
    """What quantizing did to each operand of each layer since the epoch began."""
    switched = {(row.layer, row.slot) for row in run.scaler.report().slots if row.switched}
    return slot_health(run.quant, switched)


def compare_with_float32(run: RunView, isolated: bool = False) -> tuple[LayerComparison, int]:
    """Each layer beside the float32 model's, on some test inputs, and how many labels they have."""
    reference = run.fresh_model()
    reference.load_state_dict(run.model.state_dict())
    apply_recipe(reference, "fp32")
    windows = max(HEALTH_LABELS // max(run.config.context, 1), 1)
    drawn = next(run.task.test(min(HEALTH_BATCH, windows, run.task.eval_batch)))
    inputs = ExTensor.from_numpy(drawn.inputs).to(run.config.device)
    return compare_layers(run.model, reference, inputs, isolated=isolated), drawn.count


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed (used from its source)"


def print_summary(run: RunView, result: dict[str, Any], console: Console) -> None:
    """Print test loss and accuracy, each layer's quantization error, and the files' paths."""
    loss = "not finite" if result["loss"] is None else f"{result['loss']:.4f}"
    if result.get("perplexity") is not None:
        loss += f" (perplexity {result['perplexity']:.3f})"
    console.print(
        f"test loss {loss}, accuracy {percent(result['accuracy'])} (top 3: "
        f"{percent(result['top3'])}), after {result['steps']} steps, {result['seconds']:.1f} s"
    )
    if result["best_epoch"] is not None:
        console.print(
            f"best {result['best_by']}: epoch {result['best_epoch']}, test accuracy "
            f"{percent(result['best_accuracy'])}"
        )
    if result["skipped_steps"]:
        console.print(
            f"{result['skipped_steps']} steps were skipped for gradients that were not finite",
            style="yellow",
        )
    if result["stopped_early"] and not result["diverged"]:
        console.print(f"stopped early: {result['stopped_early']}")
    if result["diverged"]:
        console.print(
            diverged_text(result["diverged"], result["steps"], run.config.recipe), style="bold red"
        )
    _show_health(run, console)
    best = checkpoint_in(run.out, run.config, BEST).name
    for name, what in (
        (run.last.name, "checkpoint"),
        (best, "best checkpoint"),
        (RESULT, "result"),
        (METRICS, "per epoch"),
        ("tensorboard", "events"),
    ):
        if name != best or run.task.validates:
            console.print(f"{what:<16}{run.out / name}")
    console.print(f"{'a page about it':<16}extensor report {run.out}")


def diverged_text(why: str, steps: int, recipe: str) -> str:
    """What went wrong in a run, and what to try."""
    stuck = why.startswith("stuck at chance")
    title = f"NOTHING LEARNED in {steps} steps" if stuck else "DIVERGED"
    ways = ["more --epochs"] if stuck else []
    ways.append("a smaller --lr")
    if recipe not in ("mxfp4", "bf16", "fp32"):
        ways.append(
            "a recipe with rceil scales and the first and last layer in high precision, such as "
            "mxfp4"
        )
    return f"{title}: {why}; try {', or '.join(ways)}"


def _show_health(run: RunView, console: Console) -> None:
    """Print each layer's error against float32, and each operand's health in the last epoch."""
    if not run.health:
        return  # nothing is quantized to blocks
    layers, count = compare_with_float32(run)
    console.print(f"\nlayers beside float32, on {count} test {run.task.unit}\n{layers}")
    console.print(f"\noperands in the last epoch\n{health_table(run.health)}\n")
