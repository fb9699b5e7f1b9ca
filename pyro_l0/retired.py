"""Names of earlier versions, which work for one more release, warn and name what replaces them."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["renamed_arguments", "retired_names"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def retired_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__`` for names that have moved.

    Args:
        module: the module's ``__name__``.
        names: where each old name is found now, as ``"package.module.name"``.

    Returns:
        The function to assign to ``__getattr__``. It raises AttributeError for every other name.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is deprecated. Use {names[name]}.", FutureWarning, stacklevel=2)
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home), new)

    return find


def renamed_arguments(**names: str) -> Callable[[_Function], _Function]:
    """Let a function take keyword arguments under their old names, given as ``old="new"``.

    Raises:
        TypeError: at a call that gives an argument under both names.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise TypeError(f"Expected {new} once, but {function.__qualname__} got {old}, its old name, too.")
                message = f"The argument {old} of {function.__qualname__} is deprecated. Use {new}."
                warnings.warn(message, FutureWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate
