"""The small vision models: shapes, sizes, configurations."""

from __future__ import annotations

import numpy as np
import pytest

from extensor import ExTensor, models
from extensor.training.runs import RUNS


def parameters(model: object) -> int:
    return sum(p.size for p in model.parameters())


def test_lenet5_has_its_61706_weights() -> None:
    lenet = models.build("lenet", models.config("lenet"), np.random.default_rng(0))
    assert parameters(lenet) == 61706
    assert [path for path, m in lenet.named_modules() if hasattr(m, "quant")] == [
        "conv1",
        "conv2",
        "fc1",
        "fc2",
        "fc3",
    ]


@pytest.mark.parametrize(
    ("name", "variant"), [("lenet", "lenet5"), ("mlp", "mlp"), ("mlp", "wide"), ("mlp", "linear")]
)
def test_images_become_logits_and_every_weight_gets_a_gradient(name: str, variant: str) -> None:
    config = models.config(name, variant, in_channels=3, image_size=32, classes=7)
    model = models.build(name, config, np.random.default_rng(0))
    x = np.random.default_rng(1).standard_normal((2, 3, 32, 32)).astype(np.float32)
    logits = model(ExTensor.from_numpy(x))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None and np.any(p.grad.numpy()) for p in model.parameters())


def test_the_smallest_images_of_lenet() -> None:
    model = models.build("lenet", models.config("lenet", image_size=12), np.random.default_rng(0))
    assert model(ExTensor(np.ones((2, 1, 12, 12), np.float32))).shape == (2, 10)


def test_weights_depend_on_the_generator_alone() -> None:
    one, two, other = (
        models.build("lenet", models.config("lenet"), np.random.default_rng(seed)).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(np.array_equal(one[k], two[k]) for k in one)
    assert not any(np.array_equal(one[k], other[k]) for k in one)


def test_every_model_of_runs_is_there() -> None:
    assert {row.model for row in RUNS.values()} <= set(models.names())
    assert all(name == row.model for name, row in RUNS.items())


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'lenet'"):
        models.config("lennet")
    with pytest.raises(ValueError, match="no variant of lenet named 'lenet7'; did you mean"):
        models.config("lenet", "lenet7")
    with pytest.raises(ValueError, match="expected images of 12x12 or more, got 8"):
        models.config("lenet", image_size=8)
    with pytest.raises(ValueError, match="expected sizes of 1 or more"):
        models.config("mlp", hidden=(0,))
