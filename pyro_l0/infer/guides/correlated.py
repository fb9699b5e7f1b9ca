"""A joint posterior of gates, slabs and other latent variables, its draws, and where it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Beta, Normal, TorchDistribution
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate, innermost, inside_events
from pyro_l0.infer.guides.expansion import (
    IndependentSlabs,
    OpenModel,
    RunAt,
    SlabPosterior,
    StructuredSlabs,
    expand,
    run_at,
)
from pyro_l0.infer.guides.mean_field import (
    MEAN_FIELD,
    GatesPosterior,
    Layout,
    SitePosterior,
    middle,
    transform_to_support,
)
from pyro_l0.infer.log_density import check_repeats
from pyro_l0.infer.record import Record, Site, is_deterministic, is_likelihood
from pyro_l0.infer.runs import (
    Args,
    Kwargs,
    forked_generators,
    is_scaled,
    log_prob,
    sample_sites,
    seeded,
    without_scales,
)
from pyro_l0.infer.slabs import Conditional, GateSite, JointSample, alignment_of, check_whole, gate_site

_ROUNDING = 1e-3  # of derivatives in float32, relative
_START = 0.2  # standard deviation of the other latents on the real line


class GateChain(nn.Module):
    r"""Log odds of gates given the gates before them and other latents: :math:`a_j + \sum_{k<j} B_{jk} z_k + U_j^T t`.

    A posterior of this form puts its probability on sets of gates: of two features that stand for each other it opens
    one or the other. The parameters :math:`a` are a guide's own, by site; :math:`t` is the other latents' distance from
    where they started. Without B (``coupled``) the gates are independent given the other latents.
    """

    def __init__(self, size: int, hyper: int, coupled: bool, like: Tensor) -> None:
        super().__init__()
        self.coupling = nn.Parameter(like.new_zeros(size, size)) if coupled else None
        self.tilt = nn.Parameter(like.new_zeros(size, hyper)) if hyper else None

    def log_odds(self, base: Tensor, gates: Tensor, hyper: Tensor) -> Tensor:
        """Log odds of each gate given those before it, shape ``(n, size)`` as z; a has shape ``(size,)``."""
        odds = base.expand_as(gates)
        if self.tilt is not None:
            odds = odds + hyper @ self.tilt.mT
        return odds if self.coupling is None else odds + gates @ self.coupling.tril(-1).mT

    @torch.no_grad()
    def sample(self, base: Tensor, hyper: Tensor) -> Tensor:
        """Gates, one after the other, shape ``(n, size)`` for other latents of shape ``(n, hyper)``."""
        noise = torch.rand(len(hyper), len(base), dtype=base.dtype, device=base.device).logit()
        start = self.log_odds(base, torch.zeros_like(noise), hyper)
        if self.coupling is None:
            return (noise < start).to(base.dtype)
        gates = torch.zeros_like(noise)
        for j, row in enumerate(self.coupling.detach()):
            gates[:, j] = noise[:, j] < start[:, j] + gates[:, :j] @ row[:j]
        return gates


class HyperPosterior(nn.Module):
    """A Gaussian of full covariance on the real line, whose mean is at ``start`` first, shape ``(d,)``."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.loc = nn.Parameter(start.clone())
        self.log_scale = nn.Parameter(torch.full_like(start, math.log(_START)))
        self.coupling = nn.Parameter(start.new_zeros(len(start), len(start)))

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiable draws, with mean and deviation of each entry given those before it; shapes ``(n, d)``."""
        scale = self.log_scale.exp()
        noise = torch.randn(n, len(self.loc), dtype=scale.dtype, device=scale.device)
        means = self.loc + noise @ self.coupling.tril(-1).mT
        return means + scale * noise, means, scale.expand_as(noise)


_normal, _beta = (partial(family, validate_args=False) for family in (Normal, Beta))
_bernoulli = partial(BernoulliGate, None, validate_args=False)  # of logits


class ConjugateRate(NamedTuple):
    """A variable of one entry that is Beta(open, closed) but for gates that are open with it as their probability."""

    name: str
    gates: tuple[str, ...]
    open: Tensor
    closed: Tensor
    weights: Tensor  # how often each of the gates counts
    shape: torch.Size

    def parameters(self, gates: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of its Beta given n draws of the gates by site, shapes ``(n, 1)``."""
        among = torch.cat([gates[name].reshape(len(gates[name]), -1) for name in self.gates], 1).detach()
        weights = self.weights.to(among)
        opened = (among @ weights).unsqueeze(1)
        return self.open.to(among) + opened, self.closed.to(among) + weights.sum() - opened


