"""Small healthy trainings with gates, of many kinds, which a diagnosis checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from pyro_l0 import BernoulliGate, HardConcrete, HardKumaraswamy, RectifiedNormal
from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.doctor import Diagnosis
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.diagnostics.networks import cnn, mlp, residual_cnn, residual_network, transformer

GATE_RATE = 0.05
Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """A training that stops where it is asked to, and can be checked there."""

    loss: Callable[..., Tensor]
    guide: AutoGate
    optimiser: torch.optim.Optimizer | pyro.optim.PyroOptim
    batches: Sequence[Batch]
    steps: int
    network: nn.Module | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    target: SparsityTarget | None = None
    svi: pyro.infer.SVI | None = None
    accumulate: int = 1
    scale: float = 1.0
    step: int = 0

    def to(self, share: float) -> Run:
        """Train until some share of the steps is done."""
        while self.step < round(share * self.steps):
            self.advance()
            self.step += 1
        return self

    def advance(self) -> None:
        if self.svi is not None:
            self.svi.step(*self.batches[0])
            return
        self.optimiser.zero_grad()
        for i in range(self.accumulate):
            batch = self.batches[(self.step * self.accumulate + i) % len(self.batches)]
            (self.scale * self.loss(*batch)).backward()
        if self.target is not None:
            self.target.add_gradient()
        self.optimiser.step()
        if self.target is not None:
            self.target.ascend()
        if self.schedule is not None:
            self.schedule.step()

    def diagnosis(self, **others: object) -> Diagnosis:
        """Check it with everything that is known."""
        known: dict[str, object] = {
            "optimiser": self.optimiser,
            "loss": self.loss,
            "batches": self.batches,
            "network": self.network,
            "error": None if self.network is None else wrong,
            "target": self.target,
            "steps_left": None if self.target else self.steps - self.step,
        }
        return diagnose(self.guide, **{**known, **others})


def wrong(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that a network takes for something else."""
    return float((network(images).argmax(-1) != labels).double().mean())


def digits(shape: tuple[int, ...] = (64,), size: int = 100, dtype: torch.dtype = torch.float32) -> list[Batch]:
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
    priced: bool = True,
    **options: object,
) -> Run:
    """A network's training by Eq. 22, or by another objective, before its first step."""
    name_gates(network)
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


def on_the_mean_loss(run: Run) -> Run:
    """Its gradients are those of the mean over the data."""
    run.scale = 1 / sum(len(y) for _, y in run.batches)
    return run


def _with_norms() -> Run:
    network, batches = mlp(), digits()
    return _quick(network, batches, weight_decay=0.1, square_norm=square_norms(network, batches[0][0]))


def pretrained(network: nn.Module, batches: Sequence[Batch], **options: object) -> Run:
    """The network is trained with open gates first."""
    for layer in network.modules():
        if isinstance(layer, L0Gate):
            layer.is_reported = True
    ones = {name: torch.ones(gate.size) for name, gate in name_gates(network).items()}
    model = pyro.condition(classifier(network, batches), data=ones)
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


def spike_and_slab(
    prior: BernoulliGate | HardConcrete, scale: float = 2.0, noise: Callable[[], float | Tensor] = lambda: 0.5
) -> Callable[[Tensor, Tensor], None]:
    def model(x: Tensor, y: Tensor) -> None:
        sigma = noise()
        with pyro.plate("features", x.shape[1]):
            z = pyro.sample("z", prior)
            w = pyro.sample("w", dist.Normal(0.0, scale))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((z * w) @ x.T, sigma), obs=y)

    return model


def _slabs(prior: BernoulliGate | HardConcrete, **options: object) -> Run:
    data = regression()
    model = spike_and_slab(prior)
    guide = AutoSpikeSlab(model, slab={"w": "z"}, family=type(prior))
    loss = L0_ELBO("spike_slab", slab={"w": "z"}, **options)(model, guide)
    loss(*data)
    return Run(loss, guide, torch.optim.Adam(guide.parameters(), 0.03), [data], 600)


def sparse_regression(x: Tensor, y: Tensor) -> None:
    """Gates times weights that are parameters."""
    weights = pyro.param("weights", lambda: torch.full((x.shape[1],), 0.5))
    z = pyro.sample("z", HardConcrete.from_active_prob(torch.full((x.shape[1],), 0.3)).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * weights), 0.5), obs=y)


def _by_svi(
    optimiser: pyro.optim.PyroOptim,
    model: Callable[[Tensor, Tensor], None] = sparse_regression,
    data: Batch | None = None,
    steps: int = 500,
    family: type = HardConcrete,
    **options: object,
) -> Run:
    data = regression(seed=1) if data is None else data
    guide = AutoGate(model, family)
    guide(*data)
    elbo = L0_ELBO(**options)
    svi = pyro.infer.SVI(model, guide, optimiser, loss=elbo)
    return Run(elbo(model, guide), guide, optimiser, [data], steps, svi=svi)


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

    options = {"objective": "free_energy", "estimator": "leave_one_out", "num_particles": 4}
    return _by_svi(pyro.optim.Adam({"lr": 0.02}), model, (x, y), 400, BernoulliGate, **options)


