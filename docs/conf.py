"""Sphinx's configuration: `tox -e docs` builds these pages, and every warning is an error.

Links to other sites are not checked: the machines that run the tests reach no sites but package indexes.
Links inside the documents are checked twice, by Sphinx and (as GitHub shows them) by tests/docs/test_links.py.
"""

from __future__ import annotations

import replication

project = "replication"
author = "The replication authors"
copyright = "2026, the replication authors"
release = version = replication.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # Args: and Raises: in docstrings
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"replication {release}"

# GitHub's anchors, so that one link serves both: [text](page.md#a-heading).
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence", "deflist", "smartquotes"]
# GitHub draws ```mermaid; Sphinx does with its directive.
myst_fence_as_directive = ["mermaid"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

nitpicky = True
# A reference in a docstring must lead somewhere. Types in signatures need not: other projects document theirs, there is
# no network to look them up, and not each of ours is public.
nitpick_ignore_regex = [("py:class", r"(?!replication\.[A-Z]\w*$).*"), ("py:obj", r".*")]

# psql's own commands are no SQL.
suppress_warnings = ["misc.highlighting_failure"]
