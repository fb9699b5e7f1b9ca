"""A log probability that a model adds, by the short way and by Pyro's; random states."""

import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, factor
from pyro_l0.infer.record import sample
from pyro_l0.infer.runs import forked_generators

LOG_FACTOR = torch.tensor([-1.5, 0.25, -3.0])


def scalar_model(add):
    add("y", LOG_FACTOR.sum())


def plate_model(add):
    with pyro.plate("data", 12, subsample=torch.arange(3)):
        add("y", LOG_FACTOR)


def scaled_model(add):
    with poutine.scale(scale=4.0):
        add("y", LOG_FACTOR.sum())


def masked_model(add):
    with pyro.plate("data", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        add("y", LOG_FACTOR)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(scalar_model, 4.25), (plate_model, 17.0), (scaled_model, 17.0), (masked_model, 4.5)],
)
def test_loss_is_that_of_pyros_factor(model, expected):
    """In this library's loss and in one of Pyro's, with plates, scales and masks around it."""
    for loss in (L0_ELBO("l0"), Trace_ELBO()):
        for add in (factor, pyro.factor):
            assert loss.loss(model, lambda _: None, add) == expected


def test_gradients_and_terms():
    """The gradient reaches what the log probability was made of, and the value counts as likelihood."""
    weight = torch.tensor(0.7, requires_grad=True)

    def model():
        factor("y", -(weight**2) * torch.ones(2, 3))
        factor("x", weight)

    elbo = L0_ELBO("l0")
    elbo.differentiable_loss(model, lambda: None).backward()
    assert weight.grad.item() == pytest.approx(6 * 2 * 0.7 - 1)
    assert elbo.terms(model, lambda: None)["nll"].item() == pytest.approx(6 * 0.49 - 0.7)


def test_nothing_is_checked():
    """Not a number passes, as a check would make the host wait; the loss shows it."""
    elbo, value = L0_ELBO("l0"), torch.tensor(torch.nan)
    with pyro.validation_enabled(True):
        assert torch.isnan(elbo.differentiable_loss(lambda: factor("y", value), lambda: None))


def test_a_name_is_used_once():
    """Beside another factor, a sample and a gate of the library."""
    value, gate = torch.tensor(0.0), HardConcrete(0.0)
    samples = (lambda name, _: pyro.sample(name, dist.Normal(0.0, 1.0), obs=value), lambda name, _: sample(name, gate))
    for first in (factor, *samples):

        def model(first=first):
            first("y", value)
            factor("y", value)

        with pytest.raises(RuntimeError, match="Multiple sample sites named 'y'"):
            L0_ELBO("l0").loss(model, lambda: pyro.sample("y", gate))


def test_a_trace_has_it():
    """Handlers of Pyro's see an observed site."""
    site = poutine.trace(factor).get_trace("y", LOG_FACTOR).nodes["y"]
    assert site["is_observed"]
    assert site["fn"].log_prob(site["value"]).tolist() == LOG_FACTOR.tolist()


def test_generators_are_as_before_where_a_run_raises():
    """NumPy's, torch's and Python's; a diagnosis measures losses that may fail."""

    def states():
        return np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist(), random.getstate()  # noqa: NPY002

    def fails():
        with forked_generators():
            np.random.rand(), torch.rand(3), random.random()  # noqa: NPY002
            raise RuntimeError("in the middle")

    before = states()
    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert states() == before
