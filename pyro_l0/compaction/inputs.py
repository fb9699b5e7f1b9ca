"""Which inputs a smaller network accepts, and data sets cut to those that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pyro_l0.compaction.calls import tensors
from pyro_l0.compaction.gate_change import Select

__all__ = ["InputSizes", "SelectedInputs", "refuse_other_sizes"]


class InputSizes:
    """A hook that refuses inputs of other sizes, without the batch, than those that a network was compacted with."""

    def __init__(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        self.sizes = sizes

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raise ValueError if the sizes are others."""
        got = tuple(tuple(x.shape[1:]) for x in tensors((args, kwargs)))
        if got != self.sizes:
            expected, found = (" and ".join(map(str, sizes)) for sizes in (self.sizes, got))
            raise ValueError(
                f"Expected inputs of size {expected}, as those that this network was compacted with (constants of "
                f"removed units depend on it), but got {found}; compact the whole network with an example of that size."
            )


def refuse_other_sizes(network: nn.Module, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Let a network refuse inputs of other sizes, in place of what it refused before."""
    _remove_hook(network)
    network.register_forward_pre_hook(InputSizes(sizes), prepend=True, with_kwargs=True)


def _remove_hook(network: nn.Module) -> None:
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, InputSizes):
            del network._forward_pre_hooks[key]


class SelectedInputs:
    """Selects the inputs that a smaller network reads once for all examples, not in every step.

    A network that lost some of its inputs begins by selecting the others. Inside :meth:`of` it does not, and accepts
    examples from the tensor that the context yields.

    Args:
        inputs: all examples, shape ``(n, ...)``.

    Example:
        >>> from pyro_l0.compaction import compact
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(3), nn.Linear(3, 1))
        >>> small = compact(net, {"0": torch.tensor([1.0, 0.0, 1.0])}, torch.ones(1, 3)).network
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
        """A context in which a network takes only the inputs that it reads.

        Args:
            network: the network; shrink and save it outside of the context.

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
        hooks = dict(network._forward_pre_hooks)
        _remove_hook(network)
        select.is_done = True
        try:
            yield self._selected
        finally:
            select.is_done = False
            network._forward_pre_hooks.clear()
            network._forward_pre_hooks.update(hooks)
