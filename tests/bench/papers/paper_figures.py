"""The figures of both papers that need no training: python tests/bench/papers/paper_figures.py

Writes to ``--out`` Figures 1 and 2 of the L0 paper (``penalties.png``, ``hard_concrete.png``) and the pictures of
Appendix A.1 of the paper on mixtures (``mixtures.png``), and prints the mass of each gate's atoms and the largest
derivative of its quantile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributions import RelaxedBernoulli

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from common.figures import figure_axes, plot_curves, save_figure
from pyro_l0 import HardConcrete
from pyro_l0.distributions import ExponentialGate, ExponentialUniformGate, PowerLawGate
from pyro_l0.distributions.gate import GateDistribution

TEMPERATURE = 0.5  # of Figure 2
DRAWS = 10_000  # of each mean of Figure 2b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    plot_penalties(out / "penalties.png")
    plot_hard_concrete(out / "hard_concrete.png")
    print(f"{'gate at q = 1/2':28s}P(z = 0)  P(z = 1)  largest derivative of the quantile for q")
    for name, (zero, one, derivative) in plot_mixtures(out / "mixtures.png").items():
        print(f"{name:28s}{zero:8.3f}  {one:8.3f}  {derivative:.3g}")


def plot_penalties(path: Path) -> None:
    """What the norms of Figure 1 charge a parameter: only that for p = 0 does not grow with it."""
    theta = np.linspace(-2, 2, 401)
    curves = {f"p = {p:g}": np.abs(theta) ** p for p in (2.0, 1.0, 0.5)}
    curves["p = 0"] = (theta != 0).astype(float)
    axes = figure_axes(figsize=(4.5, 3))
    save_figure(plot_curves(curves, theta, xlabel="parameter", ylabel="penalty", axes=axes), path)


def plot_hard_concrete(path: Path) -> None:
    """Densities at log alpha = 0, and means by log alpha: draws, the exact one, and the gate without noise."""
    density, means = figure_axes(1, 2, figsize=(8, 3))
    s = torch.linspace(0.005, 0.995, 199, dtype=torch.float64)
    gate = HardConcrete(torch.zeros((), dtype=torch.float64), TEMPERATURE)
    concrete = RelaxedBernoulli(torch.tensor(TEMPERATURE), logits=gate.log_alpha)
    curves = {"concrete": concrete.log_prob(s).exp(), "hard concrete": gate.log_prob(s).exp()}
    title = f"P(z = 0) = P(z = 1) = {float(gate.log_prob_zero.exp()):.3f}"
    plot_curves(curves, s, xlabel="gate", ylabel="density between 0 and 1", title=title, axes=density)
    density.set_ylim(0, 3)
    locations = torch.linspace(-7, 7, 57, dtype=torch.float64)
    gates = HardConcrete(locations, TEMPERATURE)
    relaxed = RelaxedBernoulli(torch.tensor(TEMPERATURE), logits=locations)
    curves = {
        "concrete, draws": relaxed.sample((DRAWS,)).mean(0),
        "hard concrete, draws": gates.sample((DRAWS,)).mean(0),
        "hard concrete, exact": gates.mean,
        "hard concrete, no noise": gates.test_gate,
    }
    plot_curves(curves, locations, xlabel="log alpha", ylabel="mean", axes=means)
    save_figure([density, means], path)


def plot_mixtures(path: Path) -> dict[str, list[float]]:
    """Density, quantile and its derivative for the weight q, of the paper's gates for MNIST and the hard concrete."""
    p = torch.linspace(0.0025, 0.9975, 399, dtype=torch.float64)
    logits = torch.logit(torch.full_like(p, 0.5)).requires_grad_()
    many: dict[str, GateDistribution] = {
        "exponential": ExponentialGate(logits),
        "exponential and uniform": ExponentialUniformGate(logits),
        "power law": PowerLawGate(logits),
        "hard concrete": HardConcrete(logits),
    }
    quantiles = {name: gate.icdf(p) for name, gate in many.items()}
    # For q = sigmoid(logits), which is 1/2 and has a derivative of 1/4.
    slopes = {name: 4 * torch.autograd.grad(values.sum(), logits)[0] for name, values in quantiles.items()}
    z = torch.linspace(0.005, 0.995, 399, dtype=torch.float64)
    density, quantile, derivative = figure_axes(1, 3, figsize=(10, 3))
    densities = {name: gate.log_prob(z).exp() for name, gate in many.items()}
    plot_curves(densities, z, xlabel="gate", ylabel="density between 0 and 1", yscale="log", axes=density)
    plot_curves(quantiles, p, xlabel="probability", ylabel="quantile", axes=quantile)
    shown = {name: slope.where(slope > 0, torch.nan) for name, slope in slopes.items()}
    plot_curves(shown, p, xlabel="probability", ylabel="derivative for q", yscale="log", axes=derivative)
    for panel in (quantile, derivative):
        panel.get_legend().remove()  # the gates are those of the first panel
    save_figure([density, quantile, derivative], path)
    atoms = {name: (gate.log_prob_zero[0], gate.log_prob_one[0]) for name, gate in many.items()}
    return {name: [float(x.detach().exp()) for x in atoms[name]] + [float(slopes[name].max())] for name in many}


if __name__ == "__main__":
    main()
