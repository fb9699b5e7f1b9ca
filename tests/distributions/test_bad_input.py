"""Every refused input, and the message that refuses it."""

import math

import pytest
import torch

from pyro_l0.distributions import HardConcrete, RectifiedNormal

INF, NAN = math.inf, math.nan
OUTSIDE = {
    "temperature": [0.0, -1.0],
    "scale": [0.0, -1.0],
    "concentration1": [0.0],
    "concentration0": [0.0],
    "beta": [0.0],
    "epsilon": [0.0, 1.0],
    "gamma": [0.0, 0.1],
    "zeta": [1.0, 0.9],
}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bad_parameters(family, dtype):
    """A number, a tensor or an entry of a tensor outside its constraint is refused by its name."""
    good = family.parameters[0]
    for name in good:
        for value in (NAN, INF, -INF, *OUTSIDE.get(name, ())):
            kinds = [value] if dtype is None else [torch.tensor(x, dtype=dtype) for x in (value, [good[name], value])]
            for bad in kinds:
                with pytest.raises(ValueError, match=rf"\b{name}\b.*{family.gate.__name__}"):
                    family.gate(**{**good, name: bad})
            if name in family.gate.defaults:
                with pytest.raises(ValueError, match=rf"\b{name}\b"):
                    family.gate.from_active_prob(0.5, **{name: value})


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.1, NAN, INF, -INF])
def test_rates_outside_the_open_interval(rate):
    """A rate of 0 or 1 has no gate of these families; the message states the range."""
    for value in (rate, torch.tensor(rate), torch.tensor([0.5, rate])):
        for family in (HardConcrete, RectifiedNormal):
            with pytest.raises(ValueError, match="active_prob strictly between 0 and 1"):
                family.from_active_prob(value)
        with pytest.raises(ValueError, match="one_given_active strictly between 0 and 1"):
            HardConcrete.from_active_prob(0.5, one_given_active=value)


@pytest.mark.parametrize("value", [-0.1, 1 + 1e-6, -1e-30, NAN, INF])
def test_values_outside_the_support(family, value):
    """log_prob refuses what no gate can be, alone or in a batch."""
    gate = family.gate(**family.parameters[0], validate_args=True).expand((2,))
    for data in (torch.tensor(value), torch.tensor([0.0, value])):
        with pytest.raises(ValueError, match="support"):
            gate.log_prob(data)
