"""The likelihood of some observations as a function of linear predictors, and of parameters on the whole line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Transform, biject_to

from pyro_l0.maths.second_order import Point, Quadratic, Step, maximise, quadratic_of

if TYPE_CHECKING:
    from pyro_l0.selection.families.family import Family

__all__ = ["FamilyLikelihood", "Likelihood", "shaped"]


def _weighted_design(curvature: Tensor, x: Tensor) -> Tensor:
    """R' X for roots R of curvatures, shape ``(n, K, K)``, and features of shape ``(n, p)``; shape ``(n K, p K)``."""
    values, vectors = torch.linalg.eigh(curvature)
    root = vectors * values.clamp(min=0).sqrt()[:, None, :]
    return torch.einsum("nki,nj->nijk", root, x).reshape(root.shape[0] * root.shape[1], -1)


# The least curvature by a parameter that steps divide by, and the gain below which a search ends.
_FLAT, _GAIN = 0.05, 1e-5


class Likelihood(ABC):
    """Of n observations with K linear predictors each, and with d parameters of its own.

    Attributes:
        theta: the parameters on the whole line, shape ``(s, d)``, or ``(1, d)`` for all predictors; by default none.
        reach: by how much a Newton step may change a linear predictor.
    """

    theta: Tensor = torch.zeros(1, 0, dtype=torch.float64)
    reach = 3.0

    @abstractmethod
    def value(self, eta: Tensor) -> Tensor:
        """Log likelihood, shape ``(..., s)``, of linear predictors of shape ``(..., s, n, K)``."""

    @abstractmethod
    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope by eta, shape ``(s, n, K)``, and minus the second derivatives, shape ``(s, n, K, K)``.

        Where the likelihood does not add over observations, these are at least minus the second derivatives: the
        difference is positive semidefinite. Where it is not concave, they are their expectation.
        """

    def slope(self, eta: Tensor) -> Tensor:
        """The first result above, without a matrix of each observation."""
        return self.derivatives(eta)[0]

    def augmented(self, eta: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw variables given which it is quadratic, where the family ``is_augmented`` and no weights differ from 1.

        Returns its slope at coefficients of zero, and minus its second derivatives by each of eta, ``(s, n)``.
        """
        raise NotImplementedError

    @abstractmethod
    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope, and minus the second derivatives by the coefficients of some features.

        The features have the shape ``(s, m, n)``, and the second result the shape ``(s, m, K, m, K)``.
        """

    @abstractmethod
    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        """Derivatives by eta of the trace of the second result above times a covariance of the coefficients.

        The covariance has the shape ``(s, m, K, m, K)``, and the derivatives have that of eta.
        """

    def quadratic(self, x: Tensor, eta: Tensor) -> Quadratic:
        """Its second derivatives by the coefficients of features x, shape ``(n, p)``, on average over s sets of eta."""
        columns = _weighted_design(self.derivatives(eta)[1].mean(0), x).T
        return quadratic_of(columns, columns.new_zeros(len(columns)))

    def expanded(
        self, x: Tensor, ungated: Tensor, precision: Tensor, eta: Tensor
    ) -> tuple[Quadratic, Callable[[Tensor], Tensor]]:
        """To second order at linear predictors eta, ``(n, K)``, and at the mode of theta there.

        That is a quadratic of the coefficients of features x, shape ``(n, p)``, the K of each side by side, up to a
        constant. Those of u ungated features, whose normal priors have the precisions of shape ``(u,)``, are integrated
        out. The second result gives their mean at some others: shape ``(S, p K)`` to ``(S, u, K)``.

        With D the weighted columns of the first, J those of the second and P their priors' precisions, u has the mean
        (J'J + P)^-1 (h - J'D x), with h its linear term (``own``). Completing the square leaves the curvature D'(I - J
        (J'J + P)^-1 J') D and the linear term less D'J (J'J + P)^-1 h. The matrix in the middle is the square of I - U
        t U', for the left singular vectors U and the values v of J P^-1/2 and t = 1 - (1 + v^2)^-1/2.
        """
        slope, curvature = (part[0] for part in self.fitted(eta[None]).derivatives(eta[None]))
        every, outputs = torch.cat([x, ungated], 1), eta.shape[1]
        design = _weighted_design(curvature, every)
        residual = slope + (curvature @ eta[:, :, None]).squeeze(2)
        sizes = [x.shape[1] * outputs, ungated.shape[1] * outputs]
        linear, linear_ungated = (every.T @ residual).flatten().split(sizes)
        design, columns = design.split(sizes, 1)  # the second is J
        # The mean where all other coefficients are zero, and by how much it falls with each of these.
        precision = precision.repeat_interleave(outputs)
        inverse = torch.linalg.inv(columns.T @ columns + precision.diag())
        mean, crossed = inverse @ linear_ungated, columns.T @ design
        falls = inverse @ crossed
        # (I - U t U')^2 = I - J (J'J + S^-2)^-1 J' for the left singular vectors U of J S.
        left, values, _ = torch.linalg.svd(columns / precision.sqrt(), full_matrices=False)
        design = design - (left * (1 - (1 + values.square()).rsqrt())) @ (left.T @ design)
        quadratic = quadratic_of(design.T, linear - crossed.T @ mean)
        return quadratic, lambda beta: (mean - beta @ falls.T).view(len(beta), -1, outputs)

    def log_prior(self) -> Tensor:
        """Log density of theta, shape ``(s,)``."""
        return self.theta.new_zeros(len(self.theta))

    def named(self) -> dict[str, Tensor]:
        """What theta stands for: each parameter of shape ``(s, *shape)``."""
        return {}

    def at(self, theta: Tensor) -> Self:
        """A copy at other parameters theta, shape ``(s, d)``, on the whole line."""
        moved = copy(self)
        moved.theta = theta
        return moved

    def fitted(self, eta: Tensor) -> Self:
        """The same at the mode of theta given each of s sets of linear predictors, shape ``(s, n, K)``."""

        def value_at(point: Point) -> Tensor:
            there = self.at(point[0])
            return there.value(eta) + there.log_prior()

        def step_from(point: Point, value: Tensor) -> Step:
            slope, curvature = self.at(point[0])._by_theta(eta)
            move = torch.linalg.solve(curvature, slope)
            gain = (slope * move).sum(1)
            return Step((move,), gain, gain < _GAIN, curvature)

        start = self.theta.expand(len(eta), -1)
        return self.at(maximise(value_at, step_from, (start,))[0][0] if start.shape[1] else start)

    def spread(self, eta: Tensor) -> Tensor:
        """The root of the inverse of the curvature by theta, on average over s sets, shape ``(d, d)``."""
        d = self.theta.shape[1]
        curvature = self._by_theta(eta)[1].mean(0) if d else self.theta.new_zeros(0, 0)
        root: Tensor = torch.linalg.inv(torch.linalg.cholesky(curvature))
        return root

    @torch.enable_grad()
    def _by_theta(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of log likelihood and prior, shape ``(s, d)``, and minus its second derivatives, made positive."""
        theta = self.theta.detach().expand(len(eta), -1).clone().requires_grad_()
        there = self.at(theta)
        (slope,) = torch.autograd.grad((there.value(eta) + there.log_prior()).sum(), theta, create_graph=True)
        rows = torch.stack(
            [torch.autograd.grad(part.sum(), theta, retain_graph=True)[0] for part in slope.unbind(1)], 1
        )
        if bool((rows.isnan() & slope.isfinite().all(1)[:, None, None]).any()):
            raise ValueError(
                "Expected second derivatives of the log density by parameters that are numbers, but got NaN at linear "
                f"predictors from {float(eta.min()):.3g} to {float(eta.max()):.3g}, as torch.logaddexp gives where one "
                "of two terms has vanished; use torch.logsumexp or softplus."
            )
        sizes, vectors = torch.linalg.eigh(-rows)
        return slope.detach(), (vectors * sizes.clamp(min=_FLAT)[:, None, :]) @ vectors.mT


