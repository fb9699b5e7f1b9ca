"""Sizes are counted as by the rival's repository, and both constraints hold what they say."""

import pytest
import torch

from common.data import Images
from common.networks import build
from pyro_l0.compaction import compact
from pyro_l0.nn.gate import gate_names, name_gates
from tests.bench.pruning.bench_budgets import BATCH, CELLS, FULL, counts, make, used


@pytest.mark.parametrize("name", FULL)
def test_full_networks_have_the_published_sizes(name):
    network = build(name, 784)
    name_gates(network)
    gates = {site: torch.ones(gate.size) for site, gate in gate_names(network).items()}
    small = compact(network, gates, torch.rand(2, 784))
    assert counts(small.network, torch.rand(1, 784)) == FULL[name]


def few_images():
    torch.manual_seed(0)
    x, y = torch.rand(5 * BATCH, 784), torch.arange(5 * BATCH) % 10
    return Images(x, y, x[:10], y[:10], image_shape=(1, 28, 28))


def test_a_target_meets_a_budget_for_each_site():
    run = make(few_images(), CELLS["mlp-layers"], "budget", epochs=2, seed=0, shrink=False)
    for _ in range(2):
        run.train_epoch()
    gates = {site: (gate != 0).float() for site, gate in run.deterministic().items()}
    assert [int(gate.sum()) for gate in gates.values()] == [235, 90, 30]
    assert all(0.99 < share <= 1.0001 for share in used(run, gates))


def test_multipliers_rise_by_what_expected_densities_exceed():
    pytest.importorskip("cooper")
    run = make(few_images(), CELLS["mlp-layers"], "cooper", epochs=1, seed=0, shrink=False)
    active = {site: gate.active_prob.detach() for site, gate in run.guide.posterior().items()}
    excess = torch.tensor(used(run, active)) - 1
    run.train_epoch()
    # Five steps at 1e-4 * 200, in which gates hardly move; the budgets are .3.
    torch.testing.assert_close(run.multiplier.weight.data, 5 * 0.02 * 0.3 * excess, rtol=0.01, atol=0)
