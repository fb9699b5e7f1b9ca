"""What autodoc writes of classes and functions, as a reader needs it: short types, once, and nothing private."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from numpy.typing import ArrayLike
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

# What autodoc makes of numpy's ArrayLike and NDArray.
_ARRAY_LIKE = stringify_annotation(ArrayLike, "smart")
_NDARRAY = re.compile(r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[[^]]*\]\]")


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


def without_fields_of_tuples(
    app: Sphinx, what: str, name: str, member: object, skip: bool, options: Any
) -> bool | None:
    """Fields of a named tuple stand among its arguments, not once more as an alias for a number."""
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


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect these to the events of autodoc, and of entries after autodoc has added its types."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", without_fields_of_tuples)
    app.connect("object-description-transform", short_types, priority=600)
    app.connect("object-description-transform", types_once, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
