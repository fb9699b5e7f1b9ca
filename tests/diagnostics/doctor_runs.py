"""Small trainings with gates that a diagnosis looks at: healthy ones of many kinds, and what goes wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from pyro_l0 import BernoulliGate, HardConcrete, HardKumaraswamy, RectifiedNormal
from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.findings import Diagnosis
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget
from pyro_l0.nn import Gate, NetworkCost, gate_heads, insert_gates, square_norms
from pyro_l0.nn.gate import name_gates

GATE_RATE = 0.05
Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """A training that stops where it is asked to, and can be looked at there."""

    loss: Callable[..., Tensor]
    guide: AutoGate
    optimiser: torch.optim.Optimizer
    batches: Sequence[Batch]
    steps: int
    network: nn.Module | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    accumulate: int = 1
    scale: float = 1.0
    step: int = 0
    given: dict[str, object] = field(default_factory=dict)

    def to(self, share: float) -> Run:
        """Train until some share of the steps is done."""
        while self.step < round(share * self.steps):
            self.optimiser.zero_grad()
            for i in range(self.accumulate):
                batch = self.batches[(self.step * self.accumulate + i) % len(self.batches)]
                (self.scale * self.loss(*batch)).backward()
            self.optimiser.step()
            if self.schedule is not None:
                self.schedule.step()
            self.step += 1
        return self

    def diagnosis(self, **others: object) -> Diagnosis:
        """Look at it with everything that is known."""
        known: dict[str, object] = {
            "optimiser": self.optimiser,
            "loss": self.loss,
            "batches": self.batches,
            "network": self.network,
            "error": None if self.network is None else wrong,
            "steps_left": self.steps - self.step,
        }
        return diagnose(self.guide, **{**known, **self.given, **others})


def wrong(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that a network takes for something else."""
    return float((network(images).argmax(-1) != labels).double().mean())


def digits(shape: tuple[int, ...] = (64,), size: int = 100, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """The digits in batches."""
    data = load_digits()
    x = torch.tensor(data.data / 16.0, dtype=dtype).view(-1, *shape)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[i], y[i]) for i in order[: len(x) // size * size].split(size)]


def classifier(network: nn.Module, batches: Sequence[Batch]) -> Callable[[Tensor, Tensor], None]:
    """The model of a network's classes, on the scale of the whole data set."""
    number = sum(len(y) for _, y in batches)

    def model(x: Tensor, y: Tensor) -> None:
        logits = network(x)
        with pyro.plate("data", number, subsample_size=len(y)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def mlp(inputs: bool = False, prior: HardConcrete | None = None) -> nn.Sequential:
    """Two hidden layers with gates."""
    first = [Gate(64)] if inputs else []
    layers = [nn.Linear(64, 60), nn.ReLU(), Gate(60, prior=prior), nn.Linear(60, 40), nn.ReLU(), Gate(40, prior=prior)]
    return nn.Sequential(*first, *layers, nn.Linear(40, 10))


def cnn(dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions with BatchNorm and gates."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        Gate(12, dim=1),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        Gate(24, dim=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


class Residual(nn.Module):
    """A stream with two branches of which a gate each takes all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 32)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 48), nn.ReLU(), Gate(48), nn.Linear(48, 32), Gate(1))
            for _ in range(2)
        )
        self.leave = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.leave(x)


class ResidualCNN(nn.Module):
    """Two blocks of convolutions with BatchNorm beside a stream of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(12, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                Gate(16, dim=1),
                nn.Conv2d(16, 12, 3, padding=1),
                nn.BatchNorm2d(12),
            )
            for _ in range(2)
        )
        self.leave = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.leave(x.mean((2, 3)))


class Transformer(nn.Module):
    """Rows of an image as tokens, one encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.encoder = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(images)).mean(1))


def transformer() -> nn.Module:
    """With gates on its heads and hidden units."""
    gated = gate_heads(Transformer(), {"encoder.self_attn.out_proj": 4})
    return insert_gates(gated, {"encoder.linear1": Gate(64)})


def train(
    network: nn.Module,
    batches: Sequence[Batch],
    *,
    lam: float | Mapping[str, float] = 0.1,
    steps: int = 300,
    family: type = HardConcrete,
    start: float = 0.9,
    rate: float = 3e-3,
    gate_rate: float = GATE_RATE,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    gate_options: Mapping[str, object] | None = None,
    double: bool = False,
    priced: bool = True,
    **options: object,
) -> Run:
    """A network's training by Eq. 22, or by another objective, before its first step."""
    if double:
        network.double()
    model = classifier(network, batches)
    guide = AutoGate(model, family, init_active_prob=start)
    sizes = NetworkCost(network, batches[0][0]).group_sizes if priced else None
    elbo = L0_ELBO(**{"objective": "l0", "lam": lam, "group_size": sizes, **options})
    loss = elbo(model, guide)
    loss(*batches[0])
    groups = [
        {"params": list(network.parameters()), "lr": rate},
        {"params": list(guide.parameters()), "lr": gate_rate, **(gate_options or {})},
    ]
    return Run(loss, guide, make(groups), batches, steps, network)


def _accumulated() -> Run:
    run = train(mlp(), digits(size=50), steps=400)
    run.accumulate, run.scale = 2, 0.5
    return run


def _scheduled(run: Run) -> Run:
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimiser, run.steps)
    return run


def _one_cycle(run: Run) -> Run:
    rates = [group["lr"] for group in run.optimiser.param_groups]
    run.schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimiser, rates, total_steps=run.steps)
    return run


