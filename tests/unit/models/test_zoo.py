"""The image zoo at CIFAR-10 shapes: sizes against published counts, shapes, a step, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.io import load_checkpoint, save_checkpoint
from extensor.models.googlenet.configs import STAGES
from extensor.models.googlenet.model import InceptionModule
from extensor.models.vision import ConvUnits
from extensor.nn import apply_recipe, gemm_layers, init

ZOO = ("alexnet", "vgg", "resnet", "mobilenet", "googlenet")
VARIANTS = [
    (name, variant)
    for name in ZOO
    for variant in __import__(f"extensor.models.{name}.configs", fromlist=["CONFIGS"]).CONFIGS
]


def count(model: Any) -> int:
    return sum(p.size for p in model.parameters())


def make(name: str, variant: str | None = None, seed: int = 0, **changes: Any) -> Any:
    config = models.config(name, variant, **changes)
    return models.build(name, config, np.random.default_rng(seed))


def narrow(name: str, variant: str | None = None, **changes: Any) -> Any:
    """A sixteenth of the width: a step takes milliseconds."""
    return make(name, variant, width=1 / 16, **changes)


# torchvision's counts for ImageNet, and what 32x32 images and ten classes change.
COUNTS = {
    # 11x11 kernels become 3x3; 6x6 places become 4x4; 1000 classes become 10
    ("alexnet", "alexnet"): 61_100_840
    - 64 * 3 * (121 - 9)
    - 4096 * 256 * (36 - 16)
    - 990 * (4096 + 1),
    # three linear layers of 25088-4096-4096-1000 become 512-512-512-10
    ("vgg", "vgg16"): 138_357_544
    - (25088 * 4096 + 4096 * 4096 + 4096 * 1000 + 2 * 4096 + 1000)
    + (2 * 512 * 512 + 512 * 10 + 2 * 512 + 10),
    # besides, the norm's two numbers a channel come in the place of the bias
    ("vgg", "vgg16_bn"): 138_357_544
    - (25088 * 4096 + 4096 * 4096 + 4096 * 1000 + 2 * 4096 + 1000)
    + (2 * 512 * 512 + 512 * 10 + 2 * 512 + 10)
    + (2 - 1) * (2 * 64 + 2 * 128 + 3 * 256 + 6 * 512),
    ("vgg", "vgg11_bn"): 132_863_336
    - (25088 * 4096 + 4096 * 4096 + 4096 * 1000 + 2 * 4096 + 1000)
    + (2 * 512 * 512 + 512 * 10 + 2 * 512 + 10)
    + (2 - 1) * (64 + 128 + 2 * 256 + 4 * 512),
    # 7x7 kernels become 3x3
    ("resnet", "resnet18"): 11_689_512 - 64 * 3 * (49 - 9) - 990 * (512 + 1),
    ("resnet", "resnet34"): 21_797_672 - 64 * 3 * (49 - 9) - 990 * (512 + 1),
    # Keras' count of what is trained, which is the paper's 4.2 million
    ("mobilenet", "mobilenet"): 4_231_976 - 990 * (1024 + 1),
    # torchvision has 3x3 kernels where the paper has 5x5; its 7x7 kernels become 3x3
    ("googlenet", "googlenet_bn"): 6_624_904
    + (25 - 9) * sum(w.five_in * w.five for stage in STAGES for w in stage.values())
    - 64 * 3 * (49 - 9)
    - 990 * (1024 + 1),
}


@pytest.mark.parametrize(("name", "variant"), COUNTS)
def test_sizes_follow_from_the_published_ones(name: str, variant: str) -> None:
    assert count(make(name, variant)) == COUNTS[name, variant]


def test_vgg_with_one_linear_layer_has_its_well_known_size() -> None:
    """14,728,266 is the count of the usual CIFAR-10 VGG-16, whose convolutions keep biases."""
    assert count(make("vgg", hidden=())) + 4224 == 14_728_266


PAPER_KILO = {"a3": 159, "b3": 380, "b4": 437}
"""The other rows' sizes do not follow from their own widths (4c: 463, its widths give 497)."""


