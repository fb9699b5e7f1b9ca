"""The same numbers in less time. Every faster way has a flag and a plain twin, which :func:`disabled` takes."""

from pyro_l0.fast.switch import Flag, disabled, is_on

__all__ = ["Flag", "disabled", "is_on"]