def _mean_loss_sgd() -> Run:
    batches = digits()
    run = train(
        mlp(),
        batches,
        lam=0.1,
        steps=600,
        rate=0.2,
        gate_rate=20.0,
        make=lambda groups: torch.optim.SGD(groups, momentum=0.9),
    )
    run.scale = 1 / sum(len(y) for _, y in batches)
    return run


def _with_norms() -> Run:
    network, batches = mlp(), digits()
    return _quick(network, batches, weight_decay=0.1, square_norm=square_norms(network, batches[0][0]))


def _pretrained(network: nn.Module, batches: Sequence[Batch], **options: object) -> Run:
    """The network is trained with open gates first."""
    for layer in network.modules():
        if isinstance(layer, Gate):
            layer.is_reported = True
    model = pyro.condition(
        classifier(network, batches),
        data={name: torch.ones(gate.size) for name, gate in name_gates(network).items()},
    )
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    for i in range(200):
        optimiser.zero_grad()
        trace = pyro.poutine.trace(model).get_trace(*batches[i % len(batches)])
        (-trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"]).mean()).backward()
        optimiser.step()
    return train(network, batches, **options)


def regression(number: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Twelve features, of which four matter."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 12, generator=generator)
    weights = torch.tensor([2.0, -1.5, 1.0, 0.7] + [0.0] * 8)
    return x, x @ weights + 0.5 * torch.randn(number, generator=generator)


def spike_and_slab(prior: BernoulliGate | HardConcrete) -> Callable[[Tensor, Tensor], None]:
    """A regression in plain Pyro."""

    def model(x: Tensor, y: Tensor) -> None:
        with pyro.plate("features", x.shape[1]):
            z = pyro.sample("z", prior)
            w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((z * w) @ x.T, 0.5), obs=y)

    return model


def _slabs(prior: BernoulliGate | HardConcrete, guide_options: Mapping[str, object], **options: object) -> Run:
    x, y = regression()
    model = spike_and_slab(prior)
    guide = AutoSpikeSlab(model, slab={"w": "z"}, family=type(prior), **guide_options)
    loss = L0_ELBO("spike_slab", slab={"w": "z"}, **options)(model, guide)
    loss(x, y)
    return Run(loss, guide, torch.optim.Adam(guide.parameters(), 0.03), [(x, y)], 600)


def sparse_regression(x: Tensor, y: Tensor) -> None:
    """Gates times weights that are parameters."""
    weights = pyro.param("weights", lambda: torch.full((x.shape[1],), 0.5))
    z = pyro.sample("z", HardConcrete.from_active_prob(torch.full((x.shape[1],), 0.3)).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * weights), 0.5), obs=y)


def _by_svi(optimiser: pyro.optim.PyroOptim, **options: object) -> Run:
    x, y = regression(seed=1)
    guide = AutoGate(sparse_regression)
    guide(x, y)
    elbo = L0_ELBO(**options)
    svi = pyro.infer.SVI(sparse_regression, guide, optimiser, loss=elbo)
    return SVIRun(elbo(sparse_regression, guide), guide, optimiser, [(x, y)], 500, svi=svi)


