"""Reparameterise a gate so that samplers and guides of continuous variables can handle it."""

from __future__ import annotations

from typing import Any

import pyro
from pyro.distributions import Delta, MaskedDistribution
from pyro.infer.reparam.reparam import Reparam, ReparamMessage, ReparamResult
from torch.distributions import Independent

from pyro_l0.distributions.gate import GateDistribution, find_gate

__all__ = ["RectifyReparam"]


def _with_base(fn: Any, gate: GateDistribution) -> Any:
    """A gate's variable before rectification, in the wrappers of the gate."""
    if fn is gate:
        return gate.base_distribution()
    inner = _with_base(fn.base_dist, gate)
    if isinstance(fn, MaskedDistribution):
        return inner.mask(fn._mask)
    if isinstance(fn, Independent):
        return inner.to_event(fn.reinterpreted_batch_ndims)
    return inner.expand(fn.batch_shape)


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
        value = gate.rectify(pyro.sample(f"{name}_base", _with_base(fn, gate)))
        delta = Delta(value, event_dim=fn.event_dim, validate_args=False).mask(False)
        return {"fn": delta, "value": value, "is_observed": True}
