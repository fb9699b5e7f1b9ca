"""Sphinx settings: Markdown pages that run their code, furo, warnings as errors in CI."""

from pyro_l0 import __version__

project = "pyro_l0"
author = "The pyro_l0 developers"
project_copyright = f"2026, {author}"
release = __version__
version = release

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "jupyter_execute", "tables"]
html_theme = "furo"
html_title = f"pyro_l0 {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_numpy_docstring = False

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A page that fails to run fails the build; one that did not change is not run again.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
