"""Tutorials as notebooks with output: python docs/_ext/notebooks.py [NAME ...]

Each tutorial becomes ``docs/notebooks/NAME.ipynb``, which a code host shows, and the site hands out. It runs if it is
named, or if its code is not that of its file; else only the text is renewed. As an extension of Sphinx, this puts the
last picture of each tutorial on its card in their list, and says which pages have cells that run.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
_FOLDER = "tutorials/"
_BESIDE = re.compile(r"\]\((\w+\.md)")  # a link to a page in the same folder
_HEAD = "---\n{file_format: mystnb, kernelspec: {name: python3}}\n---\n"


def set_environment() -> None:
    """What kernels inherit, here and in a build of the site."""
    # Pages run side by side: with a thread for every core each, small programs take up to twenty times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Pages show pictures by the kernel's own backend, whatever the builder's is.
    os.environ.pop("MPLBACKEND", None)
    # Pyro's progress bars look for widgets in a notebook, and would warn on each page that there are none; arviz
    # announces its next version once a day.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found,ignore::FutureWarning:arviz"


def pages() -> list[Path]:
    """The tutorials: each page in their folder, but for their list."""
    return sorted(page for page in (DOCS / _FOLDER).glob("*.md") if page.stem != "index")


def link(page: Path) -> str:
    """The line of a page that leads to its notebook."""
    return f"[A notebook, with output](../notebooks/{page.stem}.ipynb)"


def as_notebook(page: Path) -> nbformat.NotebookNode:
    """The notebook of a page: its cells in their order, without outputs and without the link to itself."""
    text = page.read_text(encoding="utf-8").replace(f"{link(page)}\n\n", "", 1)
    notebook = read_myst_markdown_notebook(_BESIDE.sub(rf"](../{_FOLDER}\1", text))
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    nbformat.validate(notebook)
    return notebook


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run the cells of a notebook, from whose outputs progress bars go, as they have times of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=resources).execute()
    notebook.metadata.pop("language_info")
    for cell in code(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def mark_cells(app: Sphinx, name: str, source: list[str]) -> None:
    """Put before a page with cells what MyST-NB knows it by, which a code host would show; warnings count its lines."""
    if "\n```{code-cell}" in source[0]:
        source[0] = f"{_HEAD}{source[0]}"


def add_pictures(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Put the last picture of each tutorial on its card in their list."""
    if app.builder.format == "html" and name == f"{_FOLDER}index":
        for card in list(doctree.findall(nodes.container)):
            if card.get("design_component") == "card":
                target = next(card.findall(nodes.reference))
                tutorial = app.env.get_doctree(_FOLDER + target["refuri"].removesuffix(".html"))
                for picture in list(tutorial.findall(nodes.image))[-1:]:  # none if its cells are not run
                    card.insert(0, nodes.image(**picture.attributes | {"classes": ["sd-card-img-top"]}))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect both to the build."""
    app.connect("source-read", mark_cells)
    app.connect("doctree-resolved", add_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def renew(page: Path, again: bool) -> None:
    """Write the notebook of a page, with the outputs that its file has if the code there is the same."""
    path, notebook = DOCS / "notebooks" / f"{page.stem}.ipynb", as_notebook(page)
    before = code(nbformat.read(path, as_version=4)) if path.exists() else []
    if again or [cell.source for cell in before] != [cell.source for cell in code(notebook)]:
        print(f"{page.stem} runs", flush=True)
        execute(notebook)
    else:
        for new, old in zip(code(notebook), before, strict=True):
            new.outputs, new.execution_count = old.outputs, old.execution_count
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    """Renew all notebooks; those of tutorials that are named run in any case."""
    set_environment()
    for page in pages():
        renew(page, page.stem in names)


if __name__ == "__main__":
    main(sys.argv[1:])
