"""Integers that a network's modules hold, such as a number of heads, followed into the sizes that they give tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Held", "Holder", "follow_integers", "given_sizes"]

_KNOWN = ("torch.", "pyro_l0.")  # whose integers a table has, or nobody cuts


class Holder(NamedTuple):
    """Where an integer is held: path of the module, name of the attribute, and place in it if that is a tuple."""

    path: str
    name: str
    place: int | None = None

    def __str__(self) -> str:
        place = "" if self.place is None else f"[{self.place}]"
        return f"{self.path}.{self.name}{place}".removeprefix(".")


class Held(int):
    """An integer that a module holds, or a product, quotient, sum or difference of such.

    It is an integer like any other. What else is computed with it gives plain integers, of which nothing is known.
    """

    holders: dict[Holder, int]
    """What it is made of, with the values there."""
    formula: Callable[[Mapping[Holder, int]], int]
    text: str

    @classmethod
    def at(cls, value: int, holder: Holder) -> Held:
        """The integer of a module."""
        return cls._made(value, {holder: value}, lambda values: values[holder], str(holder))

    @classmethod
    def _made(
        cls, value: int, holders: dict[Holder, int], formula: Callable[[Mapping[Holder, int]], int], text: str
    ) -> Held:
        self = cls(value)
        self.holders, self.formula, self.text = holders, formula, text
        return self

    def _with(self, other: object, function: Callable[[int, int], int], sign: str) -> Any:
        if not isinstance(other, Held):
            return NotImplemented
        first, second = self.formula, other.formula
        return Held._made(
            function(int(self), int(other)),
            self.holders | other.holders,
            lambda values: function(first(values), second(values)),
            f"{self.text} {sign} {other.text}",
        )

    def __mul__(self, other: object) -> Any:
        return self._with(other, operator.mul, "*")

    def __floordiv__(self, other: object) -> Any:
        return self._with(other, operator.floordiv, "//")

    def __add__(self, other: object) -> Any:
        return self._with(other, operator.add, "+")

    def __sub__(self, other: object) -> Any:
        return self._with(other, operator.sub, "-")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # what a network keeps of it is plain


@contextmanager
def follow_integers(network: nn.Module) -> Iterator[None]:
    """Let the integers of users' modules be :class:`Held`; afterwards they are as before."""
    before: list[tuple[nn.Module, str, object]] = []
    for path, module in network.named_modules():
        if not type(module).__module__.startswith(_KNOWN):
            for name, value in vars(module).items():
                if type(value) is int or (type(value) is tuple and all(type(x) is int for x in value)):
                    before.append((module, name, value))
                    module.__dict__[name] = _held(value, path, name)
    try:
        yield
    finally:
        for module, name, value in before:
            if isinstance(vars(module).get(name), (Held, tuple)):
                module.__dict__[name] = value


def _held(value: int | tuple[int, ...], path: str, name: str) -> object:
    if isinstance(value, int):
        return Held.at(value, Holder(path, name))
    return tuple(Held.at(x, Holder(path, name, place)) for place, x in enumerate(value))


def given_sizes(arguments: object, results: object) -> Iterator[tuple[Held, Tensor, int]]:
    """The held integers among a function's arguments, each with a result and the dimension whose size it gave."""
    leaves = [x.stop if isinstance(x, slice) else x for x in tree_leaves(arguments)]
    sizes = [x for x in leaves if isinstance(x, int) and not isinstance(x, bool)]
    if not any(isinstance(size, Held) for size in sizes):
        return
    for tensor in tree_leaves(results):
        if isinstance(tensor, Tensor):
            shape = tensor.shape
            in_order = len(sizes) == len(shape) and all(x in (-1, n) for x, n in zip(sizes, shape, strict=True))
            for number, size in enumerate(sizes):
                dims = [number] if in_order else [dim for dim, n in enumerate(shape) if n == size]
                if isinstance(size, Held) and len(dims) == 1:
                    yield size, tensor, dims[0]
