"""All examples with the inputs that a smaller network reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pyro_l0.compaction.input_sizes import without_input_sizes
from pyro_l0.compaction.pieces import Select

__all__ = ["SelectedInputs"]


class SelectedInputs:
    """All examples with the inputs that a smaller network reads, chosen when some left, not in every step.

    A network some of whose inputs left begins by selecting the others. Inside of :meth:`of` it does not, and takes
    examples from the tensor that the context yields.

    Args:
        inputs: all examples, shape ``(n, ...)``.

    Example:
        >>> from pyro_l0.compaction.compact import plan, rewrite
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(3), nn.Linear(3, 1))
        >>> small = rewrite(net, plan(net, {"0": torch.tensor([1.0, 0.0, 1.0])}, torch.ones(1, 3)))
        >>> with SelectedInputs(torch.ones(5, 3)).of(small) as inputs:
        ...     inputs.shape, small(inputs[:2]).shape
        (torch.Size([5, 2]), torch.Size([2, 1]))
    """

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self._index: Tensor | None = None
        self._selected = inputs

    @contextmanager
    def of(self, network: nn.Module) -> Iterator[Tensor]:
        """Let a network take the inputs that it reads.

        Args:
            network: as it is now; shrink it and save it outside of the context alone.

        Yields:
            The examples with the inputs that the network reads; all inputs, not copied, if it reads all.
        """
        select = next((m for m in network.modules() if isinstance(m, Select) and m.reads_input), None)
        if select is None:
            yield self.inputs
            return
        if self._index is None or not torch.equal(self._index, select.index):  # a shrinking may leave them as they are
            self._index = select.index.clone()
            self._selected = select(self.inputs)
        select.is_done = True
        try:
            with without_input_sizes(network):
                yield self._selected
        finally:
            select.is_done = False
