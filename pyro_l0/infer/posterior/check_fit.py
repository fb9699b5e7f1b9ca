"""Checks a fitted guide: estimates of the log evidence, and chains that start from its draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor

from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.elbo.pairs import check_pair, slab_entries
from pyro_l0.infer.elbo.terms import in_log_joint
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.correlated import local_latents
from pyro_l0.infer.guides.refine import is_quadratic
from pyro_l0.infer.guides.summaries import VERDICTS, entry, printed
from pyro_l0.infer.posterior.log_joint import MOST_GATES
from pyro_l0.infer.record import Record, Site, draws_rows, is_drawn
from pyro_l0.infer.runs import can_be_mapped, log_prob, of_rows, over_particles, record_run, seeded
from pyro_l0.infer.slabs import Conditional, GateSite, gate_site, with_latent_gates
from pyro_l0.infer.target import POINTS, InferenceTarget, Point
from pyro_l0.maths.monte_carlo import MOST_ERROR, Trust
from pyro_l0.maths.tempered_gibbs import reweighted, tempered_gibbs

__all__ = ["FitCheck", "SiteCheck", "check_fit"]


_AT_ONCE = 500
_RATIO = ""  # beside the names of sites


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
    target: InferenceTarget, guide: AutoSpikeSlab, mapped: bool | None = None
) -> tuple[Callable[[int], Tensor], bool]:
    """What computes log p(D, z, w, ...) - log q(z, w, ...) at n draws of the guide, and whether it takes them at once.

    A slab that does not depend on its gates counts where they are open; where they are closed, its posterior is its
    prior, as in Eq. 20 of the L0 paper. ``torch.vmap`` takes all draws at once where it can, or as ``mapped`` says.
    """
    draws, at_once = _weighed_draws(target, guide, mapped, keep=False)
    return lambda n: draws(n)[_RATIO], at_once


@torch.no_grad()
def _weighed_draws(
    target: InferenceTarget, guide: AutoSpikeSlab, mapped: bool | None, keep: bool
) -> tuple[Callable[[int], dict[str, Tensor]], bool]:
    """As :func:`log_ratios`; beside the ratios it may keep what was drawn at each latent site."""

    def run_guide() -> Record:
        return record_run(guide, target.args, target.kwargs, 0)

    def evaluate(of_guide: Record) -> dict[str, Tensor]:
        of_model = target.with_guide(of_guide.sites)
        latent = {name: site["value"] for name, site in of_guide.sites.items() if keep and name in of_model}
        ratio = _log_ratio(in_log_joint(of_model, of_guide.sites, guide.slab), of_guide.sites, guide.slab)
        return {_RATIO: ratio, **latent}

    at_once = can_be_mapped(evaluate, run_guide, guide) if mapped is None else mapped

    @torch.no_grad()
    def draws(n: int) -> dict[str, Tensor]:
        sizes = [min(_AT_ONCE, n - i) for i in range(0, n, _AT_ONCE)]
        parts = [over_particles(evaluate, run_guide, guide, size, at_once) for size in sizes]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return draws, at_once


@torch.no_grad()
def check_model(target: InferenceTarget, guide: AutoSpikeSlab, mapped: bool) -> bool:
    """Compare the log joint of which log ratios are made with the model's own at draws of a guide.

    Returns:
        Whether the log ratios have noise, as those of a model that draws rows of its data.
    """
    drawn = record_run(guide, target.args, target.kwargs, 0).sites
    sites = target.with_guide(drawn)
    rows = {name: site for name, site in sites.items() if draws_rows(site)}
    points = []
    for _ in range(POINTS):
        with Record(rows) as run:
            guide(*target.args, **target.kwargs)
        points.append({name: site["value"] for name, site in {**run.sites, **rows}.items() if name in sites})

    def density(values: dict[str, Tensor]) -> Tensor:
        given = {**drawn, **rows, **{name: {**drawn[name], "value": value} for name, value in values.items()}}
        found = in_log_joint(target.with_guide(given), given, guide.slab)
        return torch.stack([log_prob(site).sum() for site in found.values() if is_drawn(site)]).sum()

    def log_density(points: Sequence[Point]) -> Tensor:
        latent = [name for name, site in sites.items() if is_drawn(site) and not site["is_observed"]]
        stacked = {name: torch.stack([point[name] for point in points]) for name in latent}
        return of_rows(density, stacked, mapped=mapped)

    advice = "Let no code of the model depend on how many dimensions its draws have, and write into no tensor in place."
    target.check(log_density, points, "fit", advice)
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
    (q, p, aligned), value, site = slab_entries(name, gate, model, guide), guide[name]["value"], model[name]
    ratio = (p.log_prob(value) - q.log_prob(value)) * (aligned.of(guide[gate_site(gate)]["value"]) != 0)
    ratio = sum_rightmost(ratio, site["fn"].event_dim - q.event_dim)
    total: Tensor = scale_and_mask(ratio, site["scale"], site["mask"])
    return total


_MINIMUM = 0.02  # of the running probabilities that steer the chains
_APART = 0.15  # standard deviations by which a mean or a standard deviation may be off, beside two standard errors
_FEW = 400  # draws that count: fewer know a mean to no better than a twentieth of its standard deviation
_ROWS = 60  # of a printed table


class SiteCheck(NamedTuple):
    """What a guide says of a site and what :func:`~pyro_l0.infer.check_fit` found, in the site's shape.

    Attributes:
        by: ``"chains"``, or ``"weights"`` for importance weights.
        guide: the guide's mean: of a gate P(z != 0), of a slab that of the coefficients z * w.
        found: the mean by the check.
        guide_sd: the guide's standard deviation; None for gates.
        found_sd: that by the check.
        check: 0 where the guide is right, 1 where it could not be checked, 2 where it is wrong.
    """

    by: str
    guide: Tensor
    found: Tensor
    guide_sd: Tensor | None
    found_sd: Tensor | None
    check: Tensor


@dataclass(frozen=True)
class FitCheck(Trust):
    """What :func:`~pyro_l0.infer.check_fit` finds; ``print`` shows it as a table.

    Attributes:
        active_probs: P(z != 0) of every gate by the check, by site and in its shape: the guide's, repaired as far as
            short chains from its draws went, which may be a part of the way where it is wrong.
        error: largest standard error of these, by how much the chains differ, and more where they stay near where the
            guide has them start; NaN where the check can't tell them.
        problems: what of the guide's summary is wrong or unchecked, and what to do, in sentences.
        evidence: estimates of the log evidence from the guide; they miss modes of which it has no draw.
        sites: what was found of each site.
    """

    active_probs: dict[str, Tensor]
    error: float
    problems: tuple[str, ...]
    evidence: Evidence
    sites: dict[str, SiteCheck]

    def __str__(self) -> str:
        """A row for each entry of each site, and the problems."""
        import pandas as pd  # takes half a second

        frame = pd.DataFrame(_rows(self.sites)).set_index("")
        frame["check"] = [VERDICTS[code] for code in frame["check"]]
        return "\n".join([printed(frame, _ROWS), *self.problems])


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
    """Compare a guide's inclusion probabilities with chains, and its means and deviations with importance weights.

    Gates are sampled from draws of the guide by weighted tempered Gibbs steps, which leave a mode quickly, with the
    slabs integrated out; each chain keeps the other latents of its draw. A log likelihood that is not quadratic in the
    coefficients is expanded to second order with the other latents at their means, and the gates that the chains visit
    are re-weighted by their Laplace evidence. Coefficients and other latents are weighed by the ratio of model and
    guide, at draws whose other latents are somewhat wider than the guide's; so are gates beside latents of many entries
    that chains would hold at their means. The guide's ``summary`` then marks what is wrong or could not be checked.
    :func:`~pyro_l0.infer.fit` has an example.

    Args:
        model: the model.
        guide: a trained guide.
        *args: arguments of the model.
        chains: number of chains.
        flips: flips of gates in each chain; the first third is not counted.
        draws: number of draws for the evidence; the importance weights take twice as many beside other latents.
        seed: seed of the random numbers; the global random state is then left as it was.
        **kwargs: keyword arguments of the model.

    Returns:
        What is off, the repaired probabilities and what to do.

    Raises:
        TypeError: ``guide`` is not an AutoSpikeSlab, or a number is not whole.
        ValueError: a number is below 1, the guide has not been called, or a slab's prior has a mean other than 0.

    References:
        Zanella and Roberts (2019), arXiv:1805.00541, for the sampler.
    """
    expect(AutoSpikeSlab, "an AutoSpikeSlab", guide=guide)
    expect_count(1, chains=chains, flips=flips, draws=draws)
    with seeded(seed):
        return checked(InferenceTarget(model, args, kwargs, guide.slab), guide, chains, flips, draws)


def _by_chains(
    target: InferenceTarget, guide: AutoSpikeSlab, probs: dict[str, Tensor], chains: int, flips: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """P(z != 0) by chains, its errors, and whether these hold latents at their means whose uncertainty matters."""
    drawn = guide.draws(chains)
    expansions = guide.expansions(target, drawn)
    at_mean = next(expansions)
    quadratic = is_quadratic(*at_mean) and is_quadratic(*next(expansions, at_mean))
    collapsed, log_likelihood = next(expansions, at_mean) if quadratic else at_mean
    start = (collapsed.gates.together(drawn) != 0).to(collapsed.quadratic.quadratic.linear)
    running = collapsed.gates.together(probs).clamp(min=_MINIMUM)
    run = tempered_gibbs(collapsed.quadratic, collapsed.prior, flips=flips, warm_up=1 / 3, start=start, running=running)
    if not quadratic:
        run = reweighted(run, log_likelihood, collapsed.quadratic)
    is_held = not quadratic and local_latents(collapsed.others, target)
    # It is the starts that are to be checked.
    error = run.error_of_moves() if collapsed.quadratic.chains is None else run.standard_error()
    return collapsed.gates.apart(run.active_probs), collapsed.gates.apart(error), bool(is_held)


@torch.no_grad()
def checked(
    target: InferenceTarget,
    guide: AutoSpikeSlab,
    chains: int = 256,
    flips: int = 90,
    n: int = 1000,
    fitted: bool | None = None,
) -> FitCheck:
    """What :func:`check_fit` returns, for n draws.

    A fit says by ``fitted`` whether its draws are mapped, and takes importance weights where chains refuse the model.
    """
    probs = guide.active_probs()
    try:
        found, errors, by_weights = _by_chains(target, guide, probs, chains, flips)
    except ValueError:
        if fitted is None:
            raise
        found, errors, by_weights = dict(probs), {name: math.nan * p for name, p in probs.items()}, True
    weighed = _weighed_draws(target, guide, fitted, keep=True)[0]
    of_guide = weighed(n)
    ratios = of_guide.pop(_RATIO)
    with guide.widened() as others:
        wide = weighed(2 * n) if others else {**of_guide, _RATIO: ratios}
    weights = wide.pop(_RATIO).double().softmax(0)
    effective = float(1 / weights.square().sum())
    few, by, sites = effective < _FEW, "chains", {}
    for name, p in probs.items():
        if by_weights and not few:
            by, (found[name], _, errors[name], *_) = "weights", _moments((wide[name] != 0).to(p), weights)
        wrong = (found[name] - p).abs() > MOST_ERROR + 2 * errors[name]
        unknown = ~(errors[name] <= MOST_ERROR / 2) | (few and by_weights)  # a check is twice as sure as what it checks
        sites[name] = SiteCheck(by, p, found[name], None, None, torch.where(wrong, 2, unknown.long()))
    own, other = guide.shown(of_guide), guide.shown(wide)
    sites |= {name: _compared(x, other[name], weights, few) for name, x in own.items()}
    guide.mark({name: site.check for name, site in sites.items()})

    error = math.nan if few and by_weights else float(torch.cat([x.reshape(-1) for x in errors.values()]).max())
    said = f"importance weights, of which {effective:.0f} of {len(weights)} draws count"
    return FitCheck(found, error, _problems(_rows(sites), guide.is_joint, said, by_weights), Evidence.of(ratios), sites)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Mean and standard deviation of weighted draws, their standard errors, and the deviation where they are not 0."""
    x, weights = x.double(), weights.reshape(-1, *[1] * (x.dim() - 1))
    mean = (weights * x).sum(0)
    apart = (x - mean).square()
    variance = (weights * apart).sum(0)
    error, error_of_variance = ((weights * y).square().sum(0).sqrt() for y in (x - mean, apart - variance))
    sd, tiny = variance.sqrt(), torch.finfo(x.dtype).tiny
    unit = sd / (weights * (x != 0)).sum(0).sqrt().clamp(min=tiny)
    return mean, sd, error, error_of_variance / (2 * sd).clamp(min=tiny), unit


