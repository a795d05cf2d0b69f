"""The page's template, whose values are escaped unless they are marked as HTML."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

__all__ = ["render"]

FOLDER = Path(__file__).parent


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    environment.globals["inf"] = math.inf
    return environment.get_template("page.html")


def render(**values: Any) -> str:
    """Fill the template."""
    style = Markup((FOLDER / "page.css").read_text(encoding="utf-8"))
    return _template().render(style=style, **values)
