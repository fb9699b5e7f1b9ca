"""The rule of recurrent layers."""

from __future__ import annotations

from pyro_l0.nn.engine.maps import Maps, Product
from pyro_l0.nn.engine.registry import rule
from pyro_l0.nn.engine.tape import Operation

__all__: list[str] = []


@rule("recurrent", "recurrent_cell")
def recurrent(maps: Maps, operation: Operation) -> None:
    """A barrier: features that go into a recurrent layer and that come out of it stay."""
    maps.barrier()
    x = operation.inputs[0]
    for weight in operation.inputs:
        if weight.names and weight.rank == 2:
            maps.products.append(Product(operation, (*maps.axes[weight], *maps.axes[x][:-1])))
