"""Sphinx settings: Markdown pages that run their code, furo, warnings as errors in CI."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from inventories import write_inventories

from pyro_l0 import __version__

project = "pyro_l0"
author = "The pyro_l0 developers"
project_copyright = f"2026, {author}"
release = __version__
version = release

extensions = [
    "api_page",
    "mathml",
    "myst_nb",
    "notebooks",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute", "lab/tables"]
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_title = f"pyro_l0 {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["lightning", "transformers"]  # extras, which need not be installed where the docs are built
napoleon_numpy_docstring = False

# Every name in a signature or a text is a link, but for these: names of types that a docstring describes where it takes
# one, and what only people who extend the engine meet.
nitpicky = True
_TYPES = """Coefficient Cost Error EstimatorName Example Family GateObjective GatePosterior Kind Location Loss Net
Budgets Number Objective OnBudget Rates Run SiteSummary GateSite Trainer _size CONSTANT JointDraw"""
nitpick_ignore_regex = [
    ("py:.*", "|".join(_TYPES.split())),
    ("py:class", r"pyro_l0\.(nn\.engine|maths)\..*"),
    (
        "py:class",
        r"pyro_l0\..*(State|GateChange|LayerFold|GatePosterior|JointDraws?|Collapsed|Alignment|Stay)",
    ),
    ("py:class", r"(numpy\._typing|scipy\.sparse)\..*"),
]
intersphinx_mapping = write_inventories(Path(tempfile.mkdtemp()))

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A page that fails to run fails the build; one that did not change is not run again.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Pages show pictures by the kernel's own backend, whatever the builder's is.
os.environ.pop("MPLBACKEND", None)
# Pyro's progress bars look for widgets in a notebook, and would warn on each page that there are none; arviz announces
# its next version once a day.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found,ignore::FutureWarning:arviz"
