"""Samplers and guides of continuous variables: gates are refused, or reparameterised and given back."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal, AutoNormalMessenger, AutoStructured
from pyro.infer.mcmc.rwkernel import RandomWalkKernel

from pyro_l0 import BernoulliGate, HardConcrete, RectifiedNormal
from pyro_l0.infer.reparam import RectifyReparam, complete_samples

Y = torch.tensor(0.9)


def model(gate=HardConcrete):
    with pyro.plate("two", 2):
        z = pyro.sample("z", gate(torch.zeros(2)))
    v = pyro.sample("v", gate(torch.zeros(1)).to_event(1))
    pyro.sample("y", dist.Normal(z.sum() + v.sum(), 0.5), obs=Y)


@pytest.mark.parametrize("gate", [HardConcrete, lambda x: RectifiedNormal(x, 0.5), lambda x: BernoulliGate(logits=x)])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta, AutoMultivariateNormal, AutoStructured, AutoNormalMessenger])
def test_continuous_guides_refuse_gates(guide, gate):
    svi = SVI(model, guide(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    with pytest.raises(ValueError, match=r"got a gate, .*RectifyReparam"):
        svi.step(gate)


@pytest.mark.parametrize("kernel", [NUTS, HMC, RandomWalkKernel])
def test_samplers_refuse_gates_with_a_density(kernel):
    """One of two values is summed out, and one without atoms is sampled, as before."""
    for gate in (HardConcrete, lambda x: RectifiedNormal(x, 0.5)):
        with pytest.raises(ValueError, match=r"got a gate, .*RectifyReparam"):
            MCMC(kernel(model), num_samples=2, warmup_steps=1, disable_progbar=True).run(gate)

    def others():
        z = pyro.sample("z", BernoulliGate(logits=torch.tensor(0.3)))
        v = pyro.sample("v", dist.RelaxedBernoulli(torch.tensor(2 / 3), logits=torch.tensor(0.3)))
        pyro.sample("y", dist.Normal(z * v, 0.5), obs=Y)

    mcmc = MCMC(kernel(others), num_samples=2, warmup_steps=1, disable_progbar=True)
    mcmc.run()
    assert list(mcmc.get_samples()) == ["v"]
    with pytest.raises(ValueError, match=r"\['z'\] are missing.*infer_discrete"):
        complete_samples(others, mcmc.get_samples())


def test_a_gates_support_is_copied_and_checked():
    gate = HardConcrete(torch.zeros(2))
    for other in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate)), gate.expand([3, 2])):
        assert other.support.check(torch.tensor([0.0, 1.0, 1.1])).tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"support \(Interval\(lower_bound=0.0, upper_bound=1.0\)\)"):
        gate.log_prob(torch.tensor([0.5, 2.0]))


def regression():
    """One gate, one weight: P(z != 0) and E[z w] of the posterior by sums."""
    z = pyro.sample("z", HardConcrete(torch.tensor(-0.5), 0.5))
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    effect = pyro.deterministic("effect", z * w)
    pyro.sample("y", dist.Normal(effect, 0.5), obs=Y)


def exact():
    """P(z != 0 | y) and E[z w | y]: w is integrated out in closed form, z by its atoms and a fine grid."""
    gate = HardConcrete(torch.tensor(-0.5, dtype=torch.float64), 0.5)
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    z = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), grid])
    mass = gate.log_prob(z).exp() / torch.cat([torch.ones(2), torch.full((20_000,), 20_000.0)])
    weight = mass * dist.Normal(0.0, (z**2 + 0.25).sqrt()).log_prob(Y.double()).exp()
    weight = weight / weight.sum()
    return 1 - weight[0].item(), (weight * z * z * Y / (z**2 + 0.25)).sum().item()


def test_samples_are_completed_with_gates_and_what_follows():
    """Independent draws of the posterior, by resampling the prior's, against sums over it."""
    reparameterised = poutine.reparam(regression, {"z": RectifyReparam()})
    pyro.set_rng_seed(1)
    gate, many, draws = HardConcrete(torch.tensor(-0.5), 0.5), 50_000, 500
    base, w = gate.base_distribution().sample((many,)), torch.randn(many)
    log_likelihood = dist.Normal(gate.rectify(base) * w, 0.5).log_prob(Y)
    chosen = torch.distributions.Categorical(logits=log_likelihood).sample((draws,))
    samples = complete_samples(reparameterised, {"z_base": base[chosen], "w": w[chosen]})
    assert list(samples) == ["z_base", "w", "z", "effect"]
    torch.testing.assert_close(samples["effect"], samples["z"] * samples["w"])
    active, effect = exact()
    assert abs((samples["z"] != 0).float().mean() - active) < 5 * math.sqrt(active * (1 - active) / draws)
    assert abs(samples["effect"].mean() - effect) < 5 * samples["effect"].std() / math.sqrt(draws)


def test_samples_of_a_run_by_chain():
    """As a sampler returns them, in one row of draws or in one per chain; a guide of continuous variables, too."""
    reparameterised = poutine.reparam(regression, {"z": RectifyReparam()})
    mcmc = MCMC(NUTS(reparameterised, max_tree_depth=2), num_samples=6, warmup_steps=3, disable_progbar=True)
    mcmc.run()
    svi = SVI(reparameterised, AutoNormal(reparameterised), pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    assert all(math.isfinite(svi.step()) for _ in range(3))
    flat = complete_samples(reparameterised, mcmc.get_samples())
    grouped = complete_samples(reparameterised, mcmc.get_samples(group_by_chain=True))
    assert flat["effect"].shape == (6,)
    assert all(torch.equal(grouped[name][0], x) for name, x in flat.items())


def test_samples_of_gates_of_any_shape():
    """Gates in plates and events, by values that are given; the model's arguments are handed on."""

    def scaled(scale, *, shift):
        with pyro.plate("rows", 2):
            z = pyro.sample("z", HardConcrete(torch.zeros(2, 3)).to_event(1))
        pyro.deterministic("effect", scale * z.sum(-1) + shift)
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=Y)

    base = torch.linspace(-4, 4, 4 * 5 * 2 * 3).reshape(4, 5, 2, 3)
    reparameterised = poutine.reparam(scaled, {"z": RectifyReparam()})
    samples = complete_samples(reparameterised, {"z_base": base}, 2.0, shift=1.0)
    z = HardConcrete(torch.zeros(2, 3)).rectify(base)
    torch.testing.assert_close(samples["z"], z)
    torch.testing.assert_close(samples["effect"], 2 * z.sum(-1) + 1)
    again = complete_samples(reparameterised, samples, 2.0, shift=1.0)
    assert all(torch.equal(again[name], x) for name, x in samples.items())


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"z_base": torch.zeros(4)}, r"\['w'\] are missing"),
        ({"z_base": torch.zeros(4), "w": torch.zeros(5)}, r"the same dimensions of draws, .* 'w': \(\(5,\), \(\)\)}"),
        ({"z_base": torch.zeros(4), "w": torch.tensor(0.0)}, r"the same dimensions of draws, .* 'w': \(\(\), \(\)\)"),
        ({"z_base": torch.zeros(4), "w": torch.zeros(4), "u": torch.zeros(4)}, r"\['u'\] are not in the model"),
    ],
)
def test_samples_that_do_not_fit(samples, message):
    """Named by site; so is the model without its reparameterisation."""
    with pytest.raises(ValueError, match=message):
        complete_samples(poutine.reparam(regression, {"z": RectifyReparam()}), samples)
    with pytest.raises(ValueError, match=r"'z'.* are missing and \['z_base'.*with its reparameterisation"):
        complete_samples(regression, samples)
