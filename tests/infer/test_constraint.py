"""Budgets that the deterministic network meets, and the multiplier that gets it there."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget


def model():
    pyro.sample("a", HardConcrete(torch.zeros(4)).to_event(1))
    pyro.sample("b", HardConcrete(torch.zeros(6)).to_event(1))


def make(family=HardConcrete):
    guide = AutoGate(model, family=family, init_jitter=0.0)
    guide()
    return guide


def count(gates):
    """Four for each gate of a, one for each of b: 22 in all."""
    return 4 * gates["a"].sum() + gates["b"].sum()


def test_multiplier_follows_the_deterministic_network():
    """It grows by rate times the log of cost over budget, and falls to zero within it, whatever is expected."""
    guide = make()
    target = SparsityTarget(guide, 0.5, count, dual_rate=2.0, every=5)
    for _ in range(10):
        target.ascend()
    assert target.multiplier.item() == pytest.approx(2 * 2.0 * 5 * math.log(2))
    expected = target.multiplier.item() * math.log(0.9)  # every gate is open with 0.9
    assert target.penalty().item() == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        guide.sites["a"]["log_alpha"].fill_(-2.5)  # test gates 0, P(z != 0) 0.29
    assert target.fraction().item() == pytest.approx(6 / 22)
    for _ in range(5):
        target.ascend()
    assert target.multiplier.item() == 0


def test_the_budget_falls_by_the_same_factor_in_every_step():
    """Violations are measured against the budget of the step."""
    guide = make()
    target = SparsityTarget(guide, 0.2, count, dual_rate=1.0, every=1, warm_up=4)
    values = []
    for _ in range(5):
        target.ascend()
        values.append(target.multiplier.item())
    steps = [math.log(5) * x for x in (0.25, 0.5, 0.75, 1, 1)]  # all gates stay open
    assert values == pytest.approx([sum(steps[: k + 1]) for k in range(5)])


@pytest.mark.parametrize(
    ("budget", "opened", "priced"),
    [
        (20 / 22, (4, 6), "b"),  # 22 are open, and 18 of 20 would be 90 %
        (19 / 22, (4, 6), "ab"),  # 18 of 19 are 95 %
        (15 / 22, (3, 6), "ab"),  # 14 of 15 are 93 %
        (13 / 22, (2, 6), "b"),  # 10 of 13; a closed gate of a has its price
        (3 / 22, (1, 0), "ab"),  # nothing but the last gate of a is open
    ],
)
def test_units_that_would_overshoot_have_no_price(budget, opened, priced):
    """A gate of a costs four, one of b one. Those that are closed keep their price."""
    guide = make()
    with torch.no_grad():
        for name, n in zip("ab", opened, strict=True):
            guide.sites[name]["log_alpha"][n:] = -2.5
    target = SparsityTarget(guide, budget, count, dual_rate=1.0, every=1)
    target.ascend()
    target.penalty().backward()
    active = {name: gate.active_prob.detach() for name, gate in guide.posterior().items()}
    price = target.multiplier / count(active)
    for name, n in zip("ab", opened, strict=True):
        slope = (4 if name == "a" else 1) * price * active[name] * (1 - active[name])
        slope[:n] *= name in priced
        torch.testing.assert_close(guide.sites[name]["log_alpha"].grad, slope)


def exact_penalty(target, guide):
    """mu times the log of the expected cost over the full one, of :func:`count`."""
    active = {name: gate.active_prob for name, gate in guide.posterior().items()}
    return (target.multiplier * torch.log(count(active) / target.total)).sum()


@pytest.mark.parametrize("temperature", [2 / 3, 0.5])
def test_between_two_looks_the_penalty_is_its_tangent(temperature):
    """In P(z != 0), value and gradient; after a look it is the log again. Gates of one kind or of two."""

    def other():
        pyro.sample("a", HardConcrete(torch.zeros(2, 2, dtype=torch.float64)).to_event(2))
        pyro.sample("b", HardConcrete(torch.zeros(6, dtype=torch.float64), temperature).to_event(1))

    pyro.set_rng_seed(3)
    guide = AutoGate(other, init_active_prob=0.6, init_jitter=0.5)
    guide()
    target = SparsityTarget(guide, 0.2, count, dual_rate=1.0, every=3)
    parameters = list(guide.parameters())
    for _ in range(3):
        target.ascend()
    with torch.no_grad():
        value = target.penalty()
    expected = exact_penalty(target, guide)
    torch.testing.assert_close(value, expected.detach())
    then = {name: gate.active_prob.detach() for name, gate in guide.posterior().items()}
    count_then = count(then)
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn_like(parameter)
    now = {name: gate.active_prob for name, gate in guide.posterior().items()}
    tangent = expected.detach() + target.multiplier.sum() * (count(now) - count_then) / count_then
    torch.testing.assert_close(target.penalty(), tangent)
    for ours, slope in zip(
        torch.autograd.grad(target.penalty(), parameters), torch.autograd.grad(tangent, parameters), strict=True
    ):
        torch.testing.assert_close(ours, slope)
    for _ in range(3):
        target.ascend()
    torch.testing.assert_close(target.penalty(), exact_penalty(target, guide))


def test_units_that_leave_between_two_looks():
    """The penalty is that of the gates that are left."""
    guide = make()
    target = SparsityTarget(guide, 0.2, count, every=1)
    target.ascend()
    target.penalty()
    guide.keep({"a": torch.tensor([0, 3]), "b": torch.arange(6)})
    torch.testing.assert_close(target.penalty(), exact_penalty(target, guide))
    guide.keep({"a": torch.arange(0), "b": torch.arange(0)})
    assert target.penalty().item() == 0


def test_the_penalty_in_inference_mode_and_another_type():
    """Its value, and prices of which training goes on."""
    guide = make()
    target = SparsityTarget(guide, 0.2, count, every=1)
    target.ascend()
    with torch.inference_mode():
        value = target.penalty().item()
    assert value == pytest.approx(exact_penalty(target, guide).item())
    guide.double()
    target.penalty().backward()
    assert all(parameter.grad is not None for parameter in guide.parameters())
    assert target.penalty().dtype == torch.float64


def test_gradient_goes_through_the_expected_cost():
    """mu over the expected cost, times the unit's cost times dP / d log alpha; the gates are open with 0.9."""
    guide = make()
    target = SparsityTarget(guide, 0.5, count, dual_rate=1.0, every=1)
    target.ascend()
    target.penalty().backward()
    grad = guide.sites["a"]["log_alpha"].grad
    torch.testing.assert_close(
        grad, torch.full((4,), math.log(2) * 4 / (22 * 0.9) * 0.9 * 0.1), rtol=1e-4, atol=0
    )  # float32


