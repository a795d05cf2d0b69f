"""Recipes in TOML files: written and read back equal, with a parent, refused with a place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extensor import nn
from extensor.nn.recipe import apply_recipe
from extensor.quant import Hadamard, QuantSpec
from extensor.quant.recipe import (
    SLOTS,
    Gemm,
    LayerRecipe,
    OperandRule,
    Recipe,
    Rule,
    SavedRule,
)
from extensor.quant.recipe_file import MOST_BYTES, parse_recipe, recipe_toml
from extensor.quant.recipes import RECIPES, get_recipe, parse_named, read_recipe

ROOT = Path(__file__).resolve().parents[3]


def parsed(text: str) -> Recipe:
    return parse_recipe(text, "mine", get_recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_back_equal(name: str) -> None:
    assert parsed(recipe_toml(RECIPES[name])) == RECIPES[name]


def test_everything_that_a_recipe_holds_reads_back_equal() -> None:
    mixed = RECIPES["nvfp4_nvidia"].layers.with_slot("fprop.w", "bfloat16")
    spec = QuantSpec("mxfp8_e4m3", rounding="stochastic", rbits=8)
    recipe = Recipe(
        'a"b',
        'a backslash \\, a quote ", a DEL \x7f, an é and a \N{GRINNING FACE}',
        LayerRecipe(Gemm("float32", spec, 0.5), *[mixed.dgrad] * 2),
        rules=(Rule("*.down", mixed), Rule("@head", LayerRecipe.uniform("float32"))),
        adaptive_scale_rule=True,
        activations="bfloat16",
        saved_input="input",
        saved=(SavedRule("*", spec, "gate"), SavedRule("blocks.*", "mxfp6")),
        operands=(OperandRule("*", "fprop.*", RECIPES["quartet"].layers),),
    )
    assert parsed(recipe_toml(recipe)) == recipe


@given(
    st.lists(
        st.sampled_from(
            [
                "float32",
                "bfloat16",
                QuantSpec("mxfp4"),
                QuantSpec("mxfp4", tile=(4, 16), rounding="stochastic"),
                QuantSpec("int8", tile="channel", symmetric=False),
                QuantSpec("fp8_e4m3", tile="tensor", statistic="percentile", percentile=99.5),
                QuantSpec("int4", tile=(1, 32), minimum=True, super_block=256),
            ]
        ),
        min_size=6,
        max_size=6,
    )
)
def test_any_six_operands_read_back_equal(operands: list[QuantSpec | str]) -> None:
    layers = LayerRecipe.uniform("float32")
    for slot, operand in zip(SLOTS, operands, strict=True):
        layers = layers.with_slot(slot, operand)  # type: ignore[arg-type]
    recipe = Recipe("mine", "", layers)
    assert parsed(recipe_toml(recipe)) == recipe


def test_a_file_holds_only_what_differs_from_its_parent() -> None:
    mine = parsed(
        """
        parent = "mxfp4"
        activations = "bfloat16"
        [layers]
        x = { block_size = 64 }
        [layers.wgrad]
        x = { transform = { size = 32, signs = "none" } }
        g = { rounding = "nearest_even", transform = { size = 32, signs = "none" } }
        """
    )
    parent = RECIPES["mxfp4"]
    x, g = parent.layers.slot("fprop.x"), parent.layers.slot("dgrad.g")
    assert isinstance(x, QuantSpec) and isinstance(g, QuantSpec)
    wide, turned = x.replace(tile=(1, 64)), Hadamard(32, "none")
    assert mine.layers.slot("fprop.x") == wide
    assert mine.layers.slot("wgrad.x") == wide.replace(transform=turned)
    assert mine.layers.slot("wgrad.g") == g.replace(rounding="nearest_even", transform=turned)
    for slot in ("fprop.w", "dgrad.g", "dgrad.w"):
        assert mine.layers.slot(slot) == parent.layers.slot(slot)
    assert (mine.name, mine.rules, mine.activations) == ("mine", parent.rules, "bfloat16")


def test_an_operand_with_a_format_takes_nothing_from_its_parent() -> None:
    mine = parsed('parent = "mxfp4"\n[layers]\ng = { format = "mxfp8_e5m2" }')
    assert mine.layers.slot("wgrad.g") == QuantSpec("mxfp8_e5m2")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layers = = 3", "expected TOML, got"),
        ("a = " + "[" * 5000, "nested too deep|expected TOML"),
        ("", "expected a parent"),
        ('parent = "mxpf4"', "no recipe named 'mxpf4'; did you mean 'mxfp4'"),
        ('parent = "mxfp4"\nlayer = 3', "no key named 'layer'; did you mean 'layers'"),
        ('parent = "mxfp4"\nname = 3', "name: expected text, got 3"),
        ('parent = "mxfp4"\nadaptive_scale_rule = 1', "adaptive_scale_rule: expected a bool"),
        ('parent = "mxfp4"\nactivations = "int8"', "no activations named 'int8'"),
        ('[layers]\nx = "bfloat16"\ng = "bfloat16"', r"layers.fprop.w: no operand"),
        ('parent = "mxfp4"\n[layers]\nx = 3', "layers.x: expected a table such as"),
        ('parent = "mxfp4"\n[layers]\nx = "int8"', "layers.x: no float dtype named 'int8'"),
        ('parent = "bf16"\n[layers]\nx = { tile = [1, 64] }', "layers.x: expected a format"),
        ('parent = "mxfp4"\n[layers]\nx = { axis = 0 }', "layers.x: no key named 'axis'"),
        ('parent = "mxfp4"\n[layers]\nx = { tile = [1, 6.5] }', "layers.x: tile: expected"),
        (
            'parent = "mxfp4"\n[layers]\nx = { tile = [1, 64], block_size = 64 }',
            "layers.x: expected tile or block_size",
        ),
        (
            'parent = "mxfp4"\n[layers.wgrad]\nx = { transform = { step = 3 } }',
            "layers.wgrad.x.transform: no key named 'step'",
        ),
        (
            'parent = "mxfp4"\n[layers.wgrad]\nx = { transform = { size = 32 } }',
            "layers.wgrad: a transform cancels only if both",
        ),
        ('parent = "mxfp4"\n[layers.fprop]\ng = "bfloat16"', "layers.fprop: no key named 'g'"),
        ('parent = "mxfp4"\n[layers]\nfprop = 3', "layers.fprop: expected a table"),
        ('parent = "mxfp4"\n[layers.fprop]\noutput_scale = nan', "output_scale: expected a finite"),
        (
            f'parent = "mxfp4"\n[layers.fprop]\noutput_scale = {"9" * 400}',
            "output_scale: expected a finite",
        ),
        (
            'parent = "mxfp4"\n[layers]\nx = { eden = [] }',
            r"layers.x: eden: expected True or False",
        ),
        ('parent = "mxfp4"\n[layers]\nrequantize = 1', "layers.requantize: expected true or false"),
        ('parent = "bf16"\n[layers]\nrequantize = true', "layers: clip_gradient and requantize"),
        ('parent = "mxfp4"\n[[rules]]\nmatch = "@first"', r"rules\[0\]: expected use"),
        (
            'parent = "mxfp4"\n[[rules]]\nmatch = "@frist"\nuse = "bf16"',
            "no role named '@frist'; did you mean '@first'",
        ),
        (
            'parent = "mxfp4"\n[[rules]]\nmatch = "a"\nuse = { x = "float32" }',
            r"rules\[0\].use.fprop.w: no operand",
        ),
        ('parent = "mxfp4"\n[[saved]]\nuse = "mxfp5"', "no saved format named 'mxfp5'"),
        ('parent = "mxfp4"\n[[saved]]\nuse = { format = 4 }', r"saved\[0\].use: format"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parsed(text)


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1,048,576 bytes"):
        parsed("#" * (MOST_BYTES + 1))


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "m\x1b[31m.toml"
    with pytest.raises(ValueError, match=r"m\\x1b\[31m.toml: cannot be read: No such file"):
        read_recipe(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"m\\x1b\[31m.toml: .*UTF-8"):
        read_recipe(path)
    path.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        read_recipe(path)


def test_a_name_of_the_library_stands_for_its_own_recipe() -> None:
    assert parse_named(recipe_toml(RECIPES["mxfp4"]), "x") == RECIPES["mxfp4"]
    with pytest.raises(ValueError, match="another recipe of the library; .* 'mxfp4_mine'"):
        parse_named('parent = "mxfp4_all"', "mxfp4")
    with pytest.raises(ValueError, match="another recipe of the library"):
        parse_named('parent = "mxfp4_all"', "mxfp8")
    with pytest.raises(ValueError, match="expected letters, digits.*give one in the file"):
        parse_named('parent = "mxfp4_all"\nname = "a/b"', "mine")


def test_a_file_serves_wherever_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('parent = "mxfp4_all"\n[layers]\nx = { block_size = 16 }')
    state = apply_recipe(nn.Sequential(nn.Linear(32, 32)), str(path))
    assert state.recipe.name == "mine"
    assert state.recipe == dataclasses.replace(read_recipe(path))


def test_the_example_of_the_page_is_a_recipe() -> None:
    page = (ROOT / "docs" / "how-to" / "add-a-recipe.md").read_text(encoding="utf-8")
    wide = parsed(page.partition("```toml\n")[2].partition("```")[0])
    x = wide.layers.slot("wgrad.x")
    assert isinstance(x, QuantSpec)
    assert (x.tile, x.transform) == ((1, 64), Hadamard(32, "random"))
    assert [rule.match for rule in wide.rules] == ["@last"]


def test_a_file_of_windows_reads_alike(tmp_path: Path) -> None:
    text = 'parent = "mxfp4"\n[layers]\nx = { block_size = 64 }\n'
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode())
    plain = read_recipe(path)
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_recipe(path) == plain
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ValueError, match=r"mine.toml: expected text in UTF-8.*save it as UTF-8"):
        read_recipe(path)


def test_files_in_a_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    base, mine = tmp_path / "sub" / "base.toml", tmp_path / "sub" / "mine.toml"
    base.write_text('parent = "mxfp4"\n[layers]\nx = { block_size = 64 }')
    mine.write_text('parent = "base.toml"\n[[rules]]\nmatch = "a"\nuse = "base.toml"')
    monkeypatch.chdir(tmp_path)
    recipe = get_recipe("sub/mine.toml")
    assert recipe.layers == read_recipe(base).layers == recipe.rules[0].use


@pytest.mark.parametrize("way", ['parent = "b.toml"', '[[rules]]\nmatch = "a"\nuse = "./b.toml"'])
def test_a_file_that_names_itself_is_refused(tmp_path: Path, way: str) -> None:
    (tmp_path / "a.toml").write_text(way if "parent" in way else f'parent = "mxfp4"\n{way}')
    (tmp_path / "b.toml").write_text('parent = "a.toml"')
    with pytest.raises(ValueError, match=r"b.toml: .*names itself"):
        read_recipe(tmp_path / "b.toml")
