"""Sphinx settings: Markdown pages that run their code, furo, warnings as errors in CI."""

import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from numpy.typing import ArrayLike
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

sys.path.insert(0, str(Path(__file__).parent))

from inventories import write_inventories

from pyro_l0 import __version__

project = "pyro_l0"
author = "The pyro_l0 developers"
project_copyright = f"2026, {author}"
release = __version__
version = release

extensions = [
    "mathml",
    "myst_nb",
    "notebooks",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute", "architecture.md", "lab"]
templates_path = ["templates"]
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_search_scorer = str(Path(__file__).parent / "search.js")
html_title = f"pyro_l0 {release}"

# A class has a page, with its own methods and those that it inherits here, but not those of these classes.
_OTHERS = """Module PyroModule AutoGuide AutoGuideList ELBO Distribution TorchDistributionMixin Reparam Callback
TrainerCallback BaseEstimator RegressorMixin ClassifierMixin SelectorMixin MetaEstimatorMixin TransformerMixin
_SetOutputMixin _MetadataRequester ReprHTMLMixin tuple str float dict Mapping Exception"""
autosummary_context = {"others": ", ".join(_OTHERS.split())}
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Extras, which need not be installed where the docs are built.
autodoc_mock_imports = [name for name in ("lightning", "transformers") if find_spec(name) is None]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
strip_signature_backslash = True  # without it, attributes lose the underscore at their end

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
        r"pyro_l0\..*(State|GateChange|LayerFold|GatePosterior|JointDraws?|JointSample|Collapsed|Alignment|Stay|Loader|Record|Run"
        r"|Evaluation|UnitProbs)",
    ),
    ("py:class", r"(numpy\._typing|scipy\.sparse|torch\._C|lightning\.pytorch|transformers)\..*"),
]
intersphinx_mapping = write_inventories(Path(tempfile.mkdtemp()))

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_merge_streams = True

# What autodoc makes of numpy's ArrayLike and NDArray.
_ARRAY_LIKE = stringify_annotation(ArrayLike, "smart")
_NDARRAY = re.compile(r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[[^]]*\]\]")

# A page that fails to run fails the build; one that did not change is not run again.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Pages run side by side: with a thread for every core each, small programs take up to twenty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Pages show pictures by the kernel's own backend, whatever the builder's is.
os.environ.pop("MPLBACKEND", None)
# Pyro's progress bars look for widgets in a notebook, and would warn on each page that there are none; arviz announces
# its next version once a day.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found,ignore::FutureWarning:arviz"


def link_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Links from source code lead to the page of a name: where on it, Sphinx does not know of names with two paths."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'(class="viewcode-back" href="[^"#]*)#[^"]*"', r'\1"', context["body"])


def short_types(app: Sphinx, domain: str, objtype: str, content: nodes.Element) -> None:
    """Arrays have numpy's names, and classes that Sphinx does not link to, as none beside a literal, their last one."""
    for field in content.findall(nodes.field):
        text = field[1].astext()
        short = _NDARRAY.sub("~numpy.ndarray", text.replace(_ARRAY_LIKE, "ArrayLike"))
        if "Literal[" in short:
            short = re.sub(r"~(?:\w+\.)+(\w+)", r"\1", short)
        if field[0].astext().startswith(("type", "rtype")) and short != text:
            field.replace(field[1], nodes.field_body("", nodes.paragraph("", short)))


def types_once(app: Sphinx, domain: str, objtype: str, content: nodes.Element) -> None:
    """Arguments have one entry: those that are described as attributes, or in a list before a note, no other for types.

    Arguments of classes without any description, which a page has elsewhere or nobody gives, have none.
    """
    described = set()
    for fields in [child for child in content if isinstance(child, nodes.field_list)]:
        by_name = {field[0].astext(): field for field in fields}
        described |= {name.replace("*", "") for name, field in by_name.items() if field[1].astext()}
        for name, field in by_name.items():
            kind, _, argument = name.partition(" ")
            if kind == "rtype" and objtype == "class":
                fields.remove(field)
            param, written = by_name.get(f"param {argument}"), by_name.get(f"vartype {argument}")
            if kind != "type" or param is None or param[1].astext():
                continue
            if f"ivar {argument}" in by_name:
                field.replace(field[0], nodes.field_name("", f"vartype {argument}"))
                fields.remove(param)
                if written is not None:
                    fields.remove(written)
            elif f"param {argument}" in described or objtype == "class":
                fields.remove(param)
                fields.remove(field)


def without_fields_of_tuples(*event: Any) -> bool | None:
    """Fields of a named tuple stand among its arguments, not once more as an alias for a number."""
    member = event[3]
    return True if (getattr(member, "__doc__", "") or "").startswith("Alias for field number") else None


def readable_signature(
    app: Sphinx, what: str, name: str, member: object, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Classes that nobody makes by hand, as their private arguments say, have no signature, and no default is code."""
    if what != "class" or signature is None:
        return None
    if re.search(r"\b_\w|\*args, \*\*kwargs", signature):
        return "", returns
    shown = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", signature)
    return re.sub(r"<(?:factory>|function .*?<lambda>>)", "...", shown), returns


def setup(app: Sphinx) -> None:
    """Connect what this file adds."""
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", without_fields_of_tuples)
    app.connect("object-description-transform", short_types, priority=600)  # after autodoc
    app.connect("object-description-transform", types_once, priority=600)
    app.connect("html-page-context", link_back)
