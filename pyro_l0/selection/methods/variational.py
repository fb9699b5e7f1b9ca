"""Posteriors of up to forty features by a guide whose gates depend on one another, fitted by variational inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from pyro.distributions import TorchDistribution
from scipy.sparse import csr_array
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.posterior.fit import fit
from pyro_l0.selection.posterior import Draws, SelectionPosterior
from pyro_l0.selection.problem import Problem

__all__ = ["MOST_FEATURES", "autoregressive_posterior"]

MOST_FEATURES = 40
_FOR_MOMENTS = 20_000  # draws, at least


def autoregressive_posterior(
    problem: Problem, *, draws: int = 4000, seed: int = 0, steps: int = 800
) -> SelectionPosterior:
    """The posterior of a problem by :class:`~pyro_l0.infer.AutoSpikeSlab` with autoregressive gates.

    Pyro's parameters and all random states are as before when it is done.

    Args:
        problem: with at most 40 features.
        draws: how many joint draws.
        seed: of all random numbers.
        steps: of the training, at most.

    Returns:
        The posterior, with the importance-weighted bound as its log evidence.

    Raises:
        ValueError: there are more features.
    """
    p = problem.x.shape[1]
    if p > MOST_FEATURES:
        raise ValueError(
            f"Expected at most {MOST_FEATURES} features for autoregressive gates, but got {p}; use method 'tempered'."
        )
    model = _Regression(problem)
    with _apart():
        guide = AutoSpikeSlab(
            model,
            slab={"w": "z"},
            gates="autoregressive",
            slabs="structured",
            hyper=tuple(model.unknown),
            family=BernoulliGate,
        )
        result = fit(model, guide, seed=seed, steps=steps)
        inclusion = guide.active_probs()["z"].detach()
        found = {name: x.detach() for name, x in guide.draws(max(draws, _FOR_MOMENTS)).items()}
    beta = _coefficients(found, problem)
    return SelectionPosterior(
        inclusion.reshape(p).double().numpy(),
        beta.mean(0).numpy(),
        beta.std(0).numpy(),
        result.log_evidence,
        _draws({name: x[:draws] for name, x in found.items()}, problem),
    )


@contextmanager
def _apart() -> Iterator[None]:
    """A parameter store of one's own, and random states that come back."""
    state = pyro.util.get_rng_state()
    try:
        with pyro.get_param_store().scope():
            yield
    finally:
        pyro.util.set_rng_state(state)


class _Regression:
    """A problem as a Pyro model, with the sites ``z``, ``w``, ``y`` and those of ``unknown``.

    Attributes:
        unknown: priors of the scales, the rate and the intercepts, of those that are not known.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        prior, one = problem.prior, torch.ones((), dtype=torch.float64)
        self.unknown: dict[str, TorchDistribution] = {}
        if prior.noise_scale is None and problem.family == "gaussian":
            self.unknown["noise_scale"] = dist.HalfCauchy(prior.noise_unit * one)
        if prior.slab_scale is None:
            self.unknown["slab_scale"] = dist.HalfNormal(prior.slab_unit * one)
        if isinstance(prior.rate, tuple):
            self.unknown["rate"] = dist.Beta(prior.rate[0] * one, prior.rate[1] * one)
        if problem.intercept:
            wide = torch.full((problem.outputs,), prior.intercept_scale, dtype=torch.float64)
            self.unknown["intercept"] = dist.Normal(torch.zeros_like(wide), wide).to_event(1)

    def __call__(self) -> None:
        x, outputs = self.problem.x, self.problem.outputs
        hyper = {name: pyro.sample(name, prior) for name, prior in self.unknown.items()}
        known = _known(self.problem)
        value = {name: hyper[name] if name in hyper else x.new_tensor(known[name]) for name in (*known, *hyper)}
        features = pyro.plate("features", x.shape[1], dim=-2 if outputs > 1 else -1)
        with features:
            z = pyro.sample("z", BernoulliGate(probs=value["rate"]))
            if outputs == 1:
                w = pyro.sample("w", dist.Normal(torch.zeros_like(value["slab_scale"]), value["slab_scale"]))
        if outputs > 1:
            with features, pyro.plate("outputs", outputs, dim=-1):
                w = pyro.sample("w", dist.Normal(torch.zeros_like(value["slab_scale"]), value["slab_scale"]))
        beta = z * w
        eta = beta @ x.T if outputs == 1 else x @ beta
        if "intercept" in hyper:
            eta = eta + hyper["intercept"]
        with pyro.plate("observations", len(x), dim=-1):
            pyro.sample("y", self._observed(eta, value), obs=self.problem.y)

    def _observed(self, eta: Tensor, value: Mapping[str, Tensor]) -> TorchDistribution:
        family = self.problem.family
        observed: TorchDistribution
        if family == "gaussian":
            observed = dist.Normal(eta, value["noise_scale"])
        elif family == "bernoulli":
            observed = dist.Bernoulli(logits=eta)
        else:
            observed = dist.Poisson(eta.exp()) if family == "poisson" else dist.Categorical(logits=eta)
        return observed


def _known(problem: Problem) -> dict[str, float]:
    """Scales and rate that are given; the noise of a family without is NaN."""
    prior = problem.prior
    noise = prior.noise_scale if problem.family == "gaussian" else float("nan")
    given = {"noise_scale": noise, "slab_scale": prior.slab_scale, "rate": prior.rate}
    return {name: value for name, value in given.items() if isinstance(value, float)}


def _coefficients(found: Mapping[str, Tensor], problem: Problem) -> Tensor:
    """Shape ``(N, p, K)``."""
    gates = found["z"].reshape(-1, problem.x.shape[1], 1)
    return (gates * found["w"].reshape(len(gates), -1, problem.outputs)).double()


def _draws(found: Mapping[str, Tensor], problem: Problem) -> Draws:
    beta, known = _coefficients(found, problem), _known(problem)
    number, p, outputs = beta.shape
    row, feature = found["z"].reshape(number, p).nonzero(as_tuple=True)
    place = feature[:, None] * outputs + torch.arange(outputs)
    where = (row[:, None].expand_as(place).flatten().numpy(), place.flatten().numpy())

    def of(name: str) -> NDArray[np.float64]:
        return found[name].double().numpy() if name in found else np.full(number, known[name])

    return Draws(
        csr_array((beta[row, feature].flatten().numpy(), where), shape=(number, p * outputs)),
        found["intercept"].double().numpy() if problem.intercept else np.zeros((number, outputs)),
        of("slab_scale"),
        of("noise_scale"),
        of("rate"),
    )
