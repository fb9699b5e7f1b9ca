"""Tutorials as notebooks: what a reader downloads has the cells of the page, and ends as every tutorial does."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("myst_nb")  # of the extra docs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.stem != "index")


@pytest.fixture
def as_notebook(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from notebooks import as_notebook

    return as_notebook


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_the_cells_of_its_page(page, as_notebook, tmp_path):
    text = page.read_text(encoding="utf-8")
    nbformat.write(as_notebook(text), tmp_path / "page.ipynb")
    cells = nbformat.read(tmp_path / "page.ipynb", as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    blocks = re.findall(r"^```\{code-cell\} ipython3\n((?:.|\n)*?)^```$", text, re.MULTILINE)
    assert code == [re.sub(r"\A(?::.*\n)*\n*", "", block).rstrip("\n") for block in blocks]
    assert not any("{doc}" in cell.source or "{class}" in cell.source for cell in cells)
    assert cells[0].source.startswith("# ")
    assert "plot" in code[-1]
    assert cells[-1].source.lstrip().startswith("## What can go wrong") or "\n## What can go wrong" in cells[-1].source


def test_roles_of_the_docs_become_words(as_notebook):
    text = "---\nfile_format: mystnb\n---\n\n"
    text += "See {func}`~pyro_l0.nn.fix_gates`, {doc}`the maths <../maths>` and {class}`a.b`."
    assert as_notebook(text).cells[0].source == "See `fix_gates`, the maths and `a.b`."
