"""Gradient estimators for gates of two values, whose draws have no derivative.

Each draws the gates, evaluates the cost at its draws and returns a surrogate: a tensor whose value is 0 and whose
gradient, for the gates' log odds, estimates that of the expected cost. The gates' own KL never comes in: it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate

__all__ = ["BIASED", "Estimate", "EstimatorName", "Estimators", "Evaluation"]

EstimatorName = Literal["score_function", "leave_one_out", "arm", "straight_through", "rebar"]
BIASED: tuple[EstimatorName, ...] = ("straight_through",)

_DECAY = 0.9  # of the score function's baseline
_TEMPERATURE = 0.5  # of REBAR's concrete
_Values = dict[str, Tensor]
_Gates = Mapping[str, BernoulliGate]


class Evaluation(NamedTuple):
    """The objective at given gates.

    Attributes:
        parts: its parts by name, shape ``()``.
        cost: the sum of the parts that depend on the gates' values.
        analytic: the other parts as they enter the loss.
    """

    parts: dict[str, Tensor]
    cost: Tensor
    analytic: Sequence[Tensor] = ()


_Evaluate = Callable[[_Values], Evaluation]


class Estimate(NamedTuple):
    """What an estimator found.

    Attributes:
        evaluations: evaluations at exact draws, whose mean is the loss.
        surrogate: 0 with the gradient for the gates' log odds, shape ``()``.
    """

    evaluations: list[Evaluation]
    surrogate: Tensor


class Estimators:
    """The estimators by name, with what they keep from step to step.

    Args:
        name: ``"score_function"`` (REINFORCE, with a decaying average of the cost as its baseline),
            ``"leave_one_out"`` (each draw's baseline is the mean of the others), ``"arm"`` (augment, reinforce, merge:
            two antithetic draws), ``"straight_through"`` (the draw's derivative is taken for that of its mean; biased)
            or ``"rebar"`` (the score function with a binary concrete as control variate).

    References:
        Williams (1992); Kool, van Hoof, Welling (2019), Buy 4 REINFORCE samples; Yin, Zhou (2019), arXiv:1807.11143;
        Bengio, Leonard, Courville (2013), arXiv:1308.3432; Tucker et al. (2017), arXiv:1703.07370.
    """

    def __init__(self, name: EstimatorName) -> None:
        self.name = name
        self.baseline: Tensor | None = None

    def __call__(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        """Estimate the cost and its gradient.

        Args:
            evaluate: the objective at values of the gates by site.
            gates: the gates by site.
            draws: independent draws (pairs of draws for ``"arm"``).
        """
        return _ESTIMATORS[self.name](self, evaluate, gates, draws)

    def _score_function(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        drawn = [_draw(gates) for _ in range(draws)]
        evaluations = [evaluate(values) for values in drawn]
        costs = torch.stack([evaluation.cost.detach() for evaluation in evaluations])
        baseline = costs.new_zeros(()) if self.baseline is None else self.baseline.to(costs)
        surrogate = _zero(costs) + sum(
            (cost - baseline) * _score(gates, values) for cost, values in zip(costs, drawn, strict=True)
        )
        # Only now: a baseline that knew these draws would bias the gradient.
        mean = costs.mean()
        self.baseline = mean if self.baseline is None else _DECAY * baseline + (1 - _DECAY) * mean
        return Estimate(evaluations, surrogate / draws)

    def _leave_one_out(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        drawn = [_draw(gates) for _ in range(draws)]
        evaluations = [evaluate(values) for values in drawn]
        costs = torch.stack([evaluation.cost.detach() for evaluation in evaluations])
        # cost - mean of the others = (cost - mean of all) * draws / (draws - 1)
        centred = (costs - costs.mean()) / (draws - 1)
        surrogate = _zero(costs) + sum(
            cost * _score(gates, values) for cost, values in zip(centred, drawn, strict=True)
        )
        return Estimate(evaluations, surrogate)

    def _arm(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        evaluations: list[Evaluation] = []
        surrogate: Tensor | None = None
        for _ in range(draws):
            noise = {name: torch.rand_like(gate.logits) for name, gate in gates.items()}
            pair = [
                evaluate({name: (noise[name] > torch.sigmoid(-g.logits)).to(g.logits) for name, g in gates.items()}),
                evaluate({name: (noise[name] < torch.sigmoid(g.logits)).to(g.logits) for name, g in gates.items()}),
            ]
            evaluations += pair
            difference = (pair[0].cost - pair[1].cost).detach()
            slope = [((noise[name] - 0.5) * _change(gate.logits)).sum() for name, gate in gates.items()]
            term = difference * torch.stack(slope).sum() / draws
            surrogate = term if surrogate is None else surrogate + term
        assert surrogate is not None
        return Estimate(evaluations, surrogate)

    def _straight_through(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        evaluations = []
        for _ in range(draws):
            drawn = _draw(gates)
            evaluations.append(evaluate({name: drawn[name] + _change(gate.probs) for name, gate in gates.items()}))
        return Estimate(evaluations, _zero(evaluations[0].cost))

    def _rebar(self, evaluate: _Evaluate, gates: _Gates, draws: int) -> Estimate:
        evaluations: list[Evaluation] = []
        surrogate: Tensor | None = None
        for _ in range(draws):
            hard, free, tied = _relaxations(gates)
            evaluation = evaluate(hard)
            evaluations.append(evaluation)
            _, free_slope = _cost_and_slope(evaluate, free)
            tied_cost, tied_slope = _cost_and_slope(evaluate, tied)
            term = (evaluation.cost.detach() - tied_cost) * _score(gates, hard)
            for name in gates:
                term = term + (free_slope[name] * _change(free[name])).sum()
                term = term - (tied_slope[name] * _change(tied[name])).sum()
            surrogate = term / draws if surrogate is None else surrogate + term / draws
        assert surrogate is not None
        return Estimate(evaluations, surrogate)


_ESTIMATORS: dict[EstimatorName, Callable[[Estimators, _Evaluate, _Gates, int], Estimate]] = {
    "score_function": Estimators._score_function,
    "leave_one_out": Estimators._leave_one_out,
    "arm": Estimators._arm,
    "straight_through": Estimators._straight_through,
    "rebar": Estimators._rebar,
}


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def _change(x: Tensor) -> Tensor:
    """0 with the gradient of x."""
    return x - x.detach()


def _draw(gates: _Gates) -> _Values:
    return {name: gate.sample() for name, gate in gates.items()}


def _score(gates: _Gates, values: _Values) -> Tensor:
    """0 with the gradient of the draws' log probability."""
    scores = [_change((values[name].detach() * g.logits + F.logsigmoid(-g.logits)).sum()) for name, g in gates.items()]
    return torch.stack(scores).sum()


def _relaxations(gates: _Gates) -> tuple[_Values, _Values, _Values]:
    """Exact draws, the concretes that they round, and concretes drawn anew given the exact draws."""
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
    """The cost at relaxed gates and its gradient for them alone; the weights keep out of the control variate."""
    leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
    cost = evaluate(leaves).cost
    found: Sequence[Tensor | None] = torch.autograd.grad(cost, list(leaves.values()), allow_unused=True)
    slopes = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    return cost.detach(), dict(zip(leaves, slopes, strict=True))
