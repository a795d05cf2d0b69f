"""How the documentation site is built: ``sphinx-build -W docs docs/_build``.

Pages are the Markdown files beside this one; the API reference is written from the package by
``_ext/reference.py``; ``gallery/plot_*.py`` are run, and their figures shown beside their source.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import extensor  # noqa: E402 - the checkout's, by the path above

project = "extensor"
author = "the extensor authors"
project_copyright = "the extensor authors, Apache-2.0"
release = version = extensor.__version__
html_title = f"extensor {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "reference",
]
exclude_patterns = ["_build", "gallery/*"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = False

myst_heading_anchors = 3
suppress_warnings = ["config.cache"]

# With the network, `sphinx-build -t online` also links numpy's names; a build without it is quiet.
if tags.has("online"):  # type: ignore[name-defined]  # noqa: F821
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {"numpy": ("https://numpy.org/doc/stable", None)}

# A copied block leaves out prompts and what is shown as its result.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # one backtick, as in Markdown

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 60,
    "image_scrapers": ("matplotlib",),
}

html_theme = "furo"
pygments_dark_style = "github-dark"
html_theme_options = {
    "source_view_link": "",
    "light_css_variables": {"color-brand-primary": "#3f7fbf", "color-brand-content": "#3f7fbf"},
}
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
