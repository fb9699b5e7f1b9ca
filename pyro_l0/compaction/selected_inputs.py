"""All examples with the inputs that a smaller network reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from pyro_l0.nn.pieces import Select

__all__ = ["SelectedInputs"]


class SelectedInputs:
    """All examples with the inputs that a smaller network reads, chosen when some left, not in every step.

    A network some of whose inputs left begins by selecting the others. Inside of :meth:`of` it does not, and takes
    examples from the tensor that the context yields.

    Args:
        inputs: all examples, shape ``(n, ...)``.

    Example:
        >>> from pyro_l0.compaction import plan, rewrite
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(3), nn.Linear(3, 1))
        >>> small = rewrite(net, plan(net, {"0": torch.tensor([1.0, 0.0, 1.0])}, torch.ones(1, 3)))
        >>> with SelectedInputs(torch.ones(5, 3)).of(small) as inputs:
        ...     inputs.shape, small(inputs[:2]).shape
        (torch.Size([5, 2]), torch.Size([2, 1]))
    """

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self._select: Select | None = None
        self._selected = inputs

    @contextmanager
    def of(self, network: nn.Module) -> Iterator[Tensor]:
        """Let a network take the inputs that it reads.

        Args:
            network: as it is now; shrink it and save it outside of the context alone.

        Yields:
            The examples with the inputs that the network reads; all inputs, not copied, if it reads all.
        """
        found = _first_select(network)
        if found is None:
            yield self.inputs
            return
        name, select = found
        before, self._select = self._select, select
        # A shrinking may leave the inputs as they are.
        if before is None or before.dim != select.dim or not torch.equal(before.index, select.index):
            self._selected = select(self.inputs)
        setattr(network, name, nn.Identity())
        try:
            yield self._selected
        finally:
            setattr(network, name, select)


def _first_select(network: nn.Module) -> tuple[str, Select] | None:
    """The module that alone reads a network's input, if it selects units of it."""
    if not isinstance(network, fx.GraphModule):
        return None
    readers = [user for node in network.graph.nodes if node.op == "placeholder" for user in node.users]
    modules = dict(network.named_children())
    select = modules.get(str(readers[0].target)) if len(readers) == 1 else None
    return (str(readers[0].target), select) if isinstance(select, Select) else None
