"""Every network of the zoo: what it computes with gates, and what its closed gates take with them."""

import copy
import importlib.util

import pytest
import torch

from pyro_l0.nn import fix_gates
from tests.engine.zoo import ZOO, call, sites


def entry_of(name):
    entry = ZOO[name]
    if entry.needs is not None and importlib.util.find_spec(entry.needs) is None:
        pytest.skip(f"needs the package {entry.needs}, which is not installed")
    return entry


@pytest.fixture(params=ZOO)
def entry(request):
    return entry_of(request.param)


def test_there_are_the_kinds_that_users_have():
    assert len(ZOO) >= 38


def test_runs_with_every_gate_open_and_with_half_of_them_closed(entry):
    """In both modes, at two sizes of a batch; that closed gates change something shows that they act."""
    network = entry.network()
    assert sites(network)
    values = entry.gates(network)
    fixed = fix_gates(network, values)
    opened = fix_gates(network, {site: torch.ones_like(value) for site, value in values.items()})
    for batch in (3, 2):
        example = entry.example(batch)
        outputs, others = call(fixed, example), call(opened, example)
        assert all(x.isfinite().all() for x in outputs)
        assert any(not torch.allclose(x, y) for x, y in zip(outputs, others, strict=True))
        training = call(copy.deepcopy(fixed).train(), example)
        assert [x.shape for x in training] == [x.shape for x in outputs]
        assert all(x.isfinite().all() for x in training)


def test_no_number_of_a_network_depends_on_chance(entry):
    """The same seeds give the same network, call and gates; another seed gives another network."""
    one, other = entry.network(), entry.network()
    example = entry.example()
    outputs = [call(fix_gates(net, entry.gates(net)), example) for net in (one, other)]
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    third = entry.network(seed=5)
    values = call(fix_gates(third, entry.gates(third)), entry.example())
    assert any(not torch.equal(x, y) for x, y in zip(outputs[0], values, strict=True))


def test_what_must_leave_is_half_of_the_units(entry):
    network = entry.network()
    assert entry.stays.keys() <= sites(network).keys()
    assert entry.shapes.keys() <= dict(network.named_parameters(remove_duplicate=False)).keys()
    assert sum(entry.leaving(network).values()) > 0
