"""A mean-field guide over gates and the other latents beside them, and what of their priors depends on draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, Self, TypeVar

import torch
from pyro import poutine
from pyro.infer.autoguide.guides import AutoGuide, prototype_hide_fn
from pyro.params.param_store import param_with_module_name
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_l0.distributions.gate import GateDistribution, check_rate, find_gate
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.expect import expect
from pyro_l0.infer.guides.correlated import CorrelatedPosterior
from pyro_l0.infer.guides.mean_field import (
    GatesPosterior,
    IndependentLatents,
    MeanField,
    SitePosterior,
    first_gates,
    first_latents,
    plates_and_shape,
    site_key,
    take_over,
)
from pyro_l0.infer.guides.parameters import Named, ReplacedByStore, share_with_pyro, warn_if_unmoved
from pyro_l0.infer.record import Site, sole_record
from pyro_l0.infer.runs import Args, Kwargs, forked_generators
from pyro_l0.maths.special import Number

__all__ = ["AutoGate"]


# A fair coin that sets a temperature stays unnoticed once in a thousand set-ups.
_REDRAWS = 10

_Options = dict[tuple[str, str], Number]  # by site and name


class DrawsElsewhere(Messenger):
    """Notices whether a model draws random numbers before a gate, other than for gates.

    Pyro's messages do not tell: a guide for a part of a model does not see the other part's sites.
    """

    found: bool = False

    def __enter__(self) -> Self:
        self._state = _generators()
        return super().__enter__()

    def _process_message(self, msg: Site) -> None:
        if not self.found and _is_gate(msg):
            self.found = not all(map(torch.equal, self._state, _generators()))

    def _postprocess_message(self, msg: Site) -> None:
        if not self.found and _is_gate(msg):
            self._state = _generators()


def _is_gate(msg: Site) -> bool:
    return msg["type"] == "sample" and find_gate(msg["fn"]) is not None


def inherited_options(
    family: type[GateDistribution], prototype: Trace, draws: bool, run: Callable[[], Trace]
) -> dict[str, dict[str, Number]]:
    """The options by site that posterior gates take over from their priors: those that no latent variable changes.

    ``draws`` says whether the model drew other things than gates before a gate, ``run`` runs it again.
    """
    options = _prior_options(family, prototype)
    usual = family.from_active_prob(0.5).fixed_options
    special = {key: value for key, value in options.items() if not _same(value, usual[key[1]])}
    # What depends on draws of several gates is a tensor, behind them.
    behind = [name for name, site in prototype.iter_stochastic_nodes() if find_gate(site["fn"]) is not None][1:]
    drawn: set[tuple[str, str]] = set()
    if draws or any(isinstance(value, Tensor) and name in behind for (name, _), value in special.items()):
        drawn = _drawn_options(special, lambda: _prior_options(family, run()))
    inherited: dict[str, dict[str, Number]] = {}
    for (name, key), value in options.items():
        if (name, key) not in drawn:
            inherited.setdefault(name, {})[key] = value
    return inherited


def _prior_options(family: type[GateDistribution], trace: Trace) -> _Options:
    """The parameters of priors of a family that a guide does not learn."""
    priors = {name: find_gate(site["fn"]) for name, site in trace.iter_stochastic_nodes()}
    return {
        (name, key): value
        for name, prior in priors.items()
        if type(prior) is family
        for key, value in prior.fixed_options.items()
    }


def _drawn_options(first: _Options, draw: Callable[[], _Options]) -> set[tuple[str, str]]:
    """The options that differ in further runs of a model; random numbers elsewhere stay as they were."""
    left, drawn = set(first), set()
    with forked_generators():
        for _ in range(_REDRAWS):
            if not left:
                break
            again = draw()
            drawn |= {key for key in left if not _same(first[key], again.get(key))}
            # A tensor that exists before the run depends on no draw.
            lasting = {key for key in left if isinstance(first[key], Tensor) and first[key] is again.get(key)}
            left -= drawn | lasting
    return drawn


def check_supports(sites: Mapping[str, Site], run: Callable[[], Trace]) -> None:
    """Refuse latents whose support depends on what the model draws, as ``run`` shows: a guide's would not follow."""
    bounds = {name: found for name, site in sites.items() if (found := _bounds(site))}
    if bounds:
        with forked_generators():
            again = run()
        for name, found in bounds.items():
            if name not in again or not all(map(torch.equal, found, _bounds(again.nodes[name]))):
                raise ValueError(
                    f"Expected latent site {name!r} to have the same support in every run, but that of its prior "
                    f"{sites[name]['fn']} depends on what the model draws. Sample a number of a fixed support, and "
                    "transform it in the model."
                )