class CorrelatedPosterior(nn.Module):
    """A joint posterior, whose sites are drawn in this order: other latents, gates, rates, slabs.

    ``slabs`` has the other latents too that are drawn with the slabs. ``chain`` is None where a family draws the gates.
    The guide sets ``posteriors``, those of the gates by site, and ``plates``, the names of each site's plates.
    """

    hyper_start: Tensor

    def __init__(
        self,
        gates: Layout,
        hyper: Layout,
        slabs: Layout,
        rates: Sequence[ConjugateRate],
        chain: GateChain | None,
        hyper_posterior: HyperPosterior,
        slab_posterior: SlabPosterior,
    ) -> None:
        super().__init__()
        self.gates, self.hyper, self.slabs, self.rates = gates, hyper, slabs, tuple(rates)
        self.chain, self.hyper_posterior, self.slab_posterior = chain, hyper_posterior, slab_posterior
        self.register_buffer("hyper_start", hyper_posterior.loc.detach().clone())
        self.posteriors: Mapping[str, SitePosterior] = {}
        self.plates: Mapping[str, tuple[str, ...]] = {}

    @property
    def is_chain(self) -> bool:
        """Whether gates are binary, and depend on gates before them or on other latents."""
        return self.chain is not None and any(True for _ in self.chain.parameters())

    def has_gates_of(self, sites: Mapping[str, Site], run_at: RunAt, slab: Mapping[str, GateSite]) -> bool:
        """Whether gates switch the slabs in a run of the model that they switched when this was made."""
        model = OpenModel(run_at, latent_values(sites), self.slabs, self.gates, self.hyper)
        return torch.equal(_gates_of_slabs(model, self.hyper_start, sites, slab), self.slab_posterior.gate_of)

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates, with a joint draw for each particle of the plates outside."""
        outside = {x.dim: x.size for x in runtime._PYRO_STACK if isinstance(x, IndepMessenger)}
        particles = {dim: size for dim, size in outside.items() if dim is not None}
        values: dict[str, Tensor] = {}
        for name, sample in self.draw_together(math.prod(particles.values())).items():
            with ExitStack() as stack:
                for plate in self.plates[name]:
                    stack.enter_context(plates[plate])
                fn, value = sample.at_site(particles)
                values[name] = pyro.sample(name, fn if sample.depends else Conditional(fn, value))
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site for a loss that needs sites alone."""
        return {name: record.sample(name, *sample.at_site({})) for name, sample in self.draw_together(1).items()}

    def draw_together(self, n: int) -> dict[str, JointSample]:
        """n joint samples, by site in their order."""
        samples: dict[str, JointSample] = {}
        hyper, means, deviations = self.hyper_posterior.draw(n)
        self._add(samples, self.hyper, _normal, hyper, means, deviations)
        shift = hyper - self.hyper_start
        gates = self._draw_gates(samples, shift, n)
        for rate in self.rates:
            parameters = rate.parameters({name: samples[name].values for name in rate.gates})
            values = _beta(*parameters).sample()
            samples[rate.name] = JointSample(values, _beta, parameters, rate.shape, 0)
        given = self.slab_posterior.given(gates, shift)
        noise = torch.randn_like(given.mean)
        slabs = given.draw(noise)
        self._add(samples, self.slabs, _normal, slabs, *given.conditionals(slabs, noise))
        return samples

    def active_probs(self, draws: int) -> dict[str, Tensor]:
        """P(z != 0) of the gates by site, the mean over draws of their conditional probabilities."""
        if self.chain is None:
            return {name: gate.active_prob for name, gate in self._distributions().items()}
        shift = self.hyper_posterior.draw(draws)[0] - self.hyper_start
        base = self._base()
        odds = self.chain.log_odds(base, self.chain.sample(base, shift), shift)
        return self.gates.apart(torch.sigmoid(odds).mean(0))

    def parameter_groups(self, sites: Sequence[Tensor], learning_rate: float) -> list[dict[str, object]]:
        """Parameters for an optimiser, each kind with its learning rate; ``sites`` are the gates' own."""
        chain = [] if self.chain is None else list(self.chain.parameters())
        exponents = self.slab_posterior.exponents
        slabs = [x for x in self.slab_posterior.parameters() if x is not exponents]
        hyper = [*self.hyper_posterior.parameters(), *([] if exponents is None else [exponents])]
        return [
            {"params": [*sites, *chain], "lr": learning_rate},
            {"params": slabs, "lr": 0.2 * learning_rate},
            {"params": hyper, "lr": 0.3 * learning_rate},
        ]

    def _add(
        self,
        samples: dict[str, JointSample],
        layout: Layout,
        make: Callable[..., TorchDistribution],
        values: Tensor,
        *parameters: Tensor,
    ) -> None:
        """Add the samples of several sites from what they have side by side, shape ``(n, size)`` each."""
        split = [layout.pieces(x.expand_as(values)) for x in (values, *parameters)]
        for name, shape in layout.shapes.items():
            value, *own = (x[name] for x in split)
            samples[name] = JointSample(
                value, make, tuple(own), shape, layout.event_dims[name], layout.transforms.get(name)
            )

    def _draw_gates(self, samples: dict[str, JointSample], shift: Tensor, n: int) -> Tensor:
        """Add the gates' samples; the gates side by side, shape ``(n, size)``."""
        if self.chain is None:
            for name, gate in self._distributions().items():
                samples[name] = JointSample.of(gate, n, self.gates.event_dims[name])
            return torch.cat([samples[name].values for name in self.gates.shapes], -1)
        base = self._base()
        gates = self.chain.sample(base, shift)
        self._add(samples, self.gates, _bernoulli, gates, self.chain.log_odds(base, gates, shift))
        return gates

    def _distributions(self) -> dict[str, GateDistribution]:
        """The gates by site; of a chain, given closed gates before them."""
        found = {name: x for name, x in self.posteriors.items() if isinstance(x, GatesPosterior)}
        return {name: gates.distribution(gates.parameters) for name, gates in found.items()}

    def _base(self) -> Tensor:
        """Log odds of the gates of a chain given closed gates before them, shape ``(size,)``."""
        gates = self._distributions()
        return torch.cat([gates[name].logits.reshape(-1) for name in self.gates.shapes])


