"""A generative model whose latents can be exactly zero: hard concrete variables, as the L0 paper's conclusion proposes.

A variational autoencoder of binarised images (Kingma, Welling 2014). An encoder gives the posterior of 50 latents of
each image, a decoder the probability of every pixel, and the latents' prior is learned. The latents are

- hard concrete: draws have a pathwise derivative through both atoms, and the KL is that of Appendix C of the L0 paper,
  by quadrature where temperatures differ; with temperatures that are learned, too, or all at 2/3;
- concrete, the same without atoms, whose KL is sampled;
- Bernoulli, whose KL is exact, and whose draws have no derivative: by each estimator of the library.

All train for equal steps on the same batches. The table shows bounds on log p(x) of the test images, in nats: the ELBO,
and that of many draws (IWAE: Burda et al. 2016, arXiv:1509.00519). A latent is active if its posterior mean varies by
more than 0.01 over the test images, as there.

``python examples/vae_latents.py`` takes a minute on scikit-learn's digits; ``--data mnist --steps 20000`` takes an
hour. It writes ``vae_latents.png`` to ``--out``: what each latent of the last model draws.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli

from common.data import load_images
from common.figures import save_figure
from common.plots import plot_images
from common.sweep import spread
from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import Estimators
from pyro_l0.infer.elbo.estimators import EstimatorName, Evaluation, leave_one_out

__all__ = ["Options", "Result", "Vae", "main"]

LATENTS, HIDDEN, BATCH, LEARNING_RATE = 50, 200, 100, 1e-3
ACTIVE, TEMPERATURES = 0.01, (0.1, 20.0)  # least variance of an active latent; between which temperatures are learned


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded if not given.
        steps: of every training.
        draws: for each test image.
        seeds: each a run.
        out: folder for the picture.
    """

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    steps: int = 600
    draws: int = 100
    seeds: tuple[int, ...] = (1,)
    out: Path = field(default=Path("runs/vae_latents"))


class Result(NamedTuple):  # of the test images
    elbo: float  # nats per image
    iwae: float
    active: float  # latents
    zero: float  # mean share of draws that are exactly zero, in percent


def main(options: Options) -> dict[str, list[Result]]:
    """Print the table and draw the picture; returns a result for each seed by kind of latents."""
    command.check(options)
    images = load_images(options.data, options.data_dir)
    train = images.train_x
    test = torch.bernoulli(images.test_x, generator=torch.Generator().manual_seed(0))
    results: dict[str, list[Result]] = {name: [] for name in KINDS}
    with command.folder(options.out):
        command.plan(len(KINDS) * len(options.seeds) * options.steps)
        print("latents                      ELBO                IWAE bound          active            zero, %")
        for name, kind in KINDS.items():
            for seed in options.seeds:
                torch.manual_seed(seed)
                vae = Vae(train.mean(0), kind)
                fit(vae, train, options.steps, seed)
                results[name].append(evaluate(vae, test, options.draws))
            print(f"{name:27s}", *map(spread, zip(*results[name], strict=True)), sep="  ", flush=True)
        _plot(vae, test, images.image_shape[1:], options.out / "vae_latents.png")
    return results


class Kind(NamedTuple):
    family: Callable[..., Distribution]  # makes gates of the encoder's outputs
    outputs: int = 1  # of the encoder for each latent: its logit, and with two its temperature
    estimator: EstimatorName | None = None  # of the gradient; None where draws have a derivative


def logit_concrete(logits: Tensor, temperature: Tensor) -> LogitRelaxedBernoulli:
    """The logits of gates without atoms; the log ratio of two such is that of the gates."""
    return LogitRelaxedBernoulli(temperature, logits=logits)


KINDS = {
    **{f"Bernoulli, {name}": Kind(partial(BernoulliGate, None), 1, name) for name in get_args(EstimatorName)},
    "concrete": Kind(logit_concrete, 2),
    "hard concrete at 2/3": Kind(HardConcrete),
    "hard concrete": Kind(HardConcrete, 2),
}