class _Parameter(NamedTuple):
    """A parameter of a family, with its prior and the slice of theta, on the whole line, that it is."""

    prior: Distribution
    transform: Transform  # from the whole line
    shape: torch.Size  # on the whole line
    place: slice

    def on_line(self, theta: Tensor) -> Tensor:
        """The parameter's entries of theta, from shape ``(s, d)`` to ``(s, *shape)``, on the whole line."""
        return theta[:, self.place].reshape(len(theta), *self.shape)

    def value(self, theta: Tensor) -> Tensor:
        """From shape ``(s, d)`` to ``(s, *shape)``."""
        value: Tensor = self.transform(self.on_line(theta))
        return value

    def log_density(self, theta: Tensor) -> Tensor:
        """Log prior density on the whole line, with the transform's Jacobian, shape ``(s,)``."""
        on_line = self.on_line(theta)
        value = self.transform(on_line)
        parts = self.prior.log_prob(value), self.transform.log_abs_det_jacobian(on_line, value)
        return sum((part.reshape(len(theta), -1).sum(1) for part in parts), torch.zeros(()))


def _middle(prior: Distribution) -> Tensor:
    """The median of a distribution, or its mean where it has no quantiles."""
    try:
        return prior.icdf(torch.tensor(0.5, dtype=torch.float64)).expand(prior.batch_shape)
    except NotImplementedError:
        return prior.mean


