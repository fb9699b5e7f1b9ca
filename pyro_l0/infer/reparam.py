"""Reparameterise a gate so that samplers and guides of continuous variables can handle it."""

from __future__ import annotations

from typing import Any

import pyro
from pyro.distributions import Delta
from pyro.infer.reparam.reparam import Reparam, ReparamMessage, ReparamResult

from pyro_l0.distributions.gate import find_gate

__all__ = ["RectifyReparam"]


class RectifyReparam(Reparam):
    """Sample the variable before rectification at the site ``{name}_base`` and clip it deterministically.

    NUTS, AutoNormal and Trace_ELBO then see a continuous latent variable on the real line. An ELBO of the
    reparameterised model is an upper bound on the free energy of the gate: it charges the tails inside the atoms.

    Raises:
        TypeError: the site is not a gate.
        ValueError: the site is observed.

    Example:
        >>> from pyro import poutine
        >>> from pyro_l0 import HardConcrete
        >>> model = poutine.reparam(lambda: pyro.sample("z", HardConcrete(0.0)), {"z": RectifyReparam()})
        >>> sorted(poutine.trace(model).get_trace().nodes)
        ['_INPUT', '_RETURN', 'z', 'z_base']
    """

    def apply(self, msg: ReparamMessage) -> ReparamResult:
        """Replace the gate by a deterministic function of a new continuous site."""
        name = msg["name"]
        fn: Any = msg["fn"]
        gate = find_gate(fn)
        if gate is None:
            raise TypeError(f"RectifyReparam expected a gate at site {name!r}, but got {fn}.")
        if msg["is_observed"]:
            raise ValueError(f"RectifyReparam expected a latent gate at site {name!r}, but it is observed.")
        event_dim = fn.event_dim
        base = gate.base_distribution()
        value = gate.rectify(pyro.sample(f"{name}_base", base.to_event(event_dim)))
        delta = Delta(value, event_dim=event_dim, validate_args=False).mask(False)
        return {"fn": delta, "value": value, "is_observed": True}
