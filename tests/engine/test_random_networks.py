"""Random networks compact to networks that compute the same; the units that stay have a reason."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0.compaction import compact
from pyro_l0.nn import fix_gates
from pyro_l0.nn.engine import analyse, record
from tests.engine.random_networks import cases

pytestmark = pytest.mark.filterwarnings("ignore:Gates are closed, but nothing is smaller")
OPTIONS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}


def check(case):
    """Outputs at two sizes of a batch, torch's count of multiply-adds, a reason for every closed unit that stays."""
    example = case.example(3)
    compacted = compact(case.network, case.values, example)
    assert compacted.certificate <= 1e-10
    fixed = fix_gates(case.network, case.values)
    with torch.no_grad():
        for x in (example, case.example(5)):
            expected = fixed(x)
            assert (compacted.network(x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    closed = {site: value == 0 for site, value in case.values.items()}
    analysis = analyse(record(case.network, example), closed, case.values, folds=bool(compacted.plan.folds))
    assert not analysis.barriers
    with FlopCounterMode(display=False) as counter:
        compacted.network(example)
    if not any(bool(mask.all()) for mask in closed.values()):  # behind such a gate nothing may be left to compute
        assert counter.get_total_flops() // 2 == analysis.multiply_adds()
    for site, mask in closed.items():
        stays = set(analysis.gates[site].front.tolist()) & set(analysis.gates[site].behind.tolist())
        for unit in stays & set(mask.nonzero().flatten().tolist()):
            assert analysis.reasons[site][unit]


@settings(max_examples=15, **OPTIONS)
@given(cases())
def test_some_random_networks(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=300, phases=[Phase.generate], **OPTIONS)  # a network that fails is shown as it is
@given(cases())
def test_300_random_networks(case):
    check(case)
