"""The three objectives of the L0 paper as one Pyro ELBO whose gate terms are exact."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial, reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.infer.elbo import ELBO
from pyro.infer.util import torch_item
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_l0._record import Record, Site, is_likelihood
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, JointDraw, concatenate, find_gate
from pyro_l0.infer.checks import (
    check_arguments,
    check_auxiliary,
    check_coefficient,
    check_kl_scale,
    check_pair,
    check_shape,
    number_of_bad,
    odd_arguments,
    refuse_without_likelihood,
)
from pyro_l0.infer.estimators import Estimate, EstimatorName, Estimators, Evaluation
from pyro_l0.infer.slabs import slab_kl
from pyro_l0.infer.terms import active_prob, base, log_prob_sum, other_kl, site_sum
from pyro_l0.infer.watch import BadTerm, Run, Watch, bad_values, sentences

__all__ = ["L0_ELBO", "Coefficient", "Objective"]

Objective = Literal["l0", "free_energy", "spike_slab"]
Coefficient = float | Tensor | Mapping[str, float | Tensor]

_Add = Callable[[str, str, Tensor], None]  # term, site, value

_TERMS = ("nll", "l0", "l2", "kl_gate", "kl_slab", "kl_other")


class _Outcome(NamedTuple):
    """The terms of a loss, the runs they are from, and what to say if they are not finite."""

    parts: dict[str, Tensor]
    runs: list[Run]
    explain: Callable[[], str]


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
    returns the loss, with a torch optimiser. The loss is a tensor and is not read back from an accelerator, but for a
    look at every hundredth step: at the losses since the last look, and at whether all gates of a site have closed. In
    main memory every loss that is trained is looked at. One that is not finite raises.

    Args:
        objective: which loss.
        lam: price :math:`\lambda` of one open weight in nats; a number, a tensor that broadcasts against the gates,
            or a dict of these by site (other sites are free). The paper's :math:`\lambda / N` on the mean loss is
            ``lam`` :math:`= \lambda` here.
        group_size: weights that a gate switches, :math:`|g|` of Eq. 16, in the same forms; 1 if not given.
        slab: for ``"spike_slab"``, the gate site of each slab site. A gate without event dimensions switches a whole
            event of its slab (in the same plates), as a group of weights; gates with event dimensions switch its
            elements, and broadcast along the last dimensions as in ``z * w``. The KL of a slab that has no registered
            one (Student-t, Cauchy, half-normal priors) is sampled at the slab's draw, which is unbiased; P(z != 0)
            stays analytic.
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
            site that is not a gate or has another shape, a gate has no gate as posterior or the other way round,
            shapes, scales or masks of model and guide differ, a latent variable is not reparameterised, gates fit
            their slab in no way or in several, the minibatch is empty, the loss is not finite, or the model is given
            data or returns a loss but has no likelihood. Each names the site, the term or the argument.

    Warns:
        UserWarning: all gates of a site have closed; once for each site.

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
            check_coefficient(name, value)
        if not callable(kl_scale):
            check_coefficient("kl_scale", kl_scale)
            if isinstance(kl_scale, Tensor) and kl_scale.dim():
                raise ValueError(f"Expected kl_scale to be one number, but got a shape of {tuple(kl_scale.shape)}.")
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
        self._watch = Watch()

    # ------------------------------------------------------------ Pyro's interface

    def differentiable_loss(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """The loss with its graph, shape ``()``; advances ``step`` unless gradients are off."""
        return self._step(model, guide, args, kwargs)[0]

    def loss(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """The loss as a number, without gradients; ``step`` stays."""
        with torch.no_grad():
            outcome = self._terms(model, guide, args, kwargs)
            value = float(torch_item(_total(outcome.parts)))
        self._watch.value(self.step, value, outcome.explain)
        return value

    def loss_and_grads(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """The loss as a number, after adding its gradients to the parameters' ``.grad``."""
        step = self.step
        loss, outcome = self._step(model, guide, args, kwargs)
        if loss.requires_grad:
            loss.backward()
        value = float(torch_item(loss))
        self._watch.value(step, value, outcome.explain)
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
            parts = self._terms(model, guide, args, kwargs).parts
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
        guide_sites = self._run(guide, args, kwargs)
        return self._run(model, args, kwargs, guide_sites), guide_sites

    def _step(
        self, model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Tensor, _Outcome]:
        """The loss, looked at where that is cheap or due, and how it came about."""
        outcome = self._terms(model, guide, args, kwargs)
        loss = _total(outcome.parts)
        if loss.requires_grad:  # it is trained
            self._watch.loss(self.step, loss, outcome.parts, outcome.explain)
            self._watch.gates(self.step, outcome.runs[0].guide)
        if torch.is_grad_enabled():
            self.step += 1
        return loss, outcome

    def _run(
        self, program: Callable[..., Any], args: Any, kwargs: Any, values: dict[str, Site] | None = None
    ) -> dict[str, Site]:
        """The sample sites of a guide, or of a model with the guide's values, by name and in their order."""
        record = Record(values)
        try:
            with record:
                returned = program(*args, **kwargs)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            seen = Trace()
            for name, site in record.sites.items():
                seen.add_node(name, **site)
            error.add_note(seen.format_shapes())
            # A guide of Pyro's runs the model at its first call, and takes the model's arguments.
            model = program.model if isinstance(program, AutoGuide) else program
            first = isinstance(program, AutoGuide) and program.prototype_trace is None
            odd = "; ".join(odd_arguments(model, args, kwargs))
            if not odd and "found invalid values" not in str(error):  # of torch's validation, which names no site
                raise
            what = "guide" if values is None and not first else "likelihood (nll) of the model"
            where = f", where {odd}" if odd else ""
            raise ValueError(f"The {what} failed at step {self.step}{where}: {error}") from error
        if values is not None and not any(map(is_likelihood, record.sites.values())):
            refuse_without_likelihood(program, record.sites, returned, args, kwargs)
        return record.sites

    # ------------------------------------------------------------ the terms

    def kl_scale_now(self) -> float:
        """The factor on every KL at the present step."""
        if not callable(self.kl_scale):
            return self.kl_scale
        value = self.kl_scale(self.step)
        check_kl_scale(value, self.step)
        return value

    def _terms(self, model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any) -> _Outcome:
        check_arguments(model, args, kwargs)
        parts: dict[str, Tensor] = {}
        runs: list[Run] = []
        kl_scale = self.kl_scale_now()
        particles = self.num_particles
        surrogate: Tensor | None = None
        with self._norms_on_the_way():
            if self.estimator is not None and torch.is_grad_enabled():
                evaluations, surrogate = self._estimate(self.estimator, model, guide, args, kwargs, runs)
                particles = len(evaluations)
                for evaluation in evaluations:
                    for name, value in evaluation.parts.items():
                        parts[name] = parts[name] + value if name in parts else value
            else:
                traces = self._get_traces(model, guide, args, kwargs)  # type: ignore[no-untyped-call]
                for model_sites, guide_sites in traces:
                    runs.append(Run(model_sites, guide_sites))
                    self._add_particle(_adder(parts), runs[-1])
        for name in parts:
            factor = (kl_scale if name.startswith("kl") else 1.0) / particles
            if factor != 1.0:
                parts[name] = parts[name] * factor
        if surrogate is not None:
            parts["nll"] = parts["nll"] + surrogate if "nll" in parts else surrogate
        return _Outcome(parts, runs, partial(self._explain, runs, model, args, kwargs))

    @torch.no_grad()
    def _explain(self, runs: Sequence[Run], model: Callable[..., Any], args: Any, kwargs: Any) -> str:
        """Which terms of some runs are not finite, and where that may come from."""
        bad: list[BadTerm] = []
        causes: list[str] = odd_arguments(model, args, kwargs)

        def note(term: str, name: str, value: Tensor) -> None:
            if number_of_bad(value):
                bad.append(BadTerm(term, name, float(value)))

        for run in runs:
            apart = {name: {**site, "joint": None} for name, site in run.guide.items()}
            self._add_particle(note, Run(run.model, apart))
            # An estimator's surrogate is no term of its own: then any site may be the cause.
            for name in dict.fromkeys(entry.site for entry in bad) or run.model:
                causes += [cause for sites in run for cause in (bad_values(sites[name]) if name in sites else [])]
        for option in ("lam", "group_size", "weight_decay", "kl_scale"):
            value = getattr(self, option)
            entries = value.items() if isinstance(value, dict) else [("", value)]
            causes += [f"{option} is not finite" for _, x in entries if not callable(x) and number_of_bad(x)]
        return sentences(bad, causes)

    def _estimate(
        self,
        estimator: Estimators,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: Any,
        kwargs: Any,
        runs: list[Run],
    ) -> Estimate:
        """The objective's parts at draws of the gates of two values, and a surrogate for their gradient."""
        sites = self._run(guide, args, kwargs)
        gates = {name: gate for name, gate in _gates_of(sites).items() if isinstance(gate, BernoulliGate)}
        if not gates:
            raise ValueError(f"Expected a BernoulliGate in the guide for estimator={estimator.name!r}, but found none.")

        def evaluate(values: dict[str, Tensor]) -> Evaluation:
            evaluation, run = self._evaluate(model, sites, values, args, kwargs)
            runs.append(run)
            return evaluation

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
        return self._evaluate(model, sites, values, args, kwargs)[0]

    def _evaluate(
        self, model: Callable[..., Any], sites: Mapping[str, Site], values: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Evaluation, Run]:
        kl_scale = self.kl_scale_now()
        drawn = {name: {**site, "value": values.get(name, site["value"])} for name, site in sites.items()}
        parts: dict[str, Tensor] = {}
        run = Run(self._run(model, args, kwargs, drawn), drawn)
        self._add_particle(_adder(parts), run)
        factors = {"nll": 1.0, "kl_other": kl_scale, "kl_slab": kl_scale}
        terms = [parts[name] * factor for name, factor in factors.items() if name in parts]
        return Evaluation(parts, reduce(operator.add, terms) if terms else torch.zeros(())), run

    def _add_particle(self, add: _Add, run: Run) -> None:
        """Hand out every term of one run."""
        model, guide = run
        gates: dict[str, GateDistribution] = {}
        for name, site in model.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if site["is_observed"]:
                try:
                    add("nll", name, log_prob_sum(site, -1.0))
                except ValueError as error:
                    raise ValueError(f"The nll of site {name!r} failed at step {self.step}: {error}") from error
                continue
            posterior = guide.get(name)
            gate = check_pair(name, site, posterior)
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
                gate_name = self.slab[name]
                if gate_name in guide and gate_name in model:
                    kl = slab_kl(name, site, posterior, gate_name, guide[gate_name], model[gate_name])
                    add("kl_slab", name, kl)
            else:
                add("kl_other", name, other_kl(name, site, posterior))
        for name, site in guide.items():
            if site["type"] == "sample" and name not in model and not site_is_subsample(site):
                check_auxiliary(name, site)
                add("kl_other", name, log_prob_sum(site))
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
        active = active_prob(posterior["fn"])
        size = _by_site(self.group_size, name, 1.0)
        for option, value in (("lam", price), ("group_size", size), ("weight_decay", decay)):
            check_shape(option, value, name, active)
        if not free:
            add("l0", name, site_sum(price * size * active, posterior))
        if decays:
            norm = self._square_norm(name, active.shape)
            add("l2", name, site_sum(0.5 * decay * (norm * active), posterior))

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
            add(
                "l0",
                ", ".join(posteriors),
                torch.dot(_side_by_side(tuple(prices), sizes, active.dtype, active.device), active),
            )
        if any(decays):
            add("l2", ", ".join(posteriors), torch.dot(self._square_norms(posteriors, decays, active), active))
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
        add("kl_gate", name, scale_and_mask(kl, posterior["scale"], posterior["mask"]).sum())

    def _add_joint_kl(self, add: _Add, joint: JointDraw | None, sites: Sequence[Site]) -> bool:
        """The KL of all gates of a joint draw; False, and nothing done, if their priors are no joint gate."""
        if joint is None:
            return False
        priors = [base(site["fn"]) for site in sites]
        prior = concatenate(priors) if all(isinstance(fn, GateDistribution) for fn in priors) else None
        posterior = concatenate(joint.gates)
        if prior is None or posterior is None or type(prior) is not type(posterior):
            return False
        add("kl_gate", ", ".join(site["name"] for site in sites), kl_divergence(posterior, prior).sum())
        return True

    def _check_names(self, gates: Collection[str], model: dict[str, Site]) -> None:
        for option in ("lam", "group_size", "weight_decay", "square_norm"):
            value = getattr(self, option)
            unknown = [name for name in value if name not in gates] if isinstance(value, dict) else []
            cost = option == "group_size"
            if unknown:
                raise ValueError(
                    f"Expected {option} by gate site, one of {sorted(gates)}, but got {', '.join(map(repr, unknown))}"
                    + ("; call the guide before NetworkCost, which then has these names." if cost else ".")
                )
        for slab, gate in self.slab.items():
            if slab not in model or model[slab]["is_observed"] or model[slab]["type"] != "sample" or slab in gates:
                raise ValueError(f"Expected slab to name latent weights of the model, but got {slab!r}.")
            if gate not in gates:
                raise ValueError(
                    f"Expected slab site {slab!r} to name its gate site, one of {sorted(gates)}, but got {gate!r}."
                )


def _adder(parts: dict[str, Tensor]) -> _Add:
    """What sums terms over sites and particles."""

    def add(term: str, name: str, value: Tensor) -> None:
        parts[term] = parts[term] + value if term in parts else value

    return add


def _gates_of(sites: Mapping[str, Site]) -> dict[str, GateDistribution]:
    """The gates among the sites of a run."""
    found = {name: find_gate(site["fn"]) for name, site in sites.items() if site["type"] == "sample"}
    return {name: gate for name, gate in found.items() if gate is not None}


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
