"""Which of the faster ways are taken. It imports torch alone, so that the maths can ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

__all__ = ["Flag", "disabled", "is_on"]

Flag = Literal["record", "joint_draws", "kl", "gated_weights"]

_off: ContextVar[frozenset[Flag]] = ContextVar("_off", default=frozenset())


@contextmanager
def disabled(*flags: Flag) -> Iterator[None]:
    """A context without the faster ways: the same numbers up to rounding, in more time.

    Code that ``torch.compile`` traces uses plain formulas anyway, and records sites without Pyro's messages.

    Args:
        flags: names of the faster ways to switch off; all if none is given. ``"record"``: a loss records sites without
            Pyro's messages, and so can draw jointly. ``"joint_draws"``: gates of one kind are drawn, priced and
            integrated as one vector. ``"kl"``: the closed form is one node with written-out derivatives, computed in
            chunks. ``"gated_weights"``: gates multiply the weights of the next layer.

    Raises:
        ValueError: there is no such flag.

    Example:
        >>> from pyro_l0.fast import is_on
        >>> with disabled("kl"):
        ...     is_on("kl"), is_on("record")
        (False, True)
    """
    known = get_args(Flag)
    unknown = [flag for flag in flags if flag not in known]
    if unknown:
        raise ValueError(f"Expected flags among {known}, but got {unknown}.")
    token = _off.set(_off.get() | frozenset(flags or known))
    try:
        yield
    finally:
        _off.reset(token)


def is_on(flag: Flag) -> bool:
    """Whether a faster way, named as in :func:`disabled`, is taken; the example is there."""
    # A context variable can't be traced.
    return torch.compiler.is_compiling() or flag not in _off.get()