def _bounds(site: Site) -> list[Tensor]:
    """The tensors that bound a latent's support; none of a gate's."""
    if find_gate(site["fn"]) is not None:
        return []
    support = getattr(site["fn"], "support", None)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return [x for x in vars(support).values() if isinstance(x, Tensor)] if support is not None else []


def _same(x: Number | None, y: Number | None) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.equal(x, y)
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y


def _generators() -> list[Tensor]:
    """The states of torch's generators, of the devices in use."""
    states = [torch.get_rng_state()]
    return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states


_Posterior = TypeVar("_Posterior", bound=SitePosterior)


class AutoGate(AutoGuide):
    """Mean-field guide over every gate site of a model, and over its other latents.

    Plates, scales and masks are the model's. The other latents get normals, mapped to the support of the prior. In an
    :class:`~pyro.infer.autoguide.AutoGuideList` they are left to the guides beside it. The first call makes the
    parameters.

    Args:
        model: a Pyro model.
        family: the posterior's family. If it is the prior's, it takes over the prior's fixed parameters
            (temperature and stretch of a hard concrete), and the KL has a closed form.
        init_active_prob: P(z != 0) at the start, for all sites or by site (0.9 for sites that are not named).
        init_jitter: standard deviation of the normal noise on the location at the start (0.01 in the L0 paper).
        family_options: keywords of ``family.from_active_prob`` that replace the defaults.
        create_plates: as in Pyro's guides.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: a rate is outside (0, 1); when called, a rate names a site that is not a gate, the model has no
            gate, or another latent is discrete or has a support that depends on other sites.
        NotImplementedError: when called, a latent is in a sequential plate.

    Example:
        >>> import pyro
        >>> from pyro_l0 import HardConcrete
        >>> def model():
        ...     with pyro.plate("units", 3):
        ...         pyro.sample("z", HardConcrete.from_active_prob(0.1))
        >>> guide = AutoGate(model, init_active_prob=0.5, init_jitter=0.0)
        >>> guide()["z"].shape
        torch.Size([3])
        >>> guide.posterior()["z"].active_prob.detach()
        tensor([0.5000, 0.5000, 0.5000])
    """

    _as_in_model = True  # whether a loss takes the sites under the model's scales and masks

    def __init__(
        self,
        model: Callable[..., object],
        family: type[GateDistribution] = HardConcrete,
        init_active_prob: float | Mapping[str, float] = 0.9,
        init_jitter: float = 0.01,
        *,
        family_options: Mapping[str, object] | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        expect(type, "a gate's class", family=family)
        for rate in init_active_prob.values() if isinstance(init_active_prob, Mapping) else [init_active_prob]:
            check_rate("init_active_prob", rate, family.__name__)
        expect(Real, "a number", init_jitter=init_jitter)
        if not 0 <= init_jitter < math.inf:
            raise ValueError(f"Expected init_jitter of at least 0, but got {init_jitter!r}.")
        expect(Mapping | None, "a dict of arguments of the family", family_options=family_options)
        self.family = family
        self.init_active_prob = init_active_prob
        self.init_jitter = init_jitter
        self.family_options = dict(family_options or {})
        # Plain modules: their attribute access costs far less per step than a PyroModule's.
        self.sites = nn.ModuleDict()
        self._posteriors: dict[str, SitePosterior] = {}
        self._mean_field = MeanField(self._posteriors, self._as_in_model)
        self._replaced = ReplacedByStore()
        self._is_scaled = False

    def __getstate__(self) -> dict[str, object]:
        # Pyro drops the model from the original when a guide is copied or pickled; drop it from the copy alone.
        state = self.__dict__.copy()
        state.update(_model=(None,), master=None, _replaced=ReplacedByStore())
        if self.prototype_trace is not None:  # the posteriors have what is needed of it
            state["prototype_trace"] = Trace()
        for module in self.children():
            for parameter in module.parameters():  # a weak reference, which SVI has asked for
                parameter.__dict__.pop("unconstrained", None)
        return state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The guide's parameters, which its first call makes.

        Raises:
            RuntimeError: the guide has not been called yet.
        """
        if not self._has_parameters:
            raise RuntimeError(
                f"Expected a {type(self).__name__} that has its parameters, but it makes them at its first call. Call "
                "guide(*args) once with the model's arguments, and then make the optimiser."
            )
        return super().named_parameters(*args, **kwargs)

    @property
    def _has_parameters(self) -> bool:
        return self.prototype_trace is not None or any(True for _ in self.sites.parameters())

    def _check_module_local_param_usage(self) -> None:
        if self._has_parameters:  # Pyro asks for them when the guide becomes a part of a list, too
            super()._check_module_local_param_usage()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: object) -> None:
        """Load a state before the first call, too, which finds the parameters here and keeps them."""
        bad = [name for name, x in state_dict.items() if name.startswith(prefix) and bool(x.isnan().any())]
        if bad:
            raise ValueError(f"Expected a state of numbers, but {bad[0]!r} has NaN.")
        if self.prototype_trace is None:
            sites = self.sites
            for name, value in state_dict.items():
                key, _, parameter = name.removeprefix(f"{prefix}sites.").rpartition(".")
                if name.startswith(f"{prefix}sites.") and key and "." not in key:
                    held = dict(sites[key].named_parameters()) if key in sites else {}
                    new = held.get(parameter, nn.Parameter(torch.empty_like(value)))
                    sites[key] = nn.ParameterDict({**held, parameter: new})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _prototype_hide_fn(self, msg: Site) -> bool:
        return bool(prototype_hide_fn(msg)) or not (find_gate(msg["fn"]) is not None or self._takes(msg["name"]))

    def _takes(self, name: str) -> bool:
        """Whether a latent that is no gate belongs to this guide: in a list of guides it belongs to another."""
        return self.master is None

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        self._check_model()
        prototype, draws_elsewhere = self._run_prototype(args, kwargs)
        sites: dict[str, Site] = dict(prototype.iter_stochastic_nodes())
        self._check_sites(sites)

        def run_again() -> Trace:
            program = poutine.block(self.model, self._prototype_hide_fn)
            found: Trace = poutine.block(poutine.trace(program).get_trace)(*args, **kwargs)
            return found

        check_supports(sites, run_again)
        inherited = inherited_options(self.family, prototype, draws_elsewhere, run_again)
        found = {name: self._first(name, site, inherited.get(name, {})) for name, site in sites.items()}
        first = {name: posterior for name, posterior in found.items() if posterior is not None}
        modules = self._modules["sites"]  # not self.sites, which under Pyro is a pyro.module statement
        assert isinstance(modules, nn.ModuleDict)
        self._posteriors = take_over(modules, first)
        self._mean_field = MeanField(self._posteriors, self._as_in_model)
        self.prototype_trace = prototype
        # The guide's own sites do not need the plates of the data.
        used = {plate for site in sites.values() for plate in plates_and_shape(site)[0]}
        self._prototype_frames = {name: frame for name, frame in self._prototype_frames.items() if name in used}
        scales = [site["scale"] for site in sites.values()]
        masked = any(site["mask"] is not None for site in sites.values())
        self._is_scaled = masked or any(isinstance(x, Tensor) or x != 1 for x in scales)
        prototype.detach_()
        what = f"{type(self).__name__} (gate sites {', '.join(map(repr, self._of_kind(GatesPosterior)))})"
        warn_if_unmoved(what, modules.parameters())
        with self._pyro_context:
            self._share_parameters()

    def _run_prototype(self, args: Args, kwargs: Kwargs) -> tuple[Trace, bool]:
        """A run of the model as Pyro's guides make it, and whether it draws other things than gates before a gate."""
        model, elsewhere = self._model, DrawsElsewhere()
        self._model = (self._replaced(elsewhere(self.model)),)
        try:
            super()._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._model = model
            # None until all is well: the next call raises the same error, and finds no half of a guide.
            prototype = self.prototype_trace
            self.prototype_trace = None
        assert prototype is not None
        return prototype, elsewhere.found

    def _check_model(self) -> None:
        """Refuse a guide without its model, which copies and files leave out."""
        if self.model is None:
            raise ValueError(
                f"Expected an {type(self).__name__} with its model, but this one was copied or loaded. Call a guide "
                "once with the model's arguments before copying it, or load its state_dict into a new one."
            )

    def _check_sites(self, sites: Mapping[str, Site]) -> None:
        """Refuse a model without gates, or without those that are named."""
        gates = [name for name, site in sites.items() if find_gate(site["fn"]) is not None]
        if not gates:
            raise ValueError("AutoGate found no gate site in the model.")
        if isinstance(self.init_active_prob, Mapping):
            unknown = [name for name in self.init_active_prob if name not in gates]
            if unknown:
                raise ValueError(
                    f"Expected init_active_prob by gate site, one of {sorted(gates)}, "
                    f"but got {', '.join(map(repr, unknown))}."
                )

    def _first(self, name: str, site: Site, inherited: Mapping[str, object]) -> SitePosterior | None:
        """The posterior that a site starts from; None for one without parameters of its own."""
        if find_gate(site["fn"]) is None:
            return first_latents(name, site, is_slab=False)
        rate = self.init_active_prob
        rate = rate.get(name, 0.9) if isinstance(rate, Mapping) else rate
        return first_gates(site, self.family, rate, {**inherited, **self.family_options}, self.init_jitter)

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample every site of this guide, given the model's arguments; the draws by site."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        elif self._replaced.found and torch.is_grad_enabled():
            self._replaced.warn_once()
        self._share_parameters()
        record = sole_record()
        if record is not None and not self._prototype_frames and not self._is_scaled:
            return self._drawing().draw_for(record)
        return self._drawing().draw(self._create_plates(*args, **kwargs))  # type: ignore[no-untyped-call]

    def _drawing(self) -> MeanField | CorrelatedPosterior:
        return self._mean_field

    def _share_parameters(self) -> None:
        """Let Pyro know the parameters, under the names that ``pyro.module`` would give them."""
        found: Named = []
        for part in ("sites", "joint"):
            module, prefix = self._modules.get(part), self._pyro_get_fullname(part)
            if module is not None:
                found += [(param_with_module_name(prefix, name), x) for name, x in module.named_parameters()]
        share_with_pyro(found)

    def _of_kind(self, kind: type[_Posterior]) -> dict[str, _Posterior]:
        if not self._posteriors and self.prototype_trace is None:
            raise ValueError("The guide has not seen the model yet; call it once with the model's arguments.")
        return {name: posterior for name, posterior in self._posteriors.items() if isinstance(posterior, kind)}

    def posterior(self) -> dict[str, GateDistribution]:
        """The posterior gates by site, in the full size of subsampled plates.

        Their parameters are the guide's own, so the gates are differentiable and change with training.

        Raises:
            ValueError: the guide has not been called.
        """
        return {name: gates.distribution(gates.parameters) for name, gates in self._of_kind(GatesPosterior).items()}

    def locations(self) -> list[nn.Parameter]:
        """The parameter that each site's locations are computed from, in the order of :meth:`posterior`."""
        key = next(iter(self.family.learned))
        return [gates.parameters[key] for gates in self._of_kind(GatesPosterior).values()]

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Keep some units of some gate sites, for instance after the others were removed from the network.

        Args:
            units: by site, the indices of the units that stay, shape ``(n,)``; a site that keeps none is removed.

        Returns:
            For each parameter replaced, the new one (None if its site was removed) and the indices that it holds.

        Raises:
            TypeError: ``units`` is not a dict.
            ValueError: a name is not a gate site of one dimension outside of plates, or gates depend on other sites.
        """
        expect(Mapping, "a dict of tensors by gate site", units=units)
        is_correlated = self._drawing() is not self._mean_field
        replaced: dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]] = {}
        for name, index in units.items():
            gates = self._posteriors.get(name)
            flat = gates is not None and all(x.dim() == 1 for x in gates.parameters.values())
            if not isinstance(gates, GatesPosterior) or gates.plates or not flat or is_correlated:
                raise ValueError(
                    f"Expected units of gate sites of one dimension, outside of plates and of correlated guides, but "
                    f"got {name!r}."
                )
            self._posteriors[name] = gates.cut(index)
            for key, old in gates.parameters.items():
                new = nn.Parameter(old.detach()[index.to(old.device)].clone()) if len(index) else None
                replaced[old] = new, index
                if new is not None:
                    gates.parameters[key] = new
            if not len(index):
                del self._posteriors[name], self.sites[site_key(name)]
        self._mean_field = MeanField(self._posteriors, self._as_in_model)
        return replaced

    @torch.no_grad()
    def close(self, name: str, indices: Tensor) -> None:
        """Close some gates of a site for good: their test gates are 0, and P(z != 0) is 1e-6 or its minimum.

        Args:
            name: a gate site.
            indices: indices of the gates in the flattened site, shape ``(n,)``.

        Raises:
            ValueError: the guide has not been called.
        """
        self._of_kind(GatesPosterior)[name].close(indices)

    @torch.no_grad()
    def test_gates(self) -> dict[str, Tensor]:
        """The deterministic gates that prune, by site and in its shape."""
        return {name: gate.test_gate for name, gate in self.posterior().items()}

    @torch.no_grad()
    def active_probs(self) -> dict[str, Tensor]:
        """P(z != 0) of every gate, by site and in its shape."""
        return {name: gate.active_prob.clone() for name, gate in self.posterior().items()}

    @torch.no_grad()
    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Posterior median of every gate and other latent, by site; a copy. Takes the model's arguments."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        medians = {name: gate.median.clone() for name, gate in self.posterior().items()}
        for name, latent in self._of_kind(IndependentLatents).items():
            loc = latent.parameters["loc"].detach().clone()
            medians[name] = loc if latent.transform is None else latent.transform(loc)
        return medians
