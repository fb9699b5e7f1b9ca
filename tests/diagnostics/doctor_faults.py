"""Small trainings with gates in which something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0 import BernoulliGate
from pyro_l0.infer import L0_ELBO, AutoGate
from tests.diagnostics.doctor_runs import Run, classifier, digits, on_the_mean_loss, pretrained, train, within
from tests.diagnostics.networks import cnn, mlp


class Fault(NamedTuple):
    """A training with something wrong in it, the share of its steps after which it is looked at, and what to find."""

    make: Callable[[], Run]
    share: float
    code: str


def _left_out() -> Run:
    run = train(mlp(), digits())
    run.optimiser = torch.optim.Adam(run.network.parameters(), 3e-3)
    return run


def _stale() -> Run:
    """The optimiser was made of an earlier guide."""
    run, later = train(mlp(), digits()), train(mlp(), digits())
    later.optimiser = torch.optim.Adam([*later.network.parameters(), *run.guide.parameters()], 0.02)
    return later


def _frozen() -> Run:
    run = train(mlp(), digits())
    run.guide.requires_grad_(False)
    return run


def _halved(dtype: torch.dtype, rate: float) -> Run:
    run = train(mlp(), digits(), gate_rate=rate, steps=20_000)
    run.guide.to(dtype)
    return run


def _wrong_statistics(spoil: Callable[[nn.Module], None]) -> Run:
    """BatchNorm's statistics are spoilt after the training."""
    run = train(cnn(), digits((1, 8, 8)), lam=0.2, steps=60, gate_rate=0.3).to(1.0)
    for layer in run.network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            spoil(layer)
    return run


@torch.no_grad()
def _of_other_images(layer: nn.BatchNorm2d) -> None:
    layer.running_mean.mul_(3.0)
    layer.running_var.mul_(9.0)


def _unused() -> Run:
    """The network's gates are drawn, and the likelihood is that of a network without them."""
    plain = mlp()
    for i in (2, 5):
        plain[i] = nn.Identity()
    gated, batches = mlp(), digits()
    of_plain = classifier(plain, batches)

    def model(x: Tensor, y: Tensor) -> None:
        gated(x)
        of_plain(x, y)

    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.1)(model, guide)
    loss(*batches[0])
    optimiser = torch.optim.Adam([*plain.parameters(), *guide.parameters()], 0.02)
    return Run(loss, guide, optimiser, batches, 300)


def _one_site_collapses() -> Run:
    return train(mlp(), digits(), lam={"2": 6.0, "5": 0.1}, steps=150, gate_rate=0.1)


def _silenced(*methods: str) -> Run:
    """A target of which something is not called."""
    run = within(0.3, mlp(), digits(), 300, is_pretrained=True)
    for method in methods:
        setattr(run.target, method, lambda: None)
    return run


def _saturated() -> Run:
    """A target that has raised its multiplier for as long as it may."""
    run = within(0.3, mlp(), digits(), 300, is_pretrained=True).to(0.3)
    run.target.load_state_dict({**run.target.state_dict(), "integral": torch.tensor([6.0])})
    run.steps, run.to = run.steps, lambda share: run
    return run


def _cut() -> Run:
    """Bernoulli gates that are open with a probability of 0.45 have test gates of 0."""
    options = {"family": BernoulliGate, "estimator": "straight_through"}
    return train(mlp(), digits(), start=0.45, gate_rate=1e-5, lam=1e-2, rate=0.01, **options)


FAULTS: dict[str, Fault] = {
    "gates not in the optimiser": Fault(_left_out, 0.1, "gates-not-trained"),
    "parameters of another guide": Fault(_stale, 0.1, "gates-not-trained"),
    "requires_grad is off": Fault(_frozen, 0.1, "gates-not-trained"),
    "rate of 1e-3": Fault(lambda: train(mlp(), digits(), gate_rate=1e-3), 0.1, "rate-too-small"),
    # A rate for weights.
    "SGD with small gradients": Fault(
        lambda: on_the_mean_loss(
            train(mlp(), digits(), rate=0.1, gate_rate=0.1, make=partial(torch.optim.SGD, momentum=0.9))
        ),
        0.1,
        "rate-too-small",
    ),
    "AdamW, decay of 0.1": Fault(
        lambda: train(mlp(), digits(), make=partial(torch.optim.AdamW, weight_decay=0.1)), 0.1, "weight-decay-on-gates"
    ),
    "Adam, decay on the mean loss": Fault(
        lambda: on_the_mean_loss(train(mlp(), digits(), make=partial(torch.optim.Adam, weight_decay=5e-3))),
        0.1,
        "weight-decay-on-gates",
    ),
    "bfloat16 gates": Fault(lambda: _halved(torch.bfloat16, 2e-3), 0.002, "step-below-rounding"),
    "float16 gates": Fault(lambda: _halved(torch.float16, 3e-4), 0.002, "step-below-rounding"),
    "lam of 10": Fault(lambda: train(mlp(), digits(), lam=10.0), 0.05, "price-too-large"),
    "lam of 1e-6": Fault(lambda: train(mlp(), digits(), lam=1e-6), 0.3, "price-too-small"),
    "one site collapses": Fault(_one_site_collapses, 1.0, "site-collapsed"),
    "undecided at the end": Fault(lambda: train(mlp(), digits(), gate_rate=0.03, steps=150), 1.0, "undecided-gates"),
    "sampled gates wreck": Fault(lambda: pretrained(mlp(inputs=True), digits(), start=0.8), 0.0, "sampled-gap"),
    "test gates cut": Fault(_cut, 1.0, "sampled-gap"),
    "BatchNorm reset": Fault(
        lambda: _wrong_statistics(lambda layer: layer.reset_running_stats()), 1.0, "batch-norm-of-another-network"
    ),
    "BatchNorm of other images": Fault(
        lambda: _wrong_statistics(_of_other_images), 1.0, "batch-norm-of-another-network"
    ),
    "gates not used": Fault(_unused, 0.1, "gates-drift-together"),
    "target without its gradient": Fault(lambda: _silenced("add_gradient"), 0.2, "no-price"),
    "target that does not ascend": Fault(lambda: _silenced("add_gradient", "ascend"), 0.2, "no-price"),
    "multiplier at its limit": Fault(_saturated, 0.5, "multiplier-at-limit"),
    "lam of 0": Fault(lambda: train(mlp(), digits(), lam=0.0), 0.1, "no-price"),
}
