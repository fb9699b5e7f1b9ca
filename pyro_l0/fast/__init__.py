"""The same numbers in less time; every door has a plain twin, and :func:`disabled` takes it.

Whoever reads the rest of the library sees the maths. What is done otherwise for the sake of speed alone stands here, or
asks :func:`is_open` where it is chosen.
"""

from pyro_l0.fast.switch import disabled, is_open

__all__ = ["disabled", "is_open"]
