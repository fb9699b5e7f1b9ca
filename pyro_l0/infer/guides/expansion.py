"""A model's log likelihood to second order in its coefficients, and slabs given their gates that start there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0.infer.guides.mean_field import MEAN_FIELD, Layout
from pyro_l0.infer.record import Site, is_likelihood
from pyro_l0.infer.runs import log_prob
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.maths.collapsed import opened, slab_given_gates
from pyro_l0.maths.second_order import Normals, Point, Step, jacobian, maximise, open_positions, slope_and_curvature

_LEAST_CURVATURE = 1e-6
_LEAST_GAIN = 1e-7  # of a Newton step, relative
_ROUNDS = 3  # of coefficients and other latents in turn
_DRAWS = 4  # pairs of them, of the coefficients for the other latents' mode
_FAR, _EQUAL = 0.5, 1e-3  # on the real line, where two slopes are compared; their relative difference
_STEP = 0.05  # of differences in other latents, on the real line


_RANDOM = 12  # gate vectors at which a model is tried, beside those that tell any two gates apart
_OTHERWISE = f"Sum the gates out by sample_posterior, or, for a fit alone, {MEAN_FIELD}."


class OpenModel(NamedTuple):
    """A model's log densities as functions of its coefficients and other latent variables, every gate open."""

    target: InferenceTarget
    values: Mapping[str, Tensor]  # of all latent sites; those that the layouts do not name stay
    slabs: Layout
    gates: Layout
    hyper: Layout

    def sites(self, slabs: Tensor, hyper: Tensor, gates: Tensor | None = None) -> dict[str, Site]:
        """The model's sites at slabs, shape ``(p,)``, other latents, shape ``(d,)``, and open gates or those given."""
        gates = torch.ones(self.gates.size, dtype=slabs.dtype, device=slabs.device) if gates is None else gates
        given = {**self.slabs.apart(slabs), **self.hyper.apart(hyper), **self.gates.apart(gates)}
        return self.target.at({**self.values, **given})

    def log_likelihood(self, slabs: Tensor, hyper: Tensor, gates: Tensor | None = None) -> Tensor:
        """Log probability of the observed sites in nats, shape ``()``."""
        sites = self.sites(slabs, hyper, gates).values()
        return torch.stack([log_prob(site).sum() for site in sites if is_likelihood(site)]).sum()

    def slab_prior(self, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the slabs' priors, shapes ``(p,)``."""
        sites = self.sites(torch.zeros(self.slabs.size, dtype=hyper.dtype, device=hyper.device), hyper)
        priors = [self.slabs.normal(name, sites[name]["fn"]) for name in self.slabs.shapes]
        return torch.cat([loc for loc, _ in priors]), torch.cat([scale for _, scale in priors])

    def hyper_prior(self, hyper: Tensor) -> Tensor:
        """Log density of the other latents on the real line, shape ``()``."""
        sites = self.sites(torch.zeros(self.slabs.size, dtype=hyper.dtype, device=hyper.device), hyper)
        found = [log_prob(sites[name]).sum() for name in self.hyper.shapes]
        return torch.stack([*found, self.hyper.log_jacobian(hyper)]).sum()

    @torch.no_grad()
    def gates_of(self, slab_scale: Tensor, hyper: Tensor, gate_of: Tensor) -> Tensor:
        """Which gate switches each slab: ``gate_of``, or shape ``(p, k)`` where only products of gates do.

        Refuses a model in which gates do anything else. Its likelihood at any gates and slabs must be that at open
        gates and the slabs times their gates, and no prior of another site may depend on gates.
        """
        # At generic values, as effects of gates may cancel or vanish at a mode.
        generator = torch.Generator().manual_seed(0)
        moves = (torch.rand(len(slab_scale) + len(hyper), generator=generator) - 0.5).to(hyper)
        slabs, hyper = slab_scale * moves[: len(slab_scale)], hyper + moves[len(slab_scale) :]
        vectors = gate_vectors(self.gates.size, hyper)
        self._check_priors(slabs, hyper, vectors)
        if self._misfit(slabs, hyper, vectors, gate_of) is None:
            return gate_of
        gate_of = self._products(slabs, hyper, gate_of)
        misfit = self._misfit(slabs, hyper, vectors, gate_of)
        if misfit is None:
            return gate_of
        gates, found, expected = misfit
        alone = {x: torch.ones_like(gates).index_copy(0, own, gates[own]) for x, own in self.gates.positions().items()}
        names = [name for name, x in alone.items() if self._misfit(slabs, hyper, x[None], gate_of)] or list(alone)
        raise ValueError(
            f"Expected slabs {_listed(self.slabs.shapes)} to enter the model as products with their gates, and gates "
            f"in no other way, but closing gates of {_listed(names)} makes its log likelihood {found:.6g} where those "
            f"products give {expected:.6g}. {_OTHERWISE}"
        )

    def _check_priors(self, slabs: Tensor, hyper: Tensor, vectors: Tensor) -> None:
        """Refuse a prior, other than a gate's, that depends on gates."""
        before = self.sites(slabs, hyper)
        for gates in vectors:
            sites = self.sites(slabs, hyper, gates)
            for name in self.values:
                densities = (float(log_prob(x[name]).sum()) for x in (before, sites))
                if name not in self.gates.shapes and not _is_close(*densities):
                    raise ValueError(
                        f"Expected priors of slabs and other latents that do not depend on gates, but that of {name!r} "
                        f"changes with gates of {_listed(self.gates.shapes)}. {_OTHERWISE}"
                    )

    def _misfit(
        self, slabs: Tensor, hyper: Tensor, vectors: Tensor, gate_of: Tensor
    ) -> tuple[Tensor, float, float] | None:
        """The first gates at which the log likelihood is not that of the products, and both values."""
        for gates in vectors:
            found = float(self.log_likelihood(slabs, hyper, gates))
            expected = float(self.log_likelihood(slabs * opened(gates, gate_of), hyper))
            if not _is_close(found, expected):
                return gates, found, expected
        return None

    def _products(self, slabs: Tensor, hyper: Tensor, gate_of: Tensor) -> Tensor:
        """All gates of each slab, shape ``(p, k)``: its own, and those without which it has no slope."""
        eye = torch.eye(self.gates.size + 1, dtype=slabs.dtype, device=slabs.device)[:, : self.gates.size]
        with torch.enable_grad():
            at = slabs.clone().requires_grad_()
            slopes = [torch.autograd.grad(self.log_likelihood(at, hyper, 1 - closed), at)[0] for closed in eye]
        silent = torch.stack(slopes, 1) == 0
        needed = silent[:, :-1] & ~silent[:, -1:]
        switched = (gate_of >= 0).nonzero().squeeze(1)
        needed[switched, gate_of[switched]] = True
        index, valid = open_positions(needed)
        return index.where(valid, -1)


def gate_vectors(size: int, like: Tensor) -> Tensor:
    """Gates at which to try a model, shape ``(n, size)``: of any two, one is open where the other is closed."""
    number = torch.arange(size)
    apart = [number >> bit & 1 for bit in range((size - 1).bit_length())]
    rate = torch.linspace(0.4, 0.9, _RANDOM)[:, None]
    mixed = torch.rand(_RANDOM, size, generator=torch.Generator().manual_seed(1)) < rate
    return torch.stack([torch.zeros_like(number), *apart, *(1 - x for x in apart), *mixed.long()]).to(like)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _is_close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6)


