"""Costs of networks whose gates stand in series, and the comparison of counts when a cost is made."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates, insert_gates, suggest_gates
from pyro_l0.nn.engine import record
from pyro_l0.nn.engine.dependency import find_dependencies
from pyro_l0.nn.engine.operations import ENTRIES, Entry
from pyro_l0.nn.engine.statements import NormalForms, TruthTables
from pyro_l0.nn.gate import gate_names
from tests.bench.fuzz_cost import Excited, difference
from tests.engine.zoo import ZOO
from tests.networks import Dense

pytestmark = pytest.mark.filterwarnings("ignore:Gates are closed, but nothing is smaller")


def own_filters(depth, norm=False, gated=True):
    layers = [nn.Conv1d(3, 8, 1)]
    for _ in range(depth):
        layers += [nn.Conv1d(8, 8, 3, padding=1, groups=8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU()]
        layers += [L0Gate(8, dim=1)] if gated else []
    return nn.Sequential(*layers, nn.Conv1d(8, 2, 1)), torch.randn(2, 3, 16)


def narrow(depth, size=2, gated=True):
    layers = [nn.Linear(3, size)]
    for _ in range(depth):
        layers += [nn.Linear(size, size), nn.Tanh(), *([L0Gate(size)] if gated else [])]
    return nn.Sequential(*layers, nn.Linear(size, 1)), torch.randn(2, 3)


def excited(blocks, gated=True):
    layers = [nn.Conv2d(3, 8, 1)]
    for _ in range(blocks):
        layers += [Excited(8, 4), *([L0Gate(8, dim=1)] if gated else [])]
    return nn.Sequential(*layers, nn.Conv2d(8, 2, 1)), torch.randn(2, 3, 4, 4)


DEEP = {
    "own filters": lambda gated: own_filters(20, gated=gated),
    "own filters and norms": lambda gated: own_filters(16, norm=True, gated=gated),
    "narrow": lambda gated: narrow(64, gated=gated),
    "narrow, three units": lambda gated: narrow(40, 3, gated=gated),
    "squeeze and excite": lambda gated: excited(16, gated=gated),
}


@pytest.mark.parametrize("gated", [True, False], ids=["by hand", "suggested"])
@pytest.mark.parametrize("name", DEEP)
def test_all_open_is_the_whole_network_and_one_closed_what_is_left(name, gated):
    torch.manual_seed(0)
    network, x = DEEP[name](gated)
    if not gated:
        network = insert_gates(network, suggest_gates(network, x))
    cost = NetworkCost(network, x)
    gates = {site: torch.ones(size) for site, size in cost.sizes.items()}
    whole = sum(p.numel() for p in network.parameters() if p.dim() > 1)
    assert cost.weights(gates) == cost.total_weights == whole
    next(iter(gates.values()))[0] = 0
    small = compact(network, gates, x).network
    assert cost.weights(gates) == sum(p.numel() for p in small.parameters() if p.dim() > 1)


@pytest.mark.parametrize("make", [own_filters, excited])
def test_statements_grow_with_depth_and_not_with_its_powers(make):
    torch.manual_seed(0)
    numbers = [len(NetworkCost(*make(depth))._dependencies.statements._clauses) for depth in (4, 8, 16)]
    assert numbers[2] - numbers[1] <= 3 * (numbers[1] - numbers[0])  # 2 if each block adds as many


def test_an_expectation_in_series_is_exact():
    """Five gates in a row on each of two channels, by enumeration: read-once statements stay so."""
    torch.manual_seed(0)
    layers = [x for _ in range(5) for x in (nn.Conv1d(2, 2, 1, groups=2), L0Gate(2, dim=1))]
    network, x = nn.Sequential(nn.Conv1d(3, 2, 1), *layers, nn.Conv1d(2, 1, 1)), torch.randn(1, 3, 4)
    cost = NetworkCost(network, x)
    probs = {site: torch.tensor([0.9 - 0.1 * i, 0.5 + 0.05 * i]).double() for i, site in enumerate(cost.sizes)}
    alive = torch.stack([*probs.values()]).prod(0)  # of each channel; its weights are 3 + 5 + 1
    assert cost.weights(probs).item() == pytest.approx(9 * alive.sum().item(), rel=1e-12)  # rounding


@pytest.mark.parametrize("seed", range(30))
def test_what_is_proven_to_follow_does(seed):
    """Against enumeration; nothing is proven that has a counterexample, and each is refuted that random draws can't."""
    rng = random.Random(seed)
    statements = NormalForms([6])
    functions = {statements.gate(g): (lambda z, g=g: z[g]) for g in range(6)}
    for _ in range(40):
        parts = rng.sample(sorted(functions), rng.choice((2, 2, 3)))
        own = [functions[x] for x in parts]
        if rng.random() < 0.5:
            functions.setdefault(statements.every(parts), lambda z, own=own: all(f(z) for f in own))
        else:
            functions.setdefault(statements.some(parts), lambda z, own=own: any(f(z) for f in own))
    states = list(itertools.product((False, True), repeat=6))
    held = {x: np.array([f(z) for z in states]) for x, f in functions.items()}
    for one, other in itertools.permutations(held, 2):
        follows = not (held[one] & ~held[other]).any()
        assert follows or not statements._implies(one, other)
        assert statements.implies(one, other) == follows
        opened = [{g for g in range(6) if z[g]} for z in states[::7]]
        assert [statements.holds([one], x)[one] for x in opened] == held[one][::7].tolist()


