"""What many tests of guides share: a regression with a gate and a slab for each feature, and a loop of training."""

import pyro
import pyro.distributions as dist


def regression(x, y, gate, slab, noise=1.0, offset=0.0):
    """Normal observations of x (z * w) + offset."""
    with pyro.plate("features", x.shape[-1]):
        z = pyro.sample("z", gate)
        w = pyro.sample("w", slab)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal((z * w) @ x.mT + offset, noise), obs=y)


def train(loss, optimiser, steps):
    """The losses of some steps."""
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimiser.step()
    return losses
