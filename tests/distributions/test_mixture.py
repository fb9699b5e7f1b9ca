"""What is particular to the mixture gates: implicit gradients, the range of rates, the deterministic gates."""

import pytest
import torch

from pyro_l0.distributions import ExponentialGate, ExponentialUniformGate, HardConcrete, PowerLawGate
from pyro_l0.distributions.mixtures import MixtureGate
from pyro_l0.maths import mixture
from tests.cases import FAMILIES, GATES
from tests.reference import ExponentialReference, ExponentialUniformReference, PowerLawReference, mp

MIXTURES = [family for family in FAMILIES if issubclass(family.gate, MixtureGate)]
REFERENCES = {
    mixture.Exponential: ExponentialReference,
    mixture.ExponentialUniform: ExponentialUniformReference,
    mixture.PowerLaw: PowerLawReference,
}


@pytest.mark.parametrize("case", [case for case in GATES if case.family in MIXTURES], ids=repr)
def test_the_two_ways_to_draw_agree(case):
    """The fused draw and the general one give the same values and the same derivative for the logits."""
    family, parameters = case.family, case.parameters
    logits = torch.full((2000,), parameters["logits"], dtype=torch.float64, requires_grad=True)
    fixed = {name: value for name, value in parameters.items() if name != "logits"}
    torch.manual_seed(61)
    fused = family.gate(logits, **fixed).rsample()
    (slope,) = torch.autograd.grad(fused.sum(), logits)
    beta = torch.tensor(fixed.pop("beta"), dtype=torch.float64, requires_grad=True)
    torch.manual_seed(61)
    general = family.gate(logits, beta=beta, **fixed).rsample()
    (expected,) = torch.autograd.grad(general.sum(), logits)
    torch.testing.assert_close(fused, general, rtol=0, atol=1e-15)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 6e-6)], ids=str)
@pytest.mark.parametrize(
    "component",
    [
        *(mixture.Exponential(beta) for beta in (1e-3, 1.0, 30.0, 300.0)),
        *(mixture.ExponentialUniform(beta, share) for beta in (0.1, 25.0, 90.0) for share in (1e-6, 0.9)),
        *(mixture.PowerLaw(beta) for beta in (1.5, 40.0, 300.0)),
    ],
    ids=repr,
)
def test_slopes_of_the_logits(component, dtype, tolerance):
    """The closed forms, from narrow to wide interiors and up to weights of e^-80."""
    s = torch.tensor([1e-3, 1 / 12, 0.3, 0.5, 0.875, 1 - 1 / 64], dtype=dtype)
    for logits in (-80.0, -20.0, -1.0, 0.0, 3.0, 60.0):
        found = component.logit_slope(torch.full_like(s, logits), mixture.Point(s, 1 - s))
        reference = REFERENCES[type(component)](logits, *component)
        exact = [float(reference.logit_slope(mp.mpf(x))) for x in s.tolist()]
        finite = [i for i, x in enumerate(exact) if x < 1e37]  # float32 ends soon after
        expected = torch.tensor(exact, dtype=torch.float64)[finite]
        # Below float32's normal numbers digits are lost.
        torch.testing.assert_close(found.double()[finite], expected, rtol=tolerance, atol=1e-37)


