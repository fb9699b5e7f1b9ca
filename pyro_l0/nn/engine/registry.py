"""Which rule belongs to an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyro_l0.nn.engine.tape import Operation

if TYPE_CHECKING:
    from pyro_l0.nn.engine.maps import Maps

__all__ = ["Rule", "find_rule", "rule"]

Rule = Callable[["Maps", Operation], None]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the operations of these names, replacing any earlier one.

    By the methods of :class:`~pyro_l0.nn.engine.Maps`, a rule says how the entries of an operation's inputs and
    outputs belong together, which of them are read together, and what is known of the outputs. An operation without a
    rule is a barrier: all that it touches stays. The twin that works in place (``relu_``) has the same rule.

    Args:
        names: as ``torch.ops`` has them, with their library: ``"aten::relu"``, or ``"mine::scale"`` for an operation
            of your own.

    Example:
        >>> @rule("mine::scale")
        ... def scale(maps, operation):
        ...     "Each entry comes from the same entry, and zeros stay zeros."
        ...     for dim in range(operation.output.rank):
        ...         maps.passes(operation.value("x"), dim, operation.output, dim)
    """

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def find_rule(name: str) -> Rule | None:
    """The rule of an operation, or of its twin that does not work in place."""
    return _RULES.get(name) or (_RULES.get(name[:-1]) if name.endswith("_") else None)
