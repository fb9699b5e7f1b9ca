"""Regressions with spike and slab whose posterior can be known: data, and the same as a Pyro model.

A design is data in float64 and a likelihood of the linear predictor x (z * w); noise, slab scale and rate are numbers
or priors. Every recipe says its seed, so a design is the same wherever it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyro_l0 import BernoulliGate

__all__ = [
    "CORRELATIONS",
    "Design",
    "correlated_features",
    "exact_pair",
    "gaussian_design",
    "gaussian_designs",
    "generalised_linear_designs",
    "heavy_tailed_designs",
    "unknown_hyperparameters",
    "wide_designs",
]

DEGREES_OF_FREEDOM = 4.0
CONCENTRATION = 3.0
CORRELATIONS = ("independent", "AR(1)", "near-duplicates")
_EFFECTS = {0: 0.6, 4: -0.35, 7: 0.2}

LIKELIHOODS: dict[str, Callable[[Tensor, Tensor], TorchDistribution]] = {
    "normal": lambda eta, sigma: dist.Normal(eta, sigma),
    "student_t": lambda eta, sigma: dist.StudentT(DEGREES_OF_FREEDOM, eta, sigma),
    "logistic": lambda eta, _: dist.Bernoulli(logits=eta),
    "poisson": lambda eta, _: dist.Poisson(eta.exp()),
    "negative_binomial": lambda eta, _: dist.NegativeBinomial(CONCENTRATION, logits=eta - math.log(CONCENTRATION)),
}


@dataclass(frozen=True)
class Design:
    """Data and a model of them; scales and rate are numbers or priors."""

    name: str
    x: Tensor
    y: Tensor
    family: str = "normal"
    sigma: float | TorchDistribution = 1.0
    tau: float | TorchDistribution = 0.5
    rate: float | TorchDistribution = 0.2

    @property
    def hyper(self) -> tuple[str, ...]:
        """The names of the unknown scales and rates, which are sites of the model."""
        return tuple(name for name in ("sigma", "tau", "rate") if not isinstance(getattr(self, name), float))

    def likelihood(self, eta: Tensor, sigma: Tensor) -> TorchDistribution:
        """The distribution of the observations at linear predictors of shape ``(..., n)``."""
        return LIKELIHOODS[self.family](eta, sigma)

    def model(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The Pyro model: sites ``z``, ``w``, ``y`` and those of ``hyper``."""
        sigma, tau, rate = (self._value(name, x) for name in ("sigma", "tau", "rate"))
        with pyro.plate("features", x.shape[-1]):
            z = pyro.sample("z", BernoulliGate(probs=rate))
            w = pyro.sample("w", dist.Normal(torch.zeros_like(tau), tau))
        with pyro.plate("observations", len(x)):
            return pyro.sample("y", self.likelihood((z * w) @ x.T, sigma), obs=y)

    def _value(self, name: str, like: Tensor) -> Tensor:
        value = getattr(self, name)
        return like.new_tensor(value) if isinstance(value, float) else pyro.sample(name, value)


def _standardised(a: np.ndarray) -> np.ndarray:
    return (a - a.mean(0)) / a.std(0)


def _effects(p: int, effects: dict[int, float]) -> np.ndarray:
    beta = np.zeros(p)
    beta[list(effects)] = list(effects.values())
    return beta


def _ar1(rng: np.random.Generator, n: int, p: int, rho: float) -> np.ndarray:
    covariance = rho ** np.abs(np.subtract.outer(range(p), range(p)))
    return rng.normal(size=(n, p)) @ np.linalg.cholesky(covariance).T


def correlated_features(kind: str, rng: np.random.Generator, n: int = 100, p: int = 10) -> np.ndarray:
    """Standardised features: independent, AR(1) with .7, or the first three of them nearly the same."""
    x = _ar1(rng, n, p, 0.7) if kind == "AR(1)" else rng.normal(size=(n, p))
    if kind == "near-duplicates":
        for j in (1, 2):
            x[:, j] = x[:, 0] + 0.1 * rng.normal(size=n)
    return _standardised(x)


def _design(name: str, x: np.ndarray, y: np.ndarray, **options: object) -> Design:
    return Design(name, torch.as_tensor(x), torch.as_tensor(np.asarray(y, dtype=float)), **options)  # type: ignore[arg-type]


