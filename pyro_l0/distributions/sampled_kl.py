"""The warning of objectives that sample the KL of a gate."""

from __future__ import annotations

import sys
import traceback
import warnings
from itertools import islice

_warned = False
# Estimators whose gradient has no bias on a gate: an analytic KL, and one that differentiates no sample.
_EXACT = ("TraceMeanField_ELBO", "ReweightedWakeSleep")


def warn_if_sampled() -> None:
    """Warn once when a Trace-style ELBO is about to differentiate a sampled gate KL.

    ELBOs give a distribution no sign of who asks for a log probability, so the callers are looked up: the guide's
    terms are computed by ``Trace.compute_score_parts``, a few frames below the ELBO.
    """
    global _warned
    if _warned:
        return
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    # Independent and masked wrappers, score_parts itself
    if not any(frame.f_code.co_name == "compute_score_parts" for frame in islice(callers, 4)):
        return
    for frame in callers:
        kinds = [kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__]
        if "ELBO" in kinds or "ReweightedWakeSleep" in kinds:
            if not any(kind in _EXACT for kind in kinds):
                _warned = True
                warnings.warn(
                    f"{kinds[0]} samples the KL of a gate, and the gradient of a sampled KL misses the mass that "
                    "crosses the atoms: it is biased, however many particles are drawn. Use pyro_l0.infer.L0_ELBO "
                    "or pyro.infer.TraceMeanField_ELBO, whose gate KL is exact.",
                    stacklevel=3,
                )
            return
