"""A Bayesian multilayer perceptron whose weights can be exactly zero, beside an ensemble and Monte Carlo dropout.

The spike-and-slab ELBO (Louizos et al., Eq. 20) with a binary gate for each weight and the inputs read by every layer.
Units and inputs that no weight reads any more leave while it trains. Then the gates are fixed and the slabs train on.
The table has, for the test data,

- ``median``: the slabs' means behind gates that are more likely open than not, of which only the weights on a path from
  an input to an output count;
- ``draws``: predictions averaged over draws of these weights;
- one deterministic network, five of them (an ensemble), and one trained and drawn with dropout, all for equal steps.

``AUROC``: how well predictions' entropy tells test images from ones turned by a quarter, and from CIFAR-10's in grey.

``python examples/bayesian_mlp.py`` takes a minute on scikit-learn's digits; ``--data cancer`` takes scikit-learn's
breast cancer, each seed another split; ``--data mnist --hidden 600 600 --steps 7200 --prior-active-prob 0.065
--no-rivals`` takes ten minutes a seed. It writes ``reliability.png`` to ``--out``.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from common.bayesian import InputSkipMLP, fit
from common.cifar import load_cifar
from common.data import Images, load_images
from common.figures import plot_curves, save_figure
from common.paths import WeightGates, active_weights
from common.scores import auroc, predictive, reliability, scores
from common.sweep import spread
from pyro_l0 import bayes
from pyro_l0.compaction import Shrinker

__all__ = ["Options", "main"]

SLAB_RATE, GATE_RATE, DROPOUT, ENSEMBLE = 5e-3, 3e-2, 0.5, 5  # of learning, of dropout
FIXED = 20.0  # logit of a gate that is open or closed for good
Row = dict[str, float]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: embedded digits or breast cancer, or MNIST.
        data_dir: folder with MNIST's four files; downloaded if not given.
        cifar_dir: folder with CIFAR-10, for images from elsewhere.
        hidden: units of the hidden layers.
        steps: of every training.
        prior_active_prob: prior probability that a weight is not zero.
        draws: of predictions.
        rivals: whether to train the deterministic networks.
        seeds: each a run.
        out: folder for the files.
    """

    data: Literal["digits", "mnist", "cancer"] = "digits"
    data_dir: Path | None = None
    cifar_dir: Path | None = None
    hidden: tuple[int, ...] = (100, 100)
    steps: int = 2400
    prior_active_prob: float = 0.05
    draws: int = 20
    rivals: bool = True
    seeds: tuple[int, ...] = (1,)
    out: Path = field(default=Path("runs/bayesian_mlp"))


