"""Tutorials as notebooks to download, linked at the top of each page; a picture of each in their list."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx

_FOLDER = "tutorials/"
# Roles of the docs, which a notebook does not know: {func}`~a.b`, {doc}`text <page>`.
_WITH_TARGET = re.compile(r"\{\w+\}`([^`<]+?)\s*<[^`>]*>`")
_SHORTENED = re.compile(r"\{\w+\}`~(?:[\w]+\.)*(\w+)`")
_ROLE = re.compile(r"\{\w+\}`([^`]+)`")


def as_notebook(page: str) -> nbformat.NotebookNode:
    """The notebook of a page's text: its cells in their order, without outputs and roles of Sphinx."""
    notebook = read_myst_markdown_notebook(page)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = _WITH_TARGET.sub(r"\1", cell.source)
            cell.source = _ROLE.sub(r"`\1`", _SHORTENED.sub(r"`\1`", text))
    nbformat.validate(notebook)
    return notebook


def is_tutorial(name: str) -> bool:
    """Whether a page is downloadable: each in the tutorials' folder, but for their list."""
    return name.startswith(_FOLDER) and name != f"{_FOLDER}index"


def add_link(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Put the link behind the title of a tutorial."""
    if app.builder.format == "html" and is_tutorial(name):
        link = nodes.reference("", "Download as a notebook", refuri=f"{name.removeprefix(_FOLDER)}.ipynb")
        title = next(doctree.findall(nodes.title))
        title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", "", link))


def add_pictures(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Put the last picture of each tutorial on its card in their list."""
    if app.builder.format == "html" and name == f"{_FOLDER}index":
        for card in list(doctree.findall(nodes.container)):
            if card.get("design_component") == "card":
                link = next(card.findall(nodes.reference))
                tutorial = app.env.get_doctree(_FOLDER + link["refuri"].removesuffix(".html"))
                for picture in list(tutorial.findall(nodes.image))[-1:]:  # none if its cells are not run
                    card.insert(0, nodes.image(**picture.attributes | {"classes": ["sd-card-img-top"]}))


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    """Write the notebooks beside the pages."""
    if exception is None and app.builder.format == "html":
        for name in filter(is_tutorial, app.env.found_docs):
            notebook = as_notebook(Path(app.env.doc2path(name)).read_text(encoding="utf-8"))
            nbformat.write(notebook, app.outdir / f"{name}.ipynb")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all three to the build."""
    app.connect("doctree-resolved", add_link)
    app.connect("doctree-resolved", add_pictures)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