def test_inception_modules_have_the_sizes_of_the_papers_table() -> None:
    """Column "params" of table 1 (arXiv 1409.4842), in units of 1,024, without biases."""
    rng, width = np.random.default_rng(0), 192
    for name, widths in [pair for stage in STAGES for pair in stage.items()]:
        module = InceptionModule(width, widths, ConvUnits(init.xavier_uniform, rng, norm=False))
        kernels = sum(p.size for p in module.parameters() if p.ndim == 4)
        assert abs(kernels / 1024 - PAPER_KILO.get(name, kernels / 1024)) <= 1, name
        width = widths.one + widths.three + widths.five + widths.pool
    assert width == 1024


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_images_become_logits_and_every_weight_gets_a_gradient(name: str, variant: str) -> None:
    model = narrow(name, variant, classes=7)
    x = np.random.default_rng(1).standard_normal((4, 3, 32, 32)).astype(np.float32)
    logits = model(et.from_numpy(x))
    assert logits.shape == (4, 7)
    (logits * et.from_numpy(np.arange(28, dtype=np.float32).reshape(4, 7))).sum().backward()
    silent = [path for path, p in model.named_parameters() if p.grad is None]
    assert not silent
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("size", [16, 28, 33])
def test_other_sizes_of_images(name: str, size: int) -> None:
    model = narrow(name, in_channels=1, image_size=size).eval()
    x = et.from_numpy(np.ones((2, 1, size, size), np.float32))
    assert model(x).shape == (2, 10)


@pytest.mark.parametrize("name", ZOO)
def test_a_checkpoint_brings_the_model_back(name: str, tmp_path: Path) -> None:
    x = et.from_numpy(np.random.default_rng(3).standard_normal((2, 3, 32, 32)).astype(np.float32))
    one, two = narrow(name), narrow(name, seed=1)
    one(x)  # moves the running statistics
    save_checkpoint(tmp_path / "a", one.state_dict(), {})
    two.load_state_dict(load_checkpoint(tmp_path / "a").tensors)
    assert np.array_equal(one.eval()(x).numpy(), two.eval()(x).numpy())


@pytest.mark.parametrize("name", ZOO)
def test_recipes_reach_every_product(name: str) -> None:
    """As many layers under a recipe as there are weights with two axes or more."""
    model = narrow(name)
    weights = [p for p in model.parameters() if p.ndim >= 2]
    assert len(list(gemm_layers(model))) == len(weights)
    state = apply_recipe(model, "mxfp4_all")
    x = np.random.default_rng(1).standard_normal((2, 3, 32, 32)).astype(np.float32)
    model(et.from_numpy(x)).square().sum().backward()
    met = {path for path, slot in state.telemetry if slot == "wgrad.g"}
    assert met == state.layers.keys()
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())


def test_initial_weights_are_those_of_the_papers() -> None:
    alexnet = make("alexnet", width=0.25)
    assert alexnet.features.conv2.conv.weight.numpy().std() == pytest.approx(0.01, rel=0.02)
    biases = {p: v.numpy() for p, v in alexnet.named_parameters() if p.endswith("bias")}
    ones = [path for path, value in biases.items() if (value == 1).all()]
    assert [path.split(".")[1] for path in ones] == ["conv2", "conv4", "conv5", "fc6", "fc7"]
    assert all((biases[path] == 0).all() for path in set(biases) - set(ones))
    googlenet = dict(make("googlenet", "googlenet", width=0.25).named_parameters())
    units = [p.numpy() for path, p in googlenet.items() if path.endswith("conv.bias")]
    assert units and all((bias == np.float32(0.2)).all() for bias in units)
    resnet = make("resnet", width=0.25)
    weight = getattr(resnet.stages, "3")[1].conv2.conv.weight.numpy()
    assert weight.std() == pytest.approx(np.sqrt(2 / (128 * 9)), rel=0.02)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("alexnet", {"image_size": 15}, "image_size: expected 16 or more, got 15"),
        ("alexnet", {"dropout": 1.0}, r"p: \w+ a number in \[0, 1\)"),
        ("resnet", {"width": 0.0}, "a width above 0"),
        ("resnet", {"blocks": (2, 2)}, "for each stage"),
        ("vgg", {"stages": ()}, "stages: expected"),
        ("vgg", {"hidden": (0,)}, "hidden: expected"),
        ("mobilenet", {"stem": 0}, "channels and strides of 1 or more"),
        ("googlenet", {"classes": 0}, "classes of 1 or more"),
    ],
)
def test_bad_configurations_are_refused(name: str, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **changes)


def test_the_least_of_each_size_is_allowed() -> None:
    assert count(narrow("resnet", blocks=(1, 1, 1, 1))) < count(narrow("resnet"))
    assert count(make("resnet", blocks=(1,), channels=(1,))) > 0


def test_what_a_vgg_refuses() -> None:
    for changes in ({"stages": ()}, {"stages": ((64,), ())}, {"stages": ((64, 0),)}):
        with pytest.raises(ValueError, match="VGG: stages: expected channels of 1 or more"):
            models.config("vgg", **changes)
    for hidden, fits in (((), True), ((1,), True), ((4, 0), False)):
        if fits:
            assert models.config("vgg", hidden=hidden).hidden == hidden
        else:
            with pytest.raises(ValueError, match="VGG: hidden: expected widths of 1 or more"):
                models.config("vgg", hidden=hidden)
