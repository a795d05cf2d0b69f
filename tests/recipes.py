"""The recipes that a test of a layer's operands needs: each way to quantize a layer once."""

from __future__ import annotations

from extensor.quant.recipes import RECIPES

__all__ = ["DISTINCT"]

_by_rules = sorted(RECIPES, key=lambda name: bool(RECIPES[name].rules), reverse=True)
_of_layers = {RECIPES[name].layers: name for name in _by_rules}  # without rules, if there is one
DISTINCT = [name for name in RECIPES if name in {"mxfp4", *_of_layers.values()}]
"""Recipes that differ in the layers which their rules choose are alike here, but for ``mxfp4``."""