def test_a_statement_of_sixty_gates_is_refuted_though_no_random_case_has_them_all_open():
    statements = NormalForms([1] * 60)
    gates = [statements.gate(g) for g in range(60)]
    whole, first = statements.every(gates), statements.every(gates[:30])
    assert not statements.implies(first, whole)
    assert statements.implies(whole, first)
    assert statements.is_proven


def ring():
    """Groups whose maps are the product of two dimensions in several layers, which gates link."""

    def forward(net, x):
        x = net.first(net.norms[0](net.start(x)))
        x = x + net.two(net.second(net.norms[1](net.one(x))))
        return net.end(net.third(net.norms[2](x)))

    gates = {name: L0Gate(8, dim=1) for name in ("first", "second", "third")}
    layers = {"start": nn.Conv2d(2, 8, 1), "one": nn.Conv2d(8, 8, 1, groups=2)}
    layers |= {"two": nn.Conv2d(8, 8, 1, groups=2), "end": nn.Conv2d(8, 3, 1)}
    return Dense(forward, **gates, **layers, norms=nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3)))


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_given_gates_are_counted_exactly_where_no_proof_was_found(share):
    torch.manual_seed(3)
    network, x = ring().double().eval(), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    cost = NetworkCost(network, x)
    cost._dependencies.statements.is_proven = False
    gates = {site: (torch.rand(size) >= share).double().requires_grad_() for site, size in cost.sizes.items()}
    closed = {number for number, z in enumerate(torch.cat([*gates.values()])) if z == 0}
    tables = find_dependencies(record(network, x), lambda _: TruthTables([closed]))
    maps = tables.maps
    expected = sum(
        np.prod([tables.statements.count(tables.remaining(axis))[0] for axis in product.axes])
        for product in maps.products
    )
    found = cost.macs(gates)
    assert found.item() == expected / 2
    found.backward()
    assert all(gate.grad is not None for gate in gates.values())


@pytest.mark.parametrize("seed", [*range(1000, 1030), 30073, 30100])  # the last two: a layer that is called twice
def test_costs_of_random_networks_are_counts_of_what_is_left(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert difference(seed) is None


def counted_wrongly(maps, operation):
    """Says that a product is an addition: no multiply-adds."""
    for dim in range(3):
        maps.fixes(operation.output, dim)
        maps.fixes(operation.value("self"), dim)


@pytest.mark.parametrize("inner", ["the first", "1.inner"])
def test_multiply_adds_that_torch_counts_otherwise_are_refused_by_name(inner, monkeypatch):
    monkeypatch.setitem(ENTRIES, "aten::bmm", Entry(counted_wrongly))
    layers = [nn.Sequential(), nn.Sequential()]
    layers[inner != "the first"].inner = Dense(lambda net, x: torch.bmm(x, x.mT))
    path = "0.inner" if inner == "the first" else inner
    with pytest.raises(ValueError, match=rf"count the 16 multiply-adds of bmm in {path}, but got 0\. Please report it"):
        NetworkCost(nn.Sequential(*layers, nn.Linear(2, 2), L0Gate(2)), torch.randn(2, 2, 2))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("both", lambda self, one, other: other), ("some", lambda self, statements: min(statements, default=1))],
)
def test_a_wrong_statement_is_refused_by_the_name_of_its_weight(name, wrong, monkeypatch):
    """Of what two statements need, one is left out."""
    monkeypatch.setattr(NormalForms, name, wrong)
    layers = nn.Linear(4, 8), nn.ReLU(), L0Gate(8), nn.Linear(8, 8), nn.ReLU(), L0Gate(8)
    network = nn.Sequential(*layers, nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"Expected to count the \d+ \S+ of '\d.weight', but got \d+\. Please report"):
        NetworkCost(network, torch.randn(2, 4))


def test_gates_of_the_fuzz_are_there():
    """The thirty networks have gates, by hand and suggested."""
    from tests.bench.fuzz_cost import make

    numbers = [len(gate_names(make(seed)[0])) for seed in range(1000, 1010)]
    assert sum(number > 0 for number in numbers) >= 8


def test_the_way_out_of_a_network_that_is_not_counted():
    """Its gates are trained at a price that is given, and it is cut."""
    network, x = ZOO["style_network"].network(), ZOO["style_network"].example(4)
    with pytest.raises(ValueError, match="meanwhile train it with L0_ELBO, whose group_size you give"):
        NetworkCost(network, x)

    def model():
        factor("y", -network(x).square().sum())

    guide = AutoGate(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), L0_ELBO("l0", lam=1e-3, group_size={"style.2": 4.0, "gate": 30.0}))
    for _ in range(2):
        svi.step()
    gates = {"style.2": torch.tensor([1.0, 0, 1, 1, 0, 1]), "gate": torch.tensor([1.0, 0, 1, 1, 1, 1, 0, 1])}
    small = compact(network, gates, x).network
    torch.testing.assert_close(small(x), fix_gates(network, gates)(x), rtol=1e-6, atol=1e-7)