@dataclass
class SVIRun(Run):
    """The same by Pyro's SVI."""

    svi: pyro.infer.SVI | None = None

    def to(self, share: float) -> Run:
        while self.step < round(share * self.steps):
            self.svi.step(*self.batches[0])
            self.step += 1
        return self


def _logistic() -> Run:
    """Thirty features of tumours; weights start at 0, so that the first gradients of the gates are 0."""
    data = load_breast_cancer()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)

    def model(x: Tensor, y: Tensor) -> None:
        weights = pyro.param("weights", lambda: torch.zeros(30))
        z = pyro.sample("z", BernoulliGate(probs=torch.full((30,), 0.2)).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ (z * weights)), obs=y)

    guide = AutoGate(model, BernoulliGate)
    guide(x, y)
    elbo, optimiser = L0_ELBO("free_energy", estimator="leave_one_out", num_particles=4), pyro.optim.Adam({"lr": 0.02})
    svi = pyro.infer.SVI(model, guide, optimiser, loss=elbo)
    return SVIRun(elbo(model, guide), guide, optimiser, [(x, y)], 400, svi=svi)


def _beside_other_latents() -> Run:
    """Gates in one guide of a list, weights and the noise's scale in another."""
    x, y = regression(100, seed=3)

    def model(x: Tensor, y: Tensor) -> None:
        noise = pyro.sample("noise", dist.HalfCauchy(1.0))
        with pyro.plate("features", x.shape[1]):
            z = pyro.sample("z", HardConcrete.from_active_prob(torch.tensor(0.3)))
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((z * w) @ x.T, noise), obs=y)

    both = pyro.infer.autoguide.AutoGuideList(model)
    guide = AutoGate(pyro.poutine.block(model, expose=["z"]))
    both.append(guide)
    both.append(pyro.infer.autoguide.AutoNormal(pyro.poutine.block(model, expose=["noise", "w"])))
    loss = L0_ELBO("free_energy")(model, both)
    loss(x, y)
    return Run(loss, guide, torch.optim.Adam(both.parameters(), 0.03), [(x, y)], 400)


def _quick(network: nn.Module, batches: Sequence[Batch], **options: object) -> Run:
    """With gates that have decided at the end of so few steps."""
    return train(network, batches, **{"gate_rate": 0.1, "steps": 400, **options})


_RARE = BernoulliGate(probs=torch.tensor(0.2))


@dataclass
class TargetRun(Run):
    """The same within a budget."""

    target: SparsityTarget | None = None

    def to(self, share: float) -> Run:
        while self.step < round(share * self.steps):
            self.optimiser.zero_grad()
            self.loss(*self.batches[self.step % len(self.batches)]).backward()
            self.target.add_gradient()
            self.optimiser.step()
            self.target.ascend()
            self.step += 1
        return self


def within(budget: float, network: nn.Module, batches: Sequence[Batch], steps: int, pretrained: bool) -> Run:
    """A network's training with a target of multiply-adds."""
    make = _pretrained if pretrained else train
    run = make(network, batches, lam=0.0, steps=steps, priced=False)
    cost = NetworkCost(network, batches[0][0])
    target = SparsityTarget(run.guide, budget, cost.macs, steps=steps, pretrained=pretrained)
    groups = [{"params": list(network.parameters()), "lr": 2e-3}]
    optimiser = torch.optim.Adam([*groups, {"params": list(run.guide.parameters()), **target.optimiser_options}])
    given = {"target": target, "steps_left": None}
    return TargetRun(run.loss, run.guide, optimiser, batches, steps, network, given=given, target=target)


