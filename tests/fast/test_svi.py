"""SVI, which collects parameters by a handler of its own, takes the fast ways and finds every parameter."""

import contextlib

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from torch import nn

from pyro_l0 import HardConcrete, fast
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.infer.record import Record, sample, sole_record
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates


def pair(objective):
    """A gated network, its guide and its loss, with one seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(L0Gate(6), nn.Linear(6, 5), nn.ReLU(), L0Gate(5), nn.Linear(5, 3)).double()
    name_gates(net)
    x, y = torch.randn(20, 6).double(), torch.arange(20) % 3

    def model():
        pyro.module("net", net)
        factor("y", -F.cross_entropy(net(x), y, reduction="sum"))

    guide = AutoGate(model)
    guide()
    return net, guide, model, L0_ELBO(objective, lam=0.1)


def by_svi(objective):
    """Losses of three steps, the parameters in the end, and the names that SVI steps."""
    net, guide, model, elbo = pair(objective)
    stepped = []
    adam = pyro.optim.Adam(lambda name: stepped.append(name) or {"lr": 0.01})
    svi = SVI(model, guide, adam, elbo)
    pyro.set_rng_seed(1)
    losses = [svi.step() for _ in range(3)]
    return losses, [x.detach().clone() for x in [*net.parameters(), *guide.parameters()]], stepped


def by_module(objective):
    """The same steps of a torch optimiser."""
    net, guide, model, elbo = pair(objective)
    parameters = [*net.parameters(), *guide.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    pyro.set_rng_seed(1)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = elbo.differentiable_loss(model, guide)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, [x.detach().clone() for x in parameters]


@pytest.mark.parametrize("objective", ["l0", "free_energy"])
def test_the_same_steps_by_svi_as_by_a_torch_optimiser(objective):
    """Bit for bit; and to rounding with the fast ways off, where sites are priced one by one."""
    losses, parameters, _ = by_svi(objective)
    expected, of_module = by_module(objective)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(parameters, of_module, strict=True))
    with fast.disabled():
        slow, of_slow, _ = by_svi(objective)
    torch.testing.assert_close(losses, slow, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(parameters, of_slow, rtol=1e-8, atol=1e-10)


def test_the_short_way_to_a_site_is_bit_equal():
    """That alone, with products, joint draws and closed forms computed plainly on both sides."""
    with fast.disabled("joint_draws", "kl", "gated_weights"):
        losses, parameters, _ = by_svi("free_energy")
    with fast.disabled():
        slow, of_slow, _ = by_svi("free_energy")
    assert losses == slow
    assert all(torch.equal(one, other) for one, other in zip(parameters, of_slow, strict=True))


def test_svi_takes_joint_draws_and_steps_every_parameter():
    net, guide, model, elbo = pair("l0")
    with poutine.trace(param_only=True) as trace:
        run = elbo._get_trace(model, guide, (), {})
    assert run.joint_draws
    found = {id(site["value"].unconstrained()) for site in trace.trace.nodes.values()}
    assert found == {id(x) for x in [*net.parameters(), *guide.parameters()]}
    assert len(by_svi("l0")[2]) == len(found)


class Subclass(poutine.trace_messenger.TraceMessenger):
    """May do more than collect parameters."""


@pytest.mark.parametrize(
    ("handler", "is_short"),
    [
        (contextlib.nullcontext, True),
        (lambda: poutine.trace(param_only=True), True),
        (poutine.trace, False),
        (lambda: Subclass(param_only=True), False),
        (lambda: poutine.scale(scale=2.0), False),
        (lambda: poutine.block(hide=["z"]), False),
    ],
)
def test_which_handlers_leave_the_short_way(handler, is_short):
    fn = HardConcrete(torch.zeros(3)).to_event(1)
    with handler(), Record() as record:
        assert (sole_record() is record) == is_short
        z = sample("z", fn)
        with poutine.mask(mask=False):
            sample("masked", fn)
    assert record.sites["z"]["value"] is z
    assert (record.sites["z"]["mask"], record.sites["masked"]["mask"]) == (None, False)
    with Record(record.sites) as again:
        assert sample("z", fn) is z
    assert again.sites["z"]["value"] is z
    with Record(), poutine.trace(param_only=True):  # it would take the sites of the record inside
        assert sole_record() is None
