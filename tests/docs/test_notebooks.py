"""Tutorials as notebooks: those in the repository have the cells of the pages, ran, and say nothing of a machine."""

import os
import re
import tempfile
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("myst_nb")  # of the extra docs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.stem != "index")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    import notebooks

    return notebooks


def stored(page):
    return nbformat.read(DOCS / "notebooks" / f"{page.stem}.ipynb", as_version=4)


@each_page
def test_a_notebook_has_the_cells_of_its_page(page, notebooks):
    """If it has not: python docs/_ext/notebooks.py"""
    cells = stored(page).cells
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        (cell.cell_type, cell.source) for cell in notebooks.as_notebook(page).cells
    ]
    text = page.read_text(encoding="utf-8")
    assert notebooks.link(page) in text
    blocks = re.findall(r"^```\{code-cell\} ipython3\n((?:.|\n)*?)^```$", text, re.MULTILINE)
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert code == [re.sub(r"\A(?::.*\n)*\n*", "", block).rstrip("\n") for block in blocks]
    assert cells[0].source.startswith("# ")
    assert "plot" in code[-1]
    assert cells[-1].source.lstrip().startswith("## What can go wrong") or "\n## What can go wrong" in cells[-1].source


@each_page
def test_a_notebook_has_output(page):
    """Each cell ran after the one before it; what prints has text, and the last one a picture."""
    cells = [cell for cell in stored(page).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        kinds = {output.output_type for output in cell.outputs}
        assert "error" not in kinds
        assert "stream" in kinds or not re.search(r"^(?: {4})?print\(", cell.source, re.MULTILINE)
    assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs)


@each_page
def test_a_notebook_says_nothing_of_a_machine(page):
    notebook, text = stored(page), (DOCS / "notebooks" / f"{page.stem}.ipynb").read_text(encoding="utf-8")
    assert {*notebook.metadata} == {"kernelspec"}
    assert not any(cell.metadata for cell in notebook.cells)
    assert '"name": "stderr"' not in text
    for folder in (DOCS.parent, Path.home(), tempfile.gettempdir()):
        assert f"{folder}{os.sep}" not in text


def test_notebooks_are_small():
    assert {path.stem for path in (DOCS / "notebooks").iterdir()} == {page.stem for page in PAGES}
    assert sum(path.stat().st_size for path in (DOCS / "notebooks").iterdir()) < 2_000_000


def test_outputs_stay_while_the_code_does(notebooks, tmp_path, monkeypatch):
    """A page's text is renewed without a run; a change of code, or a name given to the command, runs it."""
    ran = []

    def execute(notebook):
        ran.append([cell.source for cell in notebooks.code(notebook)])
        for cell in notebooks.code(notebook):
            cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text=f"{len(ran)}")], 1

    def printed():
        notebooks.main(names)
        (cell,) = notebooks.code(nbformat.read(tmp_path / "notebooks" / "page.ipynb", as_version=4))
        return cell.outputs[0].text

    monkeypatch.setattr(notebooks, "DOCS", tmp_path)
    monkeypatch.setattr(notebooks, "execute", execute)
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "notebooks").mkdir()
    page, names = tmp_path / "tutorials" / "page.md", []
    text = "# A page\n\n```{code-cell} ipython3\nprint(1)\n```\n"
    page.write_text(text)
    assert printed() == "1"
    page.write_text(text.replace("A page", "Another title"))
    assert printed() == "1"
    page.write_text(text.replace("print(1)", "print(2)"))
    assert printed() == "2"
    names = ["page"]
    assert printed() == "3"
