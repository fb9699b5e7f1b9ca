"""Parts of pages: captions of pictures, files that are no pages, and the commands behind results, which fold away."""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def add_captions(app: Sphinx, doctree: nodes.document) -> None:
    """A picture that is alone in its paragraph is a figure, whose caption is its description."""
    for picture in list(doctree.findall(nodes.image)):
        if isinstance(picture.parent, nodes.paragraph) and len(picture.parent) == 1:
            paragraph, figure = picture.parent, nodes.figure("", picture, nodes.caption("", picture["alt"]))
            doctree.set_id(figure)  # which Sphinx expects of one with a caption
            paragraph.replace_self(figure)


def offer_files(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a Markdown file that is no page of the site, as those of the laboratory, downloads it."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        path = f"{link['reftarget']}.md"
        is_page = link["reftarget"] in app.env.found_docs
        if link.get("refdomain") == "doc" and not is_page and (app.srcdir / path).is_file():
            link.replace_self(addnodes.download_reference("", "", *link.children, reftarget=f"/{path}"))


def fold_commands(app: Sphinx, doctree: nodes.document) -> None:
    """On the page of results, fold blocks of commands, and the end of a paragraph from a command on."""
    if app.env.docname != "results":
        return
    for command in [*doctree.findall(nodes.literal_block), *doctree.findall(nodes.literal)]:
        if not command.astext().startswith("python tests/"):
            continue
        block, paragraph = command, command.parent
        if isinstance(command, nodes.literal):
            start = paragraph.index(command)
            block = nodes.paragraph("", "", *paragraph[start:])
            del paragraph[start:]
            paragraph.replace_self([paragraph, block] if start else block)
        opening = nodes.raw("", "<details><summary>Command</summary>", format="html")
        block.replace_self([opening, block, nodes.raw("", "</details>", format="html")])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all to the reading of pages: links to files before Sphinx looks for what to copy."""
    app.connect("doctree-read", offer_files, priority=400)
    app.connect("doctree-read", add_captions)
    app.connect("doctree-read", fold_commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
