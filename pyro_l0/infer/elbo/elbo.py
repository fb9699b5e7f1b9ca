"""The three objectives of the L0 paper as one Pyro ELBO whose gate terms are exact."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from pyro.infer.elbo import ELBO
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_l0.expect import expect
from pyro_l0.infer.elbo.coefficients import Coefficient, as_dict, check_number, check_numbers
from pyro_l0.infer.elbo.estimators import (
    EstimatorName,
    Estimators,
    Evaluation,
    binary_gates,
    check_particles,
    gates_log_prob,
    leave_one_out,
)
from pyro_l0.infer.elbo.pairs import check_dependence
from pyro_l0.infer.elbo.terms import (
    TERMS,
    Kind,
    Run,
    Term,
    as_in_model,
    check_slab,
    in_log_joint,
    site_groups,
    terms_of,
)
from pyro_l0.infer.record import Record, SharedRows
from pyro_l0.infer.runs import (
    EVERY,
    Args,
    Kwargs,
    Program,
    Watch,
    check_arguments,
    forked_generators,
    over_particles,
    record_run,
)
from pyro_l0.infer.slabs import Conditional, GateSite, slab_to_gate, with_latent_gates

Objective = Literal["l0", "free_energy", "spike_slab"]
_LOG_Q = "log q(z)"  # beside the terms of a particle
_Parts = dict[str, Tensor]  # by the names of terms


class ElboState(TypedDict):
    """What a resumed run needs of an objective: the step, and the score function's baseline."""

    step: int
    baseline: Tensor | None


class _Call(NamedTuple):
    model: Program
    guide: Program
    args: Args
    kwargs: Kwargs


class _Outcome(NamedTuple):
    """The terms of a loss, and the runs that they are from; none where ``torch.vmap`` has mapped these."""

    parts: _Parts
    runs: list[Run]

    @property
    def loss(self) -> Tensor:
        return reduce(operator.add, self.parts.values()) if self.parts else torch.zeros(())


