"""Collapsed odds and evidence of gates against the normal distribution of the outcome."""

import itertools
import math

import pytest
import torch

import pyro_l0.maths.collapsed
import pyro_l0.maths.second_order
from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import DenseQuadratic
from tests.maths.spike_and_slab import Regression, prior, seeded, vectors, with_each

REGRESSIONS = {
    "independent": Regression.drawn(30, 6, 1),
    "correlated": Regression.drawn(30, 6, 2, rho=0.9),
    "copies": Regression.drawn(30, 6, 3, copies=2),
    "more features than rows": Regression.drawn(3, 6, 4),
    "one feature": Regression.drawn(10, 1, 5),
}
FORMS = ["dense", "wide"]
SCALES = torch.tensor([0.5, 2.0, 0.1, 1.0, 0.7, 3.0], dtype=torch.float64)
FACTOR = torch.linspace(0.2, 3, 64, dtype=torch.float64)
GROUPS = torch.tensor([1, 0, 1, 3, 1, 0])  # no element for gate 2
GATES = {
    "features": None,
    "by number": torch.arange(6),
    "groups": GROUPS,
    # One, two or three gates, and an element that is always there.
    "products": torch.tensor([[0, -1, -1], [0, 1, -1], [0, 1, 3], [-1, -1, -1], [2, 3, -1], [3, 2, -1]]),
}


def opened(z, gate_of):
    """Elements whose gates are all open."""
    if gate_of is None:
        return z
    return torch.nn.functional.pad(z, (0, 1), value=1)[:, gate_of].view(len(z), len(gate_of), -1).prod(-1)


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


SEVERAL = itertools.product(["correlated", "copies", "more features than rows"], FORMS, ["groups", "products"])
OF_CHAINS = [SCALES, SCALES[:, None].repeat(11, 1)[:64], SCALES.repeat(64, 1) * 0.9]  # by element, by chain, and both
CASES = [
    *((*case, "features", 0.5, None) for case in itertools.product(REGRESSIONS, FORMS)),
    *((*case, SCALES, None) for case in SEVERAL),
    *(("correlated", "dense", gates, scale, FACTOR) for gates in ("features", "by number") for scale in OF_CHAINS),
]


@pytest.mark.parametrize(("name", "form", "gates", "scale", "factor"), CASES)
def test_evidence_and_odds_of_all_vectors(name, form, gates, scale, factor):
    """From none open to all of them, which may be more than there are rows."""
    regression, gate_of, rate = REGRESSIONS[name], GATES[gates], prior(0.2)
    z = vectors(regression.x.shape[1] if gate_of is None else int(gate_of.max()) + 1)
    collapsed = CollapsedQuadratic(getattr(regression, form)(), scale, factor=factor, gate_of=gate_of)
    assert (collapsed.gates, collapsed.chains) == (z.shape[1], None if factor is None else len(z))
    evidence, odds = collapsed.log_evidence(z), collapsed.log_bayes_factors(z)
    close(evidence, regression.log_evidence(opened(z, gate_of), scale, factor))
    each = torch.arange(len(z)).repeat_interleave(z.shape[1])
    known = [part[each] if torch.is_tensor(part) and len(part) == len(z) else part for part in (scale, factor)]
    both = [regression.log_evidence(opened(with_each(z, v), gate_of), *known) for v in (1.0, 0.0)]
    close(odds.flatten(), both[0] - both[1])
    close(collapsed.gibbs_logits(z, rate.logits(z)), odds + math.log(0.25))
    assert evidence[0] == 0 or gates == "products"
    assert gates != "groups" or (odds[:, 2] == 0).all()  # the data say nothing about a gate of no element


def in_parts(monkeypatch, regression, width):
    monkeypatch.setattr(pyro_l0.maths.second_order, "_PART", width)
    return regression.wide()


def test_parts_of_a_design(monkeypatch):
    """Each part and the anchors have the odds that they have among all, and so have open gates outside of these."""
    regression, z = Regression.drawn(30, 7, 2, rho=0.9), vectors(7)
    design = in_parts(monkeypatch, regression, 2)
    assert design.parts == 4
    design.set_anchors(torch.tensor([0.0, 3.0, 0.0, 0.0, 2.0, 0.0, 1.0], dtype=torch.float64))
    assert design.part_of.tolist() == [0, 4, 1, 1, 4, 2, 3]
    collapsed = CollapsedQuadratic(design, torch.linspace(0.2, 2, len(z), dtype=torch.float64)[:, None])
    factors = collapsed.log_bayes_factors(z)
    for part, own in enumerate(([0], [2, 3], [5], [6])):
        found = collapsed.of_parts(z, torch.tensor([[part, 4]]).expand(len(z), 2))
        close(found.factors[found.valid], factors.gather(1, found.gates)[found.valid])
        assert torch.equal(found.open[found.valid], z.bool().gather(1, found.gates)[found.valid])
        for row in range(len(z)):
            expected = {1, 4, *own, *z[row].nonzero()[:, 0].tolist()}
            assert sorted(found.gates[row][found.valid[row]].tolist()) == sorted(expected)


