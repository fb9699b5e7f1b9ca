"""Refuses samplers and guides that ask for a smooth transform of the real line to a gate.

Importing this module registers the refusal.
"""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

from torch.distributions import Transform, biject_to, constraints, transform_to

from pyro_l0.distributions.gate import GateSupport
from pyro_l0.distributions.wrappers import find_gate


def _refuse_to_transform(support: constraints.Constraint) -> NoReturn:
    """Answers samplers and guides of continuous variables, which ask a support for its transform.

    They pass the support alone, so the site's name and gate are read from the call stack.
    """
    where = "a gate site"
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        here = frame.f_locals
        site = here.get("site", here.get("node", {"name": here.get("name"), "fn": here.get("prior")}))
        gate = find_gate(site.get("fn")) if isinstance(site, dict) else None
        if gate is not None:
            where = f"gate site {site['name']!r}, a {type(gate).__name__}"
            break
    raise ValueError(
        f"Expected a continuous variable for NUTS, HMC and guides such as AutoNormal or AutoDelta, but got {where}, "
        "which is exactly 0 or 1 with positive probability. Sample it with pyro_l0.infer.sample_posterior; or "
        "reparameterise each gate but a BernoulliGate, as in pyro.poutine.reparam(model, {'z': "
        "pyro_l0.infer.reparam.RectifyReparam()}), or use pyro_l0.infer.AutoGate with L0_ELBO."
    )


def _transform_to_start(support: constraints.Constraint) -> Transform:
    """A first value of a site may come from a transform: a sampler draws it before it sees the reparameterisation."""
    callers = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    if "pyro.infer.autoguide.initialization" in callers:
        transform: Transform = transform_to(constraints.unit_interval)
        return transform
    return _refuse_to_transform(support)


biject_to.register(GateSupport, _refuse_to_transform)
transform_to.register(GateSupport, _transform_to_start)
