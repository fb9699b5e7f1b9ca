"""Bias and variance of the gradient of an objective, per gate and per unit of compute."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.distributions.stretched import integrate
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.parameters import GateGuide, check_guide
from pyro_l0.infer.record import Record
from pyro_l0.infer.runs import Program
from pyro_l0.maths.quadrature import Nodes, Stretch

__all__ = ["GradientReport", "exact_gradient", "measure_gradient", "pathwise_noise"]


@dataclass(frozen=True)
class GradientReport:
    """Statistics of many draws of a gradient; every tensor has one entry per gate, site after site, shape ``(n,)``.

    Attributes:
        name: what was measured.
        mean: mean gradient in the gates' locations, in nats.
        variance: variance of the gradient.
        draws: number of draws.
        seconds: seconds of one draw, forward and backward.
        slope: derivative of E[z] in the location.
        exact: the exact gradient; None if it was not asked for.
    """

    name: str
    mean: Tensor
    variance: Tensor
    draws: int
    seconds: float
    slope: Tensor
    exact: Tensor | None = None

    @property
    def standard_error(self) -> Tensor:
        """Standard error of the mean, shape ``(n,)``."""
        return (self.variance / self.draws).sqrt()

    @property
    def bias(self) -> Tensor:
        """Mean minus the exact gradient, shape ``(n,)``; compare it with :attr:`standard_error`."""
        assert self.exact is not None, "measure_gradient has to be called with exact=True"
        return self.mean - self.exact

    @property
    def scaled_variance(self) -> Tensor:
        """Variance of the gradient in E[z], which does not depend on how a family writes its location."""
        return self.variance / self.slope**2

    @property
    def variance_seconds(self) -> Tensor:
        """Scaled variance times seconds, the variance of a mean over one second of draws."""
        return self.scaled_variance * self.seconds


def measure_gradient(
    elbo: L0_ELBO,
    model: Program,
    guide: GateGuide,
    *args: object,
    name: str = "",
    draws: int = 1000,
    exact: bool = False,
) -> GradientReport:
    """Draw the gradient of an objective in the gates' locations many times, to see its bias and variance.

    Args:
        elbo: the objective.
        model: the model.
        guide: its guide, after its first call.
        *args: the model's arguments; every draw has the same batch, so its noise is not measured.
        name: name of the report.
        draws: number of draws, at least 2.
        exact: whether to compare with :func:`exact_gradient`, for at most 15 Bernoulli gates or three with a density.

    Returns:
        The statistics of the draws.

    Raises:
        TypeError: ``elbo`` is not an L0_ELBO, ``guide`` is not over gates, or an option has the wrong type.
        ValueError: ``draws`` is below 2.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import L0_ELBO, AutoGate
        >>> def model():
        ...     z = pyro.sample("z", HardConcrete(torch.zeros(2)).to_event(1))
        ...     pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.5))
        >>> guide = AutoGate(model)
        >>> _ = guide()
        >>> report = measure_gradient(L0_ELBO("l0"), model, guide, draws=200, exact=True)
        >>> bool((report.bias.abs() < 5 * report.standard_error).all())
        True
    """
    expect(L0_ELBO, "an L0_ELBO", elbo=elbo)
    expect_count(2, draws=draws)
    expect(bool, "True or False", exact=exact)
    locations = _locations(guide)
    start = time.perf_counter()
    losses = (elbo.differentiable_loss(model, guide, *args) for _ in range(draws))
    rows = [_flat(torch.autograd.grad(loss, locations, materialize_grads=True)) for loss in losses]
    seconds = (time.perf_counter() - start) / draws
    gradients = torch.stack(rows)
    means = torch.stack([gate.mean.sum() for gate in guide.posterior().values()]).sum()
    slope = _flat(torch.autograd.grad(means, locations))
    found = exact_gradient(elbo, model, guide, *args) if exact else None
    return GradientReport(name, gradients.mean(0), gradients.var(0), draws, seconds, slope, found)


def exact_gradient(
    elbo: L0_ELBO, model: Program, guide: GateGuide, *args: object, max_configurations: int = 2**15
) -> Tensor:
    """The gradient of an objective in the gates' locations without sampling, in nats, one entry per gate, ``(n,)``.

    The expectation is a sum over all configurations of Bernoulli gates, and over atoms and quadrature nodes of others.
    Their probabilities carry the gradient. :func:`measure_gradient` has an example with ``exact=True``.

    Args:
        elbo: the objective.
        model: the model.
        guide: its guide of gates alone, after its first call.
        *args: the model's arguments.
        max_configurations: the maximum number of evaluations of the model.

    Raises:
        TypeError: ``elbo`` is not an L0_ELBO, or ``guide`` is not over gates.
        ValueError: there are more configurations, or the guide has latent variables other than gates.
    """
    expect(L0_ELBO, "an L0_ELBO", elbo=elbo)
    locations = _locations(guide)
    with Record() as record:
        guide(*args)
    gates = {name: _gate(name, site["fn"]) for name, site in record.sites.items() if not site_is_subsample(site)}
    pairs = [pair for gate in gates.values() for pair in _points(gate)]
    values, log_masses = [z for z, _ in pairs], [log_mass for _, log_mass in pairs]
    configurations = math.prod(len(points) for points in values)
    if configurations > max_configurations:
        raise ValueError(
            f"Expected at most {max_configurations=}, but these gates have {configurations} configurations."
        )
    costs = []
    with torch.no_grad():
        for state in itertools.product(*values):
            pieces = torch.stack(state).split([gate.batch_shape.numel() for gate in gates.values()])
            drawn = {name: x.view(gates[name].batch_shape) for name, x in zip(gates, pieces, strict=True)}
            costs.append(elbo.evaluate(model, record, drawn, args, {}).cost)
    joint = log_masses[0]
    for log_mass in log_masses[1:]:
        joint = (joint.unsqueeze(-1) + log_mass).flatten()
    expected = (torch.exp(joint) * torch.stack(costs).to(joint)).sum()
    for part in elbo.evaluate(model, record, {}, args, {}).analytic:
        expected = expected + part
    return _flat(torch.autograd.grad(expected, locations))


def _gate(name: str, distribution: object) -> GateDistribution:
    gate = find_gate(distribution)
    if gate is None:
        raise ValueError(f"Expected a guide of gates alone, but site {name!r} is {distribution}.")
    return gate


def pathwise_noise(gate: GateDistribution) -> Tensor:
    r"""Second moment of a gate's pathwise derivative over its squared mean.

    That is :math:`E[(\partial z / \partial \theta)^2] / (dE[z] / d\theta)^2` for the location :math:`\theta`, whatever
    its scale. It is at least 1 / P(0 < z < 1), because the derivative is 0 at the atoms, and equals that if the
    derivative is the same everywhere in between.

    Args:
        gate: a gate with a density and a location, which all families have but ``BernoulliGate`` and ``Rectified``.

    Returns:
        A tensor of shape ``batch_shape``.

    Raises:
        TypeError: the gate has no density, or is not a gate.

    Example:
        >>> from pyro_l0 import HardConcrete
        >>> pathwise_noise(HardConcrete(torch.tensor(0.0, dtype=torch.float64)))
        tensor(1.6406, dtype=torch.float64)
    """
    expect(GateDistribution, "a gate", gate=gate)
    name = next(iter(gate.learned))
    location = getattr(gate, name).detach().requires_grad_()
    others = {key: getattr(gate, key).detach() for key in gate.learned if key != name}
    moved = gate.with_learned(**{name: location}, **others)
    z, log_mass = _nodes(gate)
    # One row per node: the derivative of the cdf at it, for each gate by itself.
    rows = z.movedim(-1, 0)
    changes = [torch.autograd.grad(moved.cdf(row).sum(), location, retain_graph=True)[0] for row in rows]
    with torch.no_grad():
        log_density = gate.log_prob(rows)
        slope = -torch.stack(changes) / torch.exp(log_density)
        mass = torch.exp(log_mass).movedim(-1, 0)
        square: Tensor = (mass * slope**2).sum(0)
        mean: Tensor = (mass * slope).sum(0)
        return square / mean**2


def _locations(guide: GateGuide) -> Sequence[Tensor]:
    check_guide(guide, "a gradient", "posterior", "locations")
    return guide.locations()


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.detach().flatten() for gradient in gradients])


def _nodes(gate: GateDistribution) -> tuple[Tensor, Tensor]:
    """Points between the atoms and the log mass that a rule gives them, each of shape ``batch_shape + (n,)``."""

    def both(nodes: Nodes, stretch: Stretch, gate: GateDistribution) -> Tensor:
        log_mass = gate._log_density_in_t(nodes, stretch) + torch.log(nodes.weight)
        return torch.stack(torch.broadcast_tensors(nodes.z, log_mass))

    z, log_mass = integrate(both, gate)
    return z, log_mass


def _points(gate: GateDistribution) -> list[tuple[Tensor, Tensor]]:
    """For each gate of a batch the values that it takes in such a sum, and their log masses, shape ``(k,)``."""
    atoms = torch.stack((gate.log_prob_zero, gate.log_prob_one), -1).reshape(-1, 2)
    ends = torch.tensor([0.0, 1.0], dtype=atoms.dtype, device=atoms.device)
    if isinstance(gate, BernoulliGate):
        return [(ends, row) for row in atoms]
    z, log_mass = _nodes(gate)
    log_mass = log_mass.reshape(len(atoms), -1)
    z = z.expand(*gate.batch_shape, z.shape[-1]).reshape(log_mass.shape)
    pairs = []
    for row, nodes, mass in zip(atoms, z, log_mass, strict=True):
        used = mass > -math.inf  # a panel of no width has no mass
        pairs.append((torch.cat((ends, nodes[used])), torch.cat((row, mass[used]))))
    return pairs