def _beside_other_latents() -> Run:
    """Gates in one guide of a list, weights and the noise's scale in another."""
    data = regression(100, seed=3)
    prior = HardConcrete.from_active_prob(torch.tensor(0.3))
    model = spike_and_slab(prior, 1.0, lambda: pyro.sample("noise", dist.HalfCauchy(1.0)))
    both = pyro.infer.autoguide.AutoGuideList(model)
    guide = AutoGate(pyro.poutine.block(model, expose=["z"]))
    both.append(guide)
    both.append(pyro.infer.autoguide.AutoNormal(pyro.poutine.block(model, expose=["noise", "w"])))
    loss = L0_ELBO("free_energy")(model, both)
    loss(*data)
    return Run(loss, guide, torch.optim.Adam(both.parameters(), 0.03), [data], 400)


def _quick(network: nn.Module, batches: Sequence[Batch], **options: object) -> Run:
    """With gates that have decided at the end of so few steps."""
    return train(network, batches, **{"gate_rate": 0.1, "steps": 400, **options})


_RARE = BernoulliGate(probs=torch.tensor(0.2))


def within(budget: float, network: nn.Module, batches: Sequence[Batch], steps: int, is_pretrained: bool) -> Run:
    """A network's training with a target of multiply-adds."""
    make = pretrained if is_pretrained else train
    run = make(network, batches, lam=0.0, steps=steps, priced=False)
    cost = NetworkCost(network, batches[0][0])
    target = SparsityTarget(run.guide, budget, cost.macs, steps=steps, pretrained=is_pretrained)
    groups = [{"params": list(network.parameters()), "lr": 2e-3}]
    optimiser = torch.optim.Adam([*groups, {"params": list(run.guide.parameters()), **target.optimiser_options}])
    return Run(run.loss, run.guide, optimiser, batches, steps, network, target=target)


HEALTHY: dict[str, Callable[[], Run]] = {
    "MLP": lambda: train(mlp(), digits(), steps=400),
    "MLP with input gates": lambda: train(mlp(inputs=True), digits(), steps=600),
    "MLP, cosine": lambda: _scheduled(_quick(mlp(), digits())),
    "MLP, one cycle": lambda: _one_cycle(_quick(mlp(), digits(), steps=300)),
    "MLP, AdamW with groups": lambda: train(
        mlp(), digits(), make=torch.optim.AdamW, gate_options={"weight_decay": 0.0}, steps=400
    ),
    "MLP, AdamW without groups": lambda: _quick(mlp(), digits(), make=torch.optim.AdamW),
    "MLP, SGD on the mean loss": lambda: on_the_mean_loss(
        train(mlp(), digits(), steps=600, rate=0.2, gate_rate=20.0, make=partial(torch.optim.SGD, momentum=0.9))
    ),
    "MLP, accumulated gradients": _accumulated,
    "MLP in float64": lambda: _quick(mlp().double(), digits(dtype=torch.float64)),
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
    "MLP, pretrained": lambda: pretrained(mlp(), digits(), lam=1.0, steps=400, gate_rate=0.1, start=0.98),
    "CNN": lambda: train(cnn(), digits((1, 8, 8)), lam=0.2, steps=300),
    "CNN, cosine, dropout": lambda: _scheduled(_quick(cnn(0.2), digits((1, 8, 8)), lam=0.2, gate_rate=0.2)),
    "CNN, pretrained": lambda: pretrained(cnn(), digits((1, 8, 8)), lam=0.2, steps=300, start=0.98, gate_rate=0.1),
    "residual network": lambda: _quick(residual_network(), digits(), gate_rate=0.2),
    "transformer": lambda: _quick(transformer(), digits((8, 8)), lam=0.05, gate_rate=0.2),
    "spike and slab, hard concrete": lambda: _slabs(HardConcrete.from_active_prob(0.2)),
    "spike and slab, Bernoulli": lambda: _slabs(_RARE, estimator="leave_one_out", num_particles=4),
    "regression by SVI, free energy": lambda: _by_svi(pyro.optim.Adam({"lr": 0.03}), objective="free_energy"),
    "regression by SVI, Eq. 22": lambda: _by_svi(
        pyro.optim.ClippedAdam({"lr": 0.03}), objective="l0", lam=3.0, num_particles=2
    ),
    "logistic regression by SVI": _logistic,
    "gates beside a guide of the other latents": _beside_other_latents,
    "residual CNN": lambda: _quick(residual_cnn(), digits((1, 8, 8)), lam=0.3, rate=0.01),
    "MLP, all data in a batch": lambda: _quick(mlp(), digits(size=1797), steps=200),
    "MLP, NAdam, 4 particles": lambda: _quick(mlp(), digits(), make=torch.optim.NAdam, num_particles=4, steps=300),
    "MLP, pretrained, a target of .3": lambda: within(0.3, mlp(), digits(), 400, is_pretrained=True),
    "MLP, pretrained, a target of .1": lambda: within(0.1, mlp(), digits(), 300, is_pretrained=True),
    "CNN, pretrained, a target of .3": lambda: within(0.3, cnn(), digits((1, 8, 8)), 300, is_pretrained=True),
    "CNN from scratch, a target of .3": lambda: within(0.3, cnn(), digits((1, 8, 8)), 400, is_pretrained=False),
    "residual CNN, a target of .2": lambda: within(0.2, residual_cnn(), digits((1, 8, 8)), 300, is_pretrained=True),
    "transformer, a target of .3": lambda: within(0.3, transformer(), digits((8, 8)), 400, is_pretrained=True),
}


def start(make: Callable[[], Run], seed: int = 1) -> Run:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    return make()
