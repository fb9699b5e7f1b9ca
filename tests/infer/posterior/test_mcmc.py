"""Posteriors with gates by NUTS: right against sums over all gates, or a warning."""

import functools
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import NUTS

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import sample_posterior
from pyro_l0.infer.posterior.log_joint import LogJoint, recorded_with_slope
from pyro_l0.infer.posterior.mcmc import chain_statistics, error_of_probs, moved_by_swaps, slabs_of
from pyro_l0.infer.reparam import RectifyReparam
from pyro_l0.infer.target import InferenceTarget
from tests.infer.regressions import regression
from tests.reference_posteriors import GaussianPosterior

# What the warning of a sample that cannot be trusted ends with.
DISTRUST = "These draws are not the posterior"


def data(columns=3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, columns, generator=generator)
    return x, 0.5 * x[:, 0] + torch.randn(30, generator=generator)


def twins(strength):
    """Two features that are the same, and one that is not."""
    x, y = data()
    x[:, 1] = x[:, 0]
    return x, y + strength * x[:, 0]


def bernoulli():
    return BernoulliGate(probs=0.3)


def sharp():
    return HardConcrete.from_active_prob(torch.tensor(0.3), one_given_active=0.9)


def of_features(x, y, gate=bernoulli):
    regression(x, y, gate(), dist.Normal(0.0, 0.5))


def exact(x, y):
    """P(z = 1 | y) and E[z w | y] by a sum over all gates."""
    found = GaussianPosterior(x.double(), y.double(), 1.0, 0.5, 0.3).summary()
    return found.inclusion, found.mean