def test_training_ends_at_the_most_valuable_units():
    """Gates that scale known signals: the budget keeps the largest, and does not close more."""
    size = torch.tensor([3.0, 0.1, 2.0, 0.2, 2.5, 0.15, 0.3, 1.5, 0.05, 0.25])

    def signal():
        z = pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        with pyro.plate("data", 10):
            pyro.sample("y", dist.Normal(size * z, 0.3), obs=size)

    pyro.set_rng_seed(5)
    guide = AutoGate(signal)
    loss = L0_ELBO("l0")(signal, guide)
    loss()
    target = SparsityTarget(guide, {"z": 0.4}, dual_rate=1.0, warm_up=500)
    optimiser = torch.optim.Adam(guide.parameters(), 0.02)
    for _ in range(2000):
        optimiser.zero_grad()
        (loss() + target.penalty()).backward()
        optimiser.step()
        target.ascend()
    assert target.fraction().item() <= 0.5  # it swings about the budget by the gate that is next
    target.project()
    assert target.fraction().item() == pytest.approx(0.4)
    assert set(guide.test_gates()["z"].nonzero().flatten().tolist()) == {0, 2, 4, 7}


@pytest.mark.parametrize("family", [HardConcrete, RectifiedNormal])
def test_projection_closes_the_least_probable(family):
    """Just as many as it takes; a site keeps its last gate."""
    guide = make(family)
    location = next(iter(family.learned))
    with torch.no_grad():
        guide.sites["a"][location] += torch.tensor([0.0, 0.1, 0.2, 0.3])
        guide.sites["b"][location] += 1.0
    target = SparsityTarget(guide, 0.5, count)
    target.project()
    gates = guide.test_gates()
    assert [bool(gate) for gate in gates["a"] != 0] == [False, False, True, True]  # a third would waste the budget
    assert count({name: (gate != 0).float() for name, gate in gates.items()}) == 11
    assert all(gate.active_prob.min() < 1e-5 for name, gate in guide.posterior().items() if name == "a")
    with pytest.raises(ValueError, match="a budget that one open gate per site meets"):
        SparsityTarget(guide, 0.01, count).project()


def test_projection_from_far_away_warns():
    """After training that did not get there; not where pruning at once is what is asked for."""
    guide = make()
    target = SparsityTarget(guide, 0.5, count, every=1)
    target.ascend()
    with pytest.warns(UserWarning, match=r"still has \[1.0\] of the cost where \[0.5\] are allowed"):
        target.project()


