"""What a response is: how observations depend on their linear predictors, and all else that a regression asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution

from pyro_l0.selection.families.likelihood import FamilyLikelihood, Likelihood

__all__ = ["Array", "Family"]

Array = NDArray[np.float64]


class Family(ABC):
    """The distribution of observations given their linear predictors eta and parameters of its own.

    A subclass writes :meth:`log_density`, :meth:`sample` and :meth:`mean`, and what differs from the defaults below;
    :class:`~pyro_l0.selection.SpikeSlabGLM` then does with it what the library does with its own families.

    Shapes: observations y are ``(n,)``. Linear predictors are ``(..., S, n)`` for S draws, or ``(..., S, n, K)`` if
    ``has_outputs``. A parameter whose prior has the shape ``shape`` arrives as ``(S, 1, *shape)``, or ``(S, 1, 1)`` if
    it is one number and ``has_outputs``, so that it broadcasts against eta. ``log_density`` and what is differentiated
    work on torch's tensors in float64; ``sample``, ``mean`` and ``variance`` on NumPy's arrays.

    Attributes:
        expected: what y may hold, for messages.
        slab_unit: scale of the half-normal prior of an unknown slab scale, for features of deviation 1.
        has_outputs: whether an observation has several linear predictors.
        outputs: how many these are, K.
        has_intercept: whether the linear predictors may have an intercept.
        is_location: whether y is eta plus noise: the intercept is then around :meth:`middle`, priors are in the unit
            of y (:meth:`unit`), an offset is a shift of y, and the mean is eta.
        has_closed_form: whether coefficients, intercept and noise are integrated out in closed form, which only the
            normal distribution has.
        is_joint: whether each of its K responses is a linear regression of its own; one that is NaN was not observed.
        is_augmented: whether there are variables that make the log density quadratic, by :meth:`augmented`.
        is_partial: whether there is a likelihood of all observations alone, such as a partial one, and none of each.
        reach: by how much a Newton step may change a linear predictor.
    """

    expected: ClassVar[str] = "finite numbers"
    slab_unit: ClassVar[float] = 1.0
    has_outputs: ClassVar[bool] = False
    has_intercept: ClassVar[bool] = True
    is_location: ClassVar[bool] = False
    has_closed_form: ClassVar[bool] = False
    is_joint: ClassVar[bool] = False
    is_augmented: ClassVar[bool] = False
    is_partial: ClassVar[bool] = False
    reach: ClassVar[float] = 3.0
    outputs: int = 1

    @abstractmethod
    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        """Log density or log mass of each observation, in the shape of eta, without its last dimension of K outputs.

        It may leave out what :meth:`log_constant` has.
        """

    @abstractmethod
    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        """New observations, in the shape of eta, without its last dimension of K outputs."""

    @abstractmethod
    def mean(self, eta: Array, **parameters: Array) -> Array:
        """Means of new observations, in the shape of eta; of classes, their probabilities in the last dimension."""

    def variance(self, eta: Array, **parameters: Array) -> Array | None:
        """Variances of new observations, in the shape of eta; None, the default, lets draws of them say it."""
        return None

    def takes(self, y: Array) -> NDArray[np.bool_]:
        """Which of some finite observations may be, in their shape."""
        return np.ones(y.shape, dtype=bool)

    def check(self, y: Array, weight: Array, intercept: bool) -> None:  # noqa: B027  most have nothing to refuse
        """Refuse observations for which the posterior is improper, less the offset where ``is_location``."""

    def log_constant(self, y: Tensor, **parameters: Tensor) -> Tensor:
        """What of the log density does not depend on eta, shape ``(S, n)``: it is evaluated once for equal y."""
        return torch.zeros(1, len(y), dtype=y.dtype)

    def priors(self, y: Tensor, unit: float) -> Mapping[str, Distribution]:
        """Prior distributions of the parameters by name; ``unit`` is the size of y where ``is_location``, or 1."""
        return {}

    def start(self, y: Tensor, weight: Tensor, unit: float) -> Mapping[str, Tensor]:
        """Values from which the modes of some parameters are searched for; of the others, it is the prior's middle."""
        return {}

    def reported(self, parameters: Mapping[str, Array]) -> Mapping[str, Array]:
        """The parameters as users see them, shape ``(S, *shape)`` each."""
        return parameters

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor | None:
        """Linear predictors of a model with an intercept alone, shape ``(K,)``; None, the default: the mode."""
        return torch.zeros(self.outputs, dtype=y.dtype) if self.is_location else None

    def middle(self, y: Array, weight: Array) -> Array:
        """Where the prior of the intercept is, if ``is_location``, shape ``(K,)``: the weighted mean."""
        return np.atleast_1d(np.average(y, axis=0, weights=weight))

    def unit(self, y: Array, weight: Array) -> float:
        """The size of y around its middle, if ``is_location``, for the priors."""
        return float(np.sqrt(np.average(y**2, axis=0, weights=weight).mean()))

    def observed(self, y: Array) -> Mapping[str, Array]:
        """The observations by name, as arviz has them."""
        return {"y": y}

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of the log density by eta, and minus its second derivatives; by autograd unless overridden.

        The second result has the shape of eta, or ``(..., S, n, K, K)``, and is never negative: where the log density
        is not concave, the default cuts it off, and an override may give the expectation.
        """
        with torch.enable_grad():
            slope, curvature = self._by_autograd(y, eta.detach().clone().requires_grad_(), parameters)
        return slope.detach(), curvature.detach()

    def slope(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        """The derivative of the log density by eta, in its shape; override it where that is cheaper alone."""
        return self.derivatives(y, eta, **parameters)[0]

    @torch.enable_grad()
    def curvature_slope(self, y: Tensor, eta: Tensor, covariance: Tensor, **parameters: Tensor) -> Tensor:
        """The slope by eta of the trace of minus the second derivatives times covariances of eta, in the shape of eta.

        The covariances have the shape of the second derivatives.
        """
        eta = eta.detach().clone().requires_grad_()
        slope, curvature = self._by_autograd(y, eta, parameters)
        return _by(slope, _gradient((curvature * covariance).sum(), eta), eta)

    def augmented(
        self, y: Tensor, eta: Tensor, generator: torch.Generator, **parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw variables given which the log density is quadratic in eta, where the family ``is_augmented``.

        Returns its slope at eta = 0, and minus its second derivatives by each of eta.
        """
        raise NotImplementedError

    def log_prob(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        """Log density or log mass of each observation, as :meth:`log_density`, and with nothing left out."""
        constant = self.log_constant(y, **parameters)
        density = self.log_density(y, eta, **parameters)
        return density + constant.reshape(*constant.shape, *[1] * (density.dim() - eta.dim() + self.has_outputs))

    def likelihood(self, y: Tensor, weight: Tensor | None, offset: Tensor | None, unit: float) -> Likelihood:
        """The likelihood of some observations with weights of shape ``(n,)`` and offsets of shape ``(n, K)``."""
        return FamilyLikelihood(self, y, weight, offset, unit)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def _by_autograd(self, y: Tensor, eta: Tensor, parameters: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The derivatives at an eta that requires a gradient, with their own graph."""
        slope = _gradient(self.log_density(y, eta, **parameters).sum(), eta)
        if not self.has_outputs:
            return slope, _by(slope, -_gradient(slope.sum(), eta), eta).clamp(min=0.0)
        rows = torch.stack([_by(slope, -_gradient(part.sum(), eta), eta) for part in slope.unbind(-1)], -2)
        sizes, vectors = torch.linalg.eigh(0.5 * (rows + rows.mT))
        return slope, (vectors * sizes.clamp(min=0.0)[..., None, :]) @ vectors.mT


def _by(slope: Tensor, derivative: Tensor, eta: Tensor) -> Tensor:
    """A further derivative: where autograd has none, it is 0 of a slope of 0, and refused elsewhere."""
    missed = derivative.isnan()
    if bool((missed & slope.isfinite() & (slope != 0)).any()):
        raise ValueError(
            "Expected second derivatives of the log density by linear predictors that are numbers, but got NaN at "
            f"linear predictors as {float(eta.detach()[missed][0]):.3g}, as torch.logaddexp gives where one of two "
            "terms has vanished; use torch.logsumexp or softplus."
        )
    return torch.where(missed, 0.0, derivative)


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    """With a graph of its own; zero where the value does not depend on the point."""
    if not value.requires_grad:
        return torch.zeros_like(at)
    (found,) = torch.autograd.grad(value, at, create_graph=True, materialize_grads=True, allow_unused=True)
    return found