class Expansion(NamedTuple):
    r"""Second-order expansion of a log likelihood in p coefficients, and how it moves with d other latents.

    With :math:`t = \theta - \theta_0` on the real line and :math:`f = \exp(c^T t)`, curvature and linear term are
    :math:`f A` and :math:`f (b + K t)`, those of :math:`\exp(P t) \beta`, and the slabs' prior deviations
    :math:`s \exp(E t)`.
    """

    curvature: Tensor  # A, positive definite, (p, p)
    linear: Tensor  # b, (p,)
    mode: Tensor  # of likelihood and prior, (p,)
    loc: Tensor  # means of the slabs' priors, (p,)
    scale: Tensor  # s, (p,)
    loc_shifts: Tensor  # by which the means move with t, (p, d)
    hyper: Tensor  # theta_0, (d,)
    exponents: Tensor  # c, (d,)
    shifts: Tensor  # K, (p, d)
    scale_exponents: Tensor  # E, (p, d)
    powers: Tensor  # P, (p, d): of the latents that multiply coefficients


@torch.enable_grad()
def expand(model: OpenModel, hyper: Tensor, held: Tensor) -> Expansion:
    """Find the mode and expand about it.

    The other latents start at ``hyper`` on the real line, and those of ``held`` stay there.

    The slabs' mode and that of the other latents are found by turns. At the mode w of the slabs, with A the curvature
    of the log likelihood L and g its gradient, b = g + A w, so that b'x - x'A x / 2 has the slope g at w. With f =
    e^(c't) the slope at w is f (b + K t - A w) = f (g + K t), whose derivative by t at 0 is that of g if K = dg/dt - g
    c', and c is taken from how the trace of A changes. "Slabs given their gates, computed" in docs/lab/derivations.md.
    """
    slabs = torch.zeros(model.slabs.size, dtype=hyper.dtype, device=hyper.device, requires_grad=True)
    loc, scale = (x.detach() for x in model.slab_prior(hyper))
    (slope,) = torch.autograd.grad(model.log_likelihood(slabs, hyper), slabs)
    # Between a mode and its mirror image there is no slope: start beside it.
    aside = scale * (torch.arange(len(scale)).to(scale) / len(scale) + 0.5)
    slabs = torch.where((slope * scale).abs() > _LEAST_CURVATURE, 0.0, aside)
    for _ in range(_ROUNDS if len(hyper) else 1):
        slabs, curvature = _mode(model, slabs, hyper, loc, scale)
        if len(hyper):
            hyper = _hyper_mode(model, slabs, hyper, held, curvature, scale)
            loc, scale = (x.detach() for x in model.slab_prior(hyper))
    if len(hyper):
        slabs, curvature = _mode(model, slabs, hyper, loc, scale)
    at, theta = slabs.clone().requires_grad_(), hyper.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.log_likelihood(at, theta), at, create_graph=True)
    exponents = _exponents(model, slabs, hyper)
    moves = jacobian(gradient, theta)
    gradient = gradient.detach()
    moving_loc, moving_scale = model.slab_prior(theta)
    loc_shifts, scale_exponents = jacobian(moving_loc, theta), jacobian(moving_scale.log(), theta)
    powers = _powers(model, hyper, scale)
    exponents = exponents.where((powers == 0).all(0), 0.0)
    shifts = (moves - gradient.unsqueeze(-1) * exponents).where((powers == 0).all(0), 0.0)
    linear = gradient + curvature @ slabs
    return Expansion(
        curvature, linear, slabs, loc, scale, loc_shifts, hyper, exponents, shifts, scale_exponents, powers
    )


