"""Checks a fitted guide: estimates of the log evidence, and chains that start from its draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyro
import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor

from pyro_l0.distributions.gate import inside_events
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.elbo.pairs import check_pair
from pyro_l0.infer.elbo.terms import in_log_joint
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.refine import is_quadratic
from pyro_l0.infer.log_density import POINTS, Point, check_target
from pyro_l0.infer.record import Record, Site, draws_rows, is_drawn
from pyro_l0.infer.runs import Args, Kwargs, Program, can_be_mapped, log_prob, over_particles, record_run, seeded
from pyro_l0.infer.slabs import Conditional, GateSite, alignment_of, gate_site, with_latent_gates
from pyro_l0.maths.tempered_gibbs import reweighted, tempered_gibbs

__all__ = ["FitCheck", "check_fit"]


_AT_ONCE = 250


class Evidence(NamedTuple):
    """Estimates of the log evidence from log ratios of model and guide, in nats.

    Attributes:
        elbo: mean log ratio, a lower bound.
        standard_error: standard error of that mean.
        importance_weighted: log of the mean ratio, a tighter bound that misses modes of which the guide has no draw. In
            a subsampled plate ratios have noise, of whose mean the log is no bound: ``elbo`` again.
        effective: effective sample size of the weights as a fraction of the draws.

    Example:
        >>> round(Evidence.of(torch.tensor([-1.0, -2.0, -1.5])).importance_weighted, 2)
        -1.42
    """

    elbo: float
    standard_error: float
    importance_weighted: float
    effective: float

    @classmethod
    def of(cls, ratios: Tensor, has_noise: bool = False) -> Evidence:
        """Estimate from log ratios at draws in nats, shape ``(n,)``."""
        weights, mean = torch.softmax(ratios, 0), float(ratios.mean())
        return cls(
            mean,
            float(ratios.std()) / math.sqrt(len(ratios)),
            mean if has_noise else float(torch.logsumexp(ratios, 0)) - math.log(len(ratios)),
            1 / float(weights.square().sum()) / len(ratios),
        )


@torch.no_grad()
def log_ratios(
    model: Program, guide: AutoSpikeSlab, args: Args, kwargs: Kwargs, mapped: bool | None = None
) -> tuple[Callable[[int], Tensor], bool]:
    """What computes log p(D, z, w, ...) - log q(z, w, ...) at n draws of the guide, and whether it takes them at once.

    A slab that does not depend on its gates counts where they are open; where they are closed, its posterior is its
    prior, as in Eq. 20 of the L0 paper. ``torch.vmap`` takes all draws at once where it can, or as ``mapped`` says.
    """

    def run_guide() -> Record:
        return record_run(guide, args, kwargs, 0)

    def evaluate(of_guide: Record) -> dict[str, Tensor]:
        of_model = record_run(model, args, kwargs, 0, of_guide.sites).sites
        return {"ratio": _log_ratio(in_log_joint(of_model, of_guide.sites, guide.slab), of_guide.sites, guide.slab)}

    at_once = can_be_mapped(evaluate, run_guide, guide) if mapped is None else mapped

    @torch.no_grad()
    def ratios(n: int) -> Tensor:
        parts = [min(_AT_ONCE, n - i) for i in range(0, n, _AT_ONCE)]
        return torch.cat([over_particles(evaluate, run_guide, guide, part, at_once)["ratio"] for part in parts])

    return ratios, at_once


@torch.no_grad()
def check_model(model: Program, guide: AutoSpikeSlab, args: Args, kwargs: Kwargs, mapped: bool) -> bool:
    """Compare the log joint of which log ratios are made with the model's own at draws of a guide.

    Returns:
        Whether the log ratios have noise, as those of a model that draws rows of its data.
    """
    drawn = record_run(guide, args, kwargs, 0).sites
    sites = record_run(model, args, kwargs, 0, drawn).sites
    rows = {name: site for name, site in sites.items() if draws_rows(site)}
    points = []
    for _ in range(POINTS):
        with Record(rows) as run:
            guide(*args, **kwargs)
        points.append({name: site["value"] for name, site in {**run.sites, **rows}.items() if name in sites})

    def density(values: dict[str, Tensor]) -> Tensor:
        given = {**drawn, **rows, **{name: {**drawn[name], "value": value} for name, value in values.items()}}
        found = in_log_joint(record_run(model, args, kwargs, 0, given).sites, given, guide.slab)
        return torch.stack([log_prob(site).sum() for site in found.values() if is_drawn(site)]).sum()

    def target(points: Sequence[Point]) -> Tensor:
        latent = [name for name, site in sites.items() if is_drawn(site) and not site["is_observed"]]
        if not mapped:
            return torch.stack([density({name: point[name] for name in latent}) for point in points])
        stacked = {name: torch.stack([point[name] for point in points]) for name in latent}
        with pyro.validation_enabled(False):
            found: Tensor = torch.vmap(density, randomness="different")(stacked)
        return found

    advice = "Let no code of the model depend on how many dimensions its draws have, and write into no tensor in place."
    check_target(partial(model, *args, **kwargs), points, target, "fit", advice)
    return bool(rows)


def _log_ratio(model: Mapping[str, Site], guide: Mapping[str, Site], slab: Mapping[str, GateSite]) -> Tensor:
    slab = with_latent_gates(slab, model)
    found = [-log_prob(site).sum() for name, site in guide.items() if name not in model and is_drawn(site)]
    for name, site in model.items():
        if not is_drawn(site):
            continue
        if not site["is_observed"]:
            check_pair(name, site, guide.get(name))
        if name in slab and not isinstance(guide[name]["fn"], Conditional):
            value = _open_log_ratio(name, slab[name], model, guide)
        elif name in guide:
            value = log_prob(site) - log_prob(guide[name])
        else:
            value = log_prob(site)
        found.append(value.sum())
    return torch.stack(found).sum()


def _open_log_ratio(name: str, gate: GateSite, model: Mapping[str, Site], guide: Mapping[str, Site]) -> Tensor:
    """log p - log q of the entries of a slab whose gates are open, summed over events, in the shape of its batch."""
    q, p = inside_events(guide[name]["fn"]), inside_events(model[name]["fn"])
    if q.event_dim != p.event_dim:
        q, p = guide[name]["fn"], model[name]["fn"]
    joint: int = q.event_dim  # dimensions of entries that have no densities of their own, and share a gate
    value = guide[name]["value"]
    alignment = alignment_of(name, gate, model, guide)
    is_open = alignment.of(guide[gate_site(gate)]["value"]) != 0
    is_open = is_open.reshape(is_open.shape[: is_open.dim() - joint])
    ratio = (p.log_prob(value) - q.log_prob(value)) * is_open
    site = model[name]
    total: Tensor = scale_and_mask(sum_rightmost(ratio, site["fn"].event_dim - joint), site["scale"], site["mask"])
    return total


_Function = TypeVar("_Function", bound=Callable[..., Any])

_TOLERANCE = 0.06  # over 42 fits it flagged every one with an error of 0.07 or more, and none below 0.05
_MINIMUM = 0.02  # of the running probabilities that steer the chains


class FitCheck(NamedTuple):
    """What :func:`~pyro_l0.infer.check_fit` finds.

    Attributes:
        moved: largest change of an inclusion probability.
        ok: whether it is within 0.06.
        active_probs: P(z != 0) of every gate by the chains, by site and in its shape: the guide's, repaired.
        by_site: change of every gate's P(z != 0), by site and in its shape.
        evidence: estimates of the log evidence from the guide; they miss modes of which it has no draw.
        advice: what to do, in a sentence.
    """

    moved: float
    ok: bool
    active_probs: dict[str, Tensor]
    by_site: dict[str, Tensor]
    evidence: Evidence
    advice: str


@torch.no_grad()
def check_fit(
    model: Callable[..., object],
    guide: AutoSpikeSlab,
    *args: object,
    chains: int = 256,
    flips: int = 90,
    draws: int = 1000,
    seed: int | None = None,
    **kwargs: object,
) -> FitCheck:
    """Run chains of gates from draws of a guide, and see whether inclusion probabilities move.

    If they do not, the guide has found the posterior. Gates are sampled by weighted tempered Gibbs steps, which leave a
    mode quickly, with the slabs integrated out; each chain keeps the other latents of its draw. A log likelihood that
    is not quadratic in the coefficients is expanded to second order with the other latents at their means, and the
    gates that the chains visit are re-weighted by their Laplace evidence. :func:`~pyro_l0.infer.fit` has an example.

    Args:
        model: the model.
        guide: a trained guide.
        *args: arguments of the model.
        chains: number of chains.
        flips: flips of gates in each chain; the first third is not counted.
        draws: number of the guide's draws for the evidence.
        seed: seed of the random numbers; the global random state is then left as it was.
        **kwargs: keyword arguments of the model.

    Returns:
        What moved, the repaired probabilities and advice.

    Raises:
        TypeError: ``guide`` is not an AutoSpikeSlab, or a number is not whole.
        ValueError: a number is below 1, the guide has not been called, or a slab's prior has a mean other than 0.

    References:
        Zanella and Roberts (2019), arXiv:1805.00541, for the sampler.
    """
    expect(AutoSpikeSlab, "an AutoSpikeSlab", guide=guide)
    expect_count(1, chains=chains, flips=flips, draws=draws)
    with seeded(seed):
        collapsed, log_likelihood = guide.collapsed_at_means(model, args, kwargs)
        quadratic = is_quadratic(log_likelihood, collapsed.quadratic)
        if quadratic:
            collapsed = guide.collapse(model, args, kwargs, chains)
        drawn, probs = guide.draws(chains), guide.active_probs()
        start = (collapsed.gates.together(drawn) != 0).to(collapsed.quadratic.quadratic.linear)
        running = collapsed.gates.together(probs).clamp(min=_MINIMUM)
        run = tempered_gibbs(
            collapsed.quadratic, collapsed.prior, flips=flips, warm_up=1 / 3, start=start, running=running
        )
        if not quadratic:
            run = reweighted(run, log_likelihood, collapsed.quadratic)
        evidence = Evidence.of(log_ratios(model, guide, args, kwargs)[0](draws))
    repaired = collapsed.gates.apart(run.active_probs)
    by_site = {name: repaired[name] - probs[name] for name in repaired}
    moved = max(float(change.abs().max()) for change in by_site.values())
    return FitCheck(moved, moved <= _TOLERANCE, repaired, by_site, evidence, _advice(moved, by_site, probs, repaired))


def _advice(moved: float, by_site: dict[str, Tensor], probs: dict[str, Tensor], repaired: dict[str, Tensor]) -> str:
    if moved <= _TOLERANCE:
        return f"Inclusion probabilities move by at most {moved:.3f}: the guide is where it should be."
    site = max(by_site, key=lambda name: float(by_site[name].abs().max()))
    index = int(by_site[site].abs().argmax())
    before, after = (float(x[site].reshape(-1)[index]) for x in (probs, repaired))
    return (
        f"Inclusion probabilities move by up to {moved:.2f} (gate {index} of site {site!r}: from {before:.2f} to "
        f"{after:.2f}): the guide misses a part of the posterior. Use gates='autoregressive' with slabs='structured', "
        "more steps or restarts, or the probabilities of this check."
    )
