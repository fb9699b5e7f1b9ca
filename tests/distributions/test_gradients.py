"""Derivatives against differences and against the exact mean; the papers' formulas are among the stored values."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from pyro_l0.distributions import HardConcrete
from tests.cases import SMOOTH

pytestmark = pytest.mark.interior  # a promise about densities and pathwise draws


def leaves(case):
    """The case's parameters as leaf tensors."""
    return tuple(torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in case.parameters.values())


def make(case, values):
    """The case's gate from its parameters in order."""
    return case.family.gate(**dict(zip(case.parameters, values, strict=True)))


# --- against differences ------------------------------------------------------------------------
# gradcheck compares with central differences of step 1e-6, whose rounding and curvature leave
# about 1e-8 on values of order one: its default tolerance of 1e-5 and 1e-3 is tightened to 1e-6.


def check(function, inputs):
    """gradcheck with a tolerance that fits float64."""
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-6)


QUANTITIES = {name: (lambda gate, name=name: getattr(gate, name)) for name in SMOOTH} | {
    "entropy": lambda gate: gate.entropy(),
    "log_prob": lambda gate: gate.log_prob(torch.tensor([0.0, 1.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_in_the_parameters(case, name):
    check(lambda *values: QUANTITIES[name](make(case, values)), leaves(case))


@pytest.mark.parametrize("name", ["cdf", "log_prob"])
def test_in_a_value_inside(case, name):
    inside = torch.tensor([0.01, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    check(lambda z, *values: getattr(make(case, values), name)(z), (inside, *leaves(case)))


def test_icdf(case):
    gate = case.gate()
    # Nearer an atom the quantile may bend so much that differences of step 1e-6 miss its slope.
    ends = gate.cdf(torch.tensor([0.2, 0.8], dtype=torch.float64))
    u = torch.lerp(ends[0], ends[1], torch.tensor([0.0, 0.5, 1.0]).double()).requires_grad_()
    check(lambda p, *values: make(case, values).icdf(p), (u, *leaves(case)))


@pytest.mark.parametrize("seed", [34, 35])
def test_draws_move_as_the_cdf_says(case, seed):
    """A draw with P(Z <= z) = u moves by minus the change of the cdf over the density, and not at all at an atom."""
    inputs = leaves(case)
    torch.manual_seed(seed)
    gate = make(case, inputs)
    for all_draws in (gate.rsample((1000,)), gate.rectify(gate.base_distribution().rsample((1000,)))):
        chosen = torch.cat([torch.nonzero((all_draws > 0) & (all_draws < 1))[:20], torch.arange(20)[:, None]])
        draws = all_draws[chosen[:, 0]]
        z = draws.detach()
        inside = (z > 0) & (z < 1)
        assert inside.any()
        density = gate.log_prob(z).exp().detach()
        for k, leaf in enumerate(inputs):
            step = 1e-5 * max(1e-2, abs(leaf.item()))
            ends = []
            for side in (step, -step):
                moved = [x.detach() + side * (i == k) for i, x in enumerate(inputs)]
                ends.append(make(case, moved).cdf(z))
            expected = torch.where(inside, -(ends[0] - ends[1]) / (2 * step) / density, 0.0)
            for i in range(len(z)):
                (actual,) = torch.autograd.grad(draws[i], leaf, retain_graph=True)
                # Differences of a cdf of order one are rounded to 1e-16, over a step of 1e-7 and the density.
                slack = 1e-9 + 2e-16 / step / density[i].item()
                torch.testing.assert_close(actual, expected[i], rtol=1e-6, atol=slack)


def test_test_gate_follows_its_parameters(case):
    """The deterministic gate is differentiable where it is not clipped."""
    inputs = leaves(case)
    gate = make(case, inputs)
    if 1e-3 < gate.test_gate < 1 - 1e-3:
        check(lambda *values: make(case, values).test_gate, inputs)


# --- pathwise against exact ----------------------------------------------------------------------


def test_active_probability_slope():
    """d active_prob / d log_alpha = sigmoid(a) sigmoid(-a): it never dies (unlike a clamped cdf)."""
    leaf = torch.tensor([-60.0, -20.0, 0.0, 20.0], dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(HardConcrete(leaf).active_prob.sum(), leaf)
    a = -2 / 3 * math.log(11) - leaf.detach()
    expected = torch.sigmoid(a) * torch.sigmoid(-a)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    assert (actual > 0).all()


def test_no_gradient_is_lost_after_a_look_without_gradients(family):
    """What is first computed under no_grad must not be kept for a later call with gradients."""

    def gradients(look_first):
        parameters = {
            k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[1].items()
        }
        gate = family.gate(**parameters)
        if look_first:
            gate.sample()
            with torch.no_grad():
                [getattr(gate, name) for name in SMOOTH]
        total = sum(getattr(gate, name) for name in SMOOTH) + gate.entropy()
        return torch.autograd.grad(total, list(parameters.values()))

    assert gradients(look_first=True) == gradients(look_first=False)


def test_backward_twice(family):
    """Statistics of one gate can be differentiated in two separate backward passes."""
    parameters = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    gate.mean.backward()
    gate.entropy().backward()
    gate.log_active_prob.backward()
    gate.mean.backward()
    assert all(tensor.grad.isfinite() for tensor in parameters.values())
