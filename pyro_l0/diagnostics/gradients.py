"""Bias and variance of the gradient of an objective, by gate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.parameters import GateGuide, check_guide
from pyro_l0.infer.record import Record
from pyro_l0.infer.runs import Program

__all__ = ["GradientReport", "measure_gradient"]

_MOST = 15  # gates of an exact gradient, which runs the model at all of their values


@dataclass(frozen=True)
class GradientReport:
    """Statistics of many draws of a gradient; every tensor has one entry per gate, site after site, shape ``(n,)``.

    Attributes:
        mean: mean gradient in the gates' locations, in nats.
        standard_error: of the mean.
        variance: variance of the gradient.
        scaled_variance: variance of the gradient in E[z], which does not depend on how a family writes its location.
        exact: the exact gradient; None if it was not asked for.
    """

    mean: Tensor
    standard_error: Tensor
    variance: Tensor
    scaled_variance: Tensor
    exact: Tensor | None

    @property
    def bias(self) -> Tensor:
        """Mean minus the exact gradient, shape ``(n,)``; compare it with ``standard_error``."""
        assert self.exact is not None, "measure_gradient has to be called with exact=True"
        return self.mean - self.exact


def measure_gradient(
    elbo: L0_ELBO, model: Program, guide: GateGuide, *args: object, draws: int = 1000, exact: bool = False
) -> GradientReport:
    """Draw the gradient of an objective in the gates' locations many times, to see its bias and variance.

    Args:
        elbo: the objective.
        model: the model.
        guide: its guide, after its first call.
        *args: the model's arguments; every draw has the same batch, so its noise is not measured.
        draws: number of draws, at least 2.
        exact: whether to sum the exact gradient over all values of the guide's gates, too, at most 15 BernoulliGates.

    Raises:
        TypeError: ``elbo`` is not an L0_ELBO, ``guide`` is not over gates, or an option has the wrong type.
        ValueError: ``draws`` is below 2; or for ``exact`` the guide has more gates, or other latent variables.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import L0_ELBO, AutoGate
        >>> def model():
        ...     z = pyro.sample("z", BernoulliGate(logits=torch.zeros(2)).to_event(1))
        ...     pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.5))
        >>> guide = AutoGate(model, BernoulliGate)
        >>> _ = guide()
        >>> report = measure_gradient(
        ...     L0_ELBO("l0", estimator="arm"), model, guide, draws=200, exact=True
        ... )
        >>> bool((report.bias.abs() < 5 * report.standard_error).all())
        True
    """
    expect(L0_ELBO, "an L0_ELBO", elbo=elbo)
    expect_count(2, draws=draws)
    expect(bool, "True or False", exact=exact)
    check_guide(guide, "a gradient", "posterior", "locations")
    locations = guide.locations()
    known = _exact_gradient(elbo, model, guide, args) if exact else None
    losses = (elbo.differentiable_loss(model, guide, *args) for _ in range(draws))
    gradients = torch.stack([_gradient(loss, locations) for loss in losses])
    means = torch.stack([gate.mean.sum() for gate in guide.posterior().values()]).sum()
    variance, slope = gradients.var(0), _gradient(means, locations)
    return GradientReport(gradients.mean(0), (variance / draws).sqrt(), variance, variance / slope**2, known)


def _exact_gradient(elbo: L0_ELBO, model: Program, guide: GateGuide, args: tuple[object, ...]) -> Tensor:
    """The sum of costs over all values of the gates, differentiated: their probabilities carry the gradient."""
    with Record() as record:
        guide(*args)
    sites = {name: site for name, site in record.sites.items() if not site_is_subsample(site)}
    gates = {name: find_gate(site["fn"]) for name, site in sites.items()}
    sizes = [site["value"].numel() for site in sites.values()]
    if sum(sizes) > _MOST or not all(isinstance(gate, BernoulliGate) for gate in gates.values()):
        found = ", ".join(f"{name}: {site['fn']}" for name, site in sites.items())
        raise ValueError(f"Expected at most {_MOST} BernoulliGates and no other site for exact, but got {found}.")
    expected = sum(elbo.evaluate(model, record, {}, args, {}).analytic, torch.zeros(()))
    for state in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        pieces = zip(sites.items(), torch.tensor(state).split(sizes), strict=True)
        drawn = {name: piece.to(site["value"]).view_as(site["value"]) for (name, site), piece in pieces}
        with torch.no_grad():
            cost = elbo.evaluate(model, record, drawn, args, {}).cost
        log_mass = [gate.log_prob(drawn[name]).sum() for name, gate in gates.items() if gate is not None]
        expected = expected + torch.stack(log_mass).sum().exp() * cost
    return _gradient(expected, guide.locations())


def _gradient(value: Tensor, locations: Sequence[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(value, locations, materialize_grads=True)
    return torch.cat([gradient.detach().flatten() for gradient in gradients])
