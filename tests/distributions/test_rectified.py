"""Any base: the named families agree with it, and other bases have what a gate has."""

import math

import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import kl_divergence

from pyro_l0.distributions import HardConcrete, Rectified, RectifiedNormal
from tests.distributions.test_contract import randomised_pit

LOC = torch.tensor([-0.4, 0.2, 0.9], dtype=torch.float64)
STATISTICS = ("mean", "variance", "median", "log_prob_zero", "log_prob_one", "log_interior_prob", "log_active_prob")


def pairs():
    """A named family and the same gate by its base."""
    concrete = HardConcrete(LOC, 0.7)
    stretch = concrete.stretch
    base = dist.TransformedDistribution(
        dist.Logistic(LOC / 0.7, torch.full_like(LOC, 1 / 0.7)),
        [dist.transforms.SigmoidTransform(), dist.transforms.AffineTransform(stretch.gamma, stretch.width)],
    )
    yield pytest.param(concrete, Rectified(base), id="hard concrete")
    yield pytest.param(RectifiedNormal(LOC, 0.5), Rectified(dist.Normal(LOC, 0.5)), id="rectified normal")


@pytest.mark.parametrize(("named", "general"), list(pairs()))
def test_the_named_families_agree(named, general):
    """In every statistic, density, cdf, quantile, KL and draw."""
    for name in STATISTICS:
        torch.testing.assert_close(getattr(general, name), getattr(named, name), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(general.entropy(), named.entropy(), rtol=1e-8, atol=1e-10)
    z = torch.tensor([[0.0], [0.3], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(general.log_prob(z), named.log_prob(z))
    torch.testing.assert_close(general.cdf(z), named.cdf(z))
    u = torch.tensor([[0.2], [0.5], [0.9]], dtype=torch.float64)
    torch.testing.assert_close(general.icdf(u), named.icdf(u))
    other = RectifiedNormal(torch.tensor(0.4, dtype=torch.float64), 0.8)
    torch.testing.assert_close(kl_divergence(general, other), kl_divergence(named, other), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(kl_divergence(other, general), kl_divergence(other, named), rtol=1e-7, atol=1e-9)
    assert kl_divergence(general, named).abs().max() < 1e-9


BASES = {
    "laplace": (dist.Laplace, stats.laplace),
    "gumbel": (dist.Gumbel, stats.gumbel_r),
    "cauchy": (dist.Cauchy, stats.cauchy),
}


@pytest.mark.parametrize("name", BASES)
def test_other_bases(name):
    """Moments and entropy against scipy's integrals; draws by their integral transform."""
    make, frozen = BASES[name]
    loc, scale = 0.35, 0.3
    gate = Rectified(make(torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64)))
    law = frozen(loc, scale)
    p0, p1 = law.cdf(0), law.sf(1)

    def inside(f):
        return integrate.quad(lambda z: f(z) * law.pdf(z), 0, 1, points=[loc], epsabs=1e-13, limit=200)[0]

    mean = p1 + inside(lambda z: z)
    assert gate.mean.item() == pytest.approx(mean, rel=1e-7)
    square = p1 + inside(lambda z: z * z)
    assert gate.variance.item() == pytest.approx(square - mean**2, rel=1e-6)
    entropy = -p0 * math.log(p0) - p1 * math.log(p1) - inside(law.logpdf)
    assert gate.entropy().item() == pytest.approx(entropy, rel=1e-6)
    torch.manual_seed(101)
    values = randomised_pit(gate, gate.sample((10_000,)))
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6
    draws = gate.rsample_interior((4000,))
    assert ((draws > 0) & (draws < 1)).all()
    conditional = (gate.cdf(draws) - p0) / (1 - p0 - p1)
    assert stats.kstest(conditional.numpy(), "uniform").pvalue > 1e-6


def test_shapes_and_gradients():
    """Expansion keeps the base; parameters of the base receive gradients through draws and moments."""
    loc = torch.tensor([0.1, 0.6], requires_grad=True)
    gate = Rectified(dist.Normal(loc, 0.5))
    assert gate.expand((3, 2)).rsample((4,)).shape == (4, 3, 2)
    assert gate.to_event(1).log_prob(torch.zeros(2)).shape == ()
    (gate.mean.sum() + gate.rsample().sum()).backward()
    assert (loc.grad > 0).all()
    moved = gate.apply_to_tensors(lambda x: x.double())
    assert moved.mean.dtype == torch.float64
    assert repr(gate).startswith("Rectified(Normal(")


@pytest.mark.parametrize("base", [dist.Bernoulli(0.3), dist.Dirichlet(torch.ones(3))])
def test_bad_bases(base):
    """Discrete and multivariate ones are refused by name."""
    with pytest.raises(ValueError, match=f"pathwise draws, but got {type(base).__name__}"):
        Rectified(base)
    with pytest.raises(NotImplementedError, match="give it a base"):
        Rectified.from_active_prob(0.5)
