"""Sphinx settings: Markdown pages that run their code, furo, warnings as errors in CI."""

import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from inventories import write_inventories
from notebooks import set_environment
from run_code import BLOCK, can_import, missing, pages

from pyro_l0 import __version__

project = "pyro_l0"
author = "The pyro_l0 developers"
project_copyright = f"2026, {author}"
release = __version__
version = release

extensions = [
    "api_entries",
    "mathml",
    "myst_nb",
    "names",
    "notebooks",
    "page_parts",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute", "notebooks", "architecture.md", "lab"]
templates_path = ["templates"]
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_search_scorer = str(Path(__file__).parent / "search.js")
html_title = f"pyro_l0 {release}"
_SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
if _REPOSITORY := _SETTINGS["tool"]["release"]["repository"]:
    html_theme_options = {"source_repository": _REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

# A class has a page, with its own methods and those that it inherits here, but not those of these classes.
_OTHERS = """Module PyroModule AutoGuide AutoGuideList ELBO Distribution TorchDistributionMixin Reparam Callback
TrainerCallback BaseEstimator RegressorMixin ClassifierMixin SelectorMixin MetaEstimatorMixin TransformerMixin
_SetOutputMixin _MetadataRequester ReprHTMLMixin tuple str float dict Mapping Exception"""
autosummary_context = {"others": ", ".join(_OTHERS.split())}
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Extras, which need not be installed where the docs are built, nor fit the torch that is.
autodoc_mock_imports = [name for name in ("lightning", "transformers") if not can_import(name)]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
strip_signature_backslash = True  # without it, attributes lose the underscore at their end

# Every name in a signature or a text is a link, but for these: names of types that a docstring describes where it takes
# one, and what only people who extend the engine meet.
nitpicky = True
_TYPES = """Background SparseColumns Coefficient Cost Error
EstimatorName Example Family GateObjective GatePosterior Kind Location Loss Net
Budgets Integers Number Objective OnBudget Rates Rule Run SiteSummary GateSite Trainer _size CONSTANT JointDraw"""
nitpick_ignore_regex = [
    ("py:.*", "|".join(_TYPES.split())),
    ("py:class", r"pyro_l0\.(nn\.engine|maths)\..*"),
    (
        "py:class",
        r"pyro_l0\..*(State|GateChange|LayerFold|GatePosterior|JointDraws?|JointSample|Collapsed|Alignment|Stay|Loader|Record|Run"
        r"|Evaluation|UnitProbs|Likelihood|InferenceTarget|BackgroundEffects)",
    ),
    (
        "py:class",
        r"(numpy\._typing|numpy\.random\._generator|scipy\.sparse|torch\._C|lightning\.pytorch|transformers)\..*",
    ),
]
intersphinx_mapping = write_inventories(Path(tempfile.mkdtemp()))

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A page that fails to run fails the build; one that did not change is not run again.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_excludepatterns = []
suppress_warnings = ["myst-nb.lexer"]  # only a kernel says in which language the cells of a page are
for _page in pages():
    _cells = [block["code"] for block in BLOCK.finditer(_page.read_text(encoding="utf-8")) if block["kind"] != "python"]
    if _libraries := missing("".join(_cells)):
        nb_execution_excludepatterns.append(_page.relative_to(Path(__file__).parent).as_posix())
        logging.getLogger(__name__).info("%s: its cells are not run, they need %s", _page, " and ".join(_libraries))
nb_merge_streams = True
set_environment()


def link_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Links from source code lead to the page of a name: where on it, Sphinx does not know of names with two paths."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'(class="viewcode-back" href="[^"#]*)#[^"]*"', r'\1"', context["body"])


def setup(app: Sphinx) -> None:
    """Connect what this file adds."""
    app.connect("html-page-context", link_back)