def test_tables_integrate_to_the_exact_posterior():
    """All gates at places on a grid of weights, whose sums are the integrals."""
    x, y = data(columns=2)
    posterior = LogJoint(InferenceTarget(of_features, (x, y)))
    grid = torch.linspace(-2.5, 2.5, 101)
    vectors = torch.cartesian_prod(grid, grid)
    weights = posterior.tables(vectors).double().flatten().softmax(0).reshape(len(vectors), 4)
    probability, mean = exact(x, y)
    torch.testing.assert_close(weights.sum(0) @ posterior.codes.double(), probability, rtol=1e-4, atol=0)
    product = (weights.unsqueeze(-1) * posterior.codes * vectors.unsqueeze(1)).sum((0, 1))
    torch.testing.assert_close(product, mean, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_bernoulli_gates():
    """Probabilities, draws and products against enumeration; the global generator is left as it was."""
    x, y = data()
    state = torch.get_rng_state()
    options = {"slab": {"w": "z"}, "num_samples": 100, "warmup_steps": 100, "num_chains": 3}
    result = sample_posterior(of_features, x, y, **options, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.ok
    probability, mean = exact(x, y)
    # Five standard errors of as many draws as the least effective sample size.
    error = 5 * 0.5 / math.sqrt(min(v.min().item() for v in result.ess.values()))
    torch.testing.assert_close(result.active_probs()["z"], probability, rtol=0, atol=error)
    draws = result.draws()
    torch.testing.assert_close(draws["z"].double().mean(0), probability, rtol=0, atol=error)
    torch.testing.assert_close(draws["z * w"].double().mean(0), mean, rtol=0, atol=error / 2)
    assert torch.equal(draws["z * w"], draws["z"] * draws["w"])
    assert {name: v.shape for name, v in result.samples.items()} == dict.fromkeys(("z", "w", "z * w"), (3, 100, 3))
    assert result.quantiles([0.1, 0.9])["z * w"].shape == (2, 3)
    assert len(result.divergences) == 3
    assert result.draws(50)["w"].shape == (50, 3)
    assert "z * w[2]" in str(result.summary())


@pytest.mark.slow
def test_one_seed_one_sample():
    """By HMC and by a kernel with options."""
    x, y = data()
    for kernel in ("hmc", functools.partial(NUTS, max_tree_depth=2)):
        options = {"kernel": kernel, "num_samples": 8, "warmup_steps": 0, "num_chains": 2}
        with pytest.warns(UserWarning, match=DISTRUST):
            runs = [sample_posterior(of_features, x, y, **options, seed=seed).samples for seed in (1, 1, 2)]
        assert all(torch.equal(v, runs[1][name]) for name, v in runs[0].items())
        assert not torch.equal(runs[0]["w"], runs[2]["w"])


def test_two_slow_chains_are_not_surer_than_their_difference():
    """Whose effective sample sizes are often too large by a factor: for at least one of a dozen pairs.

    Two gates that differ as much share what is added.
    """
    generator, larger = torch.Generator().manual_seed(0), 0
    for _ in range(12):
        walk = torch.randn(2, 150, generator=generator).double().cumsum(1) / 10
        probs = torch.sigmoid(walk)
        apart, by_size = float(probs.mean(1).diff().abs()) / 2, float(chain_statistics({"z": probs})[2]["z"])
        error = error_of_probs({"z": probs})
        assert error >= max(apart, by_size) * (1 - 1e-9)
        assert error_of_probs({"z": torch.stack((probs, 1 - probs), 2)}) == pytest.approx(error)
        larger += apart > by_size
    assert larger > 0
    assert error_of_probs({"z": torch.ones(2, 150)}) == error_of_probs({}) == 0


def test_chains_that_all_stay_in_one_mode_are_found_out():
    """They agree with one another; the other feature's turn shows by an exchange, also one of opposite sign."""
    x, y = twins(1.5)
    for sign, gate in itertools.product((1.0, -1.0), (bernoulli, sharp)):
        x[:, 1] = sign * x[:, 0]
        posterior = LogJoint(InferenceTarget(of_features, (x, y, gate)))
        draws = torch.tensor([2.0, 0.1, -0.2]) + 0.05 * torch.randn(200, 3)
        codes = torch.tensor([1.0, 0.0, 0.0]).expand(200, 3)
        if gate is sharp:
            draws, codes = torch.cat((40 * (codes - 0.5), draws), -1), codes[:, :0]
        moved = moved_by_swaps(posterior, draws, codes, slabs_of(posterior, {"w": "z"}))["z"]
        assert moved[0] < -0.5
        assert moved[1] > 0.5
        assert moved[2].abs() < 0.3


def test_draws_that_are_right_stay_under_exchanges():
    """Independent draws of the posterior of two features that are the same, by resampling the prior's."""
    x, y = twins(0.3)
    posterior = LogJoint(InferenceTarget(of_features, (x, y)))
    vectors, codes = 0.5 * torch.randn(100_000, 3), (torch.rand(100_000, 3) < 0.3).float()
    prior = dist.Normal(0.0, 0.5).log_prob(vectors).sum(-1) + BernoulliGate(probs=0.3).log_prob(codes).sum(-1)
    chosen = torch.distributions.Categorical(logits=posterior.many(vectors, codes)[0] - prior).sample((1000,))
    moved = moved_by_swaps(posterior, vectors[chosen], codes[chosen], slabs_of(posterior, {"w": "z"}))["z"]
    assert moved.abs().max() < 5 * 1 / math.sqrt(1000)


def hierarchical(counts, groups, *, width):
    """Group gates and gates inside, a rate, a scale, an interval that hangs on it, and gates of another kind."""
    rate = pyro.sample("rate", dist.Beta(2.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    shift = pyro.sample("shift", dist.Uniform(-tau, tau))
    with pyro.plate("groups", groups):
        z = pyro.sample("z", BernoulliGate(probs=rate))
        w = pyro.sample("w", dist.Normal(torch.zeros(width), tau).to_event(1))
    v = pyro.sample("v", BernoulliGate(logits=z.sum() - 1))
    r = pyro.sample("r", sharp().expand([2]).to_event(1))
    u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    effect = pyro.deterministic("effect", (z.unsqueeze(-1) * w).sum(0))
    with pyro.plate("data", len(counts)):
        pyro.sample("y", dist.Poisson((effect.sum() + v * shift + (r * u).sum()).exp()), obs=counts)


def test_any_model():
    """Shapes of what is sampled; the density against Pyro's own at the draws."""
    counts = torch.tensor([1.0, 2.0, 0.0, 3.0])
    with pytest.warns(UserWarning, match=DISTRUST):
        result = sample_posterior(
            hierarchical,
            counts,
            2,
            width=3,
            slab={"w": "z", "u": "r"},
            kernel=functools.partial(NUTS, max_tree_depth=2),
            num_samples=8,
            warmup_steps=4,
            num_chains=2,
            seed=1,
        )
    shapes = {"z": (2,), "w": (2, 3), "z * w": (2, 3), "v": (), "r": (2,), "r * u": (2,), "effect": (3,), "rate": ()}
    assert {name: result.samples[name].shape[2:] for name in shapes} == shapes
    assert set(result.active_probs()) == {"z", "v", "r"}
    draws = result.draws()
    torch.testing.assert_close(draws["effect"], draws["z * w"].sum(-2))
    assert (draws["shift"].abs() <= draws["tau"]).all()


def test_density_is_pyros():
    """At places where the support of a site hangs on another site; recorded or not."""
    counts = torch.tensor([1.0, 2.0, 0.0, 3.0])
    posterior = LogJoint(InferenceTarget(hierarchical, (counts, 2), {"width": 3}))
    vector, code = torch.randn(len(posterior.start)), posterior.codes[5]
    log_density, values = posterior(vector, code)
    reparameterised = pyro.poutine.reparam(hierarchical, {"r": RectifyReparam()})
    given = {name: value for name, value in values.items() if name not in ("effect", "r")}
    trace = pyro.poutine.trace(pyro.poutine.condition(reparameterised, given)).get_trace(counts, 2, width=3)
    jacobian = 0.0
    for name in posterior.latent.shapes:
        transform = torch.distributions.biject_to(trace.nodes[name]["fn"].support)
        real = transform.inv(values[name])
        jacobian += transform.log_abs_det_jacobian(real, values[name]).sum()
    torch.testing.assert_close(log_density, trace.log_prob_sum() + jacobian, rtol=1e-5, atol=1e-4)

    record = recorded_with_slope(posterior.potential, posterior.start, torch.randn_like(vector))
    assert record is not posterior.potential
    a, b = vector.clone().requires_grad_(), vector.clone().requires_grad_()
    torch.testing.assert_close(record(a), posterior.potential(b))
    torch.testing.assert_close(torch.autograd.grad(record(a), a), torch.autograd.grad(posterior.potential(b), b))


def test_gates_alone_are_drawn_exactly():
    """Without a continuous variable nothing is left to a sampler."""

    def gates():
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor([0.2, 0.6])).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.5))

    result = sample_posterior(gates, num_samples=50, seed=1)
    both = itertools.product((0, 1), repeat=2)
    weights = {(a, b): (0.8, 0.2)[a] * (0.4, 0.6)[b] * math.exp(-((1.5 - a - b) ** 2) / 2) for a, b in both}
    first = (weights[1, 0] + weights[1, 1]) / sum(weights.values())
    assert result.active_probs()["z"][0].item() == pytest.approx(first, rel=1e-5)
    assert result.samples["z"].shape == (4, 50, 2)
    assert list(result.summary().to_frame().columns[-2:]) == ["r_hat", "ess"]
    assert "divergent transitions by chain: [0, 0, 0, 0]" in str(result.summary())
    assert torch.equal(result.quantiles(0.5)["z"], result.quantiles([0.5])["z"][0])


def test_chains_that_do_not_move():
    """Gates that are always closed agree; gates that are open in one chain and closed in others do not."""
    closed, stuck = torch.zeros(4, 20), torch.zeros(4, 20)
    stuck[1] = 1
    half = torch.tensor([0.0, 1.0]).repeat(4, 10)  # the distance from the median is always the same
    r_hat, ess, error = chain_statistics({"closed": closed, "stuck": stuck, "half": half})
    assert (r_hat["closed"].item(), ess["closed"].item(), error["closed"].item()) == (1, 80, 0)
    assert error["stuck"].item() > 0.15  # one of four chains: sqrt(1/4 * 3/4 / 4) = .22 of four that are alone
    assert r_hat["stuck"].item() > 1e3
    assert r_hat["half"].item() < 1.01
    assert torch.isfinite(ess["half"])


def test_each_entry_by_itself():
    torch.manual_seed(0)
    x = torch.randn(3, 50, 2, 4)
    x[0, :, 1, 2] += 2
    r_hat, ess, _ = chain_statistics({"x": x, "binary": (x > 0).long()})
    assert r_hat["x"].shape == ess["x"].shape == (2, 4)
    assert (r_hat["x"] > 1.2).nonzero().tolist() == [[1, 2]]
    assert r_hat["x"][1, 2] == chain_statistics({"y": x[..., 1, 2]})[0]["y"]
    assert r_hat["binary"].dtype == torch.float64