class OneLogit(nn.Module):
    """Two classes from one output."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), x], -1)


def main(options: Options) -> dict[str, list[Row]]:
    """Print the table; returns a row of every seed by method."""
    command.check(options)
    rows: dict[str, list[Row]] = {}
    with command.folder(options.out):
        trainings = 1.2 + (ENSEMBLE + 1) * options.rivals  # the first goes on for a fifth of the steps
        command.plan(round(len(options.seeds) * trainings * options.steps))
        for seed in options.seeds:
            images = _cancer(seed) if options.data == "cancer" else load_images(options.data, options.data_dir)
            for name, row in _run(images, options, seed).items():
                rows.setdefault(name, []).append(row)
        columns = list(dict.fromkeys(key for found in rows.values() for row in found for key in row))
        print(" | ".join(["method", *columns]))
        for name, found in rows.items():
            cells = (spread([row[key] for row in found]) if key in found[0] else "" for key in columns)
            print(" | ".join([name, *cells]))
    return rows


def _run(images: Images, options: Options, seed: int) -> dict[str, Row]:
    torch.manual_seed(seed)
    example, is_binary = images.train_x[:8], options.data == "cancer"
    sizes = example.shape[1], *options.hidden, 1 if is_binary else 10

    def network(dropout: float = 0.0) -> nn.Module:
        mlp = InputSkipMLP(*sizes, activation=nn.Sequential(nn.ReLU(), nn.Dropout(dropout)))
        return nn.Sequential(mlp, OneLogit()) if is_binary else mlp

    net = bayes.bayesian(network(), bayes.SpikeSlabPrior(options.prior_active_prob))
    groups = [(p, GATE_RATE if name.endswith("logits") else SLAB_RATE) for name, p in net.named_parameters()]
    optimiser = torch.optim.Adam({"params": p, "lr": rate} for p, rate in groups)
    shrinker = Shrinker(net, WeightGates(net, example), example, optimiser, patience=2)
    fit(net, images, options.steps, optimiser, lambda: bayes.kl(net), shrinker.step)
    _fix_gates(net, active_weights(net, example))
    fit(net, images, max(1, options.steps // 5), optimiser, lambda: bayes.kl(net), shrinker.step)

    active = active_weights(net, example)
    weights = float(sum(int(on.sum()) for on in active.values()))
    draws = [bayes.plain_network(net, sample=True, keep=active) for _ in range(options.draws)]
    methods: dict[str, tuple[Sequence[nn.Module], Row]] = {
        "median": ([bayes.plain_network(net, keep=active)], {"weights": weights}),
        "draws": (draws, {"weights": weights}),
    }
    if options.rivals:
        ensemble = [_deterministic(network(), images, options.steps) for _ in range(ENSEMBLE)]
        dropped = [_deterministic(network(DROPOUT), images, options.steps).train()] * options.draws
        whole = {"weights": float(sum(p.numel() for p in ensemble[0].parameters() if p.dim() > 1))}
        methods["deterministic"] = ensemble[:1], whole
        methods[f"ensemble of {ENSEMBLE}"] = ensemble, {"weights": ENSEMBLE * whole["weights"]}
        methods["dropout"] = dropped, whole
    curves = {name: _calibration(nets, images) for name, (nets, _) in methods.items()}
    save_figure(plot_curves(curves, xlabel="confidence", ylabel="accuracy"), options.out / "reliability.png")
    return {name: _evaluate(nets, images, options) | row for name, (nets, row) in methods.items()}


def _fix_gates(net: nn.Module, active: Mapping[str, Tensor]) -> None:
    """Open the gates of active weights and close the others for good."""
    with torch.no_grad():
        for path, on in active.items():
            net.get_submodule(path).logits.requires_grad_(False).copy_(torch.where(on, FIXED, -FIXED))


def _deterministic(net: nn.Module, images: Images, steps: int) -> nn.Module:
    """A network trained by Adam with a weight decay of 1e-4 of the mean loss."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    decay = 0.5e-4 * len(images.train_x)
    fit(net, images, steps, optimiser, lambda: decay * sum(p.square().sum() for p in net.parameters()))
    return net


def _evaluate(nets: Sequence[nn.Module], images: Images, options: Options) -> Row:
    probs = predictive(nets, images.test_x)
    row: Row = scores(probs, images.test_y)._asdict()
    if options.data == "cancer":
        return row

    def tell(other: Tensor) -> float:
        return auroc(*(torch.special.entr(p).sum(-1) for p in (probs, predictive(nets, other))))

    _, height, width = images.image_shape
    row["AUROC turned"] = tell(images.test_x.view(-1, height, width).rot90(1, (1, 2)).flatten(1))
    if options.cifar_dir is not None and height == 28:
        grey = load_cifar(options.cifar_dir).test_x.float().mean(1)[:, 2:30, 2:30].flatten(1) / 255
        row["AUROC CIFAR"] = tell(grey)
    return row


def _calibration(nets: Sequence[nn.Module], images: Images) -> Tensor:
    """Accuracy over confidence, shape ``(2, bins)``."""
    found = reliability(predictive(nets, images.test_x), images.test_y, bins=10)
    return torch.stack([found.confidence, found.accuracy])[:, found.examples > 0]


def _cancer(seed: int) -> Images:
    """Breast cancer, standardised, a fifth for the test; another split for each seed."""
    data = load_breast_cancer()
    x, test_x, y, test_y = train_test_split(
        data.data, data.target, test_size=0.2, random_state=seed, stratify=data.target
    )
    mean, scale = x.mean(0), x.std(0)
    parts = [torch.tensor((part - mean) / scale, dtype=torch.float32) for part in (x, test_x)]
    return Images(parts[0], torch.tensor(y), parts[1], torch.tensor(test_y), (1, 1, x.shape[1]))


if __name__ == "__main__":
    command.run(main, Options, __doc__)