HEALTHY: dict[str, Callable[[], Run]] = {
    "MLP": lambda: train(mlp(), digits(), steps=400),
    "MLP with input gates": lambda: train(mlp(inputs=True), digits(), steps=600),
    "MLP, cosine": lambda: _scheduled(_quick(mlp(), digits())),
    "MLP, one cycle": lambda: _one_cycle(_quick(mlp(), digits(), steps=300)),
    "MLP, AdamW with groups": lambda: train(
        mlp(), digits(), make=torch.optim.AdamW, gate_options={"weight_decay": 0.0}, steps=400
    ),
    "MLP, AdamW without groups": lambda: _quick(mlp(), digits(), make=torch.optim.AdamW),
    "MLP, SGD on the mean loss": _mean_loss_sgd,
    "MLP, accumulated gradients": _accumulated,
    "MLP in float64": lambda: _quick(mlp(), digits(dtype=torch.float64), double=True),
    "MLP, 60 steps": lambda: train(mlp(), digits(), steps=60, rate=0.01, gate_rate=0.3),
    "MLP, 1500 steps": lambda: train(mlp(), digits(), steps=1500, gate_rate=0.03),
    "MLP, weight decay of Eq. 17": _with_norms,
    "MLP, free energy": lambda: train(
        mlp(prior=HardConcrete.from_active_prob(0.2)), digits(), objective="free_energy", lam=0.0, priced=False
    ),
    "MLP, rectified normal": lambda: _quick(mlp(), digits(), family=RectifiedNormal, steps=800),
    "MLP, Kumaraswamy": lambda: train(mlp(), digits(), family=HardKumaraswamy, steps=400),
    "MLP, Bernoulli gates, ARM": lambda: _quick(mlp(), digits(), family=BernoulliGate, estimator="arm", lam=0.5),
    "MLP, Bernoulli gates, straight through": lambda: _quick(
        mlp(), digits(), family=BernoulliGate, estimator="straight_through"
    ),
    "MLP, pretrained": lambda: _pretrained(mlp(), digits(), lam=1.0, steps=400, gate_rate=0.1, start=0.98),
    "CNN": lambda: train(cnn(), digits((1, 8, 8)), lam=0.2, steps=300),
    "CNN, cosine, dropout": lambda: _scheduled(_quick(cnn(0.2), digits((1, 8, 8)), lam=0.2, gate_rate=0.2)),
    "CNN, pretrained": lambda: _pretrained(cnn(), digits((1, 8, 8)), lam=0.2, steps=300, start=0.98, gate_rate=0.1),
    "residual network": lambda: _quick(Residual(), digits(), gate_rate=0.2),
    "transformer": lambda: _quick(transformer(), digits((8, 8)), lam=0.05, gate_rate=0.2),
    "spike and slab, hard concrete": lambda: _slabs(HardConcrete.from_active_prob(0.2), {}),
    "spike and slab, Bernoulli": lambda: _slabs(_RARE, {}, estimator="leave_one_out", num_particles=4),
    "regression by SVI, free energy": lambda: _by_svi(pyro.optim.Adam({"lr": 0.03}), objective="free_energy"),
    "regression by SVI, Eq. 22": lambda: _by_svi(
        pyro.optim.ClippedAdam({"lr": 0.03}), objective="l0", lam=3.0, num_particles=2
    ),
    "logistic regression by SVI": _logistic,
    "gates beside a guide of the other latents": _beside_other_latents,
    "residual CNN": lambda: _quick(ResidualCNN(), digits((1, 8, 8)), lam=0.3, rate=0.01),
    "MLP, all data in a batch": lambda: _quick(mlp(), digits(size=1797), steps=200),
    "MLP, NAdam, 4 particles": lambda: _quick(mlp(), digits(), make=torch.optim.NAdam, num_particles=4, steps=300),
    "MLP, pretrained, a target of .3": lambda: within(0.3, mlp(), digits(), 400, pretrained=True),
    "MLP, pretrained, a target of .1": lambda: within(0.1, mlp(), digits(), 300, pretrained=True),
    "CNN, pretrained, a target of .3": lambda: within(0.3, cnn(), digits((1, 8, 8)), 300, pretrained=True),
    "CNN from scratch, a target of .3": lambda: within(0.3, cnn(), digits((1, 8, 8)), 400, pretrained=False),
    "residual CNN, a target of .2": lambda: within(0.2, ResidualCNN(), digits((1, 8, 8)), 300, pretrained=True),
    "transformer, a target of .3": lambda: within(0.3, transformer(), digits((8, 8)), 400, pretrained=True),
}


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


