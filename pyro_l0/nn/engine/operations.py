"""What is known of operations: one entry for each name, which :func:`rule` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pyro_l0.nn.engine.maps import Maps
    from pyro_l0.nn.engine.record import Operation
    from pyro_l0.nn.engine.sizes import Notes

__all__ = ["ENTRIES", "WHOLE", "Entry", "Integers", "Rule", "find_entry", "is_pointwise", "rule"]

Rule = Callable[["Maps", "Operation"], None]
Integers = Callable[["Notes", tuple[Any, dict[str, Any]], Any], None]


@dataclass(frozen=True)
class Entry:
    """What is known of an operation, as :func:`rule` describes it; nothing is by default."""

    rule: Rule | None = None
    arguments: tuple[str, ...] = ()
    is_homogeneous: bool = False
    size: str = ""
    parts: str = ""
    integers: Integers | None = None


ENTRIES: dict[str, Entry] = {}
_UNKNOWN = Entry()
WHOLE: dict[Callable[..., object], str] = {}  # by function that is recorded as one operation, the name of that


def rule(
    *names: str,
    calls: tuple[Callable[..., object], ...] = (),
    arguments: str = "",
    is_homogeneous: bool = False,
    size: str = "",
    parts: str = "",
    integers: Integers | None = None,
) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the operations of these names, replacing any earlier entry.

    A rule calls methods of :class:`~pyro_l0.nn.engine.Maps` to say how the entries of an operation's inputs and outputs
    belong together, which of them are read together, and what is known of the outputs. An operation without a rule is a
    barrier: all that it touches stays. The in-place twin (``relu_``) has the same entry.

    Args:
        names: names as in ``torch.ops``, with the library: ``"aten::relu"``, or ``"mine::scale"`` for an operation of
            your own.
        calls: functions of torch that are recorded as one such operation, before they become several others.
        arguments: the names of the arguments of these functions, in order; those that are not given are None.
        is_homogeneous: whether its first output is c times as large if all its inputs of numbers are, for c > 0, and
            made of them by moves, maxima and sums with weights of at least 0. Gates between 0 and 1 in front of it can
            then go into the weights behind it.
        size: the name of an argument that is the size of a dimension whose units leave, or a list of it.
        parts: the name of an argument that is the number of parts into which a dimension, ``dim``, is cut evenly.
        integers: says what integers do that modules hold and pass to the function of this name, of torch or your own,
            so that they change with the units that stay, or keep these: ``are_sizes``, ``are_numbers``, ... of
            ``pyro_l0.nn.engine.sizes``.

    Example:
        >>> @rule("mine::scale")
        ... def scale(maps, operation):
        ...     "Each entry comes from the same entry, and zeros stay zeros."
        ...     for dim in range(operation.output.rank):
        ...         maps.passes(operation.value("x"), dim, operation.output, dim)
    """

    def register(function: Rule) -> Rule:
        entry = Entry(function, tuple(arguments.split()), is_homogeneous, size, parts, integers)
        ENTRIES.update(dict.fromkeys(names, entry))
        WHOLE.update(dict.fromkeys(calls, names[0]))
        return function

    return register


def find_entry(name: str) -> Entry:
    """The entry of an operation, or of its twin that does not work in place."""
    return ENTRIES.get(name) or (ENTRIES.get(name[:-1]) if name.endswith("_") else None) or _UNKNOWN


def is_pointwise(operation: Operation) -> bool:
    """Whether torch itself calls an operation pointwise, or the one that does the same to a copy."""
    twin = operation.name.removeprefix("aten::").rstrip("_")
    packet = getattr(torch.ops.aten, twin, None) if operation.name.startswith("aten::") else None
    twins = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in getattr(function, "tags", ()) for function in (operation.function, *twins))