def test_projection_does_not_waste_the_budget():
    """A gate that costs four is spared, though it is the least probable, where gates of one do."""
    guide = make()
    with torch.no_grad():
        guide.sites["b"]["log_alpha"] += 1.0
    target = SparsityTarget(guide, 19 / 22, count)  # 22 are open
    target.project()
    assert target.fraction().item() == pytest.approx(19 / 22)
    assert bool((guide.test_gates()["a"] != 0).all())


def test_projection_spares_what_a_later_gate_made_needless():
    """Five gates of one are not enough; the gate of four that goes then lets the best two of them stay."""
    guide = make()
    with torch.no_grad():
        guide.sites["a"]["log_alpha"] += 1.0
        guide.sites["b"]["log_alpha"] += 0.1 * torch.arange(6)
    target = SparsityTarget(guide, 15 / 22, count)
    target.project()
    assert target.fraction().item() == pytest.approx(15 / 22)
    gates = guide.test_gates()
    assert int((gates["a"] != 0).sum()) == 3
    assert gates["b"].nonzero().flatten().tolist() == [3, 4, 5]


def test_budgets_by_site():
    """Each with its own multiplier."""
    guide = make()
    target = SparsityTarget(guide, {"b": 0.5, "a": 0.75}, dual_rate=1.0, every=1)
    target.ascend()
    assert target.multiplier.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])
    with pytest.warns(UserWarning, match=r"\[1.0, 1.0\] of the cost where \[0.5, 0.75\]"):
        target.project()
    assert target.fraction().tolist() == pytest.approx([0.5, 0.75])


def test_state_goes_on():
    """The multiplier, the step, the prices between two looks and what the warnings need."""
    guide = make()
    one, other = (SparsityTarget(guide, 0.2, count, warm_up=10, every=2) for _ in range(2))
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        one.ascend()
    one.penalty()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        guide.sites["a"]["log_alpha"] -= 0.5
    assert torch.equal(one.penalty(), other.penalty())
    assert one.penalty() != exact_penalty(one, guide)
    one.ascend()
    other.ascend()
    assert torch.equal(one.multiplier, other.multiplier)
    assert torch.equal(one.penalty(), other.penalty())
    with pytest.raises(ValueError, match="the state of 2 constraints, but got 1"):
        SparsityTarget(make(), {"a": 0.5, "b": 0.5}).load_state_dict(one.state_dict())


def test_warnings_of_a_stuck_run():
    """A multiplier without effect, and a layer without open gates."""
    guide = make()
    target = SparsityTarget(guide, 0.2, count, every=1)
    target.ascend()
    for _ in range(49):
        target.check()
    with pytest.warns(UserWarning, match=r"grown to .* nats over 50 checks .* gates hardly move"):
        target.check()
    with torch.no_grad():
        guide.sites["b"]["log_alpha"].fill_(-9.0)
    with pytest.warns(UserWarning, match="No gate of site 'b' is open"):
        target.check()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.0, count), {}, "Expected budget strictly between 0 and 1"),
        ((1.5, count), {}, r"Expected budget .* got 1.5"),
        (({"a": 2.0},), {}, r"Expected budget\['a'\] strictly between 0 and 1"),
        (({"c": 0.5},), {}, r"one of \['a', 'b'\], but got 'c'"),
        ((0.5,), {}, "a cost with one budget"),
        (({"a": 0.5}, count), {}, "none with budgets by site"),
        ((0.5, count), {"dual_rate": -1.0}, "dual_rate of at least 0.0, but got -1.0"),
        ((0.5, count), {"every": 0}, "every of at least 1, but got 0"),
        ((0.5, count), {"warm_up": -1}, "warm_up of at least 0, but got -1"),
    ],
)
def test_bad_targets(arguments, options, message):
    """Named, with what arrived."""
    with pytest.raises(ValueError, match=message):
        SparsityTarget(make(), *arguments, **options)


def test_closing_an_unknown_site():
    """By name."""
    with pytest.raises(ValueError, match="Expected a gate site"):
        make().close("c", torch.tensor([0]))


def test_the_total_is_that_of_the_full_network():
    """A guide that has lost gates keeps to the budget of the network at the start."""
    guide = make()
    total = SparsityTarget(guide, 0.5, count).total
    guide.keep({"a": torch.tensor([0, 1]), "b": torch.arange(6)})
    target = SparsityTarget(guide, 0.5, count, total=total)
    assert target.fraction().item() == pytest.approx(14 / 22)
    target.project()
    assert 7 / 22 < target.fraction().item() <= 0.5