def _small_gradients() -> Run:
    """SGD with a rate for weights, on the mean loss."""
    batches = digits()
    run = train(mlp(), batches, rate=0.1, gate_rate=0.1, make=lambda groups: torch.optim.SGD(groups, momentum=0.9))
    run.scale = 1 / sum(len(y) for _, y in batches)
    return run


def _decayed() -> Run:
    """Weight decay in Adam's gradient, on the mean loss."""
    batches = digits()
    run = train(mlp(), batches, make=lambda groups: torch.optim.Adam(groups, weight_decay=5e-3))
    run.scale = 1 / sum(len(y) for _, y in batches)
    return run


def _halved(dtype: torch.dtype, rate: float) -> Run:
    """The guide in half precision."""
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
    number = sum(len(y) for _, y in batches)

    def model(x: Tensor, y: Tensor) -> None:
        gated(x)
        with pyro.plate("data", number, subsample_size=len(y)):
            pyro.sample("y", dist.Categorical(logits=plain(x)), obs=y)

    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.1)(model, guide)
    loss(*batches[0])
    optimiser = torch.optim.Adam([*plain.parameters(), *guide.parameters()], 0.02)
    return Run(loss, guide, optimiser, batches, 300)


def _one_site_collapses() -> Run:
    return train(mlp(), digits(), lam={"2": 6.0, "5": 0.1}, steps=150, gate_rate=0.1)


def _wrecked() -> Run:
    """A network that was trained without gates gets half-closed ones."""
    return _pretrained(mlp(inputs=True), digits(), start=0.8)


def _without_gradient() -> Run:
    run = within(0.3, mlp(), digits(), 300, pretrained=True)
    run.target.add_gradient = lambda: None
    return run


def _without_ascent() -> Run:
    run = within(0.3, mlp(), digits(), 300, pretrained=True)
    run.target.ascend = run.target.add_gradient = lambda: None
    return run


def _saturated() -> Run:
    """A target that has raised its multiplier for as long as it may."""
    run = within(0.3, mlp(), digits(), 300, pretrained=True).to(0.3)
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
    "SGD with small gradients": Fault(_small_gradients, 0.1, "rate-too-small"),
    "AdamW, decay of 0.1": Fault(
        lambda: train(mlp(), digits(), make=lambda groups: torch.optim.AdamW(groups, weight_decay=0.1)),
        0.1,
        "weight-decay-on-gates",
    ),
    "Adam, decay on the mean loss": Fault(_decayed, 0.1, "weight-decay-on-gates"),
    "bfloat16 gates": Fault(lambda: _halved(torch.bfloat16, 2e-3), 0.002, "step-below-rounding"),
    "float16 gates": Fault(lambda: _halved(torch.float16, 3e-4), 0.002, "step-below-rounding"),
    "lam of 10": Fault(lambda: train(mlp(), digits(), lam=10.0), 0.05, "price-too-large"),
    "lam of 1e-6": Fault(lambda: train(mlp(), digits(), lam=1e-6), 0.3, "price-too-small"),
    "one site collapses": Fault(_one_site_collapses, 1.0, "site-collapsed"),
    "undecided at the end": Fault(lambda: train(mlp(), digits(), gate_rate=0.03, steps=150), 1.0, "undecided-gates"),
    "sampled gates wreck": Fault(_wrecked, 0.0, "sampled-gap"),
    "test gates cut": Fault(_cut, 1.0, "sampled-gap"),
    "BatchNorm reset": Fault(
        lambda: _wrong_statistics(lambda layer: layer.reset_running_stats()), 1.0, "batch-norm-of-another-network"
    ),
    "BatchNorm of other images": Fault(
        lambda: _wrong_statistics(_of_other_images), 1.0, "batch-norm-of-another-network"
    ),
    "gates not used": Fault(_unused, 0.1, "gates-drift-together"),
    "target without its gradient": Fault(_without_gradient, 0.2, "no-price"),
    "target that does not ascend": Fault(_without_ascent, 0.2, "no-price"),
    "multiplier at its limit": Fault(_saturated, 0.5, "multiplier-at-limit"),
    "lam of 0": Fault(lambda: train(mlp(), digits(), lam=0.0), 0.1, "no-price"),
}


def start(make: Callable[[], Run], seed: int = 1) -> Run:
    """A training from a seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    return make()