class L0_ELBO(ELBO):  # noqa: N801  # Pyro names its ELBOs so
    r"""Training objectives for models with gates, in nats, summed over the data set; ``loss = -elbo``.

    ==================  ==========================================================================  ===========
    ``objective``       loss                                                                        L0 paper
    ==================  ==========================================================================  ===========
    ``"l0"``            :math:`-E \log p(D) + \sum \lambda\, |g|\, P(z \neq 0)`                     Eq. 22
    ``"free_energy"``   the same :math:`+ \sum KL(q(z) \| p(z))`                                    Eq. 21
    ``"spike_slab"``    :math:`-E \log p(D) + \sum KL(q(z) \| p(z)) + \sum P(z \neq 0)\, KL(w)`     Eq. 20
    ==================  ==========================================================================  ===========

    Use it as ``SVI(model, guide, optim, loss=elbo)``, or with a torch optimiser: ``module = elbo(model, guide)``,
    whose ``module(*args)`` is the loss, a tensor of shape ``()``.

    The KL of a gate is analytic: with a density, sampling it would bias the gradient, whatever the number of
    particles. Only ``estimator="leave_one_out"`` samples the KL of binary gates, in the log ratio at the draws, which
    is unbiased. Latent variables other than gates and slabs add their KL to every objective, in closed form where one
    is registered and by the pathwise sample otherwise. A loss that is not finite raises: on the CPU at once, on an
    accelerator at the next hundredth step, which also checks whether all gates of a site have closed.

    Args:
        objective: which loss; a row of :data:`~pyro_l0.infer.elbo.terms.OBJECTIVES`.
        lam: price :math:`\lambda` of one open weight in nats; a number, a tensor that broadcasts against the gates,
            or a dict of these by site (other sites are free). The paper's :math:`\lambda / N` on the mean loss is
            ``lam`` :math:`= \lambda` here.
        group_size: weights that a gate switches, :math:`|g|` of Eq. 16, in the same forms; 1 if not given.
        slab: for ``"spike_slab"``, the gate site of each slab site. A gate without event dimensions switches a whole
            event of its slab (in the same plates); gates with event dimensions switch its elements, and broadcast
            along the last dimensions as in ``z * w``. ``{"w": ("z", index)}`` is for ``z[..., index] * w``: integers
            along the last dimension of z, such as the group of each weight. A slab's KL without a registered closed
            form (Student-t, Cauchy, half-normal priors) is sampled at the slab's draw, which is unbiased. Slabs of
            AutoNormal and AutoDiagonalNormal count with their own density; a guide's slab depends on no gate of its
            own, and no other site on it.
        kl_scale: factor on every KL; a number, or a function of the step for annealing. The step is the number of
            losses taken so far with a gradient, kept in the attribute ``step``.
        weight_decay: coefficient of half the expected squared norm of the gated weights (Eq. 15 and 17),
            :math:`\sum P(z \neq 0) \tfrac12 \|\theta_g\|^2`; a number or a dict by site. A weight decay w on the mean
            loss of N examples is :math:`N w` here.
        square_norm: for ``weight_decay``, a function per gate site that returns :math:`\|\theta_g\|^2` of every
            gate's weights; see :func:`pyro_l0.nn.square_norms`.
        estimator: how the gradient of :class:`~pyro_l0.distributions.BernoulliGate` posteriors is estimated:
            ``"score_function"``, ``"leave_one_out"``, ``"arm"``, ``"straight_through"`` (biased), ``"reinmax"`` (less
            so) or ``"rebar"``; see :class:`~pyro_l0.infer.Estimators`.
        num_particles: draws per step.
        max_plate_nesting: as in Pyro, needed only for ``vectorize_particles``; guessed if not given.
        vectorize_particles: draw the particles in one run: in a plate, as in Pyro; with ``"leave_one_out"`` by
            ``torch.vmap``, for which the model need not broadcast. Other estimators draw one by one.
        temper: factor in (0, 1] on the model's side of the log ratio in the gradient of ``"leave_one_out"`` for the
            gates; a number, or a function of the step. Let it rise to 1 over the first third of the training, and the
            gates do not settle before the slabs.
        extra_terms: your own terms, added to those of the objective; see :class:`~pyro_l0.infer.Term`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range or does not fit the objective; when called, a coefficient names a site
            that is not a gate or has another shape, model and guide differ at a site, a latent variable is not
            reparameterised, gates fit their slab in no way or in several, sites depend on one another so that
            their KL is no sum of KLs, the minibatch is empty, the loss is not
            finite, or the model has no likelihood.

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
        objective: Objective | str = "free_energy",
        lam: Coefficient = 0.0,
        group_size: Coefficient | None = None,
        slab: Mapping[str, GateSite] | None = None,
        kl_scale: float | Callable[[int], float] = 1.0,
        num_particles: int = 1,
        *,
        weight_decay: Coefficient = 0.0,
        square_norm: Mapping[str, Callable[[], Tensor]] | None = None,
        estimator: EstimatorName | None = None,
        max_plate_nesting: float = math.inf,
        vectorize_particles: bool = False,
        temper: float | Callable[[int], float] = 1.0,
        extra_terms: Sequence[Term] = (),
    ) -> None:
        self.objective_terms = terms_of(objective, extra_terms)
        expect(Mapping | None, "a dict by site", slab=slab, square_norm=square_norm)
        expect(bool, "True or False", vectorize_particles=vectorize_particles)
        size = 1.0 if group_size is None else group_size
        check_numbers(kl_scale, lam=lam, group_size=size, weight_decay=weight_decay)
        check_particles(num_particles, estimator, temper)
        check_slab(objective, slab, lam=lam, weight_decay=weight_decay)
        super().__init__(  # type: ignore[no-untyped-call]
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles and estimator in (None, "leave_one_out"),
        )
        self.objective = objective
        self.lam = as_dict(lam)
        self.group_size = as_dict(size)
        self.slab = slab_to_gate(slab)
        self.kl_scale = kl_scale
        self.weight_decay = as_dict(weight_decay)
        # A copy of its own class: that of square_norms computes all sites' norms together.
        self.square_norm = copy.copy(square_norm) if isinstance(square_norm, dict) else dict(square_norm or {})
        self.estimator = None if estimator is None else Estimators(estimator)
        self.temper = temper
        self.step = 0
        self._kls = {term.name for term in self.objective_terms if term.is_kl}
        self._by_kind = {k: [term for term in self.objective_terms if term.kind == k] for k in get_args(Kind)}
        self._watch = Watch()
        self.at_draws: set[str] = set()  # sites whose KL is taken at their draws
        self._checked: tuple[object, ...] | None = None  # the guide and the sites whose dependence was checked

    def differentiable_loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> Tensor:
        """The loss in nats with its graph, shape ``()``; advances ``step`` unless gradients are off."""
        return self._step(_Call(model, guide, args, kwargs))[0]

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """The loss in nats as a number, without gradients; leaves ``step`` as it is."""
        with torch.no_grad():
            outcome = self._outcome(_Call(model, guide, args, kwargs))
            value = float(torch_item(outcome.loss))
        self._watch.value(self.step, value, partial(self._explain, outcome))
        return value

    def loss_and_grads(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """Add the loss's gradients to the parameters' ``.grad``, advance ``step``, and return the loss in nats."""
        step = self.step
        loss, outcome = self._step(_Call(model, guide, args, kwargs))
        if loss.requires_grad:
            loss.backward()
        value = float(torch_item(loss))
        self._watch.value(step, value, partial(self._explain, outcome))
        return value

    def terms(self, model: Program, guide: Program, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """The parts that add up to the loss, without gradients; leaves ``step`` as it is.

        Returns:
            Parts by name, in nats and of shape ``()``. They are ``nll`` (expected negative log likelihood), ``l0``,
            ``l2`` (the penalties), ``kl_gate``, ``kl_slab``, ``kl_other`` (times ``kl_scale``), and extra terms by
            their names. Parts that the objective does not have are 0.
        """
        with torch.no_grad():
            parts = self._outcome(_Call(model, guide, args, kwargs)).parts
        return {term.name: torch.as_tensor(parts.get(term.name, 0.0)) for term in (*TERMS, *self.objective_terms)}

    def drop(self, sites: Collection[str]) -> None:
        """Forget the coefficients and norms of gate sites that have left the model."""
        for value in (self.lam, self.group_size, self.weight_decay, self.square_norm):
            if isinstance(value, dict):
                for site in sites:
                    value.pop(site, None)

    def state_dict(self) -> ElboState:
        """What a resumed run needs: the step and the score function's baseline."""
        return {"step": self.step, "baseline": None if self.estimator is None else self.estimator.baseline}

    def load_state_dict(self, state: ElboState) -> None:
        """Continue from :meth:`state_dict` of an objective with the same options."""
        self.step = state["step"]
        if self.estimator is not None:
            self.estimator.baseline = state["baseline"]

    def kl_scale_now(self) -> float | Tensor:
        """The factor on every KL at the current step; what a schedule returns is checked without reading a device."""
        if not callable(self.kl_scale):
            return self.kl_scale
        value: float | Tensor = self.kl_scale(self.step)
        if not isinstance(value, Tensor) or value.dim() or value.device.type == "cpu":
            check_number(f"kl_scale({self.step})", value)
        return value

    def _step(self, call: _Call) -> tuple[Tensor, _Outcome]:
        """The loss, checked where that is cheap or due, with its terms and runs."""
        outcome = self._outcome(call)
        loss = outcome.loss
        if loss.requires_grad:  # it is trained
            self._watch.loss(self.step, loss, outcome.parts, partial(self._explain, outcome))
            if outcome.runs:
                self._watch.gates(self.step, outcome.runs[0].guide)
        if torch.is_grad_enabled():
            self.step += 1
        return loss, outcome

    def _outcome(self, call: _Call) -> _Outcome:
        """The terms; once more where it turns out that KLs have to be taken at the draws."""
        check_arguments(call.args, call.kwargs)
        outcome = self._estimate(call)
        return self._estimate(call) if self._is_newly_at_draws(call, outcome.runs) else outcome

    def _is_newly_at_draws(self, call: _Call, runs: Sequence[Run]) -> bool:
        """Check what the sites depend on, in the first step and every hundredth; whether KLs change by that."""
        key = (id(call.guide), *(name for run in runs[:1] for sites in (run.model, run.guide) for name in sites))
        if key == self._checked and (self.step % EVERY or not torch.is_grad_enabled()):
            return False
        with forked_generators(), torch.no_grad():
            run = runs[0] if runs else self._get_trace(*call)
            before = self.at_draws
            run_model, run_guide = (partial(_run_under, program, call) for program in (call.model, call.guide))
            slab = with_latent_gates(self.slab, run.model)
            self.at_draws = check_dependence(run.model, run.guide, slab, run_model, run_guide, self._is_leave_one_out)
        self._checked = key
        return self.at_draws != before

    @property
    def _is_leave_one_out(self) -> bool:
        return self.estimator is not None and self.estimator.name == "leave_one_out"

    def _estimate(self, call: _Call) -> _Outcome:
        """The terms at draws that are made as the estimator asks."""
        if self._is_leave_one_out:
            return self._leave_one_out(call)
        if self.estimator is not None and torch.is_grad_enabled():
            return self._at_estimator_draws(self.estimator, call)
        runs = list(self._get_traces(*call))  # type: ignore[no-untyped-call]
        return _Outcome(self._mean(self.sum_terms(runs), self.num_particles), runs)

    def _leave_one_out(self, call: _Call) -> _Outcome:
        """The terms of particles, each of which is compared with the others for the binary gates' gradient."""
        runs: list[Run] = []
        has_gradient = torch.is_grad_enabled()

        def evaluate(of_guide: Record) -> _Parts:
            run = self._run(call.model, of_guide, call.args, call.kwargs)._replace(at_draws=has_gradient)
            if not self.vectorize_particles:
                runs.append(run)
            return {**self.sum_terms([run]), _LOG_Q: gates_log_prob(run.guide)}

        run_guide = partial(record_run, call.guide, call.args, call.kwargs, self.step)
        with SharedRows():  # the particles differ by their draws alone
            found = over_particles(evaluate, run_guide, call.guide, self.num_particles, self.vectorize_particles)
        log_q = found.pop(_LOG_Q)
        parts = self._mean({name: values.sum() for name, values in found.items()}, self.num_particles)
        if has_gradient:
            loss = reduce(operator.add, self._mean(found, 1).values())
            temper = self.temper(self.step) if callable(self.temper) else self.temper
            parts = _summed([parts, {"nll": leave_one_out(loss, log_q, temper)}])
        return _Outcome(parts, runs)

    def _at_estimator_draws(self, estimator: Estimators, call: _Call) -> _Outcome:
        """The terms at draws that an estimator makes of the binary gates, each beside its own of the other latents."""
        runs: list[Run] = []
        parts: list[_Parts] = []
        for _ in range(self.num_particles):
            of_guide = record_run(call.guide, call.args, call.kwargs, self.step)
            gates = binary_gates(of_guide.sites)
            if not gates:
                raise ValueError(
                    f"Expected a BernoulliGate in the guide for estimator={estimator.name!r}, but found none."
                )
            if together := [name for name, site in of_guide.sites.items() if isinstance(site["fn"], Conditional)]:
                raise ValueError(
                    f"Expected a guide of independent sites for estimator={estimator.name!r}, which draws the gates "
                    f"anew, but it draws {together} together. Take estimator='leave_one_out'."
                )

            def evaluate(values: Mapping[str, Tensor], of_guide: Record = of_guide) -> Evaluation:
                runs.append(self._run(call.model, of_guide, call.args, call.kwargs, values))
                return self._evaluation(runs[-1])

            evaluations, surrogate = estimator(evaluate, gates)
            each = self._mean(_summed(x.parts for x in evaluations), len(evaluations) * self.num_particles)
            parts += [each, {"nll": surrogate / self.num_particles}]
        return _Outcome(_summed(parts), runs)

    def _mean(self, sums: _Parts, particles: int) -> _Parts:
        """Terms as they enter the loss, of their sums over particles."""
        kl_scale = self.kl_scale_now()
        factors = {name: (kl_scale if name in self._kls else 1.0) / particles for name in sums}
        return {name: value if factors[name] == 1.0 else value * factors[name] for name, value in sums.items()}

    def _get_trace(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> Run:
        return self._run(model, record_run(guide, args, kwargs, self.step), args, kwargs)

    def _run(
        self, model: Program, of_guide: Record, args: Args, kwargs: Kwargs, values: Mapping[str, Tensor] | None = None
    ) -> Run:
        """A run of the guide, in which some sites may have other values, and one of the model at it."""
        changed = {name: {**of_guide.sites[name], "value": value} for name, value in (values or {}).items()}
        drawn = {**of_guide.sites, **changed}
        of_model = record_run(model, args, kwargs, self.step, drawn).sites
        of_guide_too = as_in_model(of_model, drawn)
        return Run(in_log_joint(of_model, of_guide_too, self.slab), of_guide_too, of_guide.joint_draws)

    def evaluate(
        self, model: Program, of_guide: Record, values: Mapping[str, Tensor], args: Args, kwargs: Kwargs
    ) -> Evaluation:
        """The objective at given values of some gates, which replace those of a guide's run."""
        return self._evaluation(self._run(model, of_guide, args, kwargs, values))

    def _evaluation(self, run: Run) -> Evaluation:
        parts = self.sum_terms([run])
        scaled = self._mean(parts, 1)
        present = [term for term in self.objective_terms if term.name in scaled]
        cost = [scaled[term.name] for term in present if term.uses_draws]
        analytic = [scaled[term.name] for term in present if not term.uses_draws]
        return Evaluation(parts, reduce(operator.add, cost) if cost else torch.zeros(()), analytic)

    def sum_terms(self, runs: Iterable[Run]) -> _Parts:
        """Every term, summed over the sites of some runs; without ``kl_scale``."""
        return _summed({term: value} for run in runs for term, _, value in self._values(run))

    def _values(self, run: Run, apart: bool = False) -> Iterator[tuple[str, str, Tensor]]:
        """Terms, sites and values of one run, on request site by site."""
        for group in site_groups(run, self):
            for term in self._by_kind[group.kind]:
                whole = group.joint is None or (not apart and term.takes(group, self))
                for part in (group,) if whole else group.apart:
                    value = term.value(part, self)
                    if value is not None:
                        yield term.name, part.name, value

    @torch.no_grad()
    def _explain(self, outcome: _Outcome) -> str:
        """Which terms are not finite, and at which sites."""
        each = [found for run in outcome.runs for found in self._values(run, apart=True)]
        bad = [f"{term} of site {name!r} is {float(x)}" for term, name, x in each if not torch.isfinite(x)]
        sums = [f"{term} is {float(x)}" for term, x in outcome.parts.items() if not torch.isfinite(x)]
        return ", ".join(dict.fromkeys(bad or sums)) or "every term is finite"


def _run_under(program: Program, call: _Call, record: Record) -> None:
    with record:
        program(*call.args, **call.kwargs)


def _summed(parts: Iterable[_Parts]) -> _Parts:
    """Terms added up by name."""
    sums: _Parts = {}
    for each in parts:
        for name, value in each.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums
