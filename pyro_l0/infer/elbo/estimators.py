"""Gradient estimators for binary gates, whose draws have no derivative.

Each draws the gates, evaluates the cost at its draws and returns a surrogate: a tensor whose value is 0 and whose
gradient, for the gates' log odds, estimates that of the expected cost. The gates' own KL is exact and not part of it.
A cost has shape ``()``, or one of batches for gates of each example: the leading dimensions of every gate. Then an
example's gates answer for its own cost alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate
from pyro_l0.expect import expect_count
from pyro_l0.infer.record import Site

EstimatorName = Literal["score_function", "leave_one_out", "arm", "straight_through", "reinmax", "rebar"]

_DECAY = 0.9  # of the score function's baseline
_TEMPERATURE = 0.5  # of REBAR's concrete
_Values = dict[str, Tensor]
_Gates = Mapping[str, BernoulliGate]


class Evaluation(NamedTuple):
    """The objective at given gates, split by what an estimator has to differentiate by itself."""

    parts: dict[str, Tensor]  # by name, shape ()
    cost: Tensor  # the sum of the parts that depend on the gates' values; its shape is also the surrogate's
    analytic: Sequence[Tensor] = ()  # the other parts as they enter the loss


_Evaluate = Callable[[_Values], Evaluation]
Estimate = tuple[list[Evaluation], Tensor]


class Estimators:
    """A gradient estimator for binary gates, by name, with what it keeps from step to step.

    Use it as ``L0_ELBO(..., estimator=name)``; :func:`~pyro_l0.diagnostics.measure_gradient` compares them.

    Args:
        name: ``"score_function"`` (REINFORCE, with a decaying average of the cost as its baseline), ``"arm"`` (augment,
            reinforce, merge: two antithetic draws), ``"straight_through"`` (uses the derivative of the mean for that of
            the draw; biased), ``"reinmax"`` (its second-order form: exact on average where the cost is quadratic in
            each gate, otherwise biased) or ``"rebar"`` (the score function with a binary concrete as control variate).
            ``"leave_one_out"`` (each draw's baseline is the mean of the others) compares whole particles, which
            :class:`~pyro_l0.infer.L0_ELBO` draws.

    References:
        Williams (1992); Kool, van Hoof, Welling (2019), Buy 4 REINFORCE samples; Yin, Zhou (2019), arXiv:1807.11143;
        Bengio, Leonard, Courville (2013), arXiv:1308.3432; Liu et al. (2023), arXiv:2304.08612, algorithm 2 at
        temperature 1; Tucker et al. (2017), arXiv:1703.07370.
    """

    def __init__(self, name: EstimatorName) -> None:
        self.name = name
        self.baseline: Tensor | None = None

    def __call__(self, evaluate: _Evaluate, gates: _Gates) -> Estimate:
        """Evaluations at an exact draw (a pair for ``"arm"``), whose mean is the loss, and a surrogate.

        The surrogate is 0 with the gradient for the gates' log odds, shape that of the cost.
        """
        return _ESTIMATORS.get(self.name, self._score_function)(evaluate, gates)

    def _score_function(self, evaluate: _Evaluate, gates: _Gates) -> Estimate:
        values = _draw(gates)
        evaluation = evaluate(values)
        cost = evaluation.cost.detach()
        baseline = cost.new_zeros(()) if self.baseline is None else self.baseline.to(cost)
        surrogate = (cost - baseline) * _score(gates, values, cost)
        # Only now: a baseline that knew this draw would bias the gradient.
        self.baseline = cost.mean() if self.baseline is None else _DECAY * baseline + (1 - _DECAY) * cost.mean()
        return [evaluation], surrogate


def _arm(evaluate: _Evaluate, gates: _Gates) -> Estimate:
    """The cost at two gates from the same uniform numbers u, less one another, times u - 1/2.

    z = 1[u > sigmoid(-l)] and 1[u < sigmoid(l)] both have the probability sigmoid(l). They are the same where the
    logits l are far from 0, so that the difference is 0 there (Yin and Zhou 2019).
    """
    noise = {name: torch.rand_like(gate.logits) for name, gate in gates.items()}
    first = evaluate({name: (noise[name] > torch.sigmoid(-g.logits)).to(g.logits) for name, g in gates.items()})
    second = evaluate({name: (noise[name] < torch.sigmoid(g.logits)).to(g.logits) for name, g in gates.items()})
    difference = (first.cost - second.cost).detach()
    slope = [_over((noise[name] - 0.5) * _change(gate.logits), difference) for name, gate in gates.items()]
    return [first, second], difference * torch.stack(slope).sum(0)


def _straight_through(evaluate: _Evaluate, gates: _Gates) -> Estimate:
    drawn = _draw(gates)
    evaluation = evaluate({name: drawn[name] + _change(gate.probs) for name, gate in gates.items()})
    return [evaluation], torch.zeros_like(evaluation.cost)


def _reinmax(evaluate: _Evaluate, gates: _Gates) -> Estimate:
    """Draws whose derivative is half the probability of the other value.

    With the mean m of draw and p, the paper's 2 m (1 - m) - p (1 - p) / 2 is (1 - p) / 2 at 1 and p / 2 at 0. So the
    mean gradient is p (1 - p) (f'(0) + f'(1)) / 2, where f(1) - f(0) is integrated by the trapezoidal rule.
    """
    drawn = _draw(gates)
    slopes = {name: 0.5 * torch.sigmoid((1 - 2 * drawn[name]) * gate.logits.detach()) for name, gate in gates.items()}
    evaluation = evaluate({name: drawn[name] + slopes[name] * _change(gate.logits) for name, gate in gates.items()})
    return [evaluation], torch.zeros_like(evaluation.cost)


def _rebar(evaluate: _Evaluate, gates: _Gates) -> Estimate:
    """The score function of the cost less that of a concrete, and the concrete's own derivative added again.

    With c the cost, z the draw (``hard``), x the concrete that it rounds (``free``) and y a concrete given z
    (``tied``), the gradient is E[(c(z) - c(y)) d log q(z) + d c(x) - d c(y)], where the derivatives of x and y are
    pathwise (Tucker and others 2017). The terms with x and y have the mean 0 together.
    """
    hard, free, tied = _relaxations(gates)
    evaluation = evaluate(hard)
    _, free_slope = _cost_and_slope(evaluate, free)
    tied_cost, tied_slope = _cost_and_slope(evaluate, tied)
    surrogate = (evaluation.cost.detach() - tied_cost) * _score(gates, hard, tied_cost)
    for name in gates:
        surrogate = surrogate + _over(free_slope[name] * _change(free[name]), tied_cost)
        surrogate = surrogate - _over(tied_slope[name] * _change(tied[name]), tied_cost)
    return [evaluation], surrogate


_ESTIMATORS = {"arm": _arm, "straight_through": _straight_through, "reinmax": _reinmax, "rebar": _rebar}


def _change(x: Tensor) -> Tensor:
    """A tensor of zeros in the shape of x with its gradient."""
    return x - x.detach()


def _draw(gates: _Gates) -> _Values:
    return {name: gate.sample() for name, gate in gates.items()}


def _over(x: Tensor, cost: Tensor) -> Tensor:
    """The sum of x, which has a gate's shape, in the shape of the cost."""
    if x.shape[: cost.dim()] != cost.shape:
        raise ValueError(
            f"Expected a cost of shape () or of the first sizes of {tuple(x.shape)}, a site's gates, but got "
            f"{tuple(cost.shape)}."
        )
    # torch sums over everything where it is given no dimension.
    return x.sum(tuple(range(cost.dim(), x.dim()))) if x.dim() > cost.dim() else x


def _score(gates: _Gates, values: _Values, cost: Tensor) -> Tensor:
    """0 with the gradient of the draws' log probability, in the shape of the cost."""
    scores = [values[name].detach() * gate.logits + F.logsigmoid(-gate.logits) for name, gate in gates.items()]
    return torch.stack([_change(_over(score, cost)) for score in scores]).sum(0)


def _relaxations(gates: _Gates) -> tuple[_Values, _Values, _Values]:
    """Exact draws, the concretes that they round, and new concretes given the exact draws."""
    hard: _Values = {}
    free: _Values = {}
    tied: _Values = {}
    for name, gate in gates.items():
        logits, p = gate.logits, torch.sigmoid(gate.logits)
        eps = torch.finfo(logits.dtype).eps
        u, v = torch.rand((2, *logits.shape), dtype=logits.dtype, device=logits.device).clamp(eps, 1 - eps)
        relaxed = logits + torch.logit(u)
        hard[name] = (relaxed > 0).to(logits.dtype).detach()
        # The uniform that leads to the same side of the threshold at 1 - p.
        again = torch.where(hard[name] > 0, 1 - p * (1 - v), (1 - p) * v)
        free[name] = torch.sigmoid(relaxed / _TEMPERATURE)
        tied[name] = torch.sigmoid((logits + torch.logit(again.clamp(eps, 1 - eps))) / _TEMPERATURE)
    return hard, free, tied


def _cost_and_slope(evaluate: _Evaluate, values: _Values) -> tuple[Tensor, _Values]:
    """The cost at relaxed gates and its gradient for them alone, without the weights."""
    leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
    cost = evaluate(leaves).cost
    slopes = torch.autograd.grad(cost.sum(), list(leaves.values()), materialize_grads=True)
    return cost.detach(), dict(zip(leaves, slopes, strict=True))


def check_particles(num_particles: object, estimator: EstimatorName | None, temper: object) -> None:
    """Refuse numbers of particles, estimators and factors out of range."""
    if estimator is not None and estimator not in get_args(EstimatorName):
        raise ValueError(f"Expected estimator to be one of {get_args(EstimatorName)}, but got {estimator!r}.")
    expect_count(2 if estimator == "leave_one_out" else 1, num_particles=num_particles)
    if not callable(temper) and not (isinstance(temper, Real) and 0 < float(temper) <= 1):
        raise ValueError(f"Expected temper to be a number in (0, 1] or a function of the step, but got {temper!r}.")


def binary_gates(sites: Mapping[str, Site]) -> dict[str, BernoulliGate]:
    """The BernoulliGates of a guide's sample sites, whatever wraps them."""
    found = {name: find_gate(site["fn"]) for name, site in sites.items() if site["type"] == "sample"}
    return {name: gate for name, gate in found.items() if isinstance(gate, BernoulliGate)}


def gates_log_prob(sites: Mapping[str, Site]) -> Tensor:
    """Log probability of a guide's binary gates at its draws, shape ``()``; 0 if all are pathwise."""
    found = [sites[name]["fn"].log_prob(sites[name]["value"]).sum() for name in binary_gates(sites)]
    return torch.stack(found).sum() if found else torch.zeros(())


def leave_one_out(loss: Tensor, log_q: Tensor, temper: float) -> Tensor:
    r"""0 with an estimate of the mean loss's gradient for the gates' parameters.

    :math:`\sum_s (c_s - \bar c) \nabla \log q(z_s) / (S - 1)` with the cost
    :math:`c = \kappa (loss - \log q) + \log q`: each draw's baseline is the mean of the others. Where
    :math:`\log q` is a part of the loss and the posterior is exact, all costs are the same and the estimate has no
    variance; taking the gates' KL out would leave one. Losses and log probabilities have shape ``(S,)``, or
    ``(S, batch)`` for gates of each example, and ``temper`` is :math:`\kappa` in (0, 1].

    References:
        Kool, van Hoof, Welling (2019), Buy 4 REINFORCE samples, get a baseline for free; Richter et al. (2020),
        VarGrad, arXiv:2010.10436.
    """
    cost = (temper * (loss - log_q) + log_q).detach() if temper != 1 else loss.detach()
    centred = (cost - cost.mean(0)) / (len(cost) - 1)
    return (centred * (log_q - log_q.detach())).sum()  # they may be of different dtypes
