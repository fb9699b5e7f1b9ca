"""Guides over gates and slabs: a mean field, or one in which they depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Literal

import pyro
import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions.utils import clamp_probs

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.correlated import (
    CorrelatedPosterior,
    Structure,
    correlated_posterior,
    local_latents,
    structure_of,
)
from pyro_l0.infer.guides.expansion import OpenModel, StructuredSlabs
from pyro_l0.infer.guides.mean_field import (
    GatesPosterior,
    IndependentLatents,
    MeanField,
    SitePosterior,
    Slab,
    first_latents,
    in_full,
    plates_and_shape,
)
from pyro_l0.infer.guides.refine import Collapsed, Method, RefinedPosterior, collapse, refined
from pyro_l0.infer.guides.summaries import JointDraws, Summary
from pyro_l0.infer.record import Site
from pyro_l0.infer.runs import Args, Kwargs, of_rows
from pyro_l0.infer.slabs import GateSite, JointSample, alignment_of, check_used, gate_site, slab_to_gate
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.maths.second_order import LogLikelihood

__all__ = ["AutoSpikeSlab"]

_WIDER = 1.0  # over the square root of the number of latents


class AutoSpikeSlab(AutoGate, JointDraws):
    r"""Gates, slabs and other latents in one guide, made for :func:`fit` or ``L0_ELBO("spike_slab", slab=...)``.

    For inclusion probabilities take ``gates="autoregressive", slabs="structured"`` with up to about 30 gates, whatever
    the likelihood, and :meth:`refine` with more. The default is a mean field, whose probabilities can be wrong by a
    half where features are correlated. Its slabs are independent, entries of a multivariate one included: normal where
    the prior's support is the real line, log-normal on the positive numbers, normals mapped by torch's ``biject_to``
    on an interval.

    Structured slabs, and normal latents that have no gate, are one Gaussian given the gates: the log likelihood of
    :math:`\beta = z \circ w` is taken as :math:`b^T \beta - \tfrac12 \beta^T A \beta`, which starts at the model's
    mode and Hessian with open gates and is then learned. Autoregressive gates have
    :math:`\mathrm{logit}\, q(z_j = 1 | z_{<j}) = a_j + \sum_{k<j} B_{jk} z_k`. Both depend on further latents, a
    Gaussian of full covariance; a rate that is Beta given the gates is drawn after them. Scales and masks are a part of
    the model's log joint, whose posterior this is: a prior under a scale is one to a power.

    Args:
        model: a Pyro model.
        slab: the gate site of each slab site, as given to the ELBO: ``{"w": "z"}``, or ``{"w": ("z", index)}`` for
            weights in groups, ``z[..., index] * w``.
        init_scale: standard deviation of a mean field's slabs at the start, or of the normals mapped to their support.
        init_loc: median of each of its slabs at the start, by site; by default the prior's mean (the median of some
            draws where it has none) plus normal noise of a hundredth of its standard deviation.
        gates: ``"mean_field"``, or ``"autoregressive"`` for binary gates that depend on those before them.
        slabs: ``"independent"``, or ``"structured"``.
        hyper: the model's other latents (noise, scale of the slabs, rate, random effects). By default all of them are
            in this guide (none in an ``AutoGuideList``): in a mean field as independent normals, mapped to the prior's
            support; otherwise normal latents on which no other prior depends are drawn with the slabs, and the rest
            before the gates. Names restrict the guide to these, all drawn before the gates.
        **options: those of :class:`AutoGate`. ``family`` is ``BernoulliGate`` by default if all priors are, or if
            gates or slabs depend on anything; in the latter case ``init_active_prob`` is 0.5 and ``init_jitter`` 0.1
            by default.

    Shape:
        Sites have the model's shapes. For n draws of structured slabs, which have p elements in all, n matrices of
        shape ``(p, p)`` are factorised.

    Raises:
        TypeError: an option has the wrong type, or an entry of ``slab`` is neither a name nor a name and an index.
        ValueError: ``gates`` or ``slabs`` is unknown, or ``family`` is not binary but gates are autoregressive; when
            called, as AutoGate, and if ``slab`` or ``hyper`` names no such site of the model, a slab's support is
            neither the real line nor an interval, or ``init_loc`` has another shape or lies outside of it; in a guide
            that is not a mean field, also if a slab's prior is not normal or masked, a site is subsampled, or gates do
            anything else in the model than to switch slabs: ``z * w``, or a product of gates as the gate of a group and
            that of a feature.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import fit
        >>> x = torch.linspace(-1, 1, 20).expand(2, 20)  # one feature twice: either explains y
        >>> def regression():
        ...     with pyro.plate("features", 2):
        ...         z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.1)))
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal((z * w) @ x, 0.3).to_event(1), obs=x[0])
        >>> slab = {"w": "z"}
        >>> guide = AutoSpikeSlab(regression, slab, gates="autoregressive", slabs="structured")
        >>> result = fit(regression, guide, steps=400, seed=0)
        >>> bool((guide.active_probs()["z"] - 0.52).abs().max() < 0.05)
        True

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 20. Slabs given gates: ``docs/lab/derivations.md`` of
        the repository.
    """

    _as_in_model = False  # it is the posterior of the model's log joint, which has them

    def __init__(
        self,
        model: Callable[..., object],
        slab: Mapping[str, GateSite],
        init_scale: float = 0.1,
        init_loc: Mapping[str, Tensor] | None = None,
        *,
        gates: Literal["mean_field", "autoregressive"] = "mean_field",
        slabs: Literal["independent", "structured"] = "independent",
        hyper: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        expect(Real, "a number", init_scale=init_scale)
        expect(Mapping | None, "a dict of tensors by slab site", init_loc=init_loc)
        expect(list | tuple | None, "a list of sites", hyper=hyper)
        self._family_of_prior = "family" not in options
        gate_of_slab = slab_to_gate(slab)
        self._structure, options = structure_of(gates, slabs, hyper, options)
        super().__init__(model, **options)
        self.slab = gate_of_slab
        self._hyper = None if hyper is None else tuple(hyper)
        self._others: list[str] = []  # sites of this guide that are neither gates nor slabs
        self._pending: dict[str, Tensor] = {}
        self._checks: tuple[dict[str, Tensor], list[Tensor]] = {}, []
        self._fixed: dict[str, Tensor] = {}  # values of gates that are observed
        self.init_scale = init_scale
        self.init_loc = dict(init_loc or {})

    def _takes(self, name: str) -> bool:
        return name in self.slab or (super()._takes(name) if self._hyper is None else name in self._hyper)

    def _prototype_hide_fn(self, msg: Site) -> bool:
        is_gate = msg["type"] == "sample" and find_gate(msg["fn"]) is not None and msg["is_observed"]
        return not is_gate and super()._prototype_hide_fn(msg)

    def _run_prototype(self, args: Args, kwargs: Kwargs) -> tuple[Trace, bool]:
        found = super()._run_prototype(args, kwargs)
        gates = set(map(gate_site, self.slab.values()))
        nodes: dict[str, Site] = found[0].nodes
        self._fixed = {x: site["value"] for x, site in nodes.items() if x in gates and site["is_observed"]}
        return found

    def _check_sites(self, sites: Mapping[str, Site]) -> None:
        super()._check_sites(sites)
        found = [find_gate(site["fn"]) for site in sites.values()]
        if self._family_of_prior and all(isinstance(gate, BernoulliGate) for gate in found if gate is not None):
            self.family = BernoulliGate  # any other posterior would have an infinite KL
        for slab, gate in self.slab.items():
            for name, is_gate in ((slab, False), (gate_site(gate), True)):
                if name in self._fixed:
                    continue
                if name not in sites or (find_gate(sites[name]["fn"]) is not None) != is_gate:
                    raise ValueError(f"Expected slab to name latent sites of the model, but {name!r} is none.")
        self._others = [name for name in sites if name not in self.slab and find_gate(sites[name]["fn"]) is None]
        for name in self._hyper or ():
            if name not in self._others:
                raise ValueError(f"Expected hyper to name latent sites other than gates and slabs, but got {name!r}.")

    def _first(self, name: str, site: Site, inherited: Mapping[str, object]) -> SitePosterior | None:
        if find_gate(site["fn"]) is not None:
            return super()._first(name, site, inherited)
        if self._structure is not None:
            return None
        return first_latents(name, site, name in self.slab, self.init_loc.get(name), self.init_scale)

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        prototype, self.prototype_trace = self.prototype_trace, None  # until all is well
        assert prototype is not None
        nodes: dict[str, Site] = prototype.nodes
        whole = {name: in_full(nodes[name]) for pair in self.slab.items() for name in (pair[0], gate_site(pair[1]))}
        self._alignments = {name: alignment_of(name, gate, whole) for name, gate in self.slab.items()}
        check_used(self.slab, {name: nodes[name]["value"].shape for name in map(gate_site, self.slab.values())})
        if self._structure is not None:
            target = InferenceTarget(self.model, args, kwargs, self.slab)
            with poutine.block():  # a loss or a trace whose first call this is has no use for these runs
                joint = correlated_posterior(target, self._structure, self._named())
            if self._pending:
                joint.load_state_dict(self._pending)
                self._pending = {}
            joint.posteriors = self._of_kind(GatesPosterior)
            joint.plates = {name: plates_and_shape(site)[0] for name, site in target.sites.items()}
            self.joint = joint
        self.prototype_trace = prototype

    def _named(self) -> tuple[str, ...] | None:
        """The other latents, all drawn before the gates; None to draw all latents of the model as suits them."""
        takes_all = self._hyper is None and super()._takes("")
        return None if takes_all else tuple(self._others)

    @property
    def _joint(self) -> CorrelatedPosterior | None:
        found = self._modules.get("joint")
        assert found is None or isinstance(found, CorrelatedPosterior)
        return found

    def _drawing(self) -> MeanField | CorrelatedPosterior:
        return self._joint or super()._drawing()

    def collapsed(self, *args: object, chains: int = 1, **kwargs: object) -> Collapsed:
        """The model with its slabs integrated out, for samplers of gates.

        Normal latents without a gate are integrated out with the slabs if this guide draws them together or is a mean
        field. The others are at draws of this guide, one for each chain; with one chain at their mean (in a mean field
        their mode). The log likelihood is expanded to second order: as in this guide's structured slabs, or about its
        mode.

        Args:
            *args: arguments of the model, those of the guide's first call: structured slabs have an expansion of these
                data. :meth:`refine` takes others.
            chains: number of chains.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: the guide has not been called, its latent sites are not the model's, its gates switch
                other slabs than in the first call, a slab's prior is not normal, or one that several gates switch has
                a mean other than 0.
        """
        self._check_model()
        target = InferenceTarget(self.model, args, kwargs, self.slab)
        *_, (found, _) = self.expansions(target, self.draws(chains) if chains > 1 else None)
        return found

    def expansions(
        self, target: InferenceTarget, drawn: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[Collapsed, LogLikelihood]]:
        """A model as :meth:`collapsed` has it: with the other latents at their mean, the first of some draws, and all.

        Each comes with the log likelihood of its first chain: coefficients of shape ``(S, p)`` to ``(S,)``.
        """
        probs = self.active_probs(1)
        joint = self._joint
        if joint is None or not isinstance(joint.slab_posterior, StructuredSlabs):
            joint = correlated_posterior(target, Structure(False, True, True), self._named())
        elif not joint.has_gates_of(target):
            raise ValueError(
                "Expected a model whose gates switch the same slabs as when this guide was first called, but with "
                "these arguments they switch others; make a new guide for them."
            )
        known = {*self.slab, *probs, *self._others}
        unknown = [name for name in target.latent if name not in known]
        if unknown:
            raise ValueError(
                f"Expected a guide of all latent sites of the model, but {', '.join(map(repr, unknown))} are none of "
                "its sites; name them in hyper."
            )
        rows = [joint.hyper_start.unsqueeze(0)]  # not where a mean field starts: it may be untrained
        if joint.hyper.size and (drawn is not None or self._structure is not None):
            hyper = joint.hyper.together(self.draws(1000) if drawn is None else drawn)
            rows = [hyper.mean(0, keepdim=True)] + ([hyper[:1], hyper] if drawn is not None else [])
        for i, row in enumerate(rows):
            collapsed = collapse(joint, target, row)
            of_one = partial(_log_likelihood, joint.open_model(target), collapsed, row[0])
            log_likelihood_of = partial(of_rows, of_one)
            if not i:
                target.check(
                    partial(collapsed.log_joint, log_likelihood_of),
                    collapsed.points({**target.latent, **collapsed.others}),
                    "AutoSpikeSlab with its slabs integrated out",
                    "Make a new guide for other arguments, or use sample_posterior.",
                )
            yield collapsed, log_likelihood_of

    def refine(
        self,
        *args: object,
        method: Method = "tempered",
        chains: int = 16,
        flips: int = 1200,
        seed: int | None = None,
        **kwargs: object,
    ) -> RefinedPosterior:
        """Sample the gates of a large design with the slabs integrated out. The guide need not be trained.

        Normal latents are sampled with the slabs where :meth:`collapsed` integrates them out, the others are held
        fixed. A log likelihood that is not quadratic is expanded again at the coefficients' mean, and the gates are
        re-weighted by their Laplace evidence; draws of the slabs follow the likelihood itself.

        Args:
            *args: arguments of the model.
            method: ``"tempered"`` for weighted tempered Gibbs, which gives joint draws; ``"mean_field"`` for
                independent gates by natural gradients, which is faster but misses that features can replace others.
            chains: number of the sampler's chains.
            flips: flips of gates in each chain.
            seed: seed of the sampler's random numbers.
            **kwargs: keyword arguments of the model.

        Returns:
            A posterior with ``active_probs``, ``draws``, ``coefficients``, ``quantiles`` and ``summary``; its class
            has an example.

        Raises:
            ValueError: as :meth:`collapsed`, or the method is unknown.

        References:
            Zanella and Roberts (2019), arXiv:1805.00541.
        """
        expect_count(1, chains=chains, flips=flips)
        if self.prototype_trace is None:
            self(*args, **kwargs)
        self._check_model()
        target = InferenceTarget(self.model, args, kwargs, self.slab)
        collapsed, log_likelihood = next(self.expansions(target))
        if local := local_latents(collapsed.others, target):
            raise ValueError(
                f"Expected normal latents that are added to the products of gates and slabs, as refine holds others "
                f"fixed, but got site {local[0]!r} of many entries. Use fit with gates='autoregressive' and "
                "slabs='structured'."
            )
        device = collapsed.quadratic.scale.device
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        found = refined(collapsed, log_likelihood, method, generator, chains, flips)
        return RefinedPosterior(*found, self.slab, self._alignments, self._fixed)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:  # type: ignore[override]
        if self._structure is not None and self.prototype_trace is None:
            start = f"{prefix}joint."
            for name in [name for name in state_dict if name.startswith(start)]:
                self._pending[name.removeprefix(start)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def is_joint(self) -> bool:
        """Whether gates depend on those before them, and slabs on one another."""
        return self._structure is not None and self._structure.coupled and self._structure.structured

    @contextmanager
    def widened(self) -> Iterator[int]:
        """Draw the d latents that are neither gates nor slabs, d being given, from normals somewhat wider.

        Of importance weights that use the draws, a third or more count where the guide is right.
        """
        latents, couplings = self._of_kind(IndependentLatents), []
        scales = [latents[name].parameters["log_scale"] for name in latents.keys() - self.slab.keys()]
        if self._joint is not None:
            scales, couplings = [self._joint.hyper_posterior.log_scale], [self._joint.hyper_posterior.coupling]
        size = sum(x.numel() for x in scales)
        factor, before = 1 + _WIDER / math.sqrt(max(size, 1)), [x.detach().clone() for x in (*scales, *couplings)]
        with torch.no_grad():
            for x in scales:
                x.add_(math.log(factor))
            for x in couplings:
                x.mul_(factor)
            try:
                yield size
            finally:
                for x, old in zip((*scales, *couplings), before, strict=True):
                    x.copy_(old)

    def mark(self, checks: Mapping[str, Tensor]) -> None:
        """Let summaries say what a check found, 0 to 2 as in a ``SiteCheck``, until a parameter moves."""
        self._checks = dict(checks), [x.detach().clone() for x in self.parameters()]

    def summary(self, draws: int | None = None) -> Summary:
        """As of other posteriors, and in a column ``check`` what :func:`~pyro_l0.infer.check_fit` found."""
        found = super().summary(draws)
        marked, at = self._checks
        marked = marked if all(map(torch.equal, at, self.parameters())) else {}
        checks = {**{name: torch.zeros_like(x, dtype=torch.long) for name, x in self._fixed.items()}, **marked}
        for name, site in found.items():
            check = checks.get(name, torch.ones_like(site.mean, dtype=torch.long))
            gate = self._active(name, site.mean[None], checks) if name in checks else None
            found[name] = site._replace(check=check if gate is None else torch.maximum(check, gate))
        return found

    def draw_together(self, number: int) -> dict[str, JointSample] | None:
        """Joint samples by site, for a loss that takes many particles at once; None in subsampled plates."""
        self._share_parameters()
        if self._joint is None and any(frame.full_size != frame.size for frame in self._prototype_frames.values()):
            return None
        return self._drawing().draw_together(number)

    def parameter_groups(self, learning_rate: float = 0.1) -> list[dict[str, object]]:
        """The guide's parameters in groups for an optimiser, each kind with a suitable learning rate.

        Args:
            learning_rate: the gates' learning rate; slabs get 0.2 of it, other latents 0.3 of it. In a mean field all
                get the same.

        Raises:
            ValueError: the guide has not been called.
        """
        posteriors = [*self._of_kind(GatesPosterior).values(), *self._of_kind(IndependentLatents).values()]
        sites = [x for posterior in posteriors for x in posterior.parameters.values()]
        if self._joint is None:
            return [{"params": sites, "lr": learning_rate}]
        return self._joint.parameter_groups(sites, learning_rate)

    def posterior(self) -> dict[str, GateDistribution]:
        """The posterior gates by site; as in AutoGate if gates do not depend on each other.

        If they do, these are binary gates with the marginal probabilities of :meth:`active_probs`, without a gradient.
        """
        if self._joint is not None and self._joint.is_chain:
            return {name: BernoulliGate(probs=clamp_probs(probs)) for name, probs in self.active_probs().items()}
        return super().posterior()

    @torch.no_grad()
    def active_probs(self, draws: int = 40_000) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape.

        Args:
            draws: number of draws over which probabilities given other gates are averaged, if gates depend on each
                other; the standard error is below 0.5 / sqrt(draws).
        """
        return super().active_probs() if self._joint is None else self._joint.active_probs(draws)

    @torch.no_grad()
    def draws(self, n: int) -> dict[str, Tensor]:
        """n joint draws of gates, slabs and the other latents, by site, shape ``(n, *shape of the site)``."""
        self._of_kind(GatesPosterior)  # refuses a guide that was not called
        return {name: sample.supported() for name, sample in self._drawing().draw_together(n).items()}

    def _is_gate(self, name: str) -> bool:
        return name in self._of_kind(GatesPosterior)

    def slabs(self) -> dict[str, Slab]:
        """The posterior slabs by site, differentiable and changing with training.

        Raises:
            ValueError: slabs depend on their gates, or the guide has not been called.
        """
        if self._structure is not None:
            raise ValueError("Expected slabs that depend on nothing, but they depend on their gates; use draws.")
        found = self._of_kind(IndependentLatents)
        return {name: slab.distribution(slab.parameters) for name, slab in found.items() if name in self.slab}

    @torch.no_grad()
    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Posterior median of every site of this guide; a copy. Takes the model's arguments."""
        medians = super().median(*args, **kwargs)
        if self._structure is not None:
            return {**{name: x.median(0).values for name, x in self.draws(1000).items()}, **medians}
        return medians


def _log_likelihood(model: OpenModel, collapsed: Collapsed, hyper: Tensor, slabs: Tensor) -> Tensor:
    """The log likelihood at coefficients behind open gates, with the tilt of their priors."""
    with pyro.validation_enabled(False):
        return model.log_likelihood(slabs + collapsed.offset, hyper) + slabs @ collapsed.tilt
