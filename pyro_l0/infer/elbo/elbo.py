"""The three objectives of the L0 paper as one Pyro ELBO whose gate terms are exact."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from pyro.infer.elbo import ELBO
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_l0.expect import expect
from pyro_l0.fast.record import Record, Site
from pyro_l0.infer.elbo.coefficients import NAMES, Coefficient, as_dict, by_site, check_numbers, is_zero, kl_scale_at
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
from pyro_l0.infer.elbo.terms import TERMS, Kind, Run, Term, as_in_model, blocks_of, check_slab, terms_of
from pyro_l0.infer.runs import (
    EVERY,
    Args,
    Kwargs,
    Program,
    Watch,
    bad_values,
    check_arguments,
    generators_kept,
    number_of_bad,
    odd_arguments,
    over_particles,
    record_run,
)
from pyro_l0.infer.slabs import Switch, switches_of

Objective = Literal["l0", "free_energy", "spike_slab"]
_LOG_Q = "log q(z)"  # beside the terms of a particle
_Parts = dict[str, Tensor]  # by the names of terms


class ElboState(TypedDict):
    """What a resumed run needs of an objective: the step, and the score function's baseline."""

    step: int
    baseline: Tensor | None


class _Outcome(NamedTuple):
    """The terms of a loss, the runs they are from, and what to say if they are not finite."""

    parts: _Parts
    runs: list[Run]
    explain: Callable[[], str]

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

    Use it as ``SVI(model, guide, optim, loss=elbo)``, or with a torch optimiser as ``elbo(model, guide)``, a module
    whose ``forward`` returns the loss, a tensor of shape ``()``.

    The KL of a gate is analytic: with a density, sampling it would bias the gradient, whatever the number of
    particles. Only ``estimator="leave_one_out"`` samples the KL of binary gates, in the log ratio at the draws, which
    is unbiased. Latent variables other than gates and slabs add their KL to every objective, in closed form where one
    is registered and by the pathwise sample otherwise. A loss that is not finite raises: on the CPU at once, on an
    accelerator at the next hundredth step, when the host also checks whether all gates of a site have closed.

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
            gate's weights; see :func:`pyro_l0.nn.square_norms.square_norms`.
        estimator: how the gradient of :class:`~pyro_l0.distributions.BernoulliGate` posteriors is estimated:
            ``"score_function"``, ``"leave_one_out"``, ``"arm"``, ``"straight_through"`` (biased) or ``"rebar"``; see
            :class:`~pyro_l0.infer.elbo.estimators.Estimators`.
        num_particles: draws per step.
        max_plate_nesting: as in Pyro, needed only for ``vectorize_particles``; guessed if not given.
        vectorize_particles: draw the particles in one run: in a plate, as in Pyro; with ``"leave_one_out"`` by
            ``torch.vmap``, for which the model need not broadcast.
        temper: factor in (0, 1] on the model's side of the log ratio in the gradient of ``"leave_one_out"`` for the
            gates; a number, or a function of the step. Let it rise to 1 over the first third of the training, and the
            gates do not settle before the slabs.
        extra_terms: your own terms, added to those of the objective; see :class:`~pyro_l0.infer.elbo.terms.Term`.

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
        slab: Mapping[str, Switch] | None = None,
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
        expect(Mapping | None, "a dict by gate site", slab=slab, square_norm=square_norm)
        size = 1.0 if group_size is None else group_size
        check_numbers(kl_scale, lam=lam, group_size=size, weight_decay=weight_decay)
        check_particles(num_particles, estimator, vectorize_particles, temper)
        check_slab(objective, slab, lam=lam, weight_decay=weight_decay)
        super().__init__(  # type: ignore[no-untyped-call]
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
        )
        self.objective = objective
        self.lam = as_dict(lam)
        self.group_size = as_dict(size)
        self.slab = switches_of(slab)
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
        return self._step(model, guide, args, kwargs)[0]

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """The loss in nats as a number, without gradients; leaves ``step`` as it is."""
        with torch.no_grad():
            outcome = self._terms(model, guide, args, kwargs)
            value = float(torch_item(outcome.loss))
        self._watch.value(self.step, value, outcome.explain)
        return value

    def loss_and_grads(self, model: Program, guide: Program, *args: object, **kwargs: object) -> float:
        """Add the loss's gradients to the parameters' ``.grad``, advance ``step``, and return the loss in nats."""
        step = self.step
        loss, outcome = self._step(model, guide, args, kwargs)
        if loss.requires_grad:
            loss.backward()
        value = float(torch_item(loss))
        self._watch.value(step, value, outcome.explain)
        return value

    def terms(self, model: Program, guide: Program, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """The parts that add up to the loss, without gradients; leaves ``step`` as it is.

        Returns:
            In nats, of shape ``()``: ``nll`` (expected negative log likelihood), ``l0``, ``l2`` (the penalties),
            ``kl_gate``, ``kl_slab``, ``kl_other`` (times ``kl_scale``), and extra terms by their names. Parts that the
            objective does not have are 0.
        """
        with torch.no_grad():
            parts = self._terms(model, guide, args, kwargs).parts
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
        """The factor on every KL at the current step."""
        return kl_scale_at(self.kl_scale, self.step)

    def _step(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> tuple[Tensor, _Outcome]:
        """The loss, checked where that is cheap or due, with its terms and runs."""
        outcome = self._terms(model, guide, args, kwargs)
        loss = outcome.loss
        if loss.requires_grad:  # it is trained
            self._watch.loss(self.step, loss, outcome.parts, outcome.explain)
            if outcome.runs:
                self._watch.gates(self.step, outcome.runs[0].guide)
        if torch.is_grad_enabled():
            self.step += 1
        return loss, outcome

    def _terms(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> _Outcome:
        check_arguments(model, args, kwargs)
        runs: list[Run] = []
        if self.estimator is not None and self.estimator.name == "leave_one_out":
            found = self._leave_one_out
        elif self.estimator is not None and torch.is_grad_enabled():
            found = partial(self._estimate, self.estimator)
        else:
            found = self._pathwise
        norms: Any = (
            self.square_norm
        )  # those of pyro_l0.nn.square_norms.square_norms can be computed during the network's forward pass
        decayed = [name for name in self.square_norm if not is_zero(by_site(self.weight_decay, name))]
        with norms.during(decayed) if hasattr(norms, "during") else nullcontext():
            parts = found(model, guide, args, kwargs, runs)
            if self._newly_at_draws(model, guide, args, kwargs, runs):
                runs.clear()
                parts = found(model, guide, args, kwargs, runs)
        return _Outcome(parts, runs, partial(self._explain, runs, model, args, kwargs))

    def _newly_at_draws(self, model: Program, guide: Program, args: Args, kwargs: Kwargs, runs: Sequence[Run]) -> bool:
        """Check what the sites depend on, in the first step and every hundredth; whether KLs change by that."""
        key = (id(guide), *(name for of in (runs[0].model, runs[0].guide) for name in of)) if runs else (id(guide),)
        if key == self._checked and (self.step % EVERY or not torch.is_grad_enabled()):
            return False
        with generators_kept(), torch.no_grad():
            run = runs[0] if runs else self._get_trace(model, guide, args, kwargs)
            before, leave_one_out = self.at_draws, self.estimator is not None and self.estimator.name == "leave_one_out"
            run_model, run_guide = (partial(_under, program, args, kwargs) for program in (model, guide))
            self.at_draws = check_dependence(run.model, run.guide, self.slab, run_model, run_guide, leave_one_out)
        self._checked = key
        return self.at_draws != before

    # ------------------------------------------------------------ three ways to a gradient

    def _pathwise(self, model: Program, guide: Program, args: Args, kwargs: Kwargs, runs: list[Run]) -> _Parts:
        """The terms of every particle, whose draws carry the gradient."""
        parts: _Parts = {}
        for run in self._get_traces(model, guide, args, kwargs):  # type: ignore[no-untyped-call]
            runs.append(run)
            self._add_run(parts, run)
        return self._mean(parts, self.num_particles)

    def _leave_one_out(self, model: Program, guide: Program, args: Args, kwargs: Kwargs, runs: list[Run]) -> _Parts:
        """The terms of every particle; the binary gates' gradient compares each particle with the others."""
        has_gradient = torch.is_grad_enabled()

        def evaluate(of_guide: Record) -> _Parts:
            run = self._run(model, of_guide, of_guide.sites, args, kwargs)._replace(at_draws=has_gradient)
            if not self.vectorize_particles:
                runs.append(run)
            return {**self._add_run({}, run), _LOG_Q: gates_log_prob(run.guide)}

        def run_guide() -> Record:
            return record_run(guide, args, kwargs, self.step)

        found = over_particles(evaluate, run_guide, guide, self.num_particles, self.vectorize_particles)
        log_q = found.pop(_LOG_Q)
        parts = {name: values.sum() for name, values in found.items()}
        if not has_gradient:
            return self._mean(parts, self.num_particles)
        kl_scale = self.kl_scale_now()
        loss = reduce(operator.add, (x * kl_scale if name in self._kls else x for name, x in found.items()))
        temper = self.temper(self.step) if callable(self.temper) else self.temper
        return self._mean(parts, self.num_particles, leave_one_out(loss, log_q, temper))

    def _estimate(
        self, estimator: Estimators, model: Program, guide: Program, args: Args, kwargs: Kwargs, runs: list[Run]
    ) -> _Parts:
        """The terms at draws of the binary gates that an estimator makes."""
        of_guide = record_run(guide, args, kwargs, self.step)
        gates = binary_gates(of_guide.sites)
        if not gates:
            raise ValueError(f"Expected a BernoulliGate in the guide for estimator={estimator.name!r}, but found none.")

        def evaluate(values: Mapping[str, Tensor]) -> Evaluation:
            return self.evaluate(model, of_guide, values, args, kwargs, runs)

        evaluations, surrogate = estimator(evaluate, gates, self.num_particles)
        parts: _Parts = {}
        for evaluation in evaluations:
            for name, value in evaluation.parts.items():
                _add(parts, name, value)
        return self._mean(parts, len(evaluations), surrogate)

    def _mean(self, sums: _Parts, particles: int, surrogate: Tensor | None = None) -> _Parts:
        """Terms as they enter the loss, of their sums over particles, and a surrogate for the gradient of gates."""
        kl_scale = self.kl_scale_now()
        for name in sums:
            factor = (kl_scale if name in self._kls else 1.0) / particles
            if factor != 1.0:
                sums[name] = sums[name] * factor
        if surrogate is not None:
            _add(sums, "nll", surrogate)
        return sums

    # ------------------------------------------------------------ one run

    def _get_trace(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> Run:
        of_guide = record_run(guide, args, kwargs, self.step)
        return self._run(model, of_guide, of_guide.sites, args, kwargs)

    def _run(self, model: Program, of_guide: Record, drawn: dict[str, Site], args: Args, kwargs: Kwargs) -> Run:
        """A guide's run, whose sites have the values that are given, and the model's at these."""
        of_model = record_run(model, args, kwargs, self.step, drawn).sites
        return Run(of_model, as_in_model(of_model, drawn), of_guide.joint_draws)

    def evaluate(
        self,
        model: Program,
        of_guide: Record,
        values: Mapping[str, Tensor],
        args: Args,
        kwargs: Kwargs,
        runs: list[Run] | None = None,
    ) -> Evaluation:
        """The objective at given values of some gates, which replace those of a guide's run.

        The run at these values is added to ``runs``.
        """
        drawn = {name: {**site, "value": values.get(name, site["value"])} for name, site in of_guide.sites.items()}
        run = self._run(model, of_guide, drawn, args, kwargs)
        if runs is not None:
            runs.append(run)
        parts = self._add_run({}, run)
        kl_scale = self.kl_scale_now()
        present = [term for term in self.objective_terms if term.name in parts]
        scaled = [(term, parts[term.name] * kl_scale if term.is_kl else parts[term.name]) for term in present]
        cost = [part for term, part in scaled if term.uses_draws]
        analytic = [part for term, part in scaled if not term.uses_draws]
        return Evaluation(parts, reduce(operator.add, cost) if cost else torch.zeros(()), analytic)

    def _add_run(self, parts: _Parts, run: Run) -> _Parts:
        """Add every term of a run to parts."""
        for term, _, value in self._values(run):
            _add(parts, term, value)
        return parts

    def _values(self, run: Run, apart: bool = False) -> Iterator[tuple[str, str, Tensor]]:
        """Terms, sites and values of one run, on request site by site."""
        for block in blocks_of(run, self):
            for term in self._by_kind[block.kind]:
                whole = block.joint is None or (not apart and term.takes(block, self))
                for part in (block,) if whole else block.apart:
                    value = term.value(part, self)
                    if value is not None:
                        yield term.name, part.name, value

    @torch.no_grad()
    def _explain(self, runs: Sequence[Run], model: Program, args: Args, kwargs: Kwargs) -> str:
        """Which terms of some runs are not finite, and possible causes."""
        bad: dict[str, str] = {}
        causes = odd_arguments(model, args, kwargs)
        for run in runs:
            found = [(term, name, value) for term, name, value in self._values(run, apart=True) if number_of_bad(value)]
            bad |= {f"{term} of site {name!r} is {float(value)}": name for term, name, value in found}
            # If only an estimator's surrogate is not finite, any site may be the cause.
            for name in bad.values() or run.model:
                causes += [cause for of in (run.model, run.guide) if name in of for cause in bad_values(of[name])]
        for option in (*NAMES, "kl_scale"):
            value = getattr(self, option)
            entries = value.values() if isinstance(value, dict) else [value]
            causes += [f"{option} is not finite" for x in entries if not callable(x) and number_of_bad(x)]
        what = ", ".join(bad) or "every term is finite by itself"
        return f"{what}; {'; '.join(dict.fromkeys(causes)) or 'its inputs are finite'}."


def _under(program: Program, args: Args, kwargs: Kwargs, record: Record) -> None:
    with record:
        program(*args, **kwargs)


def _add(parts: _Parts, term: str, value: Tensor) -> None:
    """Sum terms over sites and particles."""
    parts[term] = parts[term] + value if term in parts else value
