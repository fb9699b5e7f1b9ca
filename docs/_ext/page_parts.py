"""Parts of pages: captions of pictures, files that are no pages, commands that fold away, and the sidebar's groups."""

from __future__ import annotations

import re
from typing import Any

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
    """A link to a text that is no page of the site, as those of the laboratory and notebooks, downloads its file."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link.get("refdomain") == "doc" and link["reftarget"] not in app.env.found_docs:
            for suffix in app.config.source_suffix:
                if (app.srcdir / f"{link['reftarget']}{suffix}").is_file():
                    path = f"/{link['reftarget']}{suffix}"
                    link.replace_self(addnodes.download_reference("", "", *link.children, reftarget=path))


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


def group_guides(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """In the sidebar guides stand in the groups of their list, each of which begins with its first link there."""
    for group in app.env.get_doctree("howto/index").findall(nodes.section):
        if isinstance(group.parent, nodes.section) and "furo_navigation_tree" in context:
            first = next(group.findall(addnodes.pending_xref))["reftarget"]
            uri = "#" if first == page else app.builder.get_relative_uri(page, first)
            entry = re.compile(rf'<li class="toctree-l2[^>]*><a class="[^"]*" href="{re.escape(uri)}">')
            heading = f'<li class="guides">{group[0].astext()}</li>'
            context["furo_navigation_tree"] = entry.sub(rf"{heading}\g<0>", context["furo_navigation_tree"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect these to the reading of pages, links to files before Sphinx copies these, and to the theme's sidebar."""
    app.connect("doctree-read", offer_files, priority=400)
    app.connect("doctree-read", add_captions)
    app.connect("doctree-read", fold_commands)
    app.connect("html-page-context", group_guides, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
