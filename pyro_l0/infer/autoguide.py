"""Mean-field guides over gates, and over gates together with Gaussian slabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Independent, Normal
from pyro.infer.autoguide.guides import AutoGuide, prototype_hide_fn
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_l0._record import Record, sole_record
from pyro_l0.distributions.gate import GateDistribution, check_rate, concatenate, find_gate
from pyro_l0.distributions.hard_concrete import HardConcrete

__all__ = ["ActiveRate", "AutoGate", "AutoSpikeSlab"]


class ActiveRate(NamedTuple):
    """Realised rates of open gates: the mean of P(z != 0) under the posterior.

    Attributes:
        by_site: mean over the gates of each site, tensors of shape ``()``.
        overall: mean over all gates, shape ``()``.
    """

    by_site: dict[str, Tensor]
    overall: Tensor


_Parameters = Any  # a ParameterDict, or a mapping of subsampled tensors


class _Plan(NamedTuple):
    """What the guide knows of one site after it has seen the model."""

    event_dim: int
    plates: tuple[str, ...]
    template: GateDistribution | None


class AutoGate(AutoGuide):
    """Mean-field guide over every gate site of a model.

    Other latent variables are left to other guides; put them together in a
    :class:`~pyro.infer.autoguide.AutoGuideList`. The parameters exist after the first call.

    Args:
        model: a Pyro model.
        family: the posterior's family. One equal to the prior's takes over the prior's fixed parameters
            (temperature and stretch of a hard concrete), which makes the KL a closed form.
        init_active_prob: P(z != 0) at the start, for all sites or by site (0.9 for sites that are not named).
        init_jitter: standard deviation of the normal noise on the location at the start (0.01 in the L0 paper).
        family_options: keywords of ``family.from_active_prob`` that replace the defaults.
        create_plates: as in Pyro's guides.

    Raises:
        ValueError: a rate is outside (0, 1) or names a site that is not a gate, or the model has no gate.

    Example:
        >>> def model():
        ...     with pyro.plate("units", 3):
        ...         pyro.sample("z", HardConcrete.from_active_prob(0.1))
        >>> guide = AutoGate(model, init_active_prob=0.5, init_jitter=0.0)
        >>> guide()["z"].shape
        torch.Size([3])
        >>> guide.posterior()["z"].active_prob.detach()
        tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        family: type[GateDistribution] = HardConcrete,
        init_active_prob: float | Mapping[str, float] = 0.9,
        init_jitter: float = 0.01,
        *,
        family_options: Mapping[str, Any] | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, create_plates=create_plates)  # type: ignore[no-untyped-call]
        if not (isinstance(family, type) and issubclass(family, GateDistribution)):
            raise TypeError(f"Expected family to be a gate's class, but got {family!r}.")
        rates = init_active_prob.values() if isinstance(init_active_prob, Mapping) else [init_active_prob]
        for rate in rates:
            check_rate("init_active_prob", rate, family.__name__)
        if not 0 <= init_jitter < math.inf:
            raise ValueError(f"Expected init_jitter to be finite and not negative, but got {init_jitter}.")
        self.family = family
        self.init_active_prob = init_active_prob
        self.init_jitter = init_jitter
        self.family_options = dict(family_options or {})
        self._plans: dict[str, _Plan] = {}
        self._groups: list[list[str]] | None = None
        self._kept: dict[str, Any] = {}
        # Plain modules, one per site: their attribute access costs far less per step than a PyroModule's.
        self.sites = nn.ModuleDict()

    def __getstate__(self) -> dict[str, Any]:
        # Pyro drops the model from the original when a guide is copied or pickled; drop it from the copy alone.
        state = self.__dict__.copy()
        state["_model"] = (None,)
        state["master"] = None
        state["_kept"] = {}
        return state

    # ------------------------------------------------------------ set-up

    @staticmethod
    def _prototype_hide_fn(msg: dict[str, Any]) -> bool:
        return bool(prototype_hide_fn(msg)) or find_gate(msg["fn"]) is None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        prototype: Any = self.prototype_trace
        sites = dict(prototype.iter_stochastic_nodes())
        gates = {name: site for name, site in sites.items() if find_gate(site["fn"]) is not None}
        if not gates:
            raise ValueError("AutoGate found no gate site in the model.")
        if isinstance(self.init_active_prob, Mapping):
            unknown = [name for name in self.init_active_prob if name not in gates]
            if unknown:
                raise ValueError(
                    f"Expected init_active_prob by gate site, one of {sorted(gates)}, "
                    f"but got {', '.join(map(repr, unknown))}."
                )
        for name, site in sites.items():
            template = self._first_gate(name, site) if name in gates else None
            plates = tuple(frame.name for frame in site["cond_indep_stack"] if frame.vectorized)
            self._plans[name] = _Plan(site["fn"].event_dim, plates, template)
            shape = _full_shape(site)
            if template is not None and not _expands(template.batch_shape, shape):
                raise ValueError(
                    f"Expected the parameters that {self.family.__name__} does not learn to broadcast to the shape "
                    f"{tuple(shape)} of gate site {name!r}, but got {tuple(template.batch_shape)}; set family_options."
                )
            learned = self._init_other(name, site, shape) if template is None else self._init_gate(template, shape)
            self.sites[_key(name)] = nn.ParameterDict(learned)
        # The guide's own sites have no use for the plates of the data.
        used = {plate for plan in self._plans.values() for plate in plan.plates}
        self._prototype_frames = {name: frame for name, frame in self._prototype_frames.items() if name in used}
        prototype.detach_()
        if not used:
            self._groups = self._find_groups()

    def _find_groups(self) -> list[list[str]]:
        """Put the gates together that can be drawn jointly."""
        groups: list[list[str]] = []
        templates = {name: plan.template for name, plan in self._plans.items() if plan.template is not None}
        for name, template in templates.items():
            for group in groups:
                if concatenate([templates[group[0]], template]) is not None:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups

    def _first_gate(self, name: str, site: dict[str, Any]) -> GateDistribution:
        """The gate that a site starts from, shape ``()``; it keeps the parameters that are not learned."""
        prior = find_gate(site["fn"])
        assert prior is not None
        inherited = prior.fixed_options if type(prior) is self.family else {}
        options = {
            key: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
            for key, value in {**inherited, **self.family_options}.items()
        }
        rate = self.init_active_prob
        rate = rate.get(name, 0.9) if isinstance(rate, Mapping) else rate
        start = torch.as_tensor(rate, dtype=site["value"].dtype, device=site["value"].device)
        return self.family.from_active_prob(start, **options)

    def _init_gate(self, template: GateDistribution, shape: torch.Size) -> dict[str, nn.Parameter]:
        learned = {}
        for i, (key, constraint) in enumerate(self.family.learned.items()):
            unconstrained = transform_to(constraint).inv(getattr(template, key)).expand(shape).clone()
            if i == 0 and self.init_jitter > 0:
                unconstrained += self.init_jitter * torch.randn_like(unconstrained)
            learned[key] = nn.Parameter(unconstrained)
        return learned

    def _init_other(self, name: str, site: dict[str, Any], shape: torch.Size) -> dict[str, nn.Parameter]:
        raise AssertionError(f"AutoGate hides every site but gates, yet saw {name!r}.")

    # ------------------------------------------------------------ the guide

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site of this guide; takes the model's arguments."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        record = sole_record()
        if record is not None and self._groups is not None:
            return self._draw_jointly(record, self._groups)
        plates = self._create_plates(*args, **kwargs)  # type: ignore[no-untyped-call]
        sites = self.sites  # once: under Pyro every access is a pyro.module statement
        values: dict[str, Tensor] = {}
        for name, plan in self._plans.items():
            with ExitStack() as stack:
                for plate in plan.plates:
                    stack.enter_context(plates[plate])
                parameters: _Parameters = sites[_key(name)]._parameters
                if plan.plates:  # each parameter is full-sized, and a subsampled plate picks its rows
                    parameters = {key: pyro.subsample(x, event_dim=plan.event_dim) for key, x in parameters.items()}
                fn = self._distribution(plan, parameters)
                values[name] = pyro.sample(name, fn.to_event(plan.event_dim) if plan.event_dim else fn)
        return values

    def _draw_jointly(self, record: Record, groups: list[list[str]]) -> dict[str, Tensor]:
        """Sample every site for a loss that looks at the sites alone: gates of one kind in one draw."""
        sites: Any = self._modules["sites"]._modules  # type: ignore[union-attr]
        values: dict[str, Tensor] = {}
        for names in groups:
            fns = [self._fn(name, sites[_key(name)]._parameters) for name in names]
            gates = [fn.base_dist if type(fn) is Independent else fn for fn in fns]
            joint = gates[0].draw_jointly(gates)
            for name, fn, draw in zip(names, fns, joint.draws, strict=True):
                values[name] = record.sample(name, fn, draw, joint=joint)
        for name, plan in self._plans.items():
            if plan.template is None:
                values[name] = record.sample(name, self._fn(name, sites[_key(name)]._parameters))
        return values

    def _fn(self, name: str, parameters: _Parameters) -> Any:
        """The distribution of a site, kept from step to step if it holds the parameters themselves."""
        fn = self._kept.get(name)
        if fn is not None:
            gate = fn.base_dist if type(fn) is Independent else fn
            if all(getattr(gate, key) is x for key, x in parameters.items()):
                return fn
        plan = self._plans[name]
        fn = self._distribution(plan, parameters)
        fn = fn.to_event(plan.event_dim) if plan.event_dim else fn
        if plan.template is not None and all(c is constraints.real for c in self.family.learned.values()):
            self._kept[name] = fn
        return fn

    def _distribution(self, plan: _Plan, parameters: _Parameters) -> Any:
        return self._gate(plan, parameters)

    def _gate(self, plan: _Plan, parameters: _Parameters) -> GateDistribution:
        assert plan.template is not None
        values = {
            key: parameters[key] if constraint is constraints.real else transform_to(constraint)(parameters[key])
            for key, constraint in self.family.learned.items()
        }
        return plan.template.with_learned(**values)

    # ------------------------------------------------------------ summaries

    def _gate_plans(self) -> dict[str, _Plan]:
        if not self._plans and self.prototype_trace is None:
            raise ValueError("The guide has not seen the model yet; call it once with the model's arguments.")
        return self._plans

    def posterior(self) -> dict[str, GateDistribution]:
        """The posterior gates by site, of the full size of subsampled plates; differentiable."""
        sites = self.sites
        return {name: self._gate(plan, sites[_key(name)]) for name, plan in self._gate_plans().items()}

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Drop all but some units of some gate sites, as when they leave the network.

        Args:
            units: by site, the places of the units that stay, shape ``(n,)``; a site without any leaves.

        Returns:
            For each parameter that was replaced, the new one (None if its site left) and the places that it holds.

        Raises:
            ValueError: a name is not a gate site of one dimension outside of plates.
        """
        replaced: dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]] = {}
        for name, index in units.items():
            plan = self._plans.get(name)
            parameters: _Parameters = self.sites[_key(name)] if plan is not None else {}
            if plan is None or plan.template is None or plan.plates or any(x.dim() != 1 for x in parameters.values()):
                raise ValueError(f"Expected units of gate sites of one dimension, outside of plates, but got {name!r}.")
            size = next(iter(parameters.values())).numel()
            self._plans[name] = plan._replace(template=plan.template.apply_to_tensors(partial(_rows, size, index)))
            for key, old in list(parameters.items()):
                new = nn.Parameter(old.detach()[index.to(old.device)].clone()) if len(index) else None
                replaced[old] = new, index
                if new is not None:
                    parameters[key] = new
            if not len(index):
                del self._plans[name], self.sites[_key(name)]
        self._kept = {}
        self._groups = self._find_groups() if self._groups is not None else None
        return replaced

    @torch.no_grad()
    def close(self, name: str, places: Tensor) -> None:
        """Close some gates of a site for good: a test gate of 0 and P(z != 0) of 1e-6 or the least that there is.

        Args:
            name: a gate site.
            places: places of the gates in the flattened site.

        Raises:
            ValueError: the name is not a gate site.
        """
        plan = self._gate_plans().get(name)
        if plan is None or plan.template is None:
            raise ValueError(f"Expected a gate site, one of {sorted(self._gate_plans())}, but got {name!r}.")
        closed = self.family.closed(**plan.template.fixed_options)
        for key, constraint in self.family.learned.items():
            parameter = self.sites[_key(name)]._parameters[key]
            assert parameter is not None
            value = transform_to(constraint).inv(getattr(closed, key)).to(parameter).expand_as(parameter).reshape(-1)
            here = places.to(parameter.device)
            parameter.view(-1)[here] = value[here]

    @torch.no_grad()
    def test_gates(self) -> dict[str, Tensor]:
        """The deterministic gates that prune, by site."""
        return {name: gate.test_gate for name, gate in self.posterior().items()}

    @torch.no_grad()
    def active_rate(self) -> ActiveRate:
        """Realised rate of open gates, by site and over all gates."""
        probs = {name: gate.active_prob for name, gate in self.posterior().items()}
        overall = torch.cat([prob.flatten() for prob in probs.values()]).mean()
        return ActiveRate({name: prob.mean() for name, prob in probs.items()}, overall)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior median of every gate, by site; takes the model's arguments."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return {name: gate.median for name, gate in self.posterior().items()}


class AutoSpikeSlab(AutoGate):
    """Gates and Gaussian slabs in one mean-field guide, made for ``L0_ELBO("spike_slab", slab=...)``.

    Args:
        model: a Pyro model.
        slab: the gate site of each slab site, as given to the ELBO. Slab sites are real-valued.
        init_scale: standard deviation of the slabs at the start.
        init_loc: mean of each slab at the start, by site; the prior's mean plus a hundredth of its standard
            deviation times normal noise where not given.
        **options: those of :class:`AutoGate`.

    Raises:
        ValueError: ``slab`` names a site that the model does not have, or ``init_scale`` is not positive.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     with pyro.plate("weights", 2):
        ...         z = pyro.sample("z", HardConcrete.from_active_prob(0.1))
        ...         return z * pyro.sample("w", dist.Normal(0.0, 1.0))
        >>> guide = AutoSpikeSlab(model, slab={"w": "z"})
        >>> sorted(guide())
        ['w', 'z']
        >>> guide.slabs()["w"].scale.detach()
        tensor([0.1000, 0.1000])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        slab: Mapping[str, str],
        init_scale: float = 0.1,
        init_loc: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise ValueError(f"Expected init_scale to be finite and positive, but got {init_scale}.")
        super().__init__(model, **options)
        self.slab = dict(slab)
        self.init_scale = init_scale
        self.init_loc = dict(init_loc or {})

    def _prototype_hide_fn(self, msg: dict[str, Any]) -> bool:  # type: ignore[override]
        return bool(prototype_hide_fn(msg)) or (find_gate(msg["fn"]) is None and msg["name"] not in self.slab)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        for slab, gate in self.slab.items():
            for name in (slab, gate):
                if name not in self._plans:
                    raise ValueError(f"Expected slab to name latent sites of the model, but {name!r} is none.")

    def _init_other(self, name: str, site: dict[str, Any], shape: torch.Size) -> dict[str, nn.Parameter]:
        value = site["value"].detach()
        loc = self.init_loc.get(name)
        if loc is None:
            fn = site["fn"]
            loc = (fn.mean + 0.01 * fn.stddev * torch.randn_like(value)).detach()
            loc = loc if loc.shape == shape else loc.mean() + torch.zeros(shape).to(loc)
        if loc.shape != shape:
            raise ValueError(f"Expected init_loc[{name!r}] of shape {tuple(shape)}, but got {tuple(loc.shape)}.")
        log_scale = torch.full_like(loc, math.log(self.init_scale))
        return {"loc": nn.Parameter(loc.clone()), "log_scale": nn.Parameter(log_scale)}

    def _distribution(self, plan: _Plan, parameters: _Parameters) -> Any:
        return _slab(parameters) if plan.template is None else self._gate(plan, parameters)

    def _gate_plans(self) -> dict[str, _Plan]:
        return {name: plan for name, plan in super()._gate_plans().items() if name not in self.slab}

    def slabs(self) -> dict[str, Normal]:
        """The posterior slabs by site; differentiable."""
        sites = self.sites
        return {name: _slab(sites[_key(name)]) for name in super()._gate_plans() if name in self.slab}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior median of every gate and slab, by site; takes the model's arguments."""
        gates = super().median(*args, **kwargs)
        return gates | {name: slab.mean for name, slab in self.slabs().items()}


def _slab(parameters: _Parameters) -> Normal:
    return Normal(parameters["loc"], parameters["log_scale"].exp(), validate_args=False)


@lru_cache(maxsize=1024)
def _key(name: str) -> str:
    """A site's name as a key of a module dict, which may hold no dots and no names of its own attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"/{key}" if hasattr(_NO_SITES, key) else key


_NO_SITES = nn.ModuleDict()


def _rows(size: int, index: Tensor, x: Tensor) -> Tensor:
    """Some entries of a parameter that has one for each of ``size`` gates; other parameters as they are."""
    return x[index.to(x.device)] if x.shape == (size,) else x


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)
    except RuntimeError:
        return False


def _full_shape(site: dict[str, Any]) -> torch.Size:
    """Shape of a site's value with every subsampled plate at its full size."""
    shape = list(site["value"].shape)
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            shape[frame.dim - site["fn"].event_dim] = frame.full_size or frame.size
    return torch.Size(shape)
