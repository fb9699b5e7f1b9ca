"""Pages of the API: a table of a module's names and an entry for each, from one list.

A line holds a name, relative to the module unless it begins with the package, and the members that are shown:
``SparsityTarget: ascend, report``, or ``GateGuide: *`` for all that have a docstring.
"""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.ext.autosummary import import_by_name
from sphinx.util.docutils import SphinxDirective


class Api(SphinxDirective):
    """``{api} module`` with a name on each line."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Write the table and the entries as reStructuredText, and parse it."""
        module = self.arguments[0]
        table, entries = [], []
        for line in self.content:
            name, _, members = (part.strip() for part in line.partition(":"))
            table.append(f"   {name}")
            name = name if name.startswith("pyro_l0.") else f"{module}.{name}"
            kind = self.kind(name)
            entries += ["", f".. auto{kind}:: {name}"]
            if members:
                entries.append(f"   :members: {members.removeprefix('*')}")
            if kind == "data":
                entries.append("   :no-value:")
        text = [f".. automodule:: {module}", "   :no-members:", ""]
        text += [".. autosummary::", "   :nosignatures:", "", *table, *entries]
        section = nodes.Element()
        fenced = StringList(["```{eval-rst}", *text, "```"], source=self.get_source_info()[0])
        self.state.nested_parse(fenced, self.content_offset, section)
        return section.children

    def kind(self, name: str) -> str:
        """How autodoc calls what a name stands for."""
        with mock(self.config.autodoc_mock_imports):
            found = import_by_name(name)[1]
        if isinstance(found, type):
            return "class"
        return "function" if callable(found) else "data"


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("api", Api)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
