"""Inline code that names something public is a link to its entry in the API, at its first mention on a page.

Pages have no roles of Sphinx, which a code host would show as they are written: they say ``L0Gate``,
``L0Gate.from_logits`` or ``gate_heads(net, heads)``. A path links if all entries that end in it are one and the same. A
single word must be called so alone: no member of a class and no argument has its name, so ``fit`` is no link, and
``pyro_l0.infer.fit`` is one. What looks like a name of ours, and is none, is a warning: a path below one of ours, and a
word with capital and small letters that stands in no list of others' names.
"""

from __future__ import annotations

import inspect
import pydoc
import re
from collections import defaultdict
from contextlib import suppress
from functools import cache

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

_NAME = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(\([^()]*\))?")
_MEMBERS = ("method", "property", "attribute", "classmethod", "staticmethod")
_CLASS = re.compile(r"[A-Z]\w*[a-z]\w*")
_PAST = ("changelog",)  # pages on names that are gone
# Names of Python and of other libraries, and a symbol.
_OTHERS = """AutoNormal BasePruner BatchNorm1d DeprecationWarning DistributedDataParallel FullyShardedDataParallel
HalfCauchy HalfNormal LassoCV ModelSpeedup NormalLikelihoodVariableSelector RenyiELBO ReweightedWakeSleep
SelectFromModel TraceEnum_ELBO TraceGraph_ELBO TraceMeanField_ELBO Trace_ELBO TypeError ValueError X_mean"""


@cache
def locate(path: str) -> object | None:
    """What a path names; nothing if it is in a module that needs an extra."""
    with suppress(pydoc.ErrorDuringImport):
        return pydoc.locate(path)
    return None


def arguments(path: str) -> set[str]:
    """The names of what a documented class or function takes."""
    with suppress(TypeError, ValueError):
        return set(inspect.signature(locate(path)).parameters)
    return set()


def find_links(env: BuildEnvironment) -> dict[str, tuple[str, str, str]]:
    """By path: the page of an entry, its place there, and its whole path."""
    entries, taken = defaultdict(dict), set()
    for path, entry in env.get_domain("py").objects.items():
        parts = path.split(".")
        first = {"module": len(parts)}.get(entry.objtype, 2 if entry.objtype in _MEMBERS else 1)
        if entry.objtype != "module":
            taken |= arguments(path)
        if first == 2:
            taken.add(parts[-1])
        for length in range(first, len(parts) + 1):
            entries[".".join(parts[-length:])][entry.docname, entry.node_id] = path
    return {
        name: (*place, path)
        for name, found in entries.items()
        if len(found) == 1 and name not in taken
        for place, path in found.items()
    }


def exists(path: str) -> bool:
    """Whether a path is there, or else its last part is a field of the class before it, as its description says."""
    owner, _, member = path.rpartition(".")
    if locate(path) is not None or locate(owner) is None:
        return locate(path) is not None
    return re.search(rf"\b{member}\b", inspect.getdoc(locate(owner)) or "") is not None


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make first mentions links, but for those in headings and in links."""
    if app.builder.format != "html" or page.startswith("api/"):
        return
    if not hasattr(app, "names"):
        app.names = find_links(app.env)
    seen = set()
    for literal in list(doctree.findall(nodes.literal)):
        name = _NAME.fullmatch(literal.astext())
        if name is None or any(isinstance(part, (nodes.title, nodes.reference)) for part in ancestors(literal)):
            continue
        if name[1] in app.names:
            place = app.names[name[1]][:2]
            if place not in seen:
                seen.add(place)
                uri = f"{app.builder.get_relative_uri(page, place[0])}#{place[1]}"
                literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=True, refuri=uri))
        elif page not in _PAST and not is_known(name[1], app.names):
            logging.getLogger(__name__).warning("Expected a public name, but %s is none", name[1], location=literal)


def is_known(name: str, links: dict[str, tuple[str, str, str]]) -> bool:
    """Whether a name without a link is one of ours all the same, as one with two entries, or looks like none."""
    first, _, rest = name.partition(".")
    path = f"{links[first][2]}.{rest}" if first in links and rest else name
    if path.startswith("pyro_l0."):
        return exists(path)
    ours = {path.split(".")[-1] for *_, path in links.values()}
    return _CLASS.fullmatch(first) is None or first in ours | set(_OTHERS.split())


def ancestors(node: nodes.Node) -> list[nodes.Node]:
    """The elements around a node, from the inside."""
    found = []
    while (node := node.parent) is not None:
        found.append(node)
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect this to pages whose own links are resolved."""
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