class Vae(nn.Module):
    """Encoder, decoder and prior of one kind of latents; ``mean`` is that of the training images."""

    def __init__(self, mean: Tensor, kind: Kind) -> None:
        super().__init__()
        self.kind, pixels, outputs = kind, len(mean), LATENTS * kind.outputs
        self.estimators = None if kind.estimator in (None, "leave_one_out") else Estimators(kind.estimator)
        self.encoder = nn.Sequential(nn.Linear(pixels, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))
        self.decoder = nn.Sequential(nn.Linear(LATENTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, pixels))
        self.of_prior = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("mean", mean)
        self.decoder[-1].bias.data = torch.logit(mean.clamp(0.01, 0.99))

    def posterior(self, x: Tensor) -> Distribution:
        return self._gates(self.encoder(x - self.mean))

    def prior(self) -> Distribution:
        return self._gates(self.of_prior)

    def _gates(self, outputs: Tensor) -> Distribution:
        logits, *log_ratios = outputs.chunk(self.kind.outputs, -1)
        return self.kind.family(logits, *((2 / 3 * x.exp()).clamp(*TEMPERATURES) for x in log_ratios))

    def gates(self, draws: Tensor) -> Tensor:
        return draws.sigmoid() if self.kind.family is logit_concrete else draws

    def cost(self, draws: Tensor, x: Tensor) -> Tensor:
        """-log p(x | z) in nats, of the batch shape of draws."""
        logits = self.decoder(self.gates(draws))
        return F.binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none").sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        """The negative ELBO, a mean over images, with the gradient that the kind of latents has."""
        q, p = self.posterior(x), self.prior()
        if self.kind.family is logit_concrete:
            z = q.rsample()
            return (self.cost(z, x) + (q.log_prob(z) - p.log_prob(z)).sum(-1)).mean()
        kl = kl_divergence(q, p).sum(-1).mean()
        if self.kind.estimator is None:
            return self.cost(q.rsample(), x).mean() + kl
        if self.estimators is None:
            z = q.sample((2,))
            cost = self.cost(z, x)
            return cost.mean() + kl + leave_one_out(cost, q.log_prob(z).sum(-1), temper=1.0) / len(x)
        found, surrogate = self.estimators(lambda z: Evaluation({}, self.cost(z["z"], x)), {"z": q})
        return torch.stack([evaluation.cost for evaluation in found]).mean() + kl + surrogate.mean()


def fit(vae: Vae, train: Tensor, steps: int, seed: int) -> None:
    """Train by Adam, whose rate falls to 0 over the last half, on images that are binarised anew in every step."""
    noise = torch.Generator().manual_seed(seed)  # the same batches for every kind of latents
    optimiser = torch.optim.Adam(vae.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, 2 * (1 - step / steps)))
    for _ in range(steps):
        batch = train[torch.randint(len(train), (BATCH,), generator=noise)]
        optimiser.zero_grad()
        vae(torch.bernoulli(batch, generator=noise)).backward()
        optimiser.step()
        schedule.step()
        command.advance()


@torch.no_grad()
def evaluate(vae: Vae, test: Tensor, draws: int) -> Result:
    """Bounds by the log ratio log p(x, z) - log q(z | x) of so many draws for each image."""
    means, rows = [], []
    for x in test.split(BATCH):
        q, p = vae.posterior(x), vae.prior()
        drawn = q.sample((draws,))
        z = vae.gates(drawn)
        log_ratio = -vae.cost(drawn, x) + (p.log_prob(drawn) - q.log_prob(drawn)).sum(-1)
        iwae = log_ratio.logsumexp(0) - math.log(draws)
        rows.append(torch.stack([log_ratio.mean(0), iwae, 100 * (z == 0).float().mean((0, 2))], -1))
        means.append(z.mean(0))
    elbo, iwae, zero = torch.cat(rows).mean(0).tolist()
    return Result(elbo, iwae, float((torch.cat(means).var(0) > ACTIVE).sum()), zero)


@torch.no_grad()
def _plot(vae: Vae, test: Tensor, shape: tuple[int, int], path: Path) -> None:
    """For the latents that vary most: how the pixels change where one goes from 0 to 1 in test images."""
    z = vae.posterior(test[:200]).sample()
    latents = z.var(0).argsort(descending=True)[:30]
    changes = []
    for k in latents:
        closed, opened = (torch.sigmoid(vae.decoder(z.index_fill(1, k, value))) for value in (0.0, 1.0))
        changes.append((opened - closed).mean(0).view(shape))
    titles = [f"{share:.0f} % zero" for share in (100 * (z[:, latents] == 0).float().mean(0)).tolist()]
    save_figure(plot_images(changes, titles=titles, label="change of a pixel", limit=0.5), path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
