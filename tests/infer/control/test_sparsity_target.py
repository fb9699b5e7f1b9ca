"""Budgets that the deterministic network keeps to, with nothing to tune."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_l0 import HardConcrete, HardKumaraswamy, PowerLawGate, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget
from tests.infer import regressions

CLOSING = -math.log(11)  # of a hard concrete's log alpha
SIZE = torch.tensor([3.0, 0.1, 2.0, 0.2, 2.5, 0.15, 0.3, 1.5, 0.05, 0.25])


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


def test_the_start():
    """All gates open with .999, or, of more than a thousand, so that one is closed in expectation."""
    guide = make()
    target = SparsityTarget(guide, 0.5, count, steps=100)
    for gate in guide.posterior().values():
        torch.testing.assert_close(gate.active_prob, torch.full_like(gate.active_prob, 0.999), rtol=1e-5, atol=0)
    assert target.fraction().item() == 1
    start = math.log(0.999 / 0.001) - 2 / 3 * math.log(11)
    assert target.gate_learning_rate == pytest.approx(4 * (start - CLOSING) / (target.reached - target.start), rel=1e-5)

    def many():
        pyro.sample("z", HardConcrete(torch.zeros(1200)).to_event(1))

    guide = AutoGate(many, init_jitter=0.5)
    guide()
    SparsityTarget(guide, 0.5, lambda gates: gates["z"].sum(), steps=100)
    assert guide.posterior()["z"].active_prob.detach().numpy() == pytest.approx(1 - 1 / 1200, rel=1e-6)


def test_long_runs_have_further_to_go_and_start_with_a_smaller_multiplier():
    """What a random walk of Adam's steps covers is the same in all of them, and a weaker force is enough."""
    targets = [SparsityTarget(make(), 0.5, count, steps=steps) for steps in (100, 40_000, 160_000)]
    falling = [target.reached - target.start for target in targets]
    distance = targets[0].gate_learning_rate * falling[0] / 4
    walks = [target.gate_learning_rate * math.sqrt(n) for target, n in zip(targets, falling, strict=True)]
    assert walks[1:] == pytest.approx([distance / 6, distance / 6], rel=1e-5)
    multipliers = []
    for target in targets:
        target.step = target.start
        for location in target.guide.locations():
            location.grad = torch.ones_like(location)
        target.add_gradient()
        multipliers.append(target.multiplier.item())
    assert multipliers[1] / multipliers[0] == pytest.approx(24 / math.sqrt(falling[1]), rel=1e-4)
    assert multipliers[2] / multipliers[1] == pytest.approx(math.sqrt(falling[1] / falling[2]), rel=1e-4)


def test_no_gate_closes_before_one_has_moved():
    """Where all stand alike, none is worse than another."""
    target = SparsityTarget(make(), 0.5, count, steps=100)
    for step in range(1, 100):
        target.ascend()
        assert (target.fraction() == 1) == (step <= target.start), step


def test_the_gradient_that_is_added():
    """The multiplier is e^I times the ratio of root mean squares; the slope of P(z != 0) is P (1 - P)."""
    guide = make()
    target = SparsityTarget(guide, 0.3, count, steps=100)
    for _ in range(target.start):
        target.ascend()
    with torch.no_grad():
        for location in guide.locations():
            location.copy_(torch.linspace(-1, 2, location.numel()))
    target._take_coefficients()
    active = {site: gate.active_prob.detach() for site, gate in guide.posterior().items()}
    expected = count(active)
    given = {"a": torch.tensor([1.0, -2.0, 0.5, 0.0]), "b": torch.arange(6.0)}
    for location, grad in zip(guide.locations(), given.values(), strict=True):
        location.grad = grad.clone()
    target.add_gradient()
    slopes = {site: (4 if site == "a" else 1) / expected * p * (1 - p) for site, p in active.items()}
    rms = {k: math.sqrt(torch.cat(list(x.values())).square().mean()) for k, x in (("g", given), ("q", slopes))}
    assert target.multiplier.item() == pytest.approx(rms["g"] / rms["q"], rel=1e-5)
    for location, site in zip(guide.locations(), given, strict=True):
        torch.testing.assert_close(
            location.grad, given[site] + rms["g"] / rms["q"] * slopes[site], rtol=1e-5, atol=1e-6
        )


