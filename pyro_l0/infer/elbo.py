"""The three objectives of the L0 paper as one Pyro ELBO whose gate terms are exact."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from typing import Any, Literal, get_args

import torch
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.infer.elbo import ELBO
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape, warn_if_nan
from torch import Tensor
from torch.distributions import Independent, kl_divergence

from pyro_l0._record import Record, Site
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, JointDraw, concatenate, find_gate
from pyro_l0.infer.estimators import Estimate, EstimatorName, Estimators, Evaluation

__all__ = ["L0_ELBO", "Coefficient", "Objective"]

Objective = Literal["l0", "free_energy", "spike_slab"]
Coefficient = float | Tensor | Mapping[str, float | Tensor]

_Add = Callable[[str, Tensor], None]

_TERMS = ("nll", "l0", "l2", "kl_gate", "kl_slab", "kl_other")


class L0_ELBO(ELBO):  # noqa: N801  # Pyro names its ELBOs so
    r"""Training objectives for models with gates, in nats, summed over the data set; ``loss = -elbo``.

    ==================  ==========================================================================  ===========
    ``objective``       loss                                                                        L0 paper
    ==================  ==========================================================================  ===========
    ``"l0"``            :math:`-E \log p(D) + \sum \lambda\, |g|\, P(z \neq 0)`                     Eq. 22
    ``"free_energy"``   the same :math:`+ \sum KL(q(z) \| p(z))`                                    Eq. 21
    ``"spike_slab"``    :math:`-E \log p(D) + \sum KL(q(z) \| p(z)) + \sum P(z \neq 0)\, KL(w)`     Eq. 20
    ==================  ==========================================================================  ===========

    The KL of a gate is analytic, never sampled: a sampled one has a biased gradient, however many particles are
    drawn. Latent variables other than gates and slabs contribute their KL in every objective, in closed form where
    one is registered and by the pathwise sample otherwise.

    Use it as ``SVI(model, guide, optim, loss=elbo)`` or as ``elbo(model, guide)``, a module whose ``forward``
    returns the loss, with a torch optimiser. The loss is a tensor and is not read back from the device.

    Args:
        objective: which loss.
        lam: price :math:`\lambda` of one open weight in nats; a number, a tensor that broadcasts against the gates,
            or a dict of these by site (other sites are free). The paper's :math:`\lambda / N` on the mean loss is
            ``lam`` :math:`= \lambda` here.
        group_size: weights that a gate switches, :math:`|g|` of Eq. 16, in the same forms; 1 if not given.
        slab: for ``"spike_slab"``, the gate site of each slab site. The gate's shape broadcasts against the slab's.
        kl_scale: factor on every KL; a number, or a function of the step for annealing. The step is the number of
            losses taken so far with a gradient, kept in the attribute ``step``.
        weight_decay: coefficient of half the expected squared norm of the gated weights (Eq. 15 and 17),
            :math:`\sum P(z \neq 0) \tfrac12 \|\theta_g\|^2`; a number or a dict by site. For a weight decay w on the
            mean loss it is :math:`N w`.
        square_norm: for ``weight_decay``, a function per gate site that returns :math:`\|\theta_g\|^2` of every
            gate's weights; see :func:`pyro_l0.nn.square_norms`.
        estimator: how the gradient of :class:`~pyro_l0.distributions.BernoulliGate` posteriors is estimated:
            ``"score_function"``, ``"leave_one_out"``, ``"arm"``, ``"straight_through"`` (biased) or ``"rebar"``; see
            :class:`~pyro_l0.infer.Estimators`. The gates' KL and price stay analytic.
        num_particles: samples per step.
        max_plate_nesting: as in Pyro, needed for ``vectorize_particles`` alone; guessed if not given.
        vectorize_particles: draw the particles in one run of the model.

    Raises:
        ValueError: an option is out of range or does not fit the objective; when called, a coefficient names a
            site that is not a gate, a gate has no gate as posterior or the other way round, shapes, scales or masks
            of model and guide differ, or a latent variable is not reparameterised. Each names the site.

    Example:
        >>> import pyro
        >>> from pyro_l0 import HardConcrete
        >>> def model():
        ...     pyro.sample("z", HardConcrete.from_active_prob(0.1))
        >>> def guide():
        ...     pyro.sample("z", HardConcrete(torch.tensor(2.0)))
        >>> round(L0_ELBO("l0", lam=0.5).loss(model, guide), 4)  # 0.5 * P(z != 0)
        0.4867

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 15-17 and 20-22.
    """

    def __init__(
        self,
        objective: Objective = "free_energy",
        lam: Coefficient = 0.0,
        group_size: Coefficient | None = None,
        slab: Mapping[str, str] | None = None,
        kl_scale: float | Callable[[int], float] = 1.0,
        num_particles: int = 1,
        *,
        weight_decay: Coefficient = 0.0,
        square_norm: Mapping[str, Callable[[], Tensor]] | None = None,
        estimator: EstimatorName | None = None,
        max_plate_nesting: float = math.inf,
        vectorize_particles: bool = False,
    ) -> None:
        if objective not in ("l0", "free_energy", "spike_slab"):
            raise ValueError(f"Expected objective 'l0', 'free_energy' or 'spike_slab', but got {objective!r}.")
        if isinstance(num_particles, bool) or not isinstance(num_particles, int) or num_particles < 1:
            raise ValueError(f"Expected num_particles of at least 1, but got {num_particles!r}.")
        for name, value in (("lam", lam), ("group_size", group_size), ("weight_decay", weight_decay)):
            _check_coefficient(name, value)
        if not callable(kl_scale):
            _check_coefficient("kl_scale", kl_scale)
        if estimator is not None and estimator not in get_args(EstimatorName):
            raise ValueError(f"Expected estimator to be one of {get_args(EstimatorName)}, but got {estimator!r}.")
        if estimator == "leave_one_out" and num_particles < 2:
            raise ValueError(f"Expected num_particles of at least 2 for 'leave_one_out', but got {num_particles}.")
        if estimator is not None and vectorize_particles:
            raise ValueError("Expected no vectorize_particles with an estimator, which draws particles by itself.")
        if objective == "spike_slab":
            if not slab:
                raise ValueError("Expected slab={'w': 'z', ...} for objective='spike_slab', but got none.")
            for name, value in (("lam", lam), ("weight_decay", weight_decay)):
                if isinstance(value, Tensor | Mapping) or value != 0:
                    raise ValueError(
                        f"Expected no {name} for objective='spike_slab', whose slab KL is the price of a weight, "
                        f"but got {value!r}."
                    )
        elif slab:
            raise ValueError(f"Expected slab for objective='spike_slab' only, but got {slab!r} for {objective!r}.")
        super().__init__(  # type: ignore[no-untyped-call]
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
        )
        self.objective = objective
        self.lam = _as_dict(lam)
        self.group_size = 1.0 if group_size is None else _as_dict(group_size)
        self.slab = dict(slab or {})
        self.kl_scale = kl_scale
        self.weight_decay = _as_dict(weight_decay)
        # A copy of its own class: that of square_norms computes all sites' norms together.
        self.square_norm: dict[str, Callable[[], Tensor]] = (
            dict(square_norm or {}) if not isinstance(square_norm, dict) else copy.copy(square_norm)
        )
        self.estimator = None if estimator is None else Estimators(estimator)
        self.step = 0

    # ------------------------------------------------------------ Pyro's interface

    def differentiable_loss(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """The loss with its graph, shape ``()``; advances ``step`` unless gradients are off."""
        loss = _total(self._terms(model, guide, args, kwargs))
        if torch.is_grad_enabled():
            self.step += 1
        return loss

    def loss(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """The loss as a number, without gradients; ``step`` stays."""
        with torch.no_grad():
            loss: float = torch_item(_total(self._terms(model, guide, args, kwargs)))
        return loss

    def loss_and_grads(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """The loss as a number, after adding its gradients to the parameters' ``.grad``."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward()
        value = float(torch_item(loss))
        warn_if_nan(loss, "loss")
        return value

    def terms(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """The parts that add up to the loss, without gradients; ``step`` stays.

        Returns:
            Tensors of shape ``()``: ``nll`` (expected negative log likelihood), ``l0``, ``l2`` (the penalties),
            ``kl_gate``, ``kl_slab``, ``kl_other`` (as they enter the loss, that is times ``kl_scale``; a part that
            the objective does not have is 0).
        """
        with torch.no_grad():
            parts = self._terms(model, guide, args, kwargs)
        return {name: torch.as_tensor(parts.get(name, 0.0)) for name in _TERMS}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the step, and the score function's baseline."""
        return {"step": self.step, "baseline": None if self.estimator is None else self.estimator.baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Args:
            state: of an objective with the same options.
        """
        self.step = state["step"]
        if self.estimator is not None:
            self.estimator.baseline = state["baseline"]

    def _get_trace(
        self, model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[dict[str, Site], dict[str, Site]]:
        guide_sites = _run(guide, args, kwargs)
        return _run(model, args, kwargs, guide_sites), guide_sites

    # ------------------------------------------------------------ the terms

    def _terms(self, model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        kl_scale = self.kl_scale(self.step) if callable(self.kl_scale) else self.kl_scale
        particles = self.num_particles
        surrogate: Tensor | None = None
        with self._norms_on_the_way():
            if self.estimator is not None and torch.is_grad_enabled():
                evaluations, surrogate = self._estimate(self.estimator, model, guide, args, kwargs)
                particles = len(evaluations)
                for evaluation in evaluations:
                    for name, value in evaluation.parts.items():
                        parts[name] = parts[name] + value if name in parts else value
            else:
                traces = self._get_traces(model, guide, args, kwargs)  # type: ignore[no-untyped-call]
                for model_sites, guide_sites in traces:
                    self._add_particle(parts, model_sites, guide_sites)
        for name in parts:
            factor = (kl_scale if name.startswith("kl") else 1.0) / particles
            if factor != 1.0:
                parts[name] = parts[name] * factor
        if surrogate is not None:
            parts["nll"] = parts["nll"] + surrogate if "nll" in parts else surrogate
        return parts

    def _estimate(
        self,
        estimator: Estimators,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Estimate:
        """The objective's parts at draws of the gates of two values, and a surrogate for their gradient."""
        sites = _run(guide, args, kwargs)
        gates = {name: gate for name, gate in _gates_of(sites).items() if isinstance(gate, BernoulliGate)}
        if not gates:
            raise ValueError(f"Expected a BernoulliGate in the guide for estimator={estimator.name!r}, but found none.")

        def evaluate(values: dict[str, Tensor]) -> Evaluation:
            return self.evaluate(model, sites, values, args, kwargs)

        return estimator(evaluate, gates, self.num_particles)

    def evaluate(
        self, model: Callable[..., Any], sites: Mapping[str, Site], values: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> Evaluation:
        """The objective of one particle at given values of its gates.

        Args:
            model: the model.
            sites: the recorded sites of a run of the guide.
            values: values that replace what the guide drew, by site.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
        """
        kl_scale = self.kl_scale(self.step) if callable(self.kl_scale) else self.kl_scale
        drawn = {name: {**site, "value": values.get(name, site["value"])} for name, site in sites.items()}
        parts: dict[str, Tensor] = {}
        self._add_particle(parts, _run(model, args, kwargs, drawn), drawn)
        factors = {"nll": 1.0, "kl_other": kl_scale, "kl_slab": kl_scale}
        terms = [parts[name] * factor for name, factor in factors.items() if name in parts]
        return Evaluation(parts, reduce(operator.add, terms) if terms else torch.zeros(()))

    def _add_particle(self, parts: dict[str, Tensor], model: dict[str, Site], guide: dict[str, Site]) -> None:
        def add(name: str, value: Tensor) -> None:
            parts[name] = parts[name] + value if name in parts else value

        gates: dict[str, GateDistribution] = {}
        for name, site in model.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if site["is_observed"]:
                add("nll", _log_prob_sum(site, -1.0))
                continue
            posterior = guide.get(name)
            gate = _check_pair(name, site, posterior)
            assert posterior is not None
            if gate is not None:
                if self.estimator is None and not gate.has_rsample and torch.is_grad_enabled():
                    instead = (
                        f"choose an estimator of L0_ELBO, one of {get_args(EstimatorName)}"
                        if isinstance(gate, BernoulliGate)
                        else "only a BernoulliGate can do without them"
                    )
                    raise ValueError(
                        f"The posterior at gate site {name!r}, a {type(gate).__name__}, has no pathwise draws; "
                        f"{instead}."
                    )
                gates[name] = gate
            elif name in self.slab:
                if self.slab[name] in guide:
                    add("kl_slab", self._slab_kl(name, site, posterior, guide[self.slab[name]]))
            else:
                add("kl_other", _other_kl(name, site, posterior))
        for name, site in guide.items():
            if site["type"] == "sample" and name not in model and not site_is_subsample(site):
                _check_auxiliary(name, site)
                add("kl_other", _log_prob_sum(site))
        self._check_names(gates, model)
        for joint, names in _jointly_drawn(guide, gates):
            posteriors = {name: guide[name] for name in names}
            if self.objective != "spike_slab" and not self._add_joint_price(add, joint, posteriors):
                for name, posterior in posteriors.items():
                    self._add_price(add, name, posterior)
            if self.objective != "l0" and not self._add_joint_kl(add, joint, [model[name] for name in names]):
                for name, posterior in posteriors.items():
                    self._add_kl(add, name, model[name], posterior)

    def _add_price(self, add: _Add, name: str, posterior: Site) -> None:
        """The penalties of one gate site."""
        price = _by_site(self.lam, name, 0.0)
        decay = _by_site(self.weight_decay, name, 0.0)
        free, decays = _is_zero(price), not _is_zero(decay)
        if free and not decays:
            return
        active = _active_prob(posterior["fn"])
        if not free:
            add("l0", _site_sum(name, price * _by_site(self.group_size, name, 1.0) * active, active, posterior))
        if decays:
            norm = self._square_norm(name, active.shape)
            add("l2", _site_sum(name, 0.5 * decay * (norm * active), active, posterior))

    def _norms_on_the_way(self) -> AbstractContextManager[None]:
        """A context in which a network's forward pass computes the norms that a weight decay asks for."""
        during = getattr(self.square_norm, "during", None)
        if during is None:
            return nullcontext()
        decays = self.weight_decay
        names = [name for name in self.square_norm if not _is_zero(_by_site(decays, name, 0.0))]
        context: AbstractContextManager[None] = during(names)
        return context

    def _square_norms(self, posteriors: Mapping[str, Site], decays: Sequence[float], active: Tensor) -> Tensor:
        """Half the squared norms of the weights of several sites' gates times their decays, side by side."""
        together = getattr(self.square_norm, "together", None)
        norms: Tensor | None = None
        if together is not None and all(decays) and self.square_norm.keys() >= posteriors.keys():
            norms = together(list(posteriors))
        if norms is None:
            each = [
                self._square_norm(name, site["value"].shape) if decay else torch.zeros_like(site["value"])
                for (name, site), decay in zip(posteriors.items(), decays, strict=True)
            ]
            norms = torch.cat([norm.flatten() for norm in each])
        norms = norms.to(active.dtype)
        if len(set(decays)) == 1:
            return decays[0] * norms
        sizes = tuple(site["value"].numel() for site in posteriors.values())
        return norms * _side_by_side(tuple(decays), sizes, active.dtype, active.device)

    def _square_norm(self, name: str, shape: torch.Size) -> Tensor:
        """The squared norms of the weights of a site's gates."""
        if name not in self.square_norm:
            raise ValueError(
                f"Expected a square_norm for gate site {name!r}, which has a weight_decay; "
                f"got some for {sorted(self.square_norm)}."
            )
        norm = self.square_norm[name]()
        if norm.shape != shape:
            raise ValueError(
                f"Expected a square_norm of shape {tuple(shape)} for gate site {name!r}, but got {tuple(norm.shape)}."
            )
        return norm

    def _add_joint_price(self, add: _Add, joint: JointDraw | None, posteriors: Mapping[str, Site]) -> bool:
        """The price of all gates of a joint draw; False, and nothing done, where it takes more than numbers."""
        if joint is None:
            return False
        prices: list[float] = []
        decays: list[float] = []
        for name in posteriors:
            price, size = _by_site(self.lam, name, 0.0), _by_site(self.group_size, name, 1.0)
            decay = _by_site(self.weight_decay, name, 0.0)
            if isinstance(price, Tensor) or isinstance(size, Tensor) or isinstance(decay, Tensor):
                return False
            prices.append(float(price * size))
            decays.append(0.5 * decay)
        if not any(prices) and not any(decays):
            return True
        active = joint.active_prob
        sizes = tuple(site["value"].numel() for site in posteriors.values())
        if any(prices):
            add("l0", torch.dot(_side_by_side(tuple(prices), sizes, active.dtype, active.device), active))
        if any(decays):
            add("l2", torch.dot(self._square_norms(posteriors, decays, active), active))
        return True

    def _add_kl(self, add: _Add, name: str, site: Site, posterior: Site) -> None:
        """The KL of one gate site."""
        fn = posterior["fn"]
        try:
            kl = kl_divergence(fn, site["fn"])
        except NotImplementedError as error:
            raise ValueError(
                f"No KL is derived for gate site {name!r} with posterior {fn} and prior {site['fn']}; "
                "sampling it would give a biased gradient."
            ) from error
        if kl.shape != fn.batch_shape:
            raise ValueError(
                f"Expected a KL of shape {tuple(fn.batch_shape)} at gate site {name!r}, but got {tuple(kl.shape)}."
            )
        add("kl_gate", scale_and_mask(kl, posterior["scale"], posterior["mask"]).sum())

    def _add_joint_kl(self, add: _Add, joint: JointDraw | None, sites: Sequence[Site]) -> bool:
        """The KL of all gates of a joint draw; False, and nothing done, if their priors are no joint gate."""
        if joint is None:
            return False
        priors = [_base(site["fn"]) for site in sites]
        prior = concatenate(priors) if all(isinstance(fn, GateDistribution) for fn in priors) else None
        posterior = concatenate(joint.gates)
        if prior is None or posterior is None or type(prior) is not type(posterior):
            return False
        add("kl_gate", kl_divergence(posterior, prior).sum())
        return True

    def _slab_kl(self, name: str, site: Site, posterior: Site, gate_site: Site) -> Tensor:
        gate_name = self.slab[name]
        gate = find_gate(gate_site["fn"])
        if gate is None:
            raise ValueError(
                f"Expected a gate at site {gate_name!r} for slab site {name!r}, but got {gate_site['fn']}."
            )
        q, p = posterior["fn"], site["fn"]
        event_dim = q.event_dim
        try:
            kl = kl_divergence(_base(q), _base(p))
        except NotImplementedError as error:
            raise ValueError(f"No KL is registered for slab site {name!r} with posterior {q} and prior {p}.") from error
        active = _active_prob(gate_site["fn"])
        try:
            weighted = kl * active
        except RuntimeError:
            weighted = None
        if weighted is None or weighted.shape != kl.shape:
            raise ValueError(
                f"Expected gates at site {gate_name!r} that broadcast against slab site {name!r} of shape "
                f"{tuple(kl.shape)}, but got {tuple(active.shape)}."
            )
        weighted = sum_rightmost(weighted, event_dim - _base(q).event_dim)
        summed: Tensor = scale_and_mask(weighted, posterior["scale"], posterior["mask"]).sum()
        return summed

    def _check_names(self, gates: Collection[str], model: dict[str, Site]) -> None:
        for option in ("lam", "group_size", "weight_decay", "square_norm"):
            value = getattr(self, option)
            unknown = [name for name in value if name not in gates] if isinstance(value, dict) else []
            if unknown:
                raise ValueError(
                    f"Expected {option} by gate site, one of {sorted(gates)}, but got {', '.join(map(repr, unknown))}."
                )
        for slab, gate in self.slab.items():
            if slab not in model or model[slab]["is_observed"] or model[slab]["type"] != "sample" or slab in gates:
                raise ValueError(f"Expected slab to name latent weights of the model, but got {slab!r}.")
            if gate not in gates:
                raise ValueError(
                    f"Expected slab site {slab!r} to name its gate site, one of {sorted(gates)}, but got {gate!r}."
                )


def _run(program: Callable[..., Any], args: Any, kwargs: Any, values: dict[str, Site] | None = None) -> dict[str, Site]:
    """The sample sites of a model or a guide by name, in their order."""
    record = Record(values)
    try:
        with record:
            program(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        seen = Trace()
        for name, site in record.sites.items():
            seen.add_node(name, **site)
        error.add_note(seen.format_shapes())
        raise
    return record.sites


def _gates_of(sites: Mapping[str, Site]) -> dict[str, GateDistribution]:
    """The gates among the sites of a run."""
    found = {name: find_gate(site["fn"]) for name, site in sites.items() if site["type"] == "sample"}
    return {name: gate for name, gate in found.items() if gate is not None}


def _check_coefficient(name: str, value: Any) -> None:
    """Refuse a coefficient that is negative or not finite."""
    if value is None:
        return
    for key, entry in value.items() if isinstance(value, Mapping) else [("", value)]:
        where = f"{name}[{key!r}]" if key else name
        if not isinstance(entry, float | int | Tensor) or isinstance(entry, bool):
            raise TypeError(f"Expected {where} to be a number or a tensor, but got {type(entry).__name__}.")
        number = torch.as_tensor(entry)
        if not bool((torch.isfinite(number) & (number >= 0)).all()):
            raise ValueError(f"Expected {where} to be finite and not negative, but got {entry}.")


def _by_site(value: Any, name: str, default: float) -> Any:
    return value.get(name, default) if isinstance(value, dict) else value


def _as_dict(value: Coefficient) -> float | Tensor | dict[str, float | Tensor]:
    """A coefficient whose kind is told faster than an abstract mapping's."""
    return dict(value) if isinstance(value, Mapping) else value


def _total(parts: Mapping[str, Tensor]) -> Tensor:
    return reduce(operator.add, parts.values()) if parts else torch.zeros(())


def _is_zero(value: Any) -> bool:
    """Whether a coefficient is known to be zero without reading a device."""
    return isinstance(value, float | int) and value == 0


def _jointly_drawn(
    guide: Mapping[str, Site], gates: Mapping[str, GateDistribution]
) -> list[tuple[JointDraw | None, list[str]]]:
    """The gate sites of each joint draw in its order, and every other gate site by itself."""
    groups: dict[int, tuple[JointDraw | None, list[str]]] = {}
    for i, (name, site) in enumerate(guide.items()):
        if name in gates:
            joint = site.get("joint")
            groups.setdefault(-i - 1 if joint is None else id(joint), (joint, []))[1].append(name)
    return list(groups.values())


@lru_cache(maxsize=16)
def _side_by_side(
    values: tuple[float, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Each value as often as its size says, in one vector."""
    return torch.cat([torch.full((n,), x, dtype=dtype, device=device) for x, n in zip(values, sizes, strict=True)])


def _base(fn: Any) -> Any:
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def _active_prob(fn: Any) -> Tensor:
    """P(z != 0) of every gate of a site, 0 where a masked distribution masks it."""
    if isinstance(fn, GateDistribution):
        return fn.active_prob
    active = _active_prob(fn.base_dist)
    if isinstance(fn, MaskedDistribution):
        mask = fn._mask
        if isinstance(mask, Tensor):
            mask = mask.expand(fn.batch_shape).reshape(fn.batch_shape + (1,) * fn.event_dim)
        return active * mask
    return active


def _site_sum(name: str, value: Tensor, active: Tensor, site: Site) -> Tensor:
    """Sum a per-gate term under its site's scale and mask."""
    if value.shape != active.shape:
        raise ValueError(
            f"Expected coefficients that broadcast against gate site {name!r} of shape {tuple(active.shape)}, "
            f"but their product has shape {tuple(value.shape)}."
        )
    scale, mask = site["scale"], site["mask"]
    if mask is not None or isinstance(scale, Tensor):
        value = sum_rightmost(value, site["fn"].event_dim)
    total: Tensor = scale_and_mask(value, scale, mask).sum()
    return total


def _log_prob_sum(site: Site, sign: float = 1.0) -> Tensor:
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    if site["cond_indep_stack"] and is_validation_enabled():
        shaped: Any = {**site, "log_prob": log_prob}
        check_site_shape(shaped, sys.maxsize)
    scale, mask = site["scale"], site["mask"]
    if mask is None and not isinstance(scale, Tensor):
        # One number, not one per row; and no sum over one number.
        total: Tensor = (log_prob.sum() if log_prob.dim() else log_prob) * (sign * scale)
        return total
    return sign * scale_and_mask(log_prob, scale, mask).sum()  # type: ignore[no-any-return]


def _other_kl(name: str, site: Site, posterior: Site) -> Tensor:
    """KL of a latent variable that is no gate: in closed form if registered, else by the pathwise sample."""
    q = posterior["fn"]
    if not getattr(q, "has_rsample", False):
        raise ValueError(
            f"Expected a reparameterised posterior at latent site {name!r}, whose gradient goes through its sample, "
            f"but got {q}."
        )
    # The KL registered for a Delta leaves out its log density, which carries the Jacobian of an AutoContinuous guide.
    if not isinstance(_base(q), Delta):
        try:
            kl = kl_divergence(q, site["fn"])
            total: Tensor = scale_and_mask(kl, posterior["scale"], posterior["mask"]).sum()
            return total
        except NotImplementedError:
            pass
    return _log_prob_sum(posterior) - _log_prob_sum(site)


def _check_pair(name: str, site: Site, posterior: Site | None) -> GateDistribution | None:
    """The posterior gate of a latent site, None for another latent; raises where model and guide disagree."""
    prior_gate = find_gate(site["fn"])
    kind = "Gate" if prior_gate is not None else "Latent"
    if posterior is None or posterior["type"] != "sample":
        raise ValueError(f"{kind} site {name!r} of the model has no posterior in the guide.")
    q, p = posterior["fn"], site["fn"]
    gate = find_gate(q)
    if (gate is None) != (prior_gate is None):
        raise ValueError(
            f"Site {name!r} is {_kind(p, prior_gate)} in the model but {_kind(q, gate)} in the guide; its KL "
            "would have to be sampled, which gives a biased gradient."
        )
    if (q.batch_shape, q.event_shape) != (p.batch_shape, p.event_shape):
        raise ValueError(
            f"Shapes of model and guide differ at site {name!r}: batch {tuple(p.batch_shape)} and event "
            f"{tuple(p.event_shape)} in the model, batch {tuple(q.batch_shape)} and event {tuple(q.event_shape)} "
            "in the guide."
        )
    for what in ("scale", "mask"):
        if not _agree(site[what], posterior[what]):
            raise ValueError(
                f"The {what} of model and guide differ at site {name!r}: {site[what]} and {posterior[what]}."
            )
    return gate


def _kind(fn: Any, gate: GateDistribution | None) -> str:
    return f"{'no gate' if gate is None else 'a gate'} ({fn})"


def _agree(x: Any, y: Any) -> bool:
    """Whether two scales or masks are the same, as far as can be told without reading a device."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x is y or x.device.type != "cpu" or y.device.type != "cpu" or not is_validation_enabled():
            return True
        return x.shape == y.shape and torch.equal(x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x is not None and y is not None and not isinstance(x, bool) and not isinstance(y, bool)
    return bool(x == y)


def _check_auxiliary(name: str, site: Site) -> None:
    if find_gate(site["fn"]) is not None:
        raise ValueError(f"Gate site {name!r} of the guide is not in the model.")
    if not (site["infer"].get("is_auxiliary") or site["is_observed"]):
        raise ValueError(
            f"Site {name!r} of the guide is not in the model; mark it infer={{'is_auxiliary': True}} if that is meant."
        )
