"""The rule of gates."""

from __future__ import annotations

import numpy as np

from pyro_l0.nn.engine.maps import GateCall, Maps, rule
from pyro_l0.nn.engine.slots import CONSTANT, VARIES, ZERO
from pyro_l0.nn.engine.tape import Operation

__all__: list[str] = []


@rule("gate")
def gate(maps: Maps, operation: Operation) -> None:
    """An open unit is one unit in front and behind. A closed one ends in front, and begins behind as zeros.

    What an open gate makes of a constant varies, unless the gate's value is fixed.
    """
    x, output, site = operation.value("input"), operation.output, str(operation.arguments["site"])
    unit_dim = operation.integer("dim") % x.rank
    size = x.shape[unit_dim]
    is_closed = maps.closed.get(site, np.zeros(size, dtype=np.bool_))
    maps.passes_rest(x, output, unit_dim)
    front, behind = maps.axes[x][unit_dim], maps.axes[output][unit_dim]
    maps.same(x, unit_dim, output, unit_dim, where=~is_closed, tied=not is_closed.any())
    if is_closed.any():
        open_units = np.flatnonzero(~is_closed)
        maps.slots.join_entries(front.block, open_units, behind.block, open_units)
    maps.set_states(output, unit_dim, np.where(is_closed, np.uint8(ZERO), maps.states(x, unit_dim)))
    if maps.values is None:
        for axis in maps.axes[output]:
            axis.states = np.where(axis.states == CONSTANT, np.uint8(VARIES), axis.states)
    for call in maps.gates:
        if call.site == site:  # one module, so one size in front and one behind
            maps.tie(call.front, front)
            maps.tie(call.behind, behind)
    maps.gates.append(GateCall(site, front, behind, bool(operation.arguments["is_whole"])))