class FamilyLikelihood(Likelihood):
    """That of a family, whose observations are independent given their linear predictors."""

    def __init__(self, family: Family, y: Tensor, weight: Tensor | None, offset: Tensor | None, unit: float) -> None:
        self._family, self._y, self.reach = family, y, family.reach
        weight = y.new_ones(len(y)) if weight is None else weight
        self._weight = weight[:, None] if family.has_outputs else weight
        self._offset = 0.0 if offset is None else offset if family.has_outputs else offset[:, 0]
        # What does not depend on the linear predictors is summed over distinct observations.
        self._distinct, which = y.unique(dim=0, return_inverse=True)
        self._times = y.new_zeros(len(self._distinct)).index_add(0, which, weight)
        self._parameters: dict[str, _Parameter] = {}
        start, theta = family.start(y, weight, unit), y.new_zeros(0)
        for name, prior in family.priors(y, unit).items():
            transform = biject_to(prior.support)
            on_line: Tensor = transform.inv(start[name] if name in start else _middle(prior)).to(y)
            place = slice(len(theta), len(theta) + on_line.numel())
            self._parameters[name] = _Parameter(prior, transform, on_line.shape, place)
            theta = torch.cat([theta, on_line.flatten()])
        self.theta = theta[None]
        self._shaped = shaped(family, self.named())  # as the family takes them
        self._check()
        self._constant = None if len(theta) else (family.log_constant(self._distinct) * self._times).sum(-1)

    def _check(self) -> None:
        """A density of another shape would be broadcast, and each observation counted more than once."""
        n = len(self._y)
        eta = self._y.new_zeros(2, n, self._family.outputs)[..., slice(None) if self._family.has_outputs else 0]
        start = {name: value.expand(2, *value.shape[1:]) for name, value in self._shaped.items()}
        density = self._family.log_density(self._y, eta, **start)
        constant = self._family.log_constant(self._y, **start)
        if density.shape not in (eta.shape, (2, n)) or constant.shape not in ((1, n), (2, n)):
            raise ValueError(
                f"Expected the log density of {self._family} to have the shape {tuple(eta.shape)} of its linear "
                f"predictors, and log_constant (2, {n}), but got {tuple(density.shape)} and {tuple(constant.shape)}; "
                "parameters have a dimension of one in place of the observations."
            )
        shown = self._family.reported({name: x.expand(2, *x.shape[1:]).numpy() for name, x in self.named().items()})
        own = shaped(self._family, shown)
        with np.errstate(all="ignore"):
            drawn = np.shape(self._family.sample(eta.numpy(), np.random.default_rng(0), **own))
            try:
                means = np.shape(self._family.mean(eta.numpy(), **own))
            except NotImplementedError:  # it has none
                means = drawn
        if drawn[:2] != (2, n) or means[:2] != (2, n):
            raise ValueError(
                f"Expected sample and mean of {self._family} to have the shape {tuple(eta.shape)} of their linear "
                f"predictors, but got {drawn} and {means}; parameters have a dimension of one in place of the "
                "observations."
            )
        if not bool((self._family.derivatives(self._y, eta, **start)[1] > 0).any()):
            raise ValueError(
                f"Expected the log density of {self._family} to curve down somewhere, but its second derivatives are "
                "none or positive at linear predictors of zero; override derivatives with minus their expectation."
            )

    def value(self, eta: Tensor) -> Tensor:
        parameters = self._shaped
        density = self._weight * self._log_density(eta, parameters)
        constant = self._constant
        if constant is None:
            constant = (self._family.log_constant(self._distinct, **parameters) * self._times).sum(-1)
        return density.flatten(eta.dim() - 2).sum(-1) + constant

    def slope(self, eta: Tensor) -> Tensor:
        return self._weighted(self._family.slope(self._y, self._predictors(eta), **self._shaped))

    def derivatives(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        slope, curvature = self._family.derivatives(self._y, self._predictors(eta), **self._shaped)
        if self._family.has_outputs:
            return self._weighted(slope), self._weight[:, :, None] * curvature
        return self._weighted(slope), (self._weight * curvature)[..., None, None]

    def augmented(self, eta: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        slope, weight = self._family.augmented(self._y, self._predictors(eta), generator, **self._shaped)
        return slope - weight * self._offset, weight

    def second_order(self, columns: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        slope, weights = self.derivatives(eta)
        s, m, _ = columns.shape
        outputs = eta.shape[2]
        curvature = columns.new_empty(s, m, outputs, m, outputs)
        for a in range(outputs):
            for b in range(a + 1):
                part = (columns * weights[:, None, :, a, b]) @ columns.mT
                curvature[:, :, a, :, b] = curvature[:, :, b, :, a] = part
        return slope, curvature

    def trace_slope(self, columns: Tensor, eta: Tensor, covariance: Tensor) -> Tensor:
        rows = columns.mT[:, None, None]
        by_output = covariance.movedim((2, 4), (1, 2))
        of_eta = ((rows @ by_output) * rows).sum(4).movedim(3, 1)
        own = of_eta if self._family.has_outputs else of_eta[..., 0, 0]
        found = self._family.curvature_slope(self._y, self._predictors(eta), own, **self._shaped)
        return self._weighted(found)

    def log_prior(self) -> Tensor:
        none = self.theta.new_zeros(len(self.theta))
        return sum((each.log_density(self.theta) for each in self._parameters.values()), none)

    def at(self, theta: Tensor) -> Self:
        moved = super().at(theta)
        moved._shaped = shaped(self._family, moved.named())
        return moved

    def named(self) -> dict[str, Tensor]:
        return {name: each.value(self.theta) for name, each in self._parameters.items()}

    def _predictors(self, eta: Tensor) -> Tensor:
        """Linear predictors plus the offset; without the last dimension where the family has one output."""
        return (eta if self._family.has_outputs else eta[..., 0]) + self._offset

    def _weighted(self, slope: Tensor) -> Tensor:
        """Back in the shape of a likelihood's linear predictors."""
        weighted: Tensor = self._weight * slope
        return weighted if self._family.has_outputs else weighted[..., None]

    def _log_density(self, eta: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        density = self._family.log_density(self._y, self._predictors(eta), **parameters)
        is_each = self._family.has_outputs and density.dim() < eta.dim()  # one for all outputs of an observation
        return density[..., None] if is_each else density


def shaped(family: Family, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of shape ``(S, *shape)`` so that they broadcast against linear predictors."""
    scalar = (1, 1) if family.has_outputs else (1,)
    return {
        name: value.reshape(len(value), *((1, *value.shape[1:]) if value.ndim > 1 else scalar))
        for name, value in parameters.items()
    }
