"""Which gates stay open within budgets, and when these fall."""

import itertools

import pytest
import torch

from pyro_l0.infer.control.budget import Budget, first_that, gates_within
from pyro_l0.infer.control.sparsity_target import BudgetSchedule


@pytest.mark.parametrize(
    ("steps", "pretrained", "start"), [(750, True, 20), (3000, True, 80), (30, True, 4), (750, False, 200)]
)
def test_phases(steps, pretrained, start):
    """Gates wait, the budget falls over four fifths of what is left, and holds."""
    schedule = BudgetSchedule(steps, pretrained)
    assert (schedule.start, schedule.reached) == (start, start + int(0.8 * (steps - start)))
    checks = [step for step in range(1, steps + 1) if schedule.is_check(step)]
    assert (checks[0], checks[-1]) == (start, steps)
    final = torch.tensor([0.2])
    budgets = [schedule.budget(step, final).item() for step in checks]
    assert all(a >= b for a, b in itertools.pairwise(budgets))
    assert budgets[-1] == pytest.approx(0.2)
    assert schedule.budget(start - schedule.interval, final).item() == 1
    halfway = schedule.start + (schedule.reached - schedule.start) / 2 - schedule.interval
    assert schedule.budget(halfway, final).item() == pytest.approx(0.2 + 0.8 / 8)


RISING = [float(i) for i in range(10)]
LOW_FIRST = [*(5.0 + i for i in range(4)), *(float(i) for i in range(6))]
ALL, NONE = [1] * 10, [0] * 10


@pytest.mark.parametrize(
    ("limit", "positions", "is_open", "minimums", "expected"),
    [
        (10, RISING, ALL, (0, 0), [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]),  # 12 leave: three of four
        (18, RISING, ALL, (0, 0), [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (20, RISING, ALL, (0, 0), [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),  # none of four fits into the rest
        (20, LOW_FIRST, ALL, (0, 0), [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]),
        (22, RISING, NONE, (0, 0), ALL),
        (5, RISING, NONE, (0, 0), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]),
        # A site's minimum comes last, whatever its positions; its highest gate never leaves.
        (10, [-x for x in RISING], ALL, (1, 3), [1, 0, 0, 0, 1, 1, 1, 1, 1, 1]),
        (12, RISING, ALL, (2, 1), [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]),
        (0.22, RISING, ALL, (2, 1), [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_a_correction_closes_the_lowest_and_opens_the_highest(limit, positions, is_open, minimums, expected):
    """As few as it takes; then what still fits. The first four gates cost four each, the others one: 22 in all."""
    gates = {"a": torch.ones(4), "b": torch.ones(6)}
    budget = Budget(0.9, lambda z: 4 * z["a"].sum() + z["b"].sum(), gates)
    budget.minimums = dict(zip("ab", minimums, strict=True))
    coefficients = budget.coefficients({site: torch.full_like(gate, 0.8) for site, gate in gates.items()})
    shapes = {site: gate.shape for site, gate in gates.items()}
    limits = torch.tensor([limit / 22])
    found = gates_within(budget, limits, torch.tensor(positions), torch.tensor(is_open) > 0, coefficients, shapes)
    assert found.int().tolist() == expected


@pytest.mark.parametrize("first", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("guess", [-3, 0, 4, 9, 50])
def test_a_search_from_any_guess(first, guess):
    """Finds the first number for which a statement holds."""
    assert first_that(lambda n: n >= first, 10, guess) == first


def test_minimums():
    """Three quarters of what an equal rate of open gates leaves; at least one of several, none of one alone."""
    gates = {"a": torch.ones(100), "b": torch.ones(10), "one": torch.ones(1)}
    budget = Budget(0.25, lambda z: (z["a"].sum() + 1) * z["b"].sum() + z["one"].sum(), gates)
    assert budget.minimums == {"a": 37, "b": 4, "one": 0}


def of_two_costs(_):
    """Random costs, one of which is a product of two sites."""
    weight = {site: torch.randint(1, 6, (n,)).float() for site, n in (("a", 5), ("b", 7))}

    def sums(gates):
        return [(weight[site] * gates[site]).sum() for site in "ab"]

    costs = {"one": lambda z: sums(z)[0] * sums(z)[1], "other": lambda z: sums(z)[0] + 3 * sums(z)[1]}
    budget = Budget({"one": 0.2, "other": 0.5}, costs, {site: torch.ones(len(x)) for site, x in weight.items()})
    return budget, torch.tensor([0.2, 0.5])


def of_multiples(seed):
    """A site in fours, one in which three never close, and one that is smaller than its multiple."""
    gates = {site: torch.ones(n) for site, n in (("a", 21), ("b", 8), ("c", 5))}
    cost = lambda z: (z["a"].sum() + 3) * z["b"].sum() + 0.1 * z["c"].sum()  # noqa: E731
    budget = Budget(0.5, cost, gates, {"a": 5, "b": 3}, {"a": 4, "c": 8})
    assert budget.least == {"a": 8, "b": 3, "c": 5}
    assert budget.minimums["a"] % 4 == 0
    return budget, torch.tensor([0.3 + 0.03 * seed])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("problem", "sizes", "steps"),
    [
        (of_two_costs, {"a": 5, "b": 7}, {"a": 1, "b": 1}),
        (of_multiples, {"a": 21, "b": 8, "c": 5}, {"a": 4, "b": 1, "c": 8}),
    ],
)
def test_a_correction_is_within_its_limits_and_wastes_nothing(problem, sizes, steps, seed):
    """All limits hold; of each site a multiple or all is open, the best of them, and no further chunk fits."""
    torch.manual_seed(seed)
    budget, limits = problem(seed)
    coefficients = budget.coefficients({site: torch.rand(n) for site, n in sizes.items()})
    positions = torch.randn(sum(sizes.values()))
    if problem is of_multiples:
        positions[seed % 21] = positions[(seed + 5) % 21]  # a tie
        positions[:6] = positions[:6].clamp(max=-1.0)  # and more, at the lower end
    shapes = {site: torch.Size([n]) for site, n in sizes.items()}
    kept = gates_within(budget, limits, positions, positions > 0, coefficients, shapes).split(list(sizes.values()))
    found = dict(zip(sizes, kept, strict=True))
    assert bool((budget.fraction(found) <= limits * (1 + 1e-5)).all())
    for (site, size), own in zip(sizes.items(), positions.split(list(sizes.values())), strict=True):
        number = int(found[site].sum())
        assert number >= budget.least[site]
        assert number == size or number % steps[site] == 0
        if number < size:
            is_open, order = found[site] > 0, own.argsort(descending=True)
            assert number == 0 or own[is_open].min() >= own[~is_open].max()
            more = is_open.float().index_fill(0, order[: number + steps[site]], 1.0)
            assert bool((budget.fraction({**found, site: more}) > limits).any())


def test_multiples_after_gates_have_left():
    """What is left of a site need not be a multiple, and all of it may then not be open."""
    gates = {"a": torch.ones(12)}
    budget = Budget(0.9, lambda z: z["a"].sum(), gates, None, {"a": 4})
    coefficients = torch.ones(1, 11) / 12
    positions = torch.arange(11.0)
    found = gates_within(budget, torch.tensor([0.95]), positions, positions >= 0, coefficients, {"a": torch.Size([11])})
    assert found.tolist() == [0] * 3 + [1] * 8