def test_gates_rest_before_and_after():
    """Their gradients are taken away, so that no optimiser moves them, whatever it remembers."""
    guide = make()
    target = SparsityTarget(guide, 0.3, count, steps=100)
    for step in range(130):
        for location in guide.locations():
            location.grad = torch.ones_like(location)
        target.add_gradient()
        moves = all(location.grad is not None for location in guide.locations())
        assert moves == (target.start <= step < 100)
        target.ascend()
    with torch.no_grad():
        before = [location.clone() for location in guide.locations()]
    target.ascend()
    assert all(torch.equal(a, b) for a, b in zip(before, guide.locations(), strict=True))


def started(budget, cost=None, *, steps, seed=5, scale=1.0, family=HardConcrete, double=False, **options):
    """A guide of gates that scale known signals of different sizes, its loss and its target."""
    pyro.set_rng_seed(seed)

    def signals():
        z = pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        with pyro.plate("data", 10), pyro.poutine.scale(scale=scale):
            pyro.sample("y", dist.Normal(SIZE * z, 0.3), obs=SIZE)

    guide = AutoGate(signals, family=family)
    loss = L0_ELBO("l0")(signals, guide)
    loss()
    if double:
        guide.double()
    return guide, loss, SparsityTarget(guide, budget, cost, steps=steps, **options)


def train(guide, loss, target, steps, optimiser=None):
    optimiser = optimiser or torch.optim.Adam(guide.locations(), **target.optimiser_options)
    regressions.train(loss, optimiser, steps, target)


@pytest.mark.parametrize(
    ("budget", "steps"), [(0.8, 60), (0.4, 60), (0.1, 60), (0.1, 300), pytest.param(0.4, 1500, marks=pytest.mark.slow)]
)
def test_training_ends_at_the_most_valuable_units(budget, steps):
    """The budget keeps the largest signals, uses all of it, and decides every gate."""
    guide, loss, target = started({"z": budget}, steps=steps)
    train(guide, loss, target, steps)
    report = target.report()
    assert report.of_budget == pytest.approx(1)
    assert report.undecided <= 0.1
    kept = set(guide.test_gates()["z"].nonzero().flatten().tolist())
    assert len(kept) == round(10 * budget)
    if steps == 1500:  # of ten alike at the start, chance chooses the first that leave
        assert kept == set(SIZE.argsort(descending=True)[: round(10 * budget)].tolist())


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        lambda groups: torch.optim.SGD(groups, momentum=0.9),
        lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
        torch.optim.RMSprop,
        torch.optim.RAdam,
        torch.optim.Adadelta,
    ],
)
def test_an_optimiser_of_another_kind_is_refused(make):
    """Where a group takes Adam's options silently; what the message names is how the others train."""
    guide, loss, target = started({"z": 0.4}, steps=60)
    others = nn.Linear(2, 2)
    groups = [
        {"params": list(others.parameters()), "lr": 0.1},
        {"params": guide.locations(), **target.optimiser_options},
    ]
    with pytest.raises(ValueError, match=r"Expected Adam or AdamW .* were moved by .*; train guide\.locations\(\) by"):
        train(guide, loss, target, 60, make(groups))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
def test_optimisers_like_adam_are_taken(make):
    """Also after steps that a gradient scaler skips, and at a rate that a schedule halves."""
    guide, loss, target = started({"z": 0.4}, steps=60)
    optimiser = make([{"params": guide.locations(), **target.optimiser_options}])
    for step in range(60):
        optimiser.zero_grad()
        loss().backward()
        target.add_gradient()
        optimiser.param_groups[0]["lr"] = target.gate_learning_rate / (1 + (step % 2))
        if step != target.start:
            optimiser.step()
        target.ascend()
    assert target.report().of_budget == pytest.approx(1)


