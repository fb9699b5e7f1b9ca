"""A joint posterior of gates, slabs and other latent variables, its draws, and where it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Beta, Normal, TorchDistribution
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.infer.guides.expansion import IndependentSlabs, OpenModel, SlabPosterior, StructuredSlabs, expand
from pyro_l0.infer.guides.mean_field import MEAN_FIELD, GatesPosterior, Layout, middle, transform_to_support
from pyro_l0.infer.record import Record
from pyro_l0.infer.slabs import Conditional, JointSample, alignment_of, check_whole, gate_site
from pyro_l0.infer.target import ConjugateRate, InferenceTarget

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
        self.posteriors: Mapping[str, GatesPosterior] = {}
        self.plates: Mapping[str, tuple[str, ...]] = {}

    @property
    def is_chain(self) -> bool:
        """Whether gates are binary, and depend on gates before them or on other latents."""
        return self.chain is not None and any(True for _ in self.chain.parameters())

    def open_model(self, target: InferenceTarget) -> OpenModel:
        """A model with these sites, and every gate open."""
        return OpenModel(target, target.latent, self.slabs, self.gates, self.hyper)

    def has_gates_of(self, target: InferenceTarget) -> bool:
        """Whether gates switch the slabs in a run of the model that they switched when this was made."""
        return torch.equal(_gates_of_slabs(self.open_model(target), self.hyper_start), self.slab_posterior.gate_of)

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
        """n joint draws, by site in the order in which they are drawn: other latents, gates, rates, slabs."""
        hyper, means, deviations = self.hyper_posterior.draw(n)
        samples = _samples(self.hyper, _normal, hyper, means, deviations)
        shift = hyper - self.hyper_start
        samples |= self._draw_gates(shift, n)
        gates = torch.cat([samples[name].values for name in self.gates.shapes], -1)
        for rate in self.rates:
            parameters = rate.parameters({name: samples[name].values for name in rate.gates})
            values = _beta(*parameters).sample()
            samples[rate.name] = JointSample(values, _beta, parameters, rate.shape, 0)
        given = self.slab_posterior.given(gates, shift)
        noise = torch.randn_like(given.mean)
        slabs = given.draw(noise)
        return samples | _samples(self.slabs, _normal, slabs, *given.conditionals(slabs, noise))

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

    def _draw_gates(self, shift: Tensor, n: int) -> dict[str, JointSample]:
        if self.chain is None:
            gates_of = self._distributions().items()
            return {name: JointSample.of(gate, n, self.gates.event_dims[name]) for name, gate in gates_of}
        base = self._base()
        gates = self.chain.sample(base, shift)
        return _samples(self.gates, _bernoulli, gates, self.chain.log_odds(base, gates, shift))

    def _distributions(self) -> dict[str, GateDistribution]:
        """The gates by site; of a chain, given closed gates before them."""
        return {name: gates.distribution(gates.parameters) for name, gates in self.posteriors.items()}

    def _base(self) -> Tensor:
        """Log odds of the gates of a chain given closed gates before them, shape ``(size,)``."""
        gates = self._distributions()
        return torch.cat([gates[name].logits.reshape(-1) for name in self.gates.shapes])


def _samples(
    layout: Layout, make: Callable[..., TorchDistribution], values: Tensor, *parameters: Tensor
) -> dict[str, JointSample]:
    """Samples of several sites from what they have side by side, shape ``(n, size)`` each."""
    split = [layout.pieces(x.expand_as(values)) for x in (values, *parameters)]
    found = {}
    for name, shape in layout.shapes.items():
        value, *own = (x[name] for x in split)
        found[name] = JointSample(value, make, tuple(own), shape, layout.event_dims[name], layout.transforms.get(name))
    return found


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


def correlated_posterior(
    target: InferenceTarget, structure: Structure, hyper_names: Sequence[str] | None
) -> CorrelatedPosterior:
    """The posterior that a guide learns from.

    ``hyper_names`` are the sites of the other latents; None for all of them, normal ones drawn with the slabs where
    they can be.
    """
    sites, latent = target.sites, target.latent
    gate_names = [name for name in latent if find_gate(sites[name]["fn"]) is not None]
    slab_names = [name for name in latent if name in target.slab]
    others = [name for name in latent if name not in (*gate_names, *slab_names)]
    if hyper_names is None:
        for name in others:
            if target.is_added(name, slab_names, gate_names):
                slab_names.append(name)
        hyper_names = [name for name in others if name not in slab_names]
    for name in (*gate_names, *slab_names, *hyper_names):  # whose posterior would depend on sites that are not drawn
        check_whole(f"site {name!r}", sites[name], f"; leave subsample_size out, or, for a fit alone, {MEAN_FIELD}")
    gates = Layout({name: sites[name] for name in gate_names})
    rates = [rate for name in hyper_names if (rate := target.conjugate_rate(name, gate_names)) is not None]
    learned = [name for name in hyper_names if name not in {rate.name for rate in rates}]
    found = {name: transform_to_support(name, sites[name]["fn"], is_slab=False) for name in learned}
    transforms = {name: transform for name, transform in found.items() if transform is not None}
    hyper = Layout({name: sites[name] for name in learned}, transforms)
    slabs = Layout({name: sites[name] for name in slab_names})
    like = sites[gate_names[0]]["value"]
    medians = {name: middle(sites[name]["fn"], transforms.get(name)) for name in learned}
    start = hyper.together(medians).to(like)
    rates_at = {x.name: sites[x.name]["fn"].mean.detach().expand_as(latent[x.name]) for x in rates}
    model = OpenModel(target, {**latent, **rates_at}, slabs, gates, hyper)
    gate_of = _gates_of_slabs(model, start)
    expansion = expand(model, start, _held(model, start))
    kind = StructuredSlabs if structure.structured else IndependentSlabs
    posterior = kind(expansion, gate_of)
    chain = GateChain(gates.size, hyper.size, structure.coupled, like) if structure.chain else None
    return CorrelatedPosterior(gates, hyper, slabs, rates, chain, HyperPosterior(expansion.hyper), posterior)


def _gates_of_slabs(model: OpenModel, start: Tensor) -> Tensor:
    """Which gates switch each element of the slabs, by what the user says of it, as :meth:`OpenModel.gates_of`."""
    target, positions, found = model.target, model.gates.positions(), []
    for name, shape in model.slabs.shapes.items():
        own = torch.tensor(-1)  # for none
        if name in target.slab and (gate := gate_site(target.slab[name])) in positions:
            alignment = alignment_of(name, target.slab[name], target.sites)
            own = alignment.of(positions[gate].reshape(model.gates.shapes[gate]))
        found.append(own.expand(shape).reshape(-1))
    return model.gates_of(model.slab_prior(start)[1].detach(), start, torch.cat(found).to(start.device))


def local_latents(held: Mapping[str, Tensor], target: InferenceTarget) -> list[str]:
    """Those of many real numbers on which observations depend: their uncertainty does not fade with more data."""
    target = replace(target)  # at values of a run of their own
    sites, many = target.sites, [name for name, value in held.items() if value.numel() > 1]
    real = [name for name in many if transform_to_support(name, sites[name]["fn"], is_slab=False) is None]
    return [name for name in real if target.is_leaf(name)]


def _held(model: OpenModel, start: Tensor) -> Tensor:
    """Which entries have no useful mode: those on which the priors of more entries depend, as a scale of many latents.

    The joint density of a scale and its latents is without bound where all of them go to 0.
    """
    hyper, held, point = model.hyper, [], {**model.values, **model.hyper.apart(start)}
    for name, own in hyper.positions(start.device).items():
        moved = hyper.apart(start.index_add(0, own, torch.full_like(start[own], _MOVE)))
        below = [
            hyper.shapes[x].numel() for x in model.target.dependents(name, point, moved[name]) if x in hyper.shapes
        ]
        held.append(torch.full_like(own, sum(below) > len(own), dtype=torch.bool))
    return torch.cat(held) if held else start.bool()
