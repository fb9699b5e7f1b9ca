"""The comparators' divergences, their pruning rules, and each on the digits."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats

from common.data import Images, load_digits
from tests.bench.pruning import comparators
from tests.bench.pruning.comparator_methods import METHODS, Convolution, log_uniform_kl
from tests.bench.pruning.comparator_noise import LogNormals, TruncatedLogNormal


@pytest.mark.parametrize("log_alpha", [-6.0, -2.0, 0.0, 1.0, 3.0, 6.0])
def test_fitted_kl_to_the_log_uniform_prior(log_alpha):
    """The published fit against the integral; its authors state an accuracy of about 0.01."""
    root = math.exp(0.5 * log_alpha)

    def density(e):
        return stats.norm.pdf(e) * math.log(abs(1 + root * e) + 1e-300)

    places = sorted({max(-9.0, -1 / root), 0.0})
    expected_log = integrate.quad(density, -9, 9, points=places, limit=400)[0]
    exact = expected_log - 0.5 * log_alpha + 0.5 * (0.5772156649 + math.log(2))
    assert log_uniform_kl(torch.tensor(log_alpha)).item() == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize(("mu", "log_sigma"), [(-1.0, -2.0), (-0.1, -0.5), (-3.0, 0.7), (0.5, 0.0)])
def test_truncated_log_normal(mu, log_sigma):
    """KL against an integral; mean, signal to noise and draws against scipy's truncated normal."""
    noise = TruncatedLogNormal(1)
    with torch.no_grad():
        noise.mu.fill_(mu)
        noise.log_sigma.fill_(log_sigma)
    sigma = math.exp(log_sigma)
    law = stats.truncnorm((-20 - mu) / sigma, -mu / sigma, mu, sigma)
    negative_entropy = integrate.quad(lambda x: law.pdf(x) * law.logpdf(x), max(-20, mu - 12 * sigma), 0, limit=400)[0]
    assert noise.kl().item() == pytest.approx(negative_entropy + math.log(20), rel=1e-5)
    first, second = (integrate.quad(lambda x, k=k: law.pdf(x) * math.exp(k * x), -20, 0, limit=400)[0] for k in (1, 2))
    mean, snr = noise.mean_and_snr()
    assert mean.item() == pytest.approx(first, rel=1e-5)
    assert snr.item() == pytest.approx(first / math.sqrt(second - first**2), rel=1e-4)
    torch.manual_seed(111)
    draws = noise.rsample(torch.Size([20_000, 1])).detach().double()
    assert stats.kstest(draws.log().flatten().numpy(), law.cdf).pvalue > 1e-6


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_log_normals_under_a_half_cauchy(scale):
    """KLs of both factors against integrals, and that a prior draw of their product is half-Cauchy."""
    torch.manual_seed(114)
    scales = LogNormals(3, scale)
    with torch.no_grad():
        scales.tenth_log_var.copy_(torch.linspace(-0.3, 0.1, 6).view(2, 3))
        scales.tenth_loc += 0.1 * torch.randn(2, 3)
    first, second = stats.gamma(0.5, scale=scale**2), stats.invgamma(0.5)
    loc, sd = scales.loc.tolist(), (0.5 * scales.log_var).exp().tolist()
    for prior, locs, sds, found in zip((first, second), loc, sd, scales.kl().tolist(), strict=True):
        for m, s, value in zip(locs, sds, found, strict=True):

            def ratio(t, m=m, s=s, prior=prior):  # t is the logarithm
                return stats.norm.pdf(t, m, s) * (stats.norm.logpdf(t, m, s) - prior.logpdf(math.exp(t)) - t)

            assert value == pytest.approx(integrate.quad(ratio, m - 10 * s, m + 10 * s, limit=400)[0], rel=1e-4)
    a, b = first.rvs(20_000, random_state=115), second.rvs(20_000, random_state=116)
    assert stats.kstest((a * b) ** 0.5, stats.halfcauchy(scale=scale).cdf).pvalue > 1e-3


def test_pruning_rules():
    """Each layer's rule on parameters on both sides of its threshold."""
    for name, method in METHODS.items():
        torch.manual_seed(112)
        layer = method(4, 3, 1.0)
        with torch.no_grad():
            if name == "generalized":
                layer.logit.copy_(torch.tensor([-0.1, 0.1, -3.0, 3.0]))
            elif name == "sparse_vd":
                layer.log_var[:, [0, 2]] = 20.0
            elif name == "vibnet":
                layer.mu.copy_(torch.tensor([0.1, 1.0, -0.1, -1.0]))
                layer.log_var.fill_(-2.0)
            elif name == "sbp":
                layer.noise.mu.copy_(torch.tensor([-15.0, -0.5, -15.0, -0.5]))
                layer.noise.log_sigma.copy_(torch.tensor([2.0, -2.0, 2.0, -2.0]))
            elif name == "bc_gnj":
                layer.log_var.copy_(torch.tensor([4.0, 2.0, 4.0, 2.0]))
            elif name == "bc_ghs":
                layer.groups.tenth_loc[0] = torch.tensor([-0.7, -0.5, -0.7, -0.5])
            elif name == "group_lasso":
                layer.linear.weight[:, [0, 2]] = 1e-9
                layer.after_step(0.1)
            elif name == "admm":
                layer.keep = 0.5
                layer.linear.weight[:, [0, 2]] *= 1e-3
                layer.after_step(0.7)
        weight, keep = layer.pruned()
        assert weight.shape == (3, 4)
        expected = [True] * 4 if "dropout" in name else [False, True, False, True]
        assert keep.tolist() == expected, name


def test_a_convolution_by_a_layer():
    """torch's, with the same filters; the noise of a map is the same at all pixels."""
    torch.manual_seed(117)
    own = Convolution(METHODS["vibnet"](3, 4 * 25, 1.0), 5)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        own.layer.linear.bias.normal_()
        own.layer.mu.fill_(1.0)
        own.layer.log_var.fill_(-40.0)
        filters, bias = own.as_filters(own.layer.linear.weight), own.layer.linear.bias.view(4, 25).sum(1)
        assert torch.allclose(own(x), F.conv2d(x, filters, bias), atol=1e-4)
        own.layer.log_var.fill_(0.0)
        own.layer.linear.bias.zero_()
        one = torch.zeros(1, 3, 9, 8)
        one[:, 1] = 1.0
        noisy, plain = own(one), F.conv2d(one, filters)
        assert torch.allclose(noisy / plain, (noisy / plain).mean(), atol=1e-3)
        assert not torch.allclose(noisy, plain, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dropout", "sparse_vd", "sbp", "bc_ghs", "group_lasso"])
def test_lenet_5(method):
    """A few steps: pruned by its rule, maps included, and compacted with a certificate."""
    generator = torch.Generator().manual_seed(118)
    x, y = torch.rand(120, 784, generator=generator), torch.randint(0, 10, (120,), generator=generator)
    row = comparators.train(Images(x, y, x, y, (28, 28)), method, 2, 1, 1.0, "lenet5")
    assert row["certificate"] < 1e-5
    assert 0 < row["weights_left"] <= 430_500
    assert len(row["architecture"]) == 4


@pytest.mark.parametrize("method", METHODS)
def test_each_on_the_digits(method):
    """Three epochs: finite, pruned by its rule, compacted with a certificate."""
    row = comparators.train(load_digits(), method, 3, 1, 1.0)
    assert row["certificate"] < 1e-5
    assert 0 < row["weights_left"] <= 50_200
    assert row["test_error_percent"] < 90
