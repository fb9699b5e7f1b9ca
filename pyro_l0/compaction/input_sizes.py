"""A network that takes inputs of one size only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from pyro_l0.compaction.certificate import tensors

__all__ = ["InputSizes", "refuse_other_sizes", "without_input_sizes"]


class InputSizes:
    """A hook in front of a network that refuses inputs of other sizes than those that it was compacted with.

    Args:
        sizes: of one example's inputs, without the batch.
    """

    def __init__(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        self.sizes = sizes

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Compare the sizes.

        Raises:
            ValueError: they are others.
        """
        got = tuple(tuple(x.shape[1:]) for x in tensors((args, kwargs)))
        if got != self.sizes:
            expected, found = (" and ".join(map(str, sizes)) for sizes in (self.sizes, got))
            raise ValueError(
                f"Expected inputs of size {expected}, as those that this network was compacted with (constants of "
                f"units that left depend on it), but got {found}; compact the whole network with an "
                "example_input of that size."
            )


def refuse_other_sizes(network: nn.Module, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Let a network refuse inputs of other sizes, in place of what it refused before."""
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, InputSizes):
            del network._forward_pre_hooks[key]
    network.register_forward_pre_hook(InputSizes(sizes), prepend=True, with_kwargs=True)


@contextmanager
def without_input_sizes(network: nn.Module) -> Iterator[None]:
    """A context in which a network takes other sizes."""
    hooks = dict(network._forward_pre_hooks)
    for key, hook in hooks.items():
        if isinstance(hook, InputSizes):
            del network._forward_pre_hooks[key]
    try:
        yield
    finally:
        network._forward_pre_hooks.clear()
        network._forward_pre_hooks.update(hooks)
