"""Inclusion probabilities of samplers and of the collapsed mean field against sums over all vectors of gates."""

import math

import pytest
import torch

from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import DenseQuadratic
from pyro_l0.maths.tempered_gibbs import (
    BetaBinomialGates,
    GibbsRun,
    IndependentGates,
    collapsed_mean_field,
    tempered_gibbs,
)
from tests.maths.spike_and_slab import Regression, active_probs, prior, seeded, vectors

SPARSE = prior(0.2)
PAIR = Regression.drawn(100, 8, 6, copies=1)


def exact(collapsed, gate_prior):
    z = vectors(collapsed.gates)
    log_weights = collapsed.log_evidence(z) + gate_prior.log_prob(z)
    return active_probs(log_weights, z), torch.softmax(log_weights, 0)


def standard_error(run):
    """From the chains' own averages, not below what is left of gates that all chains agree on."""
    return run.standard_error().clamp(min=1e-3)


CASES = {
    "correlated": (Regression.drawn(60, 8, 1, rho=0.9), SPARSE, None),
    "copies": (Regression.drawn(60, 6, 2, copies=2), SPARSE, None),
    "more features than rows": (Regression.drawn(4, 8, 3), SPARSE, None),
    "groups": (Regression.drawn(60, 9, 4, rho=0.9), SPARSE, torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 4])),
    "unknown rate": (Regression.drawn(60, 8, 5, rho=0.9), BetaBinomialGates(1.0, 4.0), None),
    "one gate": (Regression.drawn(10, 1, 7), SPARSE, None),
}


@pytest.mark.parametrize("name", CASES)
def test_within_monte_carlo_error(name):
    """Averages, states with their weights, and draws of them."""
    regression, gate_prior, gate_of = CASES[name]
    collapsed = CollapsedQuadratic(regression.wide(), 0.5, gate_of=gate_of)
    run = tempered_gibbs(collapsed, gate_prior, flips=300, generator=seeded(1))
    expected, log_weights = exact(collapsed, gate_prior)
    assert ((run.active_probs - expected).abs() / standard_error(run)).max() < 5
    assert (run.active_probs - expected).abs().max() < 0.05
    states, weights = run.distinct()
    assert weights.sum().item() == pytest.approx(1)
    assert weights.diff().max() <= 0
    assert len(states.unique(dim=0)) == len(states)
    # A state's number in the list of all vectors; each has the weight that its probability says.
    number = states.double() @ 2.0 ** torch.arange(collapsed.gates - 1, -1, -1, dtype=torch.float64)
    assert (weights - log_weights[number.long()]).abs().max() < 0.05
    drawn = run.draws(4000, seeded(2))
    assert drawn.shape == (4000, collapsed.gates)
    assert (drawn.double().mean(0) - weights @ states.double()).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert run.chain.unique().tolist() == list(range(16))


@pytest.mark.slow
def test_standard_errors_are_those_of_repetitions():
    """Of 40 short runs: the deviation of their averages, which itself is known to 11 %."""
    collapsed = CollapsedQuadratic(Regression.drawn(60, 4, 1, rho=0.9).dense(), 0.5)
    runs = [tempered_gibbs(collapsed, SPARSE, chains=8, flips=60, generator=seeded(i)) for i in range(40)]
    deviation = torch.stack([run.active_probs for run in runs]).std(0)
    stated = torch.stack([run.standard_error() for run in runs]).square().mean(0).sqrt()
    assert (stated / deviation - 1).abs().max() < 0.4


def test_an_exact_pair_shares_its_effect():
    """One half each, where single-gate moves of an untempered sampler hardly ever go from one to the other."""
    collapsed = CollapsedQuadratic(PAIR.dense(), 0.5)
    run = tempered_gibbs(collapsed, prior(0.1), generator=seeded(0))
    expected, _ = exact(collapsed, prior(0.1))
    assert expected[:2].tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert run.active_probs[:2].tolist() == pytest.approx([0.5, 0.5], abs=0.03)


def test_chains_with_noise_of_their_own():
    """Each samples its own posterior, and the average is that of the chains."""
    factor = torch.linspace(0.1, 2.0, 8, dtype=torch.float64)
    regression = CASES["correlated"][0]
    collapsed = CollapsedQuadratic(regression.dense(), 0.5, factor=factor)
    run = tempered_gibbs(collapsed, SPARSE, flips=600, generator=seeded(1))
    each = [exact(CollapsedQuadratic(regression.dense(), 0.5, factor=factor[i : i + 1]), SPARSE)[0] for i in range(8)]
    assert (run.chain_active_probs - torch.stack(each)).abs().max() < 0.1
    assert (run.active_probs - torch.stack(each).mean(0)).abs().max() < 0.02
    torch.testing.assert_close(
        run.weights.new_zeros(8).index_add(0, run.chain, run.weights), torch.full((8,), 1 / 8.0).double()
    )
    assert collapsed_mean_field(collapsed, SPARSE, steps=5, generator=seeded(1)).shape == (8,)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_chains_that_stay_know_little(share):
    """Gates all open or all closed, one half each: chains that start open more often differ less, and say so."""
    collapsed = CollapsedQuadratic(DenseQuadratic(torch.eye(6).double(), torch.zeros(6).double()), 0.01)
    together = BetaBinomialGates(0.02, 0.02)
    start = (torch.arange(256) < share * 256).double()[:, None].expand(-1, 6)
    options = {"flips": 90, "warm_up": 1 / 3, "start": start, "running": torch.full((6,), 0.9)}
    run = tempered_gibbs(collapsed, together, generator=seeded(0), **options)
    off = (run.active_probs - exact(collapsed, together)[0]).abs().max()
    assert off < 4 * run.error_of_moves().max()
    assert (off > 5 * run.standard_error().max()) == (share == 0.9)
    assert run.error_of_moves().max() > 0.05