def _compared(own: Tensor, other: Tensor, weights: Tensor, few: bool) -> SiteCheck:
    """A guide's draws of a site beside weighted ones."""
    guide, found = _moments(own, torch.full((len(own),), 1 / len(own)).to(weights)), _moments(other, weights)
    unit = torch.maximum(guide[4], found[4]).clamp(min=torch.finfo(weights.dtype).tiny)
    off = torch.maximum((guide[0] - found[0]).abs(), (guide[1] - found[1]).abs()) / unit
    error = torch.maximum(guide[2].hypot(found[2]), guide[3].hypot(found[3])) / unit
    unknown = torch.maximum(found[2], found[3]) / unit > _APART / 2
    check = torch.where(off > _APART + 2 * error, 2, unknown.long())
    return SiteCheck("weights", guide[0], found[0], guide[1], found[1], torch.ones_like(check) if few else check)


_Row = dict[str, Any]


def _rows(sites: Mapping[str, SiteCheck]) -> list[_Row]:
    """A row for each entry of each site, values by column; gates have no standard deviations."""
    rows = []
    for name, site in sites.items():
        columns = {key: x.reshape(-1).tolist() for key, x in site._asdict().items() if isinstance(x, Tensor)}
        for i in range(site.check.numel()):
            label = entry(name, site.check.shape, i)
            own = {key: x[i] for key, x in columns.items()}
            rows.append({"": label if "found_sd" in own else f"P({label} != 0)", "by": site.by, **own})
    return rows