_RATES = torch.tensor([0.2, 0.35, 0.6, 0.85], dtype=torch.float64)  # at which a rate is tried
_ODDS, _LOGS = torch.logit(_RATES), torch.stack([_RATES.log(), (-_RATES).log1p(), torch.ones_like(_RATES)], 1)
_MOVE = 0.5  # on the real line


class Structure(NamedTuple):
    """What a user asks of a correlated posterior."""

    coupled: bool  # gates depend on the gates before them
    structured: bool  # slabs are one Gaussian given their gates
    chain: bool  # gates are binary


def structure_of(
    gates: str, slabs: str, hyper: Sequence[str] | None, options: dict[str, Any]
) -> tuple[Structure | None, dict[str, Any]]:
    """What a user's words ask for, None for a mean field; and a guide's options with the defaults that suit it."""
    for name, value, known in (
        ("gates", gates, ("mean_field", "autoregressive")),
        ("slabs", slabs, ("independent", "structured")),
    ):
        if value not in known:
            raise ValueError(f"Expected {name} to be one of {known}, but got {value!r}.")
    if gates == "mean_field" and slabs == "independent" and not hyper:
        return None, options
    options = {"family": BernoulliGate, "init_active_prob": 0.5, "init_jitter": 0.1, **options}
    is_chain = options["family"] is BernoulliGate
    if gates == "autoregressive" and not is_chain:
        raise ValueError(
            f"Expected family=BernoulliGate for gates='autoregressive', but got {options['family'].__name__}."
        )
    return Structure(gates == "autoregressive", slabs == "structured", is_chain), options


