"""Trains a guide over gates and slabs in one call: the recipe that the measured results are from."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.posterior.check_fit import Evidence, FitCheck, check_model, checked, log_ratios
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.maths.monte_carlo import MOST_ERROR, Trust

_BETAS = (0.9, 0.99)
_LAST_RATE = 0.02  # of the learning rates, at the end
_TEMPERED = 0.3  # of the steps
_CHECK = 50  # steps between checks of the variance of the log ratio
_DRAWS_TO_CHECK = 256
_SMALL = 1e-3  # nats that the evidence lower bound may lack, estimated as half that variance
_DRAWS = 8_000  # for the evidence in the end
_FALLING = 0.1  # nats by which a loss that has converged does not fall any more
_STILL = "The loss was still falling after {} steps; inclusion probabilities may move further. Give more steps."
_MOST_CHECKED = 200  # slab entries, whose second derivatives take longer than the training


@dataclass
class Fit(Trust):
    """What :func:`~pyro_l0.infer.fit` returns: how the training went.

    Attributes:
        losses: loss of each step in nats, of the best restart.
        evidence: estimates of the log evidence from the trained guide.
        check: that of :func:`~pyro_l0.infer.check_fit`, by importance weights alone where chains refuse the model; None
            where the training had not converged, for over 200 slab entries, and in subsampled plates.
        error: that of the check; NaN without one.
        problems: what is wrong or was not checked, in sentences.
        converged: whether the loss had stopped falling, restarts agree and the check found nothing wrong; a fit that
            could not be checked is not ``ok``, and may have converged.
    """

    losses: list[float]
    evidence: Evidence
    check: FitCheck | None = None
    error: float = math.nan
    problems: tuple[str, ...] = ()
    converged: bool = True

    @property
    def elbo(self) -> float:
        """The evidence lower bound in nats, from fresh draws."""
        return self.evidence.elbo

    @property
    def log_evidence(self) -> float:
        """The importance-weighted bound in nats, tighter than the evidence lower bound where no rows are drawn."""
        return self.evidence.importance_weighted


def fit(
    model: Callable[..., object],
    guide: AutoSpikeSlab,
    *args: object,
    steps: int = 600,
    restarts: int = 1,
    num_particles: int = 128,
    learning_rate: float = 0.1,
    seed: int | None = None,
    progress: bool = False,
    **kwargs: object,
) -> Fit:
    """Train a guide on the spike-and-slab ELBO (Louizos et al., Eq. 20) until it fits the posterior or steps run out.

    Adam's learning rate falls by a cosine, the likelihood is tempered for the gates over the first third, and all
    particles are drawn in one run of the model if ``torch.vmap`` can map it. Training ends early once the log ratio of
    model and guide hardly varies over draws: half its variance estimates the gap between the ELBO and the evidence.

    Args:
        model: a Pyro model.
        guide: its guide, which gets the best restart's parameters.
        *args: arguments of the model.
        steps: maximum number of steps of each restart.
        restarts: trainings from different starts; the one with the largest ELBO is kept.
        num_particles: draws per step, at least 2.
        learning_rate: the gates' learning rate at the start; see :meth:`AutoSpikeSlab.parameter_groups`.
        seed: seed of all random numbers.
        progress: whether to print the loss about ten times per restart, to the standard error.
        **kwargs: keyword arguments of the model.

    Returns:
        How the training went.

    Raises:
        TypeError: ``guide`` is not an AutoSpikeSlab, or an option has the wrong type.
        ValueError: an option is out of range.

    Warns:
        UserWarning: the loss was still falling at the last step, restarts disagree, or the check finds something
            wrong or can't tell of inclusion probabilities.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import AutoSpikeSlab, check_fit
        >>> pyro.set_rng_seed(0)
        >>> x = torch.randn(50, 2)
        >>> y = 2 * x[:, 0] + torch.randn(50)
        >>> def model(x, y):
        ...     with pyro.plate("features", 2):
        ...         z = pyro.sample("z", BernoulliGate(probs=0.5))
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal((z * w) @ x.T, 1.0), obs=y)
        >>> slab = {"w": "z"}
        >>> guide = AutoSpikeSlab(model, slab, gates="autoregressive", slabs="structured")
        >>> result = fit(model, guide, x, y, seed=0)
        >>> (guide.active_probs()["z"] > 0.9).tolist(), check_fit(model, guide, x, y, seed=0).ok
        ([True, False], True)

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 20.
    """
    expect(AutoSpikeSlab, "an AutoSpikeSlab", guide=guide)
    expect(Real, "a number", learning_rate=learning_rate)
    expect(bool, "True or False", progress=progress)
    expect_count(1, steps=steps, restarts=restarts)
    expect_count(2, num_particles=num_particles)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"Expected a positive, finite learning_rate, but got {learning_rate!r}.")
    if seed is not None:
        pyro.set_rng_seed(seed)
    guide(*args, **kwargs)
    trace: Any = guide.prototype_trace
    start = copy.deepcopy(guide.state_dict())
    target = InferenceTarget(model, args, kwargs, guide.slab)
    ratios, mapped = log_ratios(target, guide)
    has_noise = check_model(target, guide, mapped)
    found: list[tuple[Fit, dict[str, Tensor], dict[str, Tensor]]] = []
    for i in range(restarts):
        if i:  # from the start, with normal noise of deviation 1 on the gates' log odds
            guide.load_state_dict(start)
            with torch.no_grad():
                for location in guide.locations():
                    location.add_(torch.randn_like(location))
        elbo = L0_ELBO(
            "spike_slab",
            slab=guide.slab,
            estimator="leave_one_out",
            num_particles=num_particles,
            vectorize_particles=mapped,
            temper=lambda k: min(1.0, (k + 1) / (_TEMPERED * steps)),
        )
        loss = partial(elbo.differentiable_loss, model, guide, *args, **kwargs)
        optimiser = torch.optim.Adam(guide.parameter_groups(learning_rate), betas=_BETAS)
        losses = _train(loss, optimiser, ratios, steps, f"restart {i + 1} of {restarts}, " if progress else None)
        said = () if _has_converged(losses, steps) else (_STILL.format(steps),)
        result = Fit(losses.tolist(), Evidence.of(ratios(_DRAWS), has_noise), problems=said)
        found.append((result, copy.deepcopy(guide.state_dict()), guide.active_probs()))
    best, state, probs = max(found, key=lambda entry: entry[0].evidence.elbo)
    guide.load_state_dict(state)
    apart = max(float((other[name] - probs[name]).abs().max()) for _, _, other in found for name in probs)
    better = "" if guide.is_joint else ", or gates='autoregressive' with slabs='structured' if slabs have normal priors"
    if apart > MOST_ERROR:
        bounds = ", ".join(f"{result.evidence.elbo:.2f}" for result, _, _ in found)
        best.problems += (
            f"Restarts disagree by {apart:.2f} in an inclusion probability, with evidence lower bounds {bounds}; the "
            f"best is kept. Use check_fit, and more steps{better}.",
        )
    if best.problems:
        best.converged = False
        warnings.warn(" ".join(best.problems), stacklevel=2)
    elif has_noise:
        best.problems = ("The guide was not checked, as plates draw rows of the data. Compare other seeds.",)
    elif not 0 < sum(trace.nodes[name]["value"].numel() for name in guide.slab) <= _MOST_CHECKED:
        best.problems = (
            f"The guide was not checked: its slabs do not have 1 to {_MOST_CHECKED} entries. Use check_fit.",
        )
    else:
        best.check = check = checked(target, guide, fitted=mapped)
        best.error, best.problems = check.error, check.problems
        # Of means and deviations that can't be told the summary speaks alone.
        if any(bool((site.check > (name not in probs)).any()) for name, site in check.sites.items()):
            best.converged = False
            warnings.warn(" ".join(check.problems), stacklevel=2)
    return best


def _train(
    loss_of: Callable[[], Tensor],
    optimiser: torch.optim.Optimizer,
    ratios: Callable[[int], Tensor],
    steps: int,
    progress: str | None,
) -> Tensor:
    """Losses of some steps, or of those until the log ratio hardly varies; prints them behind a text."""
    schedule = LambdaLR(optimiser, lambda k: _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * k / steps)))
    losses: list[Tensor] = []
    for k in range(1, steps + 1):
        optimiser.zero_grad()
        loss = loss_of()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
        if progress is not None and k % max(1, steps // 10) == 0:
            print(f"{progress}step {k} of {steps}: loss {float(loss.detach()):.2f} nats", file=sys.stderr, flush=True)
        if k % _CHECK == 0 and k > _TEMPERED * steps and 0.5 * float(ratios(_DRAWS_TO_CHECK).var()) < _SMALL:
            break
    return torch.stack(losses)


def _has_converged(losses: Tensor, steps: int) -> bool:
    """Whether the mean loss of the last tenth is below that of the tenth before by no more than its noise explains."""
    tenth = steps // 10
    if len(losses) < steps or tenth < 10:
        return len(losses) < steps
    before, last = losses[-2 * tenth : -tenth], losses[-tenth:]
    error = math.sqrt((float(before.var()) + float(last.var())) / tenth)
    return float(before.mean() - last.mean()) < _FALLING + 3 * error