def _powers(model: OpenModel, hyper: Tensor, scale: Tensor) -> Tensor:
    r"""P where the likelihood of coefficients w at latents t away is that of :math:`\exp(P t) w` here, else 0.

    Then :math:`\partial_{t_k} \nabla L = (\mathrm{diag}(\nabla L) + \nabla^2 L\, \mathrm{diag}(w)) P_k`, at any w.
    """
    slabs = (scale * (torch.linspace(0.5, 1.0, len(scale)).to(scale))).requires_grad_()
    theta = hyper.clone().requires_grad_()

    def slope(x: Tensor, at: Tensor) -> Tensor:
        found: Tensor = torch.autograd.grad(model.log_likelihood(x, at), x, create_graph=True)[0]
        return found

    first = slope(slabs, theta)
    system = first.diag() + jacobian(first, slabs) * slabs
    moves = jacobian(first, theta).expand(len(scale), len(hyper))
    powers: Tensor = (torch.linalg.pinv(system.double()) @ moves.double()).to(scale).round(decimals=2).detach()
    for k, step in enumerate(_FAR * torch.eye(len(hyper)).to(hyper)):
        ratio = (powers @ step).exp()
        there, expected = slope(slabs, hyper + step), ratio * slope(slabs * ratio, hyper)
        if not (there - expected).norm() <= _EQUAL * (there.norm() + expected.norm()):
            powers[:, k] = 0.0
    return powers


