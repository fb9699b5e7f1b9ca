"""Every refused input, and the message that refuses it."""

import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_l0.distributions import BernoulliGate, HardConcrete, PowerLawGate, Rectified, RectifiedNormal
from pyro_l0.distributions.kl import kl_by_quadrature

INF, NAN = math.inf, math.nan
RATES = [y for x in (0.0, 1.0, -0.1, 1.1, NAN, INF, -INF) for y in (x, torch.tensor(x), torch.tensor([0.5, x]))]
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


@pytest.mark.parametrize("value", [-0.1, 1 + 1e-6, -1e-30, NAN, INF])
def test_values_outside_the_support(family, value):
    """log_prob refuses what no gate can be, alone or in a batch."""
    gate = family.gate(**family.parameters[0], validate_args=True).expand((2,))
    for data in (torch.tensor(value), torch.tensor([0.0, value])):
        with pytest.raises(ValueError, match="support"):
            gate.log_prob(data)


class OneAtom(RectifiedNormal):
    """A gate that claims an atom at 0 only."""

    atoms = (0.0,)


GATE, GATES, RECTIFIED = HardConcrete(0.0), HardConcrete(torch.zeros(2)), RectifiedNormal(0.5, 0.5)
ONE_ATOM, BERNOULLI, STRANGE = OneAtom(0.5, 0.5), BernoulliGate(logits=0.3), (None, "abc", 0.5, dist.Normal)
WRAPPED = GATES.to_event(1), GATES.mask(torch.tensor([True, False]))
ABSOLUTE = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.AbsTransform()])
WITHOUT_CDF = dist.StudentT(3.0, 0.0, 1.0), dist.Beta(1.0, 2.0), ABSOLUTE
# By the error and its message, what raises it.
REFUSED = {
    ValueError: {
        "active_prob strictly between 0 and 1": [
            partial(family.from_active_prob, x) for family in (HardConcrete, RectifiedNormal) for x in RATES
        ],
        "one_given_active strictly between 0 and 1": [
            partial(HardConcrete.from_active_prob, 0.5, one_given_active=x) for x in RATES
        ],
        "one of probs and logits": [BernoulliGate, partial(BernoulliGate, 0.5, 0.0)],
        "Expected probs above 0 and below 1, but got .*; log odds are logits": [
            partial(BernoulliGate, x) for x in (1.5, 0.0, 1.0, -0.1, NAN, torch.tensor([0.5, 2.0]))
        ],
        "parameter logits .* of distribution BernoulliGate": [partial(BernoulliGate, logits=x) for x in (INF, NAN)],
        "pathwise draws, but got Bernoulli": [partial(Rectified, dist.Bernoulli(0.3))],
        "pathwise draws, but got Dirichlet": [partial(Rectified, dist.Dirichlet(torch.ones(3)))],
        r"at most 1e\+12 in an integral of HardConcrete and RectifiedNormal.*1e\+30": [
            partial(kl_divergence, HardConcrete(0.5, 1e30), RectifiedNormal(0.5, 0.5))
        ],
    },
    TypeError: {
        "Expected base to be a distribution": [partial(Rectified, x) for x in STRANGE],
        "Expected q to be a gate": [partial(kl_by_quadrature, x, GATE) for x in STRANGE],
        "Expected p to be a gate": [partial(kl_by_quadrature, GATE, x) for x in STRANGE],
        "infinite": [partial(kl_divergence, x, BERNOULLI) for x in (GATE, RECTIFIED, PowerLawGate(0.0, 2.0))],
        # A wrapper on one side alone: NotImplementedError would make Pyro sample without a word.
        "KL.*HardConcrete": [partial(kl_divergence, *pair) for x in WRAPPED for pair in ((x, GATES), (GATES, x))],
        r"atoms.*\(0\.0,": [partial(kl_divergence, *pair) for pair in ((ONE_ATOM, GATE), (GATE, ONE_ATOM))],
    },
    NotImplementedError: {
        "does not implement mode": [lambda: GATE.mode],  # a mass and a density do not compare
        "give it a base": [partial(Rectified.from_active_prob, 0.5)],
        "^": [lambda base=base: Rectified(base).active_prob for base in WITHOUT_CDF],  # torch says no more
    },
}


@pytest.mark.parametrize(
    ("error", "message"), [(error, message) for error, some in REFUSED.items() for message in some]
)
def test_refusals(error, message):
    """The message names what arrived, the argument that was given, and what is possible."""
    for call in REFUSED[error][message]:
        with pytest.raises(error, match=message):
            call()
