"""The leave-one-out gradient of gates of two values, on the total log ratio."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.wrappers import find_gate
from pyro_l0.fast.record import Site


def gates_log_prob(sites: Mapping[str, Site]) -> Tensor:
    """Log probability of a guide's gates of two values at its draws, shape ``()``; 0 if all are pathwise."""
    found = [
        site["fn"].log_prob(site["value"]).sum()
        for site in sites.values()
        if site["type"] == "sample" and isinstance(find_gate(site["fn"]), BernoulliGate)
    ]
    return torch.stack(found).sum() if found else torch.zeros(())


def leave_one_out(loss: Tensor, log_q: Tensor, temper: float) -> Tensor:
    r"""0 with an estimate of the mean loss's gradient for the gates' parameters.

    :math:`\sum_s (c_s - \bar c) \nabla \log q(z_s) / (S - 1)` with the cost
    :math:`c = \kappa (loss - \log q) + \log q`: each draw's baseline is the mean of the others. Where
    :math:`\log q` is a part of the loss and the posterior is exact, all costs are the same and the estimate has no
    variance; taking the gates' KL out would leave one.

    Args:
        loss: of each particle, shape ``(S,)``.
        log_q: log probability of its gates under the guide, shape ``(S,)``.
        temper: :math:`\kappa` in (0, 1], what the model's side of the ratio counts.

    References:
        Kool, van Hoof, Welling (2019), Buy 4 REINFORCE samples, get a baseline for free; Richter et al. (2020),
        VarGrad, arXiv:2010.10436.
    """
    cost = (temper * (loss - log_q) + log_q).detach() if temper != 1 else loss.detach()
    centred = (cost - cost.mean()) / (len(cost) - 1)
    return (centred * (log_q - log_q.detach())).sum()  # they may be of different dtypes
