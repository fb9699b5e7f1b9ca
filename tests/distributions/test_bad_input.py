"""Every refused input, and the message that refuses it."""

import math

import pytest
import torch

from pyro_l0.distributions import HardConcrete, RectifiedNormal

INF, NAN = math.inf, math.nan

# What is built, and what the message must name.
BAD_PARAMETERS = [
    (HardConcrete, dict(log_alpha=NAN), "log_alpha"),
    (HardConcrete, dict(log_alpha=INF), "log_alpha"),
    (HardConcrete, dict(log_alpha=-INF), "log_alpha"),
    (HardConcrete, dict(log_alpha=[0.0, NAN]), "log_alpha"),
    (HardConcrete, dict(log_alpha=0.0, temperature=NAN), "temperature"),
    (HardConcrete, dict(log_alpha=0.0, temperature=INF), "temperature"),
    (HardConcrete, dict(log_alpha=0.0, temperature=0.0), "temperature"),
    (HardConcrete, dict(log_alpha=0.0, temperature=-1.0), "temperature"),
    (HardConcrete, dict(log_alpha=0.0, temperature=[0.5, -0.5]), "temperature"),
    (HardConcrete, dict(log_alpha=0.0, gamma=0.0), "gamma"),
    (HardConcrete, dict(log_alpha=0.0, gamma=0.1), "gamma"),
    (HardConcrete, dict(log_alpha=0.0, gamma=NAN), "gamma"),
    (HardConcrete, dict(log_alpha=0.0, gamma=-INF), "gamma"),
    (HardConcrete, dict(log_alpha=0.0, zeta=1.0), "zeta"),
    (HardConcrete, dict(log_alpha=0.0, zeta=0.9), "zeta"),
    (HardConcrete, dict(log_alpha=0.0, zeta=NAN), "zeta"),
    (HardConcrete, dict(log_alpha=0.0, zeta=INF), "zeta"),
    (RectifiedNormal, dict(loc=NAN, scale=1.0), "loc"),
    (RectifiedNormal, dict(loc=INF, scale=1.0), "loc"),
    (RectifiedNormal, dict(loc=-INF, scale=1.0), "loc"),
    (RectifiedNormal, dict(loc=0.0, scale=NAN), "scale"),
    (RectifiedNormal, dict(loc=0.0, scale=INF), "scale"),
    (RectifiedNormal, dict(loc=0.0, scale=0.0), "scale"),
    (RectifiedNormal, dict(loc=0.0, scale=-1.0), "scale"),
]

BAD_NUMBERS = [case for case in BAD_PARAMETERS if not any(isinstance(x, list) for x in case[1].values())]
BAD_RATES = [0.0, 1.0, -0.1, 1.1, NAN, INF, -INF]


def describe(value):
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return getattr(value, "__name__", None)


def as_tensors(parameters, dtype):
    return {name: torch.tensor(value, dtype=dtype) for name, value in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "parameters", "name"), BAD_PARAMETERS, ids=describe)
def test_bad_tensor_parameters(family, parameters, name, dtype):
    """A tensor outside its constraint is refused by its name."""
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{family.__name__}"):
        family(**as_tensors(parameters, dtype))


@pytest.mark.parametrize(("family", "parameters", "name"), BAD_NUMBERS, ids=describe)
def test_bad_number_parameters(family, parameters, name):
    """A Python number outside its constraint is refused by its name."""
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{family.__name__}"):
        family(**parameters)


@pytest.mark.parametrize("rate", BAD_RATES)
def test_rates_outside_the_open_interval(rate):
    """A rate of 0 or 1 has no gate of these families; the message states the range."""
    for value in (rate, torch.tensor(rate), torch.tensor([0.5, rate])):
        for family in (HardConcrete, RectifiedNormal):
            with pytest.raises(ValueError, match="active_prob strictly between 0 and 1"):
                family.from_active_prob(value)
        with pytest.raises(ValueError, match="one_given_active strictly between 0 and 1"):
            HardConcrete.from_active_prob(0.5, one_given_active=value)


@pytest.mark.parametrize(
    ("family", "parameters", "name"),
    [
        (HardConcrete, dict(temperature=-1.0), "temperature"),
        (HardConcrete, dict(gamma=0.5), "gamma"),
        (HardConcrete, dict(zeta=1.0), "zeta"),
        (RectifiedNormal, dict(scale=0.0), "scale"),
    ],
    ids=describe,
)
def test_bad_parameters_beside_a_good_rate(family, parameters, name):
    """from_active_prob refuses what the constructor refuses, under the same name."""
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        family.from_active_prob(0.5, **parameters)


@pytest.mark.parametrize("value", [-0.1, 1.1, 1 + 1e-6, -1e-30, NAN, INF, -INF])
@pytest.mark.parametrize("family", [HardConcrete, RectifiedNormal])
def test_values_outside_the_support(family, value):
    """log_prob refuses what no gate can be, alone or in a batch."""
    gate = family(torch.zeros(2), torch.ones(2), validate_args=True)
    for data in (torch.tensor(value), torch.tensor([0.5, value])):
        with pytest.raises(ValueError, match="support"):
            gate.log_prob(data)


@pytest.mark.parametrize("family", [HardConcrete, RectifiedNormal])
def test_what_is_missing_or_of_another_kind(family):
    """log_prob wants a tensor and says so; a missing parameter is Python's own message."""
    gate = family(torch.zeros(2), torch.ones(2), validate_args=True)
    with pytest.raises(ValueError, match="must be a Tensor"):
        gate.log_prob([0.0, 1.0])
    with pytest.raises(TypeError, match="missing"):
        family()
