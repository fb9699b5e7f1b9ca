"""The same numbers in less time. Every faster way, a door, has a plain twin, which :func:`disabled` takes."""

from pyro_l0.fast.switch import Door, disabled, is_open

__all__ = ["Door", "disabled", "is_open"]
