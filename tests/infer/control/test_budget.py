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


@pytest.mark.parametrize("seed", range(20))
def test_a_correction_is_within_its_limits_and_wastes_nothing(seed):
    """Of random costs of products of two sites: all limits hold, and no closed gate fits any more."""
    torch.manual_seed(seed)
    weight = {site: torch.randint(1, 6, (n,)).float() for site, n in (("a", 5), ("b", 7))}

    def sums(gates):
        return [(weight[site] * gates[site]).sum() for site in "ab"]

    costs = {"one": lambda z: sums(z)[0] * sums(z)[1], "other": lambda z: sums(z)[0] + 3 * sums(z)[1]}
    gates = {"a": torch.ones(5), "b": torch.ones(7)}
    budget = Budget({"one": 0.2, "other": 0.5}, costs, gates)
    coefficients = budget.coefficients({site: torch.rand_like(gate) for site, gate in gates.items()})
    positions, limits = torch.randn(12), torch.tensor([0.2, 0.5])
    shapes = {site: gate.shape for site, gate in gates.items()}
    kept = gates_within(budget, limits, positions, positions > 0, coefficients, shapes) > 0

    def fractions(flat):
        return budget.fraction(dict(zip("ab", flat.float().split([5, 7]), strict=True)))

    assert bool((fractions(kept) <= limits * (1 + 1e-5)).all())
    for j in (~kept).nonzero().flatten().tolist():
        more, site = kept.clone(), slice(0, 5) if j < 5 else slice(5, 12)
        more[j] = True
        if bool(kept[site][positions[site] > positions[j]].all()):  # the next of its site
            assert bool((fractions(more) > limits).any())


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


@pytest.mark.parametrize("seed", range(20))
def test_multiples_and_gates_that_never_close(seed):
    """Within the limit; of each site a multiple or all is open, the best of them, and no further chunk fits."""
    torch.manual_seed(seed)
    sizes, steps = {"a": 21, "b": 8, "c": 5}, {"a": 4, "b": 1, "c": 8}
    gates = {site: torch.ones(n) for site, n in sizes.items()}

    def cost(z):
        return (z["a"].sum() + 3) * z["b"].sum() + 0.1 * z["c"].sum()

    budget = Budget(0.5, cost, gates, {"a": 5, "b": 3}, {"a": 4, "c": 8})
    assert budget.least == {"a": 8, "b": 3, "c": 5}
    assert budget.minimums["a"] % 4 == 0
    coefficients = budget.coefficients({site: torch.rand_like(gate) for site, gate in gates.items()})
    positions = torch.randn(34)
    positions[seed % 21] = positions[(seed + 5) % 21]  # a tie
    positions[:6] = positions[:6].clamp(max=-1.0)  # and more, at the lower end
    shapes = {site: gate.shape for site, gate in gates.items()}
    limit = torch.tensor([0.3 + 0.03 * seed])
    kept = gates_within(budget, limit, positions, positions > 0, coefficients, shapes).split(list(sizes.values()))
    found = dict(zip(sizes, kept, strict=True))
    assert float(budget.fraction(found)) <= float(limit) * (1 + 1e-5)
    numbers = {site: int(gate.sum()) for site, gate in found.items()}
    for site, number in numbers.items():
        assert number >= budget.least[site]
        assert number == sizes[site] or number % steps[site] == 0
        own = positions.split(list(sizes.values()))["abc".index(site)]
        if number < sizes[site]:
            assert own[found[site] > 0].min() >= own[found[site] == 0].max()
            more = (torch.arange(sizes[site]) < number + steps[site]).float()
            assert float(budget.fraction({**found, site: more})) > float(limit)


def test_multiples_after_gates_have_left():
    """What is left of a site need not be a multiple, and all of it may then not be open."""
    gates = {"a": torch.ones(12)}
    budget = Budget(0.9, lambda z: z["a"].sum(), gates, None, {"a": 4})
    coefficients = torch.ones(1, 11) / 12
    positions = torch.arange(11.0)
    found = gates_within(budget, torch.tensor([0.95]), positions, positions >= 0, coefficients, {"a": torch.Size([11])})
    assert found.tolist() == [0] * 3 + [1] * 8