def _diabetes() -> Design:
    """scikit-learn's 442 patients; the noise is that of least squares."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    x, y = _standardised(data["data"]), _standardised(data["target"])
    residual = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    return _design("diabetes", x, y, sigma=math.sqrt(residual @ residual / (len(y) - 11)), tau=0.2)


def exact_pair() -> Design:
    """Two features are the same and either explains the data: .5 each, and never both by much."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(100, 8))
    x[:, 1] = x[:, 0]
    return _design("exact pair", x, 0.5 * x[:, 0] + rng.normal(size=100), rate=0.1)


def gaussian_designs() -> list[Design]:
    """The five of ten features (the exact pair: eight) with known noise."""
    return [_diabetes(), *(gaussian_design(kind) for kind in CORRELATIONS), exact_pair()]


def gaussian_design(kind: str) -> Design:
    """Three effects of ten features, of one of ``CORRELATIONS``, under noise of variance 1."""
    rng = np.random.default_rng(10 + CORRELATIONS.index(kind))
    x = correlated_features(kind, rng)
    y = x @ _effects(10, _EFFECTS) + rng.normal(size=100)
    return _design(kind, x, y - y.mean())


def wide_designs(seed: int) -> list[Design]:
    """Three of fifteen features: groups of three, AR(1) with .9, independent; other data for each seed."""
    n, p, found = 120, 15, []
    for kind in ("groups of three", "AR(1) .9", "independent"):
        rng = np.random.default_rng(50 + seed)
        if kind == "groups of three":
            x = np.repeat(rng.normal(size=(n, 5)), 3, axis=1) + 0.15 * rng.normal(size=(n, p))
        else:
            x = _ar1(rng, n, p, 0.9) if kind == "AR(1) .9" else rng.normal(size=(n, p))
        x = _standardised(x)
        y = x @ _effects(p, {0: 0.5, 5: -0.4, 11: 0.3}) + rng.normal(size=n)
        found.append(_design(f"p = 15, {kind}", x, y - y.mean()))
    return found


def generalised_linear_designs() -> list[Design]:
    """Nine: logistic with 100 and 400 observations and Poisson with 100, for each kind of features."""
    found = []
    for k, kind in enumerate(CORRELATIONS):
        for m, (family, n, size) in enumerate((("logistic", 100, 2.0), ("logistic", 400, 1.0), ("poisson", 100, 0.6))):
            rng = np.random.default_rng(100 + 10 * k + m)
            x = correlated_features(kind, rng, n)
            eta = x @ _effects(10, {0: size, 4: -0.6 * size, 7: 0.35 * size})
            y = rng.random(n) < 1 / (1 + np.exp(-eta)) if family == "logistic" else rng.poisson(np.exp(eta))
            found.append(_design(f"{family}, {kind}, n = {n}", x, y, family=family, tau=1.0))
    return found


def heavy_tailed_designs() -> list[Design]:
    """Student-t noise with 4 degrees of freedom and negative binomial counts of concentration 3, two of each."""
    found = []
    for k, kind in enumerate(CORRELATIONS[1:]):
        rng = np.random.default_rng(200 + k)
        x = correlated_features(kind, rng)
        y = x @ _effects(10, _EFFECTS) + rng.standard_t(DEGREES_OF_FREEDOM, size=100)
        found.append(_design(f"student_t, {kind}", x, y, family="student_t"))
        rng = np.random.default_rng(210 + k)
        x = correlated_features(kind, rng)
        mean = np.exp(x @ _effects(10, _EFFECTS))
        y = rng.negative_binomial(CONCENTRATION, CONCENTRATION / (CONCENTRATION + mean))
        found.append(_design(f"negative_binomial, {kind}", x, y, family="negative_binomial", tau=1.0))
    return found


def unknown_hyperparameters() -> list[Design]:
    """The first four Gaussian designs with a half-Cauchy noise, a half-normal slab scale and a Beta(1, 4) rate."""
    one = torch.ones((), dtype=torch.float64)
    priors = {"sigma": dist.HalfCauchy(one), "tau": dist.HalfNormal(one), "rate": dist.Beta(one, 4 * one)}
    return [replace(design, name=f"{design.name}, unknown", **priors) for design in gaussian_designs()[:4]]
