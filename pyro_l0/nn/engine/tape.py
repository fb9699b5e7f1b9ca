"""A recorded call: operations, and the values that they read and make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_l0.nn.engine.held import Comparison, Dimension

__all__ = ["WRITE", "Call", "Operation", "Recording", "Value"]

WRITE = "write in place"  # the operation that stands for what a write does to the other views of its memory


@dataclass(eq=False)
class Value:
    """A tensor at one moment of a recorded call; what changes in place becomes another value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor  # whose entries later operations may have changed in place
    names: tuple[str, ...] = ()  # of the parameter or buffer that it is, several for a tied one
    is_input: bool = False  # of the network
    is_output: bool = False  # of the network
    is_given: bool = False  # nothing recorded made it, and it is neither input, parameter nor buffer

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclass(eq=False)
class Operation:
    """One operation of a recorded call.

    Attributes:
        name: its name without overload, such as ``"aten::addmm"`` or ``"gate"``.
        function: what was called.
        args: its positional arguments, with values in place of tensors.
        kwargs: its keyword arguments, likewise.
        arguments: all arguments by the names in its signature, defaults included.
        outputs: the values that it made; None for anything that is not a tensor.
        path: path of the module that called it.
    """

    name: str
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    arguments: dict[str, object]
    outputs: tuple[Value | None, ...]
    path: str

    @property
    def output(self) -> Value:
        """The first value that it made."""
        return self.made[0]

    @cached_property
    def inputs(self) -> list[Value]:
        """Every value among its arguments."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Value)]

    @cached_property
    def made(self) -> list[Value]:
        """Every value that it made."""
        return [value for value in self.outputs if value is not None]

    def value(self, name: str) -> Value:
        """The argument of this name, a tensor."""
        found = self.arguments[name]
        assert isinstance(found, Value), f"{name} of {self.name} is {found!r}"
        return found

    def maybe(self, name: str) -> Value | None:
        """The argument of this name if it is a tensor, or else None."""
        found = self.arguments.get(name)
        return found if isinstance(found, Value) else None

    @property
    def added(self) -> Value | None:
        """What it adds to a product: a bias."""
        return self.maybe("bias") or (self.maybe("self") if "add" in self.name else None)

    def integer(self, name: str) -> int:
        """The argument of this name, an integer."""
        return int(cast(int, self.arguments[name]))

    def integers(self, name: str) -> list[int]:
        """The argument of this name as a list of integers; a single one, or None, becomes a list."""
        found = self.arguments.get(name)
        if found is None:
            return []
        return [found] if isinstance(found, int) else [int(x) for x in cast(Sequence[int], found)]


@dataclass(frozen=True)
class Call:
    """Inputs and outputs of one recorded call."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What a network did in one call or several."""

    network: nn.Module
    operations: tuple[Operation, ...]  # in the order of their running
    calls: tuple[Call, ...]  # one for each example
    named: dict[str, Value]  # parameters and buffers that were used, by every name
    comparisons: tuple[Comparison, ...] = ()  # of sizes and of integers of the users' modules
    dimensions: Mapping[Dimension, tuple[Value, int]] = field(default_factory=dict)  # what these are sizes of