def test_chains_that_move_know_what_they_differ_by():
    """A lost mode that comes back; the error is hardly larger."""
    start = vectors(8)[torch.randint(256, (256,), generator=seeded(1))]
    options = {"flips": 90, "warm_up": 1 / 3, "start": start, "running": torch.full((8,), 0.5)}
    run = tempered_gibbs(
        CollapsedQuadratic(CASES["correlated"][0].dense(), 0.5), SPARSE, generator=seeded(0), **options
    )
    assert 1.0 <= (run.error_of_moves() / run.standard_error()).max() < 1.4


def test_from_given_states():
    """Draws of the posterior stay what they are; a lost mode comes back, within 80 flips."""
    collapsed = CollapsedQuadratic(PAIR.dense(), 0.5)
    expected, probs = exact(collapsed, SPARSE)
    right = vectors(8)[torch.multinomial(probs, 64, replacement=True, generator=seeded(1))]
    lost = right.clone()
    lost[:, 0], lost[:, 1] = right[:, :2].amax(1), 0.0
    for start in (right, lost):
        before = start.clone()
        run = tempered_gibbs(collapsed, SPARSE, flips=80, start=start, running=start.mean(0), generator=seeded(2))
        assert torch.equal(start, before)
        assert (run.active_probs - expected).abs().max() < 0.05
    assert (lost.mean(0) - expected).abs().max() > 0.4


def test_generator_decides():
    """The same seed, the same run; neither changes torch's own generator."""
    collapsed = CollapsedQuadratic(PAIR.dense(), 0.5)
    state = torch.get_rng_state()
    runs = [tempered_gibbs(collapsed, SPARSE, flips=20, generator=seeded(i)).active_probs for i in (1, 1, 2)]
    fields = [collapsed_mean_field(collapsed, SPARSE, steps=20, generator=seeded(i)) for i in (1, 1, 2)]
    for first, again, other in (runs, fields):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("gate_prior", [SPARSE, BetaBinomialGates(1.0, 4.0)])
def test_float32(gate_prior):
    """Of the likelihood, whatever the prior's numbers are."""
    dense = PAIR.dense()
    collapsed = CollapsedQuadratic(DenseQuadratic(dense.matrix.float(), dense.linear.float()), 0.5)
    run = tempered_gibbs(collapsed, gate_prior, flips=300, generator=seeded(1))
    expected, _ = exact(CollapsedQuadratic(dense, 0.5), gate_prior)
    assert run.active_probs.dtype == torch.float32
    assert (run.active_probs - expected).abs().max() < 0.05
    assert collapsed_mean_field(collapsed, gate_prior, steps=5, generator=seeded(1)).dtype == torch.float32


def test_a_vague_rate_opens_few_gates_at_first():
    """Of 2,000 gates half are open a priori, and a chain flips one at a time."""
    linear = torch.zeros(2000, dtype=torch.float64)
    linear[7] = 50.0
    collapsed = CollapsedQuadratic(DenseQuadratic(100 * torch.eye(2000, dtype=torch.float64), linear), 1.0)
    run = tempered_gibbs(collapsed, BetaBinomialGates(1.0, 1.0), flips=20, warm_up=0.0, generator=seeded(1))
    assert run.gates.sum(1).max() < 60
    assert run.active_probs[7] > 0.9


def test_states_of_another_distribution():
    """Weights of a run with the wrong rate become those of the right one."""
    collapsed = CollapsedQuadratic(CASES["correlated"][0].dense(), 0.5)
    run = tempered_gibbs(collapsed, prior(0.3), flips=600, generator=seeded(1))
    wide = run.reweighted(lambda z: SPARSE.log_prob(z) - prior(0.3).log_prob(z))
    expected, _ = exact(collapsed, SPARSE)
    assert (run.active_probs - expected).abs().max() > 0.05
    assert (wide.active_probs - expected).abs().max() < 0.03
    assert (wide.weights @ wide.gates.double() - expected).abs().max() < 0.03
    assert wide.weights.sum().item() == pytest.approx(1)


def test_a_chain_without_weight():
    """Is no reason for numbers that are not numbers."""
    states = torch.tensor([[True, False], [False, True]])
    half = torch.full((2,), 0.5)
    run = GibbsRun(half, states.float(), states, half, torch.arange(2), torch.empty(2, 0))
    moved = run.reweighted(lambda z: torch.where(z[:, 0], 0.0, -math.inf))
    assert moved.active_probs.tolist() == [1.0, 0.0]
    assert torch.isfinite(moved.chain_active_probs).all()


def test_a_gate_that_is_always_open():
    """Its log odds are infinite, and chains may start with it closed; the others are as if it were there."""
    regression = Regression.drawn(20, 3, 8)
    collapsed = CollapsedQuadratic(regression.dense(), 0.5)
    always = IndependentGates(torch.tensor([math.inf, 0.0, -1.0], dtype=torch.float64))
    run = tempered_gibbs(collapsed, always, start=torch.zeros(16, 3), generator=seeded(1))
    z = vectors(3)[4:]
    expected = active_probs(collapsed.log_evidence(z) + always.log_prob(z), z)
    assert (run.active_probs - expected).abs().max() < 0.01