def _problems(rows: list[_Row], is_joint: bool, weights: str, by_weights: bool) -> tuple[str, ...]:
    """What is wrong or unchecked, and what to do; ``by_weights`` says that it is weights that tell of gates."""
    gates = sorted((row for row in rows if "found_sd" not in row), key=lambda row: -abs(row["found"] - row["guide"]))
    wrong = [row for row in rows if row["check"] == 2 and row not in gates]
    unchecked = [row for row in rows if row["check"] == 1]
    of_chains = [row[""] for row in unchecked if row in gates and not by_weights]
    of_weights = [row[""] for row in unchecked if row not in gates or by_weights]
    most, said = gates[0], []
    if any(row["check"] == 2 for row in gates):
        said.append(
            f"Inclusion probabilities move by up to {abs(most['found'] - most['guide']):.2f} ({most['']} from "
            f"{most['guide']:.2f} to {most['found']:.2f} by {most['by']}): the guide misses a part of the posterior, "
            "and chains that start from it may not have found all of that."
        )
    if wrong:
        first = "{} is {found:.2f} ± {found_sd:.2f}, in the guide {guide:.2f} ± {guide_sd:.2f}".format(
            wrong[0][""], **wrong[0]
        )
        said.append(f"Of means and standard deviations {len(wrong)} are wrong by {weights}: {first}.")
    if of_chains:
        said.append(
            f"Unchecked are {len(of_chains)} entries, as {of_chains[0]}, by chains, which are few, differ or stay near "
            "their starts; more chains or flips of check_fit may tell."
        )
    if of_weights:
        said.append(f"Unchecked are {len(of_weights)} entries, as {of_weights[0]}, by {weights}.")
    if said:
        better = "" if is_joint else "gates='autoregressive' with slabs='structured' if slabs have normal priors, "
        said.append(f"Use {better}more steps or restarts, or sample_posterior with up to {MOST_GATES} gates.")
    return tuple(said)
