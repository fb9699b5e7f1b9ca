"""Pages as a code host shows them, without roles and with links that hold; inline code that the site makes links."""

import re
from io import StringIO
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(page):
    """A page without its blocks of code and without inline code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<![}`])`[^`\n]+`", "", text)


def anchors(page):
    """What a code host and the site call the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_reads_well_on_a_code_host(page):
    """No role of Sphinx, no label, nothing above the title; links lead to files and to headings that are there."""
    text = prose(page)
    assert not text.startswith("---")
    assert re.findall(r"\{[a-z:]+\}`[^`]*`", text) == []
    assert re.findall(r"^\([\w-]+\)=$", text, re.MULTILINE) == []
    for path, anchor in LINK.findall(text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


ENTRIES = """
.. py:class:: pyro_l0.nn.L0Gate

   .. py:method:: from_logits

.. py:function:: pyro_l0.nn.gate_heads
.. py:function:: pyro_l0.infer.fit
.. py:function:: pyro_l0.pruning.prune
.. py:class:: pyro_l0.infer.AutoGate

   .. py:method:: fit

.. py:class:: pyro_l0.callbacks.lightning.BudgetCallback
.. py:class:: pyro_l0.callbacks.transformers.BudgetCallback
.. py:module:: pyro_l0.nn
"""
PAGE = """
# On `AutoGate`

`L0Gate` [`gate_heads`](api/index.rst) `pyro_l0.nn` `L0Gate.from_logits(x)` `pyro_l0.infer.fit`
`gate_heads(net, {"a": 1})` `prune` `L0Gate(3)` `fit` `fit(x)` `BudgetCallback` `nn` `L0Gate.size`
`L0Gate(3).size` `net.fit` `dist.Nothing` `ValueError`

`L0Gate.no_method` `pyro_l0.infer.no_name` `NoGate`
"""
SETTINGS = f"""
import sys
sys.path.insert(0, {str(ROOT / "docs" / "_ext")!r})
extensions = ["myst_parser", "names"]
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A site of two pages: its text, and its warnings."""
    pytest.importorskip("myst_parser")  # of the extra docs
    from sphinx.application import Sphinx

    folder, said = tmp_path_factory.mktemp("site"), StringIO()
    (folder / "api").mkdir()
    (folder / "api" / "index.rst").write_text(f"API\n===\n{ENTRIES}")
    (folder / "index.md").write_text(f"{PAGE}\n```{{toctree}}\n:hidden:\n\napi/index\n```\n")
    (folder / "conf.py").write_text(SETTINGS)
    out = folder / "out"
    with catch_warnings():
        simplefilter("ignore")  # MyST's parser calls what the next version of Sphinx renames
        Sphinx(folder, folder, out, out, "html", status=None, warning=said).build()
    return (out / "index.html").read_text(), said.getvalue()


def test_names_are_links_at_their_first_mention(built):
    """None where several things have a name, in headings or in links, and never twice."""
    found = re.findall(r'href="api/index.html#([\w.-]+)"[^>]*><code[^>]*><span class="pre">([^<]*)', built[0])
    assert found == [
        ("pyro_l0.nn.L0Gate", "L0Gate"),
        ("module-pyro_l0.nn", "pyro_l0.nn"),
        ("pyro_l0.nn.L0Gate.from_logits", "L0Gate.from_logits(x)"),
        ("pyro_l0.infer.fit", "pyro_l0.infer.fit"),
        ("pyro_l0.nn.gate_heads", "gate_heads(net,"),
        ("pyro_l0.pruning.prune", "prune"),
    ]


def test_names_that_are_none_are_warnings(built):
    warned = re.findall(r"Expected a public name, but (\S+) is none", built[1])
    assert warned == ["L0Gate.no_method", "pyro_l0.infer.no_name", "NoGate"]