def test_the_scale_of_the_loss_does_not_matter():
    """A hundred times the loss moves the gates alike, step for step."""
    found = []
    for scale in (1.0, 100.0):
        guide, loss, target = started({"z": 0.4}, steps=120, scale=scale, double=True)
        train(guide, loss, target, 120)
        found.append((guide.locations()[0].detach().clone(), target.multiplier.item()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-3)
    assert found[1][1] == pytest.approx(100 * found[0][1], rel=1e-3)


FOUR_FAMILIES = [HardConcrete, RectifiedNormal, HardKumaraswamy, PowerLawGate]


@pytest.mark.parametrize("family", FOUR_FAMILIES)
def test_every_family_closes_and_opens(family):
    """Positions are 0 where test gates close: just below they are 0, just above they are not."""
    guide = make(family)
    target = SparsityTarget(guide, 0.5, count, steps=100)
    positions = target._positions
    for position, is_open in ((0.01, True), (-0.01, False)):
        positions.write(torch.full((10,), position))
        assert positions.read().tolist() == pytest.approx([position] * 10, abs=1e-4)
        assert all(bool((gate != 0).all()) == is_open for gate in guide.test_gates().values())
    positions.write(torch.full((10,), 0.5))
    slopes, ends = positions.slopes(), []
    for step in (-1e-2, 2e-2):
        with torch.no_grad():
            for location in guide.locations():
                location += step
        ends.append(torch.cat([gate.active_prob.detach().double() for gate in guide.posterior().values()]))
    assert bool((ends[0] < ends[1]).all())
    torch.testing.assert_close(slopes.double(), (ends[1] - ends[0]) / 2e-2, rtol=5e-3, atol=1e-5)


def test_gates_that_the_loss_would_close_are_decided_in_a_long_run():
    """The budget opens what the loss closes again and again; where gates are fast, hardening is as much faster."""
    pyro.set_rng_seed(0)
    guide = AutoGate(lambda: pyro.sample("z", HardConcrete(torch.zeros(200)).to_event(1)), init_jitter=0.0)
    guide()
    target = SparsityTarget(guide, {"z": 0.5}, steps=3000)
    optimiser = torch.optim.Adam(guide.locations(), **target.optimiser_options)
    for _ in range(3000):
        for location in guide.locations():
            location.grad = torch.randn(location.shape) + 1
        target.add_gradient()
        optimiser.step()
        target.ascend()
    assert (target.report().of_budget, target.report().undecided) == (1, 0)


def test_several_budgets_in_one_run():
    """Each is met at once after it is reached, and handed over with the gates of that moment."""
    met = []

    def note(budget, gates):
        met.append((budget, int((gates["z"] != 0).sum()), target.step))

    guide, loss, target = started([0.8, 0.5, 0.2], lambda z: z["z"].sum(), steps=300, on_budget=note)
    train(guide, loss, target, 300)
    assert [(budget, n) for budget, n, _ in met] == [(0.8, 8), (0.5, 5), (pytest.approx(0.2), 2)]
    assert met[0][2] < met[1][2] < met[2][2] == 300


def test_several_costs_at_once():
    """All hold, and one of them is used up."""
    guide = make()
    costs = {"all": count, "of b": lambda gates: gates["b"].sum()}
    target = SparsityTarget(guide, {"all": 0.5, "of b": 0.3}, costs, steps=100)
    target.project()
    fraction = target.fraction()
    assert bool((fraction <= target.budget * (1 + 1e-5)).all())
    assert int((guide.test_gates()["b"] != 0).sum()) == 1


def test_budgets_by_site():
    guide = make()
    target = SparsityTarget(guide, {"b": 0.5}, steps=100)
    target.project()
    assert [int((gate != 0).sum()) for gate in guide.test_gates().values()] == [4, 3]
    assert target.report().fraction == {"b": pytest.approx(0.5)}


def test_gates_that_never_close_and_multiples():
    """Whatever the loss says of them, and at the end of training."""
    guide, loss, target = started({"z": 0.75}, steps=60, at_least={"z": 3}, multiple_of={"z": 4})
    assert target.report().at_minimum == ()
    train(guide, loss, target, 60)
    assert target.report().open == {"z": (4, 10)}
    guide, loss, target = started({"z": 0.75}, steps=60)
    train(guide, loss, target, 60)
    assert target.report().open == {"z": (7, 10)}


def test_a_run_that_is_resumed():
    states = io.BytesIO()

    def start():
        guide, loss, target = started({"z": 0.4}, steps=100, seed=7)
        optimiser = torch.optim.Adam(guide.parameters(), **target.optimiser_options)
        return guide, loss, target, optimiser

    guide, loss, target, optimiser = start()
    train(guide, loss, target, 61, optimiser)
    torch.save([x.state_dict() for x in (guide, target, optimiser)], states)
    random = torch.get_rng_state()
    train(guide, loss, target, 39, optimiser)
    other, loss, resumed, again = start()
    states.seek(0)
    for part, state in zip((other, resumed, again), torch.load(states, weights_only=True), strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)
    train(other, loss, resumed, 39, again)
    assert torch.equal(guide.locations()[0], other.locations()[0])
    assert torch.equal(target.multiplier, resumed.multiplier)


def test_units_that_leave_during_a_run():
    """The cost goes on to be that of the network at the start."""
    guide = make()
    left = {"a": torch.arange(4), "b": torch.arange(6)}

    def full(gates):
        return count({site: torch.zeros(n).index_put((left[site],), gates[site]) for site, n in (("a", 4), ("b", 6))})

    target = SparsityTarget(guide, 0.5, full, steps=100)
    for step in range(100):
        if step == 50:
            target.project()
            left = {site: (gate != 0).nonzero().flatten() for site, gate in guide.test_gates().items()}
            guide.keep(left)
        for location in guide.locations():
            location.grad = torch.randn_like(location)
        target.add_gradient()
        target.ascend()
    assert target.total.item() == 22
    assert target.fraction().item() <= 0.5
    guide.keep({site: torch.arange(0) for site in guide.test_gates()})
    target.add_gradient()
    target.ascend()


def test_a_report():
    guide = make()
    target = SparsityTarget(guide, 0.5, count, steps=100)
    with torch.no_grad():
        guide.locations()[0].copy_(torch.tensor([-3.0, 0.0, 1.0, 3.0]))
    report = target.report()
    assert report.fraction == {"cost": pytest.approx(18 / 22)}
    assert report.undecided == pytest.approx(0.2)
    assert report.open == {"a": (3, 4), "b": (6, 6)}
    assert report.of_budget == pytest.approx(18 / 11)
    assert "a  3 of 4 gates open" in str(report)
    assert report.at_minimum == ()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.0, count), {}, "Expected budget strictly between 0 and 1"),
        ((1.5, count), {}, r"Expected budget .* got 1.5"),
        (([0.3, 0.5], count), {}, r"budgets that fall from one to the next, but got \[0.3, 0.5\]"),
        (({"a": 2.0},), {}, r"Expected budget\['a'\] strictly between 0 and 1"),
        (({"c": 0.5},), {}, "a cost above 0 with all gates open, but 'c' is 0.0"),
        ((0.5,), {}, "one cost with one budget"),
        ((0.5, lambda gates: gates["0"].sum()), {}, "Expected a cost of the sites 'a', 'b', but it asks for '0'"),
        (({"a": 0.5}, count), {}, r"budgets of \['a'\] and costs one without a name"),
        (({"x": 0.5}, {"y": count}), {}, r"budgets of \['x'\] and costs \['y'\]"),
        ((0.5, count), {"steps": 9}, "steps of at least 10, but got 9"),
        ((0.01, count), {}, r"one open gate per site meet, which cost {'cost': 0.2273} .* got {'cost': 0.01}"),
        ((0.5, count), {"at_least": {"c": 3}}, r"at_least by gate site, of \['a', 'b'\], but got 'c'"),
        ((0.5, count), {"multiple_of": {"a": 0}}, r"multiple_of\['a'\] of at least 1, but got 0"),
        (
            (0.5, count),
            {"at_least": {"a": 3}},
            "that at_least and multiple_of keep open meet, which cost {'cost': 0.59",
        ),
        ((0.5, lambda gates: count(gates).detach()), {}, "a cost that torch can differentiate .* 'cost' has no"),
        ((0.5, lambda gates: 30 - count(gates)), {}, "but got {'cost': 0.5}. A cost has to fall as gates close."),
        ((0.5, lambda gates: 0 * count(gates)), {}, "a cost above 0 with all gates open, but 'cost' is 0.0"),
    ],
)
def test_bad_targets(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SparsityTarget(make(), *arguments, **{"steps": 100, **options})