def model_runs(
    model: Callable[..., object], args: Args, kwargs: Kwargs, slab: Collection[str]
) -> tuple[dict[str, Site], RunAt]:
    """The sites of a model in one run, and what runs it at values of its latent sites; priors without scales."""
    program = partial(model, *args, **kwargs)
    sites = sample_sites(poutine.trace(program).get_trace())
    found = {name: site for name, site in sites.items() if not is_deterministic(site)}
    check_repeats(program, latent_values(found))
    return without_scales(found, slab), lambda values: without_scales(run_at(program, values), slab)


def latent_values(sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """The values of latent sites."""
    return {name: site["value"] for name, site in sites.items() if not site["is_observed"]}


def correlated_posterior(
    sites: Mapping[str, Site],
    run_at: RunAt,
    structure: Structure,
    slab: Mapping[str, GateSite],
    hyper_names: Sequence[str] | None,
) -> CorrelatedPosterior:
    """The posterior that a guide learns from, for a model with these sites in one run.

    ``hyper_names`` are the sites of the other latents; None for all of them, normal ones drawn with the slabs where
    they can be.
    """
    latent = list(latent_values(sites))
    gate_names = [name for name in latent if find_gate(sites[name]["fn"]) is not None]
    slab_names = [name for name in latent if name in slab]
    others = [name for name in latent if name not in (*gate_names, *slab_names)]
    if hyper_names is None:
        for name in others:
            if _is_effect(name, sites, run_at) and _adds(name, slab_names, gate_names, sites, run_at):
                slab_names.append(name)
        hyper_names = [name for name in others if name not in slab_names]
    for name in (*gate_names, *slab_names, *hyper_names):  # whose posterior would depend on sites that are not drawn
        check_whole(f"site {name!r}", sites[name], f"; leave subsample_size out, or, for a fit alone, {MEAN_FIELD}")
    gates = Layout({name: sites[name] for name in gate_names})
    rates = [rate for name in hyper_names if (rate := _conjugate_rate(name, sites, run_at, gate_names)) is not None]
    learned = [name for name in hyper_names if name not in {rate.name for rate in rates}]
    found = {name: transform_to_support(name, sites[name]["fn"], is_slab=False) for name in learned}
    transforms = {name: transform for name, transform in found.items() if transform is not None}
    hyper = Layout({name: sites[name] for name in learned}, transforms)
    slabs = Layout({name: sites[name] for name in slab_names})
    like = sites[gate_names[0]]["value"]
    medians = {name: middle(sites[name]["fn"], transforms.get(name)).to(like) for name in learned}
    start = hyper.together(medians) if learned else like.new_zeros(0)
    values = {name: sites[name]["value"] for name in latent}
    values |= {x.name: sites[x.name]["fn"].mean.detach().expand_as(values[x.name]) for x in rates}
    model = OpenModel(run_at, values, slabs, gates, hyper)
    gate_of = _gates_of_slabs(model, start, sites, slab)
    held = _held(hyper, start, lambda at: run_at({**values, **hyper.apart(at)}))
    expansion = expand(model, start, held)
    kind = StructuredSlabs if structure.structured else IndependentSlabs
    posterior = kind(expansion, gate_of)
    chain = GateChain(gates.size, hyper.size, structure.coupled, like) if structure.chain else None
    return CorrelatedPosterior(gates, hyper, slabs, rates, chain, HyperPosterior(expansion.hyper), posterior)


def _gates_of_slabs(model: OpenModel, start: Tensor, sites: Mapping[str, Site], slab: Mapping[str, GateSite]) -> Tensor:
    """Which gates switch each element of the slabs, by what the user says of it, as :meth:`OpenModel.gates_of`."""
    positions, found = model.gates.positions(), []
    for name, shape in model.slabs.shapes.items():
        own = torch.tensor(-1)  # for none
        if name in slab and (gate := gate_site(slab[name])) in positions:
            own = alignment_of(name, slab[name], sites).of(positions[gate].reshape(model.gates.shapes[gate]))
        found.append(own.expand(shape).reshape(-1))
    return model.gates_of(model.slab_prior(start)[1].detach(), start, torch.cat(found).to(start.device))


def _is_effect(name: str, sites: Mapping[str, Site], run_at: RunAt) -> bool:
    """Whether a latent is like a slab without a gate: normal, and no other latent's prior depends on it."""
    is_normal = isinstance(innermost(sites[name]["fn"]), Normal) and not is_scaled(sites[name])
    return is_normal and is_leaf(name, sites, run_at)


def is_leaf(name: str, sites: Mapping[str, Site], run_at: RunAt) -> bool:
    """Whether no other latent's prior depends on a latent on the real line."""
    latent = latent_values(sites)
    moved = run_at({**latent, name: latent[name] + 1})
    others = [key for key in latent if key != name]
    return all(key in moved and torch.equal(log_prob(moved[key]), log_prob(sites[key])) for key in others)


def local_latents(held: Mapping[str, Tensor], sites: Mapping[str, Site], run_at: RunAt) -> list[str]:
    """Those of many real numbers on which observations depend: their uncertainty does not fade with more data."""
    many = [name for name, value in held.items() if value.numel() > 1]
    real = [name for name in many if transform_to_support(name, sites[name]["fn"], is_slab=False) is None]
    return [name for name in real if is_leaf(name, sites, run_at)]


@torch.enable_grad()
def _adds(name: str, beside: Sequence[str], gates: Sequence[str], sites: Mapping[str, Site], run_at: RunAt) -> bool:
    r"""Whether observations depend on a latent u and on slabs beside it through a sum, as in :math:`X \beta + u`.

    A product, such as that of factors and loadings, has no Gaussian. With a sum, the slopes of an observation's log
    probability along the slabs and along u are in one ratio everywhere. This is tried at three points on a line; where
    an observation has several numbers, the log likelihood may be quadratic instead.
    """
    latent = {key: site["value"].detach() for key, site in sites.items() if not site["is_observed"]}
    latent |= {key: torch.ones_like(latent[key]) for key in gates}
    names = (*beside, name)
    with seeded(0):
        first, move, along = ({key: 0.5 * sites[key]["fn"].sample().detach() for key in names} for _ in range(3))
    slopes = []  # along the slabs and along u
    for step in range(3):
        at = {key: (first[key] + step * move[key]).requires_grad_() for key in names}
        run = run_at({**latent, **at}).values()
        each = [inside_events(x["fn"]).log_prob(x["value"]).reshape(-1) for x in run if is_likelihood(x)]
        log_probs = torch.cat(each)
        unit = torch.zeros_like(log_probs, requires_grad=True)  # for derivatives along a line by two backward passes
        rows = torch.autograd.grad(log_probs, list(at.values()), unit, create_graph=True, materialize_grads=True)
        parts = [(row * along[key]).sum() for key, row in zip(names, rows, strict=True)]
        slopes += [
            torch.autograd.grad(part, unit, retain_graph=True, materialize_grads=True)[0]
            for part in (torch.stack(parts[:-1]).sum(), parts[-1])
        ]
    s, t, s1, t1, s2, t2 = slopes
    ratio = _is_small(s * t1 - s1 * t, (s * t1).abs() + (s1 * t).abs())
    lines = (s, s1, s2), (t, t1, t2)
    return ratio or all(_is_small(x.sum() - 2 * y.sum() + z.sum(), x.abs().sum()) for x, y, z in lines)


def _is_small(x: Tensor, beside: Tensor) -> bool:
    return bool((x.nan_to_num().abs() <= _ROUNDING * (beside + _ROUNDING * beside.nan_to_num().max())).all())


def _held(hyper: Layout, start: Tensor, run: Callable[[Tensor], dict[str, Site]]) -> Tensor:
    """Which entries have no useful mode: those on which the priors of more entries depend, as a scale of many latents.

    The joint density of a scale and its latents is without bound where all of them go to 0.
    """
    held = []
    before = {name: log_prob(site) for name, site in run(start).items() if name in hyper.shapes}
    for name, own in hyper.positions(start.device).items():
        moved = run(start.index_add(0, own, torch.full_like(start[own], _MOVE)))
        below = [hyper.shapes[x].numel() for x in before if x != name and not _same(log_prob(moved[x]), before[x])]
        held.append(torch.full_like(own, sum(below) > len(own), dtype=torch.bool))
    return torch.cat(held) if held else start.bool()


@torch.no_grad()
def _conjugate_rate(
    name: str, sites: Mapping[str, Site], run_at: RunAt, gate_names: Sequence[str]
) -> ConjugateRate | None:
    """A Beta variable given which gates have it as their rate, if it has a Beta density given all else; or None.

    Its log joint is then a log r + b log(1 - r) plus a constant, with a and b that do not depend on other latents but
    for these gates. An observed child may count in them, and a scale.
    """
    if not isinstance(innermost(sites[name]["fn"]), Beta) or sites[name]["value"].numel() != 1:
        return None
    latent = latent_values(sites)
    gates = {key: x for key, x in latent.items() if key in gate_names}
    with forked_generators():
        torch.manual_seed(0)
        drawn = {key: sites[key]["fn"].sample() for key in latent if key not in gates}
        some = {key: torch.bernoulli(torch.full_like(x, 0.5)) for key, x in gates.items()}
    weights, found = dict[str, Tensor](), []
    for values in (latent, {**latent, **{key: 1 - x for key, x in gates.items()}}, {**drawn, **some}):
        runs = [run_at({**values, name: torch.full_like(latent[name], float(rate))}) for rate in _RATES]
        odds = {gate: [_odds(run[gate]) for run in runs] for gate in gate_names}
        weights = weights or {gate: x for gate, own in odds.items() if (x := _weights(own)) is not None}
        change = torch.stack([_change(runs[0], run) for run in runs])
        for gate, weight in weights.items():
            value = values[gate].reshape(-1).double()
            change = change - weight @ value * _LOGS[:, 0] - weight @ (1 - value) * _LOGS[:, 1]
        shape = torch.linalg.lstsq(_LOGS, change.unsqueeze(1)).solution
        found.append(shape[:2, 0] + 1)
        if not torch.allclose((_LOGS @ shape)[:, 0], change, 1e-4, 1e-3):
            return None
    first, second = torch.stack(found).mean(0)
    if not weights or min(first, second) <= 0 or not torch.allclose(torch.stack(found), found[0], 1e-2, 1e-2):
        return None
    return ConjugateRate(name, tuple(weights), first, second, torch.cat(list(weights.values())), latent[name].shape)


def _weights(odds: Sequence[Tensor | None]) -> Tensor | None:
    """How often gates count in the density of their rate, shape ``(n,)``, by their log odds at ``_RATES``; or None."""
    known = [x.reshape(-1).double() for x in odds if x is not None]
    found = known[0] / _ODDS[0] if known else _ODDS[:0]
    is_rate = known and torch.allclose(torch.stack(known), _ODDS[:, None] * found, atol=1e-4)
    return found if is_rate and bool(found.any()) else None


def _change(first: Mapping[str, Site], run: Mapping[str, Site]) -> Tensor:
    """By how much the log joint densities of two runs differ."""
    return torch.stack([(log_prob(run[x]) - log_prob(first[x])).double().sum() for x in first]).sum()


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is not None and y is not None and torch.equal(x, y)


def _odds(site: Site) -> Tensor | None:
    gate = find_gate(site["fn"])
    return gate.logits.detach() if isinstance(gate, BernoulliGate) else None
