"""What notebooks show: escaped, without scripts, and read from a few values."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.autograd import display
from extensor.notebook import bars, card, table

FORMATS = list(et.FORMATS)


class Checked(HTMLParser):
    """Every tag is closed, in order; nothing is loaded or run."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(markup)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "link", "img", "iframe"), tag
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attributes)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def shown(thing: object) -> str:
    """The text of what a notebook shows."""
    return " ".join(Checked(thing._repr_html_()).text)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMATS)
def test_blocked_tensors(name: str) -> None:
    q = et.randn(6, 70, seed=0).quantize(et.QuantSpec(name))
    text = shown(q)
    for part in ("(6, 70)", q.dtype.name, f"{q.nbytes:,}", "of all 420 values"):
        assert part in text
    bits = re.search(r"bits per value\s+([\d.]+)", text)
    assert bits is not None and float(bits[1]) == pytest.approx(q.nbytes / 420 * 8, rel=1e-3)
    if name != "outlier":
        for value in q.dequantize().numpy()[:4, :8].reshape(-1):
            assert f"{value:.4g}" in text.split()


def test_scales_are_powers_of_two() -> None:
    q = et.full((1, 32), 0.25).to_mxfp4()  # 4 times 2^-4
    assert re.search(r">2<sup[^>]*>-4</sup></td>", q._repr_html_())
    assert "NaN" in shown(et.full((1, 32), float("nan")).to_mxfp4())


def test_a_histogram_says_how_many_values_it_counts() -> None:
    assert "of the first 4,096 of 65,536 values" in shown(et.randn(256, 256, seed=0).to_mxfp4())


def test_empty_and_odd_tensors() -> None:
    for x in (et.zeros((0, 32)), et.ExTensor(1.0), et.zeros((0,)), et.ones((2, 3), "complex64")):
        shown(x)
    shown(et.zeros((0, 32)).to_mxfp4())
    assert "requires_grad" in shown(et.ones((2,), requires_grad=True))


@pytest.mark.parametrize(
    "shape", [(65,), (8, 9), (7, 30), (6, 30), (1, 100, 1), (5, 5, 5), (3, 20, 9, 8), (100, 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_edges_print_as_the_whole_array_does(shape: tuple[int, ...], dtype: str) -> None:
    x = (et.randn(*shape, seed=0) * 10).to(dtype)
    host = x.numpy()
    host = host.astype(np.float32) if host.dtype.kind == "V" else host
    whole = np.array2string(host, threshold=64, edgeitems=3, precision=4, prefix="  ")
    assert repr(x).endswith(f"\n  {whole})")


@pytest.mark.host
def test_a_large_dense_tensor_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def to_host(array: np.ndarray) -> np.ndarray:
        copied.append(array.size)
        return array

    monkeypatch.setattr(display, "to_host", to_host)
    x = et.zeros((300, 40, 50))
    shown(x)
    assert 0 < sum(copied) < 1000


def test_everything_else_shows_a_table() -> None:
    model = nn.Sequential(hidden=nn.Linear(32, 64, rng=0), act=nn.ReLU(), last=nn.Linear(64, 4))
    nn.apply_recipe(model, "mxfp4_all")
    text = shown(model)
    for part in ("hidden", "Linear(32, 64)", "mxfp4 1x32 rceil", "2,372", "9,488"):
        assert part in text
    reference = nn.Sequential(hidden=nn.Linear(32, 64, rng=0), act=nn.ReLU(), last=nn.Linear(64, 4))
    reference.load_state_dict(model.state_dict())
    comparison = et.compare_layers(model, reference, et.randn(8, 32, seed=0))
    assert "SQNR dB" in shown(comparison)
    assert repr(comparison).startswith("LayerComparison(3 rows, lowest ")
    assert "@first" in shown(et.RECIPES["mxfp4"]) and "wgrad.g" in shown(et.RECIPES["mxfp4"])
    optimizer = et.optim.SGD(
        [{"params": [model.hidden.weight]}, {"params": [model.last.weight], "lr": 0.5}], lr=0.1
    )
    assert "0.5" in shown(optimizer) and "2 groups" in repr(optimizer)
    assert "lr=0.1" in repr(et.optim.SGD(model.parameters(), lr=0.1))


def test_large_models_show_their_first_layers() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, rng=0) for _ in range(130)])
    assert "and 30 more layers" in shown(model)


def test_reprs_are_short() -> None:
    state = nn.apply_recipe(nn.Linear(32, 32), "mxfp4")
    assert repr(state) == (  # mxfp4 leaves the first and the last layer alone
        "RecipeState(recipe='mxfp4', seed=0, step=0, layers=1, 1 not quantized: '')"
    )
    layers = [nn.Linear(32, 32, rng=0) for _ in range(9)]
    assert "layers=9, 2 not quantized: '0', '8')" in repr(
        nn.apply_recipe(nn.Sequential(*layers), "mxfp4")
    )
    assert repr(nn.apply_recipe(nn.Sequential(*layers), "bf16")).endswith(", 9 not quantized)")
    spec = et.QuantSpec("mxfp4", scale_rule="rceil", transform=et.Hadamard(32))
    assert eval(repr(spec), {"QuantSpec": et.QuantSpec, "Hadamard": et.Hadamard}) == spec
    assert repr(et.QuantSpec("mxfp4")) == "QuantSpec(format='mxfp4')"
    assert len(repr(et.RECIPES["mxfp4"])) < 200


def test_text_is_escaped() -> None:
    evil = "<script>alert('x')</script>&"
    parts = table((evil, "b"), [(evil, 1)], evil), bars(evil, [(evil, 0.5)])
    text = "".join(Checked(card(evil, [(evil, evil)], *parts)).text)
    assert text.count(evil) == 9  # a label and a tooltip for the bar
    assert evil in shown(et.inspect.Table((evil,), ((evil,),)))

    class Named(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter([1.0])

        def extra_repr(self) -> str:
            return evil

    assert evil in shown(Named())
    recipe = et.Recipe(evil, evil, et.RECIPES["mxfp4"].layers)
    assert evil in shown(recipe)
