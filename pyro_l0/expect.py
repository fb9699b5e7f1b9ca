"""Checks of arguments, for public functions."""

from __future__ import annotations

from numbers import Integral
from types import UnionType

__all__ = ["expect", "expect_count"]


def expect(kind: type | UnionType, wanted: str, **values: object) -> None:
    """Raise a TypeError for the first of some arguments that is of another type than one that was wanted, in words."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"Expected {name} to be {wanted}, but got a value of type {type(value).__name__}.")


def expect_count(minimum: int, **values: object) -> None:
    """Raise for the first of some arguments that is no whole number (TypeError) or below a minimum (ValueError)."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"Expected {name} to be a whole number, but got a value of type {type(value).__name__}.")
        if value < minimum:
            raise ValueError(f"Expected {name} of at least {minimum}, but got {value}.")