def test_batches_of_bounded_room(monkeypatch):
    """One chain at a time, with room for two rows of the design, gives the same."""
    regression, z = REGRESSIONS["correlated"], vectors(6)
    whole = CollapsedQuadratic(regression.dense(), SCALES, factor=FACTOR, gate_of=GROUPS.clamp(max=2))
    expected = CollapsedQuadratic(regression.dense(), SCALES, factor=FACTOR).log_bayes_factors(z)
    monkeypatch.setattr(pyro_l0.maths.collapsed, "BATCH", 1)
    monkeypatch.setattr(pyro_l0.maths.second_order, "BATCH", 1)
    monkeypatch.setattr(pyro_l0.maths.second_order, "STORED", 2 * 6)
    narrow = CollapsedQuadratic(regression.wide(), SCALES, factor=FACTOR)
    close(narrow.log_bayes_factors(z), expected)
    close(narrow.log_bayes_factors(z.flip(0)[torch.arange(63, -1, -1)]), expected)
    groups = CollapsedQuadratic(regression.wide(), SCALES, factor=FACTOR, gate_of=GROUPS.clamp(max=2))
    some = z[torch.arange(64) % 8, 3:]
    close(groups.log_bayes_factors(some), whole.log_bayes_factors(some))


def test_a_design_forgets_rows_when_there_is_no_room(monkeypatch):
    """And says the same as its matrix all the time."""
    monkeypatch.setattr(pyro_l0.maths.second_order, "STORED", 3 * 6)
    regression = REGRESSIONS["correlated"]
    wide, dense = regression.wide(), regression.dense()
    close(wide.diagonal, dense.diagonal)
    for index in map(torch.tensor, ([[0, 1]], [[1, 2], [2, 2]], [[3, 4]], [[0, 1], [2, 3]], [[4, 4]], [[3, 0]])):
        close(wide.rows(index), dense.rows(index))
        close(wide.blocks(index), dense.blocks(index))


@pytest.mark.parametrize("gate_of", [None, GROUPS])
def test_moments_of_slabs(gate_of):
    """Draws have the mean and the covariance of the normal posterior, and of the prior behind closed gates."""
    regression = REGRESSIONS["correlated"]
    gates = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0] if gate_of is None else [1.0, 0.0, 1.0, 1.0]).double()
    on = gates if gate_of is None else gates[gate_of]
    factor = torch.tensor([2.0], dtype=torch.float64)
    collapsed = CollapsedQuadratic(regression.dense(), SCALES, factor=factor, gate_of=gate_of)
    both = on[:, None] * on
    covariance = torch.linalg.inv(torch.diag(SCALES**-2) + 2 * regression.dense().matrix * both)
    mean = covariance @ (2 * on * regression.linear)
    close(collapsed.mean(gates[None])[0], mean)
    n = 40_000
    w = collapsed.draw_slabs(gates.expand(n, -1), seeded(1))
    deviation = covariance.diagonal().sqrt()
    assert ((w.mean(0) - mean).abs() / deviation).max() < 5 / math.sqrt(n)
    # The standard error of a product of two standard normals is at most sqrt(2 / n).
    error = (w.T.cov() - covariance) / deviation[:, None] / deviation
    assert error.abs().max() < 5 * math.sqrt(2 / n)


@pytest.mark.parametrize("gate_of", [None, torch.tensor([0, 0, 1, 1, 2, 2])])
def test_float32_stays_finite(gate_of):
    """At copies in strong data, where a Schur complement is all rounding."""
    regression = REGRESSIONS["copies"]
    matrix, linear = (1e6 * x.float() for x in (regression.dense().matrix, regression.linear))
    collapsed = CollapsedQuadratic(DenseQuadratic(matrix, linear), 10.0, gate_of=gate_of)
    z = vectors(collapsed.gates).float()
    assert torch.isfinite(collapsed.log_bayes_factors(z)).all()
    assert torch.isfinite(collapsed.log_evidence(z)).all()


def test_refusals():
    dense = REGRESSIONS["independent"].dense()
    with pytest.raises(ValueError, match=r"Expected gates of shape \(S, 6\), but got \(2, 5\)"):
        CollapsedQuadratic(dense, 1.0).log_evidence(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"Expected gates of shape \(3, 6\), but got \(2, 6\)"):
        CollapsedQuadratic(dense, 1.0, factor=torch.ones(3)).log_evidence(torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"Expected scale to be positive and finite, but got \[0.0\]"):
        CollapsedQuadratic(dense, 0.0)
    with pytest.raises(ValueError, match=r"Expected factor to be positive and finite, but got .*nan"):
        CollapsedQuadratic(dense, 1.0, factor=torch.tensor([math.nan]))
    with pytest.raises(ValueError, match=r"index of a gate for each of 6 elements, .* got shape \(5,\)"):
        CollapsedQuadratic(dense, 1.0, gate_of=torch.zeros(5, dtype=torch.long))
