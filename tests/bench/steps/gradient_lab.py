"""How biased and how noisy is each gate's gradient? Every family and every estimator on real data.

Three tables on scikit-learn's digits:

1. ``noise``: the noise of a draw's derivative by itself (``pathwise_noise``), for families of equal sharpness. The
   paper on mixtures states that they have less than the concrete; here is where they do.
2. ``linear``: a logistic regression whose pixels have gates, two at a time so that the exact gradient of every family
   is known (a sum over gate vectors and quadrature nodes), and ten at a time, where that of Bernoulli gates is.
3. ``mlp``: a network with ten gated hidden units, half-trained, with the exact gradient of Bernoulli gates.

Variances are those of the gradient for E[z], so that families with different parameters compare.
``python tests/bench/steps/gradient_lab.py`` takes about two minutes on one core.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from common import command
from common.data import load_digits
from pyro_l0 import (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)
from pyro_l0.diagnostics.gradients import GradientReport, measure_gradient
from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.distributions.stretched import integrate
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.infer.record import Record
from pyro_l0.maths.quadrature import Nodes, Stretch

__all__ = ["Options", "exact_gradient", "main", "pathwise_noise"]


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        draws: gradients per estimator.
        batch: examples in the batch, the same for every draw.
        seed: seed of everything random.
        out: folder for the tables.
    """

    draws: int = 1000
    batch: int = 200
    seed: int = 1
    out: Path = field(default=Path("runs/gradient_lab"))


class Candidate(NamedTuple):
    """A family with its options, or a Bernoulli gate with an estimator."""

    family: type[GateDistribution]
    options: dict[str, float]
    estimator: EstimatorName | None = None

    @property
    def name(self) -> str:
        if self.estimator is not None:
            return f"Bernoulli, {self.estimator.replace('_', ' ')}"
        return ", ".join([self.family.__name__, *(f"{key} {value:g}" for key, value in self.options.items())])


CANDIDATES = (
    Candidate(HardConcrete, {"temperature": 2 / 3}),
    Candidate(HardConcrete, {"temperature": 0.1}),
    Candidate(RectifiedNormal, {"scale": 0.5}),
    Candidate(HardKumaraswamy, {"concentration1": 0.5}),
    Candidate(ExponentialGate, {"beta": 6.0}),
    Candidate(ExponentialGate, {"beta": 30.0}),
    Candidate(ExponentialUniformGate, {"beta": 25.0, "epsilon": 0.1}),
    Candidate(PowerLawGate, {"beta": 2.0}),
    Candidate(PowerLawGate, {"beta": 40.0}),
    Candidate(BernoulliGate, {}, "score_function"),
    Candidate(BernoulliGate, {}, "leave_one_out"),
    Candidate(BernoulliGate, {}, "arm"),
    Candidate(BernoulliGate, {}, "rebar"),
    Candidate(BernoulliGate, {}, "straight_through"),
    Candidate(BernoulliGate, {}, "reinmax"),
)


@dataclass(frozen=True)
class Measured(GradientReport):
    """A report with the name of what was measured, and the seconds of a draw, forward and backward."""

    name: str
    seconds: float

    @property
    def variance_seconds(self) -> Tensor:
        """Scaled variance times seconds, the variance of a mean over one second of draws."""
        return self.scaled_variance * self.seconds


