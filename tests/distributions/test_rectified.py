"""Any base: the named families agree with it, and other bases have what a gate has."""

import math

import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import kl_divergence

from pyro_l0.distributions import HardConcrete, Rectified, RectifiedNormal
from tests.cases import SMOOTH
from tests.distributions.test_law import randomised_pit

LOC = torch.tensor([-0.4, 0.2, 0.9], dtype=torch.float64)


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
    for name in (*SMOOTH, "median"):
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
    assert gate.icdf(torch.tensor([-0.5, 0.5, 1.5])).isnan().tolist() == [True, False, True]
    entropy = -p0 * math.log(p0) - p1 * math.log(p1) - inside(law.logpdf)
    assert gate.entropy().item() == pytest.approx(entropy, rel=1e-6)
    torch.manual_seed(101)
    values = randomised_pit(gate, gate.sample((10_000,)))
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", [dist.Normal, dist.Laplace, dist.Cauchy])
def test_half_precision_stays_and_can_be_integrated(family, dtype):
    """Moments, entropy and KLs of a base in half precision, within its rounding."""
    numbers = torch.tensor([-0.5, 0.5, 0.75]), torch.tensor(0.5)
    half, single = (Rectified(family(*(x.to(kind) for x in numbers))) for kind in (dtype, torch.float32))
    for name in ("mean", "variance"):
        assert getattr(half, name).dtype == dtype
        torch.testing.assert_close(getattr(half, name).float(), getattr(single, name), rtol=0.03, atol=0.01)
    torch.testing.assert_close(half.entropy().float(), single.entropy(), rtol=0.03, atol=0.03)
    gate = HardConcrete(0.0)
    torch.testing.assert_close(kl_divergence(half, gate).float(), kl_divergence(single, gate), rtol=0.03, atol=0.03)


def test_the_kl_and_its_gradient_where_the_cdf_underflows():
    """The mass of the prior at zero is 4e-39, which the cdf rounds to 0."""
    loc = torch.tensor([1.84258, 2.77841], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.207736, 0.213312], dtype=torch.float64)
    kl = kl_divergence(RectifiedNormal(loc[0], scale[0]), Rectified(dist.Normal(loc[1], scale[1])))
    (gradient,) = torch.autograd.grad(kl, loc)
    same = kl_divergence(RectifiedNormal(loc[0], scale[0]), RectifiedNormal(loc[1], scale[1]))
    torch.testing.assert_close(kl, same, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, *torch.autograd.grad(same, loc), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("base", "law"),
    [
        (dist.Normal(-3.0, 0.1), stats.norm(-3.0, 0.1)),
        (dist.Normal(4.0, 0.1), stats.norm(4.0, 0.1)),
        (dist.Laplace(30.0, 0.5), stats.laplace(30.0, 0.5)),
        (dist.Cauchy(-2e4, 0.1), stats.cauchy(-2e4, 0.1)),
    ],
    ids=["below", "above", "laplace", "cauchy"],
)
def test_log_masses_in_the_tails(base, law):
    """Of bases on the whole line; to single precision, in which the base is."""
    gate = Rectified(base)
    expected = [law.logcdf(0), law.logsf(1), law.logsf(0)]
    found = [gate.log_prob_zero, gate.log_prob_one, gate.log_active_prob]
    assert [x.item() for x in found] == pytest.approx(expected, rel=1e-4, abs=1e-6)
