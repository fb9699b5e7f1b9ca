"""Which of the faster ways are taken. It imports torch alone, so that the maths can ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

__all__ = ["Door", "disabled", "is_open"]

Door = Literal["record", "joint_draws", "kl", "deferred_products"]

_closed: ContextVar[frozenset[Door]] = ContextVar("_closed", default=frozenset())


@contextmanager
def disabled(*doors: Door) -> Iterator[None]:
    """A context without the faster ways: the same numbers up to rounding, in more time.

    Code that ``torch.compile`` traces uses plain formulas anyway, and records sites without Pyro's messages.

    Args:
        doors: names of the faster ways to close; all if none is given. ``"record"``: a loss records sites without
            Pyro's messages, and so can draw jointly. ``"joint_draws"``: gates of one kind are drawn, priced and
            integrated as one vector. ``"kl"``: the closed form is one node with written-out derivatives, computed in
            blocks. ``"deferred_products"``: gates multiply the weights of the next layer.

    Raises:
        ValueError: there is no such door.

    Example:
        >>> with disabled("kl"):
        ...     is_open("kl"), is_open("record")
        (False, True)
    """
    known = get_args(Door)
    unknown = [door for door in doors if door not in known]
    if unknown:
        raise ValueError(f"Expected doors among {known}, but got {unknown}.")
    token = _closed.set(_closed.get() | frozenset(doors or known))
    try:
        yield
    finally:
        _closed.reset(token)


def is_open(door: Door) -> bool:
    """Whether a faster way, named as in :func:`disabled`, is open; the example is there."""
    # A context variable can't be traced.
    return torch.compiler.is_compiling() or door not in _closed.get()
