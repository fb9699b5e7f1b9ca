"""What many tests of guides share: a regression with a gate and a slab for each feature, guides and their training."""

import pyro
import pyro.distributions as dist
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab
from tests.reference_posteriors import all_gates

SLAB = {"w": "z"}


def features(size, rate=0.2, prior=None, **plate):
    """Gates, and slabs of a standard normal or another prior."""
    with pyro.plate("features", size, **plate):
        z = pyro.sample("z", BernoulliGate(probs=torch.as_tensor(rate)))
        return z, pyro.sample("w", dist.Normal(0.0, 1.0) if prior is None else prior)


def observe(mean, y, noise=1.0):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def regression(x, y, gate, slab, noise=1.0, offset=0.0):
    """Normal observations of x (z * w) + offset."""
    with pyro.plate("features", x.shape[-1]):
        z = pyro.sample("z", gate)
        w = pyro.sample("w", slab)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((z * w) @ x.mT + offset, noise), obs=y)


def train(loss, optimiser, steps, target=None):
    """The losses of some steps, with a sparsity target or without."""
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        if target is not None:
            target.add_gradient()
        optimiser.step()
        if target is not None:
            target.ascend()
    return losses


def enumerated(x, y, group, rate, width):
    """P(z = 1 | y) and log p(y), with noise of deviation 1 and a gate for each group of features, in float64."""
    gates = all_gates(int(group.max()) + 1)
    open_x = x * gates[:, None, group]
    covariance = torch.eye(len(y), dtype=x.dtype) + width**2 * open_x @ open_x.mT
    log = dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    log = log + dist.Bernoulli(torch.full_like(gates, rate)).log_prob(gates).sum(1)
    return log.softmax(0) @ gates, float(log.logsumexp(0))


def correlated_guide(model, slab=SLAB, seed=0, **options):
    """A guide of autoregressive gates and structured slabs, and the generators at a seed."""
    pyro.set_rng_seed(seed)
    return AutoSpikeSlab(model, slab, **{"gates": "autoregressive", "slabs": "structured", **options})


def leave_one_out(num_particles=4, **options):
    """The spike-and-slab ELBO, whose gates have no pathwise gradient."""
    return L0_ELBO("spike_slab", slab=SLAB, estimator="leave_one_out", num_particles=num_particles, **options)


@torch.no_grad()
def shaken(module, width):
    """A module whose parameters are off their start."""
    for parameter in module.parameters():
        parameter.add_(width * torch.randn_like(parameter))
    return module
