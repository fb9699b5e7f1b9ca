"""Networks of the kinds that users have, with gates, and what must leave each when half of its gates close."""

from tests.engine.zoo import attention, convolutional, generative, inputs, mlp, norms, public, recurrent, residual, tied
from tests.engine.zoo.entry import Entry, call, sites

__all__ = ["ZOO", "Entry", "call", "sites"]

FAMILIES = (mlp, convolutional, residual, attention, norms, generative, recurrent, inputs, tied, public)
ZOO: dict[str, Entry] = {name: entry for family in FAMILIES for name, entry in family.ENTRIES.items()}
