"""Formulas as MathML, which browsers draw by themselves: no script, and no request to another host."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

# A name of a function, which stands apart from an argument without parentheses.
_FUNCTION = re.compile(r"(<m([io])>(?:log|ln|exp|logit|clamp|max|min)</m\2>)(?!<mo[^>]*>(?:&#x00028;|\())")


def as_mathml(formula: str, display: str = "inline") -> str:
    """A formula of TeX as MathML."""
    mathml: str = convert(formula, display=display)
    return _FUNCTION.sub(r'\1<mspace width="0.17em" />', mathml)


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    translator.body.append(as_mathml(node.astext()))
    raise nodes.SkipNode


def displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own, which scrolls where it is wider than the page."""
    translator.body.append(f'<div class="math">{as_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this the way in which formulas are written."""
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
