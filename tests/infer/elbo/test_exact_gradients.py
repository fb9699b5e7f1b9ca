"""Gradients of the whole loss against differences of a value that shares no code with the library; weight decay.

The noise is frozen, so that the likelihood term is a number; KLs and probabilities come from scipy's quadrature.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from torch import nn
from torch.nn.utils import parametrize

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.maths import hard_concrete
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms

BETA_Q, BETA_P, GAMMA, ZETA, PRIOR = 0.7, 2 / 3, -0.1, 1.1, -1.0
LAM, SIZE, TAU, SIGMA = 0.3, 2.0, 0.8, 0.5
T0, T1 = math.log(-GAMMA / ZETA), math.log((1 - GAMMA) / (ZETA - 1))
X = np.array([[1.0, 0.3, -0.4], [0.2, -1.0, 0.5], [0.7, 0.6, 1.1], [-0.5, 0.1, 0.9]])
Y = np.array([0.9, -0.6, 1.4, 0.3])
START = {
    "log_alpha": np.array([0.3, -1.2, 2.0]),
    "temperature": np.array([BETA_Q]),
    "loc": np.array([0.8, 0.4, -0.3]),
    "log_scale": np.array([-1.0, -1.5, -0.7]),
    "weight": np.array([0.7, 0.9, -0.8]),
}


def gate_kl(a, b):
    def log_density(t, log_alpha, temperature):
        u = temperature * t - log_alpha
        return math.log(temperature) - np.logaddexp(0, u) - np.logaddexp(0, -u)

    def integrand(t):
        q = log_density(t, a, b)
        return math.exp(q) * (q - log_density(t, PRIOR, BETA_P))

    zero = -np.logaddexp(0, -(b * T0 - a)), -np.logaddexp(0, -(BETA_P * T0 - PRIOR))
    one = -np.logaddexp(0, b * T1 - a), -np.logaddexp(0, BETA_P * T1 - PRIOR)
    atoms = sum(math.exp(q) * (q - p) for q, p in (zero, one))
    return atoms + quad(integrand, T0, T1, epsabs=1e-14, epsrel=1e-13)[0]


def value(parameters, objective, noises):
    a, (b,) = parameters["log_alpha"], parameters["temperature"]
    loc, scale = parameters["loc"], np.exp(parameters["log_scale"])
    nll = 0.0
    for gate_noise, slab_noise in noises:
        z = np.clip(GAMMA + (ZETA - GAMMA) * expit((a + gate_noise) / b), 0, 1)
        w = loc + scale * slab_noise if objective == "spike_slab" else parameters["weight"]
        error = Y - X @ (z * w)
        nll += np.sum(0.5 * (error / SIGMA) ** 2 + math.log(SIGMA) + 0.5 * math.log(2 * math.pi)) / len(noises)
    active = expit(a - b * T0)
    loss = nll
    if objective != "spike_slab":
        loss += LAM * SIZE * active.sum()
    if objective != "l0":
        loss += sum(gate_kl(x, b) for x in a)
    if objective == "spike_slab":
        loss += np.sum(active * (np.log(TAU / scale) + (scale**2 + loc**2) / (2 * TAU**2) - 0.5))
    return loss


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("shape", ["plate", "to_event"])
@pytest.mark.parametrize("objective", ["l0", "free_energy", "spike_slab"])
def test_gradient_of_the_loss(objective, shape, particles, monkeypatch):
    """Every parameter, to 1e-6 in float64: differences with h = 1e-5 are good to about 1e-9."""
    generator = np.random.default_rng(7)
    noises = [(generator.logistic(size=3), generator.normal(size=3)) for _ in range(particles)]
    gate_noise, slab_noise = iter(n[0] for n in noises), iter(n[1] for n in noises)
    monkeypatch.setattr(hard_concrete, "logistic_noise", lambda *_: torch.tensor(next(gate_noise)))
    monkeypatch.setattr(dist.Normal, "rsample", lambda d, _=(): d.loc + d.scale * torch.tensor(next(slab_noise)))
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in START.items()}
    x, y = torch.tensor(X), torch.tensor(Y)
    slab = objective == "spike_slab"

    def sample(name, fn):
        if shape == "to_event":
            return pyro.sample(name, fn.to_event(1))
        with pyro.plate(f"units of {name}", 3, dim=-1):
            return pyro.sample(name, fn)

    def model():
        prior = torch.full((3,), PRIOR, dtype=torch.float64)
        z = sample("z", HardConcrete(prior, BETA_P))
        w = sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), TAU)) if slab else leaves["weight"]
        with pyro.plate("data", len(y), dim=-1):
            pyro.sample("y", dist.Normal(x @ (z * w), SIGMA), obs=y)

    def guide():
        sample("z", HardConcrete(leaves["log_alpha"], leaves["temperature"]))
        if slab:
            sample("w", dist.Normal(leaves["loc"], leaves["log_scale"].exp()))

    options = {"slab": {"w": "z"}} if slab else {"lam": LAM, "group_size": SIZE}
    loss = L0_ELBO(objective, num_particles=particles, **options).differentiable_loss(model, guide)
    assert loss.item() == pytest.approx(value(START, objective, noises), rel=1e-12)
    loss.backward()
    for name, start in START.items():
        if leaves[name].grad is None:
            assert name in (("weight",) if slab else ("loc", "log_scale"))
            continue
        for i in range(len(start)):
            step = np.zeros_like(start)
            step[i] = 1e-5
            ends = [value({**START, name: start + s * step}, objective, noises) for s in (1, -1)]
            expected = (ends[0] - ends[1]) / 2e-5
            assert leaves[name].grad[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-9), (name, i)


# ------------------------------------------------------------ weight decay of a network's norms


def columns(layer):
    weight = layer.weight
    return weight.square().sum([dim for dim in range(weight.dim()) if dim != 1])


def mlp():
    net = nn.Sequential(L0Gate(4), nn.Linear(4, 3), nn.Tanh(), L0Gate(3), nn.Linear(3, 2, bias=False))
    return net, (9, 4), {"0": lambda: columns(net[1]), "3": lambda: columns(net[4])}


def maps_and_features():
    """A convolution behind gates; a dense layer behind gates on maps and on the features that they become."""
    maps = (nn.Conv2d(1, 2, 2), L0Gate(2, dim=1), nn.Conv2d(2, 3, (2, 3)), nn.Tanh(), L0Gate(3, dim=1))
    net = nn.Sequential(*maps, nn.Flatten(), L0Gate(6), nn.Linear(6, 2))
    norms = {"1": lambda: columns(net[2]), "4": lambda: columns(net[7]).view(3, 2).sum(1), "6": lambda: columns(net[7])}
    return net, (30, 1, 4, 4), norms


def problem(build):
    """A classifier in float64, its model and guide, one batch, and the norms by plain autograd."""
    torch.manual_seed(5)
    net, shape, norms = build()
    net = net.double()
    name_gates(net)
    x = torch.randn(shape, dtype=torch.float64)

    def model():
        pyro.sample("y", dist.Categorical(logits=net(x)).to_event(1), obs=torch.arange(len(x)) % 2)

    guide = AutoGate(model, init_jitter=0.0)
    guide()
    return net, model, guide, x, norms


def results(net, model, guide, **options):
    """The loss, its gradients, and those of the gradients' squares, at one draw."""
    pyro.set_rng_seed(3)
    loss = L0_ELBO(**options).differentiable_loss(model, guide)
    leaves = [*net.parameters(), *guide.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return [loss, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("build", [mlp, maps_and_features])
@pytest.mark.parametrize("options", [{"lam": 0.1}, {"num_particles": 2}, {"objective": "free_energy"}], ids=str)
def test_norms_of_the_layers_are_those_of_autograd(build, options):
    """Of all sites, and where one site alone has a decay."""
    net, model, guide, x, plain = problem(build)
    for decay in (0.7, {list(plain)[-1]: 0.7}):
        options = {"objective": "l0", "weight_decay": decay, **options}
        ours = results(net, model, guide, square_norm=square_norms(net, x), **options)
        assert_same(ours, results(net, model, guide, square_norm=plain, **options))


def test_a_site_whose_norm_is_the_users():
    """A function that replaces one of the library's is called, for all decays or for its own."""
    net, model, guide, x, plain = problem(mlp)
    norms = square_norms(net, x)
    norms["0"] = plain["0"] = lambda: 3 * columns(net[1])
    for decay in (0.7, {"0": 0.7}):
        ours, expected = (
            results(net, model, guide, objective="l0", weight_decay=decay, square_norm=each) for each in (norms, plain)
        )
        assert_same(ours, expected)


class Counted(nn.Module):
    """A parametrisation that counts how often it is evaluated."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return 2 * weight


def test_parametrised_weights_are_computed_no_more_often():
    """Once for the forward pass and once for the norms, which are those of the weights as they are."""
    net, model, guide, x, plain = problem(mlp)
    norms, counted = square_norms(net, x), Counted()
    parametrize.register_parametrization(net[1], "weight", counted)
    before = counted.calls
    ours = results(net, model, guide, objective="l0", weight_decay=0.7, square_norm=norms)
    assert counted.calls == before + 2
    assert_same(ours, results(net, model, guide, objective="l0", weight_decay=0.7, square_norm=plain))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
def test_norms_under_a_compiler():
    net, _, _, x, _ = problem(mlp)
    norms = square_norms(net, x)
    compiled = torch.compile(lambda: norms.together(["0", "3"]).sum(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), norms.together(["0", "3"]).sum())
