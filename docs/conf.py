"""How Sphinx makes a site of these pages: Markdown as GitHub reads it, and an API reference of what packages
export. `make docs` builds it into build/site.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

import kvtier

REPOSITORY = "https://github.com/kvtier/kvtier"

project, author, version = "kvtier", "kvtier contributors", kvtier.__version__
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
default_role = "code"  # docstrings have `names` in single backticks
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
suppress_warnings = ["misc.highlighting_failure"]  # JSON with ... in it is for people

html_theme = "furo"
html_title = f"kvtier {version}"
html_copy_source = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}


def link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links to files beside docs/ lead to the repository: they are not pages of the site."""
    if "/" not in page:
        source[0] = source[0].replace("](../", f"]({REPOSITORY}/blob/main/")


def as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring in place into what Sphinx reads: an indented block is code."""
    was_indented = False
    for at in reversed(range(len(lines))):
        indented = lines[at].startswith("    ")
        if was_indented and lines[at] and not indented and not lines[at + 1]:
            lines[at + 1 : at + 1] = ["", "::"]
        was_indented = indented or (was_indented and not lines[at])
    lines[:] = [line.replace("Alias for field number", "Field") for line in lines]


def skip_tests(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the tests of contract suites: their names in a report say what they test."""
    return True if name.startswith(("test_", "pytestmark")) else None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", link_to_repository)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-skip-member", skip_tests)