def _mode(model: OpenModel, slabs: Tensor, hyper: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mode of log likelihood and Gaussian prior by Newton's method, and the likelihood's curvature there.

    The curvature is the negative Hessian with eigenvalues of at least 1e-6.
    """

    def likelihood(x: Tensor) -> Tensor:
        return model.log_likelihood(x, hyper)

    def value_at(point: Point) -> Tensor:
        x = point[0][0]
        return (likelihood(x) - 0.5 * ((x - loc) / scale).square().sum())[None]

    def step_from(point: Point, value: Tensor) -> Step:
        x = point[0][0]
        slope, curvature = slope_and_curvature(likelihood, x, _LEAST_CURVATURE)
        slope = slope - (x - loc) / scale / scale
        step = torch.linalg.solve(curvature + torch.diag(scale**-2), slope)
        gain = (step @ slope)[None]
        return Step((step[None],), gain, ~(gain > _LEAST_GAIN * value.abs().clamp(min=1.0)), curvature)

    (mode,), _, step = maximise(value_at, step_from, (slabs[None],))
    return mode[0], step.curvature


def _exponents(model: OpenModel, slabs: Tensor, hyper: Tensor) -> Tensor:
    """Derivatives of the log of the curvature's trace for the other latents, by central differences."""

    def trace(hyper: Tensor) -> Tensor:
        return slope_and_curvature(lambda x: model.log_likelihood(x, hyper), slabs, _LEAST_CURVATURE)[1].trace()

    moves = _STEP * torch.eye(len(hyper), dtype=hyper.dtype, device=hyper.device)
    slopes = [torch.log(trace(hyper + move) / trace(hyper - move)) / (2 * _STEP) for move in moves]
    return torch.stack(slopes) if slopes else hyper.new_zeros(0)


def _hyper_mode(
    model: OpenModel, slabs: Tensor, hyper: Tensor, held: Tensor, curvature: Tensor, scale: Tensor
) -> Tensor:
    """The other latents' mode under the Gaussian of the coefficients, one step of expectation maximisation.

    The coefficients at their mode alone would make deviations of prior and noise too small.
    """
    precision = curvature + torch.diag(scale**-2)
    noise = torch.randn(_DRAWS, len(slabs), dtype=slabs.dtype, device=slabs.device)
    spread = torch.linalg.solve_triangular(torch.linalg.cholesky(precision).mT, noise.mT, upper=True).mT
    draws = torch.cat([slabs + spread, slabs - spread])
    theta = hyper.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        at = torch.where(held, hyper, theta)
        loc, deviation = model.slab_prior(at)
        prior = -0.5 * ((draws - loc) / deviation).square().sum(-1) - deviation.log().sum()
        likelihood = torch.stack([model.log_likelihood(draw, at) for draw in draws])
        loss = -(likelihood + prior).mean() - model.hyper_prior(at)
        loss.backward()
        return loss

    optimiser.step(closure)
    return theta.detach() if bool(torch.isfinite(theta).all()) else hyper


_RIDGE = 1e-3  # of the prior's precision, so that the curvature has a factor


class IndependentNormals(NamedTuple):
    """Normals of their own, shape ``(n, p)``."""

    mean: Tensor
    deviation: Tensor

    def draw(self, noise: Tensor) -> Tensor:
        """Slabs from standard normal noise of their shape, differentiable in mean and deviation."""
        return self.mean + self.deviation * noise

    def conditionals(self, slabs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each slab, shape ``(n, p)``, whatever the others are."""
        return self.mean, self.deviation


class SlabPosterior(nn.Module):
    """Slabs of p elements given their gates and d other latents; where the gates are closed they have their prior.

    ``gate_of`` says which gate switches each element, shape ``(p,)``, or which do together, shape ``(p, k)``; -1 for
    other latents, which none does.
    """

    gate_of: Tensor
    loc: Tensor
    scale: Tensor
    scale_exponents: Tensor
    loc_shifts: Tensor
    powers: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__()
        self.register_buffer("gate_of", gate_of)
        for name in ("loc", "scale", "scale_exponents"):
            self.register_buffer(name, getattr(expansion, name))
        self.register_buffer("loc_shifts", expansion.loc_shifts, persistent=False)
        self.register_buffer("powers", expansion.powers)
        self.is_centred = not bool(expansion.loc.any() or expansion.loc_shifts.any())
        self.exponents = nn.Parameter(expansion.exponents.clone()) if len(expansion.exponents) else None

    def likelihood_factor(self, hyper: Tensor) -> Tensor | None:
        """What multiplies curvature and linear term, shape ``(n, 1)``; None without other latents."""
        return None if self.exponents is None else (hyper @ self.exponents).exp().unsqueeze(-1)

    def multiplied(self, gates: Tensor, hyper: Tensor) -> Tensor:
        """What multiplies each slab: its gates and the other latents, shape ``(n, p)``."""
        return opened(gates, self.gate_of) * (hyper @ self.powers.mT).exp()

    def prior_scale(self, hyper: Tensor) -> Tensor:
        """Standard deviations of the slabs' priors, shape ``(n, p)``, or ``(p,)`` without other latents."""
        return self.scale * (hyper @ self.scale_exponents.mT).exp() if hyper.shape[-1] else self.scale

    def prior_loc(self, hyper: Tensor) -> Tensor:
        """Means of the slabs' priors, in the form of their standard deviations."""
        return self.loc + hyper @ self.loc_shifts.mT if hyper.shape[-1] else self.loc

    @abstractmethod
    def given(self, gates: Tensor, hyper: Tensor) -> Normals | IndependentNormals:
        """The slabs' Gaussian for n rows of gates and of the other latents' distances from where they started."""


class StructuredSlabs(SlabPosterior):
    r"""A Gaussian of all slabs.

    The log likelihood is taken as quadratic in the coefficients, with curvature :math:`C (I + M) (I + M)^T C^T` and
    linear term :math:`C (C^{-1} b + \delta)`, where :math:`C C^T` and :math:`b` are those of an expansion and M and
    :math:`\delta` are learned from 0: they have no unit, so that one learning rate does for all features.
    """

    factor: Tensor
    linear: Tensor
    shifts: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__(expansion, gate_of)
        factor = torch.linalg.cholesky(expansion.curvature + torch.diag(_RIDGE / expansion.scale**2))
        linear = torch.linalg.solve_triangular(factor, expansion.linear.unsqueeze(-1), upper=False).squeeze(-1)
        self.register_buffer("factor", factor)
        self.register_buffer("linear", linear)
        self.register_buffer("shifts", expansion.shifts)
        self.curvature_change = nn.Parameter(torch.zeros_like(factor))
        self.linear_change = nn.Parameter(torch.zeros_like(linear))

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """Curvature and linear term where the other latents started, shapes ``(p, p)`` and ``(p,)``."""
        change = torch.eye(len(self.linear), dtype=self.linear.dtype, device=self.linear.device) + self.curvature_change
        root = self.factor @ change
        return root @ root.mT, self.factor @ (self.linear + self.linear_change)

    def given(self, gates: Tensor, hyper: Tensor) -> Normals:
        """The slabs' joint Gaussian for gates ``(n, G)`` and other latents ``(n, d)``; closed ones keep their prior."""
        curvature, linear = self.quadratic()
        factor = self.likelihood_factor(hyper)
        if factor is not None:
            linear = factor * (linear + hyper @ self.shifts.mT)
            curvature = factor.unsqueeze(-1) * curvature
        loc = None if self.is_centred else self.prior_loc(hyper)
        return slab_given_gates(curvature, linear, self.multiplied(gates, hyper), self.prior_scale(hyper), loc)


class IndependentSlabs(SlabPosterior):
    """A normal for each slab, given its own gate: at first about the mode with open gates."""

    mode: Tensor

    def __init__(self, expansion: Expansion, gate_of: Tensor) -> None:
        super().__init__(expansion, gate_of)
        self.register_buffer("mode", expansion.mode)
        self.log_curvature = nn.Parameter(expansion.curvature.diagonal().log())
        self.mode_change = nn.Parameter(torch.zeros_like(expansion.mode))  # in standard deviations

    def given(self, gates: Tensor, hyper: Tensor) -> IndependentNormals:
        """The slabs' normals for gates ``(n, G)`` and other latents ``(n, d)``; closed ones keep their prior."""
        curvature, prior = self.log_curvature.exp(), self.scale**-2
        mode, loc = self.mode + self.mode_change / (curvature + prior).sqrt(), self.prior_loc(hyper)
        linear = curvature * mode + prior * (mode - self.loc)  # so that the mean with an open gate is the mode
        factor = self.likelihood_factor(hyper)
        if factor is not None:
            curvature, linear = factor * curvature, factor * linear
        gate, scale = self.multiplied(gates, hyper), self.prior_scale(hyper)
        precision = scale**-2 + gate.square() * curvature
        mean = (gate * linear + scale**-2 * loc) / precision
        return IndependentNormals(mean, precision.rsqrt())