class Gated(nn.Module):
    """A classifier of digits in which some features have gates.

    Args:
        gates: how many.
        features: what the gates multiply.
        read: what is made of the gated features.
    """

    def __init__(self, gates: int, features: Callable[[Tensor], Tensor], read: nn.Module) -> None:
        super().__init__()
        self.gates = gates
        self.features = features
        self.read = read

    def forward(self, x: Tensor, y: Tensor) -> None:
        prior = HardConcrete(torch.zeros(self.gates, dtype=x.dtype))
        z = pyro.sample("z", prior.to_event(1))
        features = self.features(x)
        logits = self.read(torch.cat([features[:, : self.gates] * z, features[:, self.gates :]], -1))
        with pyro.plate("batch", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def main(options: Options) -> dict[str, list[Measured]]:
    """Write the tables; returns the reports by model.

    Raises:
        ValueError: an option is outside its range, or another run uses ``out``.
    """
    command.check(options)
    with command.folder(options.out):
        torch.set_default_dtype(torch.float64)
        try:
            return _measure_all(options)
        finally:
            torch.set_default_dtype(torch.float32)


def _measure_all(options: Options) -> dict[str, list[Measured]]:
    text = ["### Noise of one derivative\n", _noise_table()]
    reports: dict[str, list[Measured]] = {}
    for name, model, x, y in _models(options):
        reports[name] = [_measure(candidate, model, x, y, options) for candidate in CANDIDATES]
        text += [f"\n### {name}\n", _table(reports[name])]
    (options.out / "gradient_lab.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))
    return reports


def _models(options: Options) -> list[tuple[str, Gated, Tensor, Tensor]]:
    """A linear model with two and with ten gates, and a network with ten; each trained for a while without gates."""
    images = load_digits()
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(images.train_x), generator=generator)[: options.batch]
    # The pixels that vary most come first.
    order = images.train_x.var(0).argsort(descending=True)
    x, y = images.train_x.double()[:, order], images.train_y
    torch.manual_seed(options.seed)
    linear = nn.Linear(x.shape[1], 10)
    hidden, read = nn.Linear(x.shape[1], 10), nn.Linear(10, 10)
    _train(linear, x, y)
    _train(nn.Sequential(hidden, nn.ReLU(), read), x, y)
    x, y = x[chosen], y[chosen]
    return [
        ("linear2, two gates on pixels", Gated(2, nn.Identity(), linear), x, y),
        ("linear10, ten gates on pixels", Gated(10, nn.Identity(), linear), x, y),
        ("mlp10, ten gates on hidden units", Gated(10, nn.Sequential(hidden, nn.ReLU()), read), x, y),
    ]


def _train(net: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()


def _measure(candidate: Candidate, model: Gated, x: Tensor, y: Tensor, options: Options) -> Measured:
    pyro.set_rng_seed(options.seed)
    rate = 0.8 if candidate.options.get("beta") in (2.0, 6.0) else 0.7
    guide = AutoGate(
        model, candidate.family, init_active_prob=rate, init_jitter=0.0, family_options=candidate.options or None
    )
    guide(x, y)
    elbo = L0_ELBO(
        "l0", estimator=candidate.estimator, num_particles=2 if candidate.estimator == "leave_one_out" else 1
    )
    start = time.perf_counter()
    report = measure_gradient(elbo, model, guide, x, y, draws=options.draws)
    seconds = (time.perf_counter() - start) / options.draws
    exact = None
    if candidate.family is BernoulliGate:
        exact = measure_gradient(elbo, model, guide, x, y, draws=2, exact=True).exact
    elif model.gates == 2:
        exact = exact_gradient(elbo, model, guide, x, y)
    return Measured(**{**vars(report), "exact": exact}, name=candidate.name, seconds=seconds)


def _table(reports: list[Measured]) -> str:
    lines = [
        "| gate | standard deviation for E[z] | milliseconds a draw | variance × seconds | bias in standard errors |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        bias = (
            ""
            if report.exact is None
            else f"{float((report.bias / report.standard_error.clamp(min=1e-12)).abs().max()):.1f}"
        )
        lines.append(
            f"| {report.name} | {math.sqrt(float(report.scaled_variance.mean())):.1f} | {1e3 * report.seconds:.2f} "
            f"| {float(report.variance_seconds.mean()):.2g} | {bias} |"
        )
    return "\n".join(lines)


def _noise_table() -> str:
    """The noise of a derivative at mean 1/2 and 0.9 over P(0 < z < 1), which bounds it from below by its inverse."""
    sharpness: dict[str, tuple[Callable[[Tensor, float], Any], list[float]]] = {
        "HardConcrete": (lambda x, s: HardConcrete(x, s), [2.0, 1.0, 2 / 3, 1 / 3, 0.1, 0.0485]),
        "RectifiedNormal": (lambda x, s: RectifiedNormal(x, s), [1.0, 0.5, 0.2]),
        "ExponentialGate": (lambda x, s: ExponentialGate(x, s), [2.0, 6.0, 12.0, 20.0, 30.0]),
        "ExponentialUniformGate": (lambda x, s: ExponentialUniformGate(x, s, 0.1), [6.0, 12.0, 25.0, 40.0]),
        "PowerLawGate": (lambda x, s: PowerLawGate(x, s), [1.5, 2.0, 5.0, 12.0, 40.0]),
    }
    lines = [
        "| gate | sharpness | P(0 < z < 1) at mean 1/2 | noise at mean 1/2 | noise at mean 0.9 |",
        "|---|---|---|---|---|",
    ]
    for name, (make, values) in sharpness.items():
        for value in values:
            cells = []
            for mean in (0.5, 0.9):
                location = _location_of_mean(make, value, mean)
                gate = None if location is None else make(location, value)
                if mean == 0.5:
                    cells.append(f"{float(gate.log_interior_prob.exp()):.3f}")
                cells.append("not reached" if gate is None else f"{float(pathwise_noise(gate)):.3g}")
            lines.append(f"| {name} | {value:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _location_of_mean(make: Callable[[Tensor, float], Any], value: float, mean: float) -> Tensor | None:
    """The location at which a family has a mean, by bisection; None if it is out of reach."""
    low, high = torch.tensor(-40.0, dtype=torch.float64), torch.tensor(40.0, dtype=torch.float64)
    if not make(low, value).mean < mean < make(high, value).mean:
        return None
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if make(middle, value).mean < mean else (low, middle)
    return middle


def exact_gradient(elbo: L0_ELBO, model: Any, guide: AutoGate, *args: Any) -> Tensor:
    """The gradient in the gates' locations without sampling: a sum over atoms and quadrature nodes of every gate.

    Their probabilities carry the gradient.
    """
    with Record() as record:
        guide(*args)
    gates = {name: find_gate(site["fn"]) for name, site in record.sites.items()}
    pairs = [pair for gate in gates.values() for pair in _points(gate)]
    values, log_masses = [z for z, _ in pairs], [log_mass for _, log_mass in pairs]
    costs = []
    with torch.no_grad():
        for state in itertools.product(*values):
            pieces = torch.stack(state).split([gate.batch_shape.numel() for gate in gates.values()])
            drawn = {name: x.view(gates[name].batch_shape) for name, x in zip(gates, pieces, strict=True)}
            costs.append(elbo.evaluate(model, record, drawn, args, {}).cost)
    joint = log_masses[0]
    for log_mass in log_masses[1:]:
        joint = (joint.unsqueeze(-1) + log_mass).flatten()
    expected = (torch.exp(joint) * torch.stack(costs).to(joint)).sum()
    for part in elbo.evaluate(model, record, {}, args, {}).analytic:
        expected = expected + part
    return torch.cat([x.flatten() for x in torch.autograd.grad(expected, guide.locations())])


def pathwise_noise(gate: GateDistribution) -> Tensor:
    r"""Second moment of a gate's pathwise derivative over its squared mean.

    That is :math:`E[(\partial z / \partial \theta)^2] / (dE[z] / d\theta)^2` for the location :math:`\theta`, whatever
    its scale. It is at least 1 / P(0 < z < 1), because the derivative is 0 at the atoms, and equals that if the
    derivative is the same everywhere in between. It needs a density and a location, which all families have but
    ``BernoulliGate`` and ``Rectified``.
    """
    name = next(iter(gate.learned))
    location = getattr(gate, name).detach().requires_grad_()
    others = {key: getattr(gate, key).detach() for key in gate.learned if key != name}
    moved = gate.with_learned(**{name: location}, **others)
    z, log_mass = _interior(gate)
    # One row per node: the derivative of the cdf at it, for each gate by itself.
    rows = z.movedim(-1, 0)
    changes = [torch.autograd.grad(moved.cdf(row).sum(), location, retain_graph=True)[0] for row in rows]
    with torch.no_grad():
        log_density = gate.log_prob(rows)
        slope = -torch.stack(changes) / torch.exp(log_density)
        mass = torch.exp(log_mass).movedim(-1, 0)
        square: Tensor = (mass * slope**2).sum(0)
        mean: Tensor = (mass * slope).sum(0)
        return square / mean**2


def _interior(gate: GateDistribution) -> tuple[Tensor, Tensor]:
    """Points between the atoms and the log mass that a rule gives them, each of shape ``batch_shape + (n,)``."""

    def both(nodes: Nodes, stretch: Stretch, gate: GateDistribution) -> Tensor:
        log_mass = gate._log_density_in_t(nodes, stretch) + torch.log(nodes.weight)
        return torch.stack(torch.broadcast_tensors(nodes.z, log_mass))

    z, log_mass = integrate(both, gate)
    return z, log_mass


def _points(gate: GateDistribution) -> list[tuple[Tensor, Tensor]]:
    """For each gate of a batch the values that it takes in such a sum, and their log masses, shape ``(k,)``."""
    atoms = torch.stack((gate.log_prob_zero, gate.log_prob_one), -1).reshape(-1, 2)
    ends = torch.tensor([0.0, 1.0], dtype=atoms.dtype, device=atoms.device)
    z, log_mass = _interior(gate)
    log_mass = log_mass.reshape(len(atoms), -1)
    z = z.expand(*gate.batch_shape, z.shape[-1]).reshape(log_mass.shape)
    pairs = []
    for row, nodes, mass in zip(atoms, z, log_mass, strict=True):
        used = mass > -math.inf  # a panel of no width has no mass
        pairs.append((torch.cat((ends, nodes[used])), torch.cat((row, mass[used]))))
    return pairs


if __name__ == "__main__":
    command.run(main, Options, __doc__)
