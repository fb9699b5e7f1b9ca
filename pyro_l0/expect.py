"""One check of an argument's type, for public functions."""

from __future__ import annotations

from types import UnionType

__all__ = ["expect"]


def expect(kind: type | UnionType, wanted: str, **values: object) -> None:
    """Raise a TypeError for the first of some arguments that is of another type.

    Args:
        kind: a type, or several as ``Mapping | None``.
        wanted: what was expected, in words.
        **values: the arguments by their names.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"Expected {name} to be {wanted}, but got a value of type {type(value).__name__}.")