@pytest.mark.parametrize(
    ("gate", "low", "high"),
    [
        (ExponentialGate(0.0, 6.0), 0.606, 0.998),
        (ExponentialGate(0.0, 30.0), 0.082, 1.000),
        (ExponentialUniformGate(0.0, 8.0, 0.1), 0.554, 0.991),
        (ExponentialUniformGate(0.0, 25.0, 0.1), 0.204, 0.992),
        (PowerLawGate(0.0, 2.0), 0.711, 0.957),
        (PowerLawGate(0.0, 30.0), 0.079, 0.997),
        (PowerLawGate(0.0, 40.0), 0.060, 0.998),
    ],
    ids=repr,
)
def test_range_of_rates(gate, low, high):
    """The rates that a weight of 0 and of 1 reach, and the refusal beyond, which states them."""
    options = {name: value for name, value in gate.fixed_options.items() if name not in ("gamma", "zeta")}
    found = [float(x) for x in gate._active_probs]
    assert found == pytest.approx([low, high], abs=6e-4)
    for rate in (found[0] * 0.99, found[0] + 0.999 * (found[1] - found[0]), found[1] + 1e-3):
        if found[0] < rate < found[1]:
            made = type(gate).from_active_prob(torch.tensor(rate, dtype=torch.float64), **options)
            assert made.active_prob.item() == pytest.approx(rate, rel=1e-12)
            continue
        with pytest.raises(ValueError, match=f"strictly between {found[0]:g} and {found[1]:g}"):
            type(gate).from_active_prob(rate, **options)


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.gate.__name__)
def test_from_active_prob_in_batches(family):
    """Float32 rates come back to six digits, and keep their gradient."""
    rates = torch.tensor([[0.3], [0.9]], requires_grad=True)
    gate = family.gate.from_active_prob(rates)
    assert gate.batch_shape == (2, 1)
    torch.testing.assert_close(gate.active_prob, rates, rtol=2e-6, atol=0)
    gate.logits.sum().backward()
    assert (rates.grad > 0).all()


def test_deterministic_gates_by_name():
    """Section 4.2.2 in docs/explanation/errata.md: four gates that the paper may mean, and where they close."""
    weight = torch.tensor(0.2, dtype=torch.float64)
    gate = ExponentialGate(torch.logit(weight), 30.0)
    assert gate.mean.item() == pytest.approx(0.202, abs=5e-4)
    assert gate.median.item() == 0
    assert gate.plug_in_mean.item() == pytest.approx(0.164, abs=5e-4)
    assert gate.plug_in_weight.item() == pytest.approx(0.140, abs=5e-4)
    assert gate.test_gate.item() == gate.plug_in_weight.item()
    # The weight closes a gate at 1/12 and opens it fully at 11/12, as Eq. 13 does with sigmoid(log alpha).
    weights = torch.tensor([1 / 12 - 1e-6, 1 / 12 + 1e-6, 11 / 12 - 1e-6, 11 / 12 + 1e-6], dtype=torch.float64)
    test_gate = ExponentialGate(torch.logit(weights), 30.0).test_gate
    assert (test_gate == 0).tolist() == [True, False, False, False]
    assert (test_gate == 1).tolist() == [False, False, False, True]
    concrete = HardConcrete(torch.logit(weights)).test_gate
    torch.testing.assert_close(test_gate, concrete)


def test_means_of_the_components():
    """The closed forms behind plug_in_mean against integrals of the survival functions."""
    s = torch.linspace(0, 1, 200_001, dtype=torch.float64)[1:-1]
    x = mixture.Point(s, 1 - s)
    for component in (
        mixture.Exponential(6.0),
        mixture.Exponential(1e-3),
        mixture.ExponentialUniform(25.0, 0.1),
        mixture.PowerLaw(1.7),
    ):
        mean = torch.trapezoid(component.log_above(x).exp(), s).item() + 2.5e-6
        assert component.mean == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("beta", [6.0, 30.0, 90.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_quantiles_of_the_exponential_mixture(beta, dtype):
    """The closed form meets the cdf again, from either tail, at any weight."""
    logits = torch.tensor([-80.0, -5.0, 0.0, 3.0, 80.0], dtype=dtype)[:, None]
    component = mixture.Exponential(beta)
    p = torch.cat([torch.logspace(-12, -0.31, 40, dtype=dtype), 1 - torch.logspace(-6, -0.31, 40, dtype=dtype)])
    s = component.mixture_quantile(logits, p)
    assert ((s >= 0) & (s <= 1)).all()
    inside = (s > 1e-6) & (s < 1 - 1e-6)
    x = mixture.Point(s.clamp(1e-6, 1 - 1e-6), 1 - s.clamp(1e-6, 1 - 1e-6))
    below = mixture.log_below(component, logits, x).exp()
    # s is rounded to an epsilon, which the density turns into an error of the cdf.
    slack = torch.finfo(dtype).eps * (4 + 4 * mixture.log_density(component, logits, x).exp())
    assert ((below - p).abs() <= slack)[inside].all()
