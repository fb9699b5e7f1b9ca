"""A Bayesian multilayer perceptron whose weights can be exactly zero, beside an ensemble and Monte Carlo dropout.

The spike-and-slab bound (Eq. 20 of the L0 paper) with a binary gate for each weight and the inputs read by every layer.
Units and inputs that no weight reads any more leave while it trains. The table has, for the test data,

- ``median``: the slabs' means behind gates that are more likely open than not, of which only the weights on a path from
  an input to an output count; it is one plain network;
- ``draws``: predictions averaged over draws of these weights;
- ``rounded``: the median network with as many bits as the posterior's spread asks for, saved and loaded again;
- one deterministic network, five of them (an ensemble), and one trained and drawn with dropout, all for equal steps.

``AUROC`` says how well the entropy of predictions tells test images from ones turned by a quarter, and from CIFAR-10's
in grey (``--cifar-dir``).

``python examples/bayesian_mlp.py`` takes a minute on scikit-learn's digits; ``--data cancer`` takes scikit-learn's
breast cancer, each seed another split; ``--data mnist --hidden 600 600 --steps 7200 --prior-active-prob 0.05`` takes
half an hour a seed. It writes ``reliability.png``, and the rounded network as ``rounded.npz``, to ``--out``.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from common.cifar import load_cifar
from common.data import Images, load_images
from common.sweep import spread
from pyro_l0.bayes import (
    InputSkipMLP,
    SpikeSlabPrior,
    WeightGates,
    active_weights,
    auroc,
    bayesian,
    bit_precision,
    kl,
    load_quantised,
    plain_network,
    predictive,
    quantise,
    reliability,
    save_quantised,
    scores,
)
from pyro_l0.compaction import Shrinker
from pyro_l0.plots import plot_curves, save_figure

__all__ = ["Options", "main"]

LEARNING_RATE, GATE_LEARNING_RATE, SHRINK_EVERY, DROPOUT, ENSEMBLE = 5e-3, 3e-2, 120, 0.5, 5
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
        prior_scale: standard deviation of the slab.
        draws: of predictions.
        rivals: whether to train the deterministic networks.
        seeds: each a run.
        out: folder for the picture and the network.
    """

    data: Literal["digits", "mnist", "cancer"] = "digits"
    data_dir: Path | None = None
    cifar_dir: Path | None = None
    hidden: tuple[int, ...] = (100, 100)
    steps: int = 2400
    prior_active_prob: float = 0.05
    prior_scale: float = 1.0
    draws: int = 20
    rivals: bool = True
    seeds: tuple[int, ...] = (1, 2, 3)
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
        for seed in options.seeds:
            images = _cancer(seed) if options.data == "cancer" else load_images(options.data, options.data_dir)
            for name, row in _run(images, options, seed).items():
                rows.setdefault(name, []).append(row)
        columns = list(dict.fromkeys(key for found in rows.values() for row in found for key in row))
        print(" | ".join(["method", *columns]))
        for name, found in rows.items():
            print(
                " | ".join([name, *(spread([row[key] for row in found]) if key in found[0] else "" for key in columns)])
            )
    return rows


def _run(images: Images, options: Options, seed: int) -> dict[str, Row]:
    torch.manual_seed(seed)
    example, is_binary = images.train_x[:8], options.data == "cancer"
    sizes = example.shape[1], *options.hidden, 1 if is_binary else 10

    def network(dropout: float = 0.0) -> nn.Module:
        mlp = InputSkipMLP(*sizes, activation=nn.Sequential(nn.ReLU(), nn.Dropout(dropout)))
        return nn.Sequential(mlp, OneLogit()) if is_binary else mlp

    net = bayesian(network(), SpikeSlabPrior(options.prior_active_prob, options.prior_scale))
    gates = [parameter for name, parameter in net.named_parameters() if name.endswith("logits")]
    rest = [parameter for name, parameter in net.named_parameters() if not name.endswith("logits")]
    optimiser = torch.optim.Adam([{"params": rest, "lr": LEARNING_RATE}, {"params": gates, "lr": GATE_LEARNING_RATE}])
    shrinker = Shrinker(net, WeightGates(net, example), example, optimiser, patience=1)
    fit(net, images, options.steps, optimiser, lambda: kl(net), shrinker)

    active = active_weights(net, example)
    median = plain_network(net, keep=active)
    precision = bit_precision(net, active)
    rounded, file = quantise(plain_network(net, keep=active), precision), options.out / "rounded.npz"
    size = save_quantised(rounded, precision, file)
    rounded.load_state_dict(load_quantised(file))
    weights = float(sum(int(on.sum()) for on in active.values()))
    bits = sum(precision[path].bits * int(on.sum()) for path, on in active.items()) / max(1.0, weights)
    draws = [plain_network(net, sample=True, keep=active) for _ in range(options.draws)]
    methods: dict[str, tuple[Sequence[nn.Module], Row]] = {
        "median": ([median], {"weights": weights}),
        "draws": (draws, {"weights": weights}),
        "rounded": ([rounded], {"weights": weights, "bits": bits, "bytes": float(size)}),
    }
    if options.rivals:
        ensemble = [_deterministic(network(), images, options.steps) for _ in range(ENSEMBLE)]
        dropped = [_deterministic(network(DROPOUT), images, options.steps).train()] * options.draws
        whole = {"weights": float(sum(p.numel() for p in ensemble[0].parameters() if p.dim() > 1))}
        methods["deterministic"] = ensemble[:1], whole
        methods[f"ensemble of {ENSEMBLE}"] = ensemble, {"weights": ENSEMBLE * whole["weights"]}
        methods["dropout"] = dropped, whole
    found = {name: _evaluate(nets, images, options) | row for name, (nets, row) in methods.items()}
    _draw({name: predictive(nets, images.test_x) for name, (nets, _) in methods.items()}, images.test_y, options.out)
    return found


def fit(
    net: nn.Module,
    images: Images,
    steps: int,
    optimiser: torch.optim.Optimizer,
    price: Callable[[], Tensor],
    shrinker: Shrinker | None = None,
) -> None:
    """Train on the expected loss of all data plus a price, with rates that fall to 0 over the second half."""
    x, y = images.train_x, images.train_y
    batch = min(500, len(x) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, max(0.02, 2 * (1 - step / steps))))
    order = iter(())
    for step in range(steps):
        index = next(order, None)
        if index is None:
            order = iter(torch.randperm(len(x))[: len(x) // batch * batch].split(batch))
            index = next(order)
        optimiser.zero_grad()
        (len(x) * F.cross_entropy(net(x[index]), y[index]) + price()).backward()
        optimiser.step()
        schedule.step()
        if shrinker is not None and step % SHRINK_EVERY == SHRINK_EVERY - 1:
            shrinker.step()
    net.eval()


def _deterministic(net: nn.Module, images: Images, steps: int) -> nn.Module:
    """Trained with a weight decay of 1e-4 of the mean loss, its weights penalised as in expectation by a slab."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    decay = 1e-4 * len(images.train_x)
    fit(net, images, steps, optimiser, lambda: 0.5 * decay * sum(p.square().sum() for p in net.parameters()))
    return net


def _evaluate(nets: Sequence[nn.Module], images: Images, options: Options) -> Row:
    probs = predictive(nets, images.test_x)
    row: Row = scores(probs, images.test_y)._asdict()
    if options.data == "cancer":
        return row
    channels, height, width = images.image_shape
    turned = images.test_x.view(-1, height, width).rot90(1, (1, 2)).flatten(1)
    row["AUROC turned"] = auroc(_entropy(probs), _entropy(predictive(nets, turned)))
    if options.cifar_dir is not None and height == 28:
        grey = load_cifar(options.cifar_dir).test_x.float().mean(1)[:, 2:30, 2:30].flatten(1) / 255
        row["AUROC CIFAR"] = auroc(_entropy(probs), _entropy(predictive(nets, grey)))
    return row


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _draw(probs: dict[str, Tensor], labels: Tensor, out: Path) -> None:
    """Accuracy over confidence; on the diagonal a method is calibrated."""
    curves = {}
    for name, of in probs.items():
        found = reliability(of, labels, bins=10)
        some = found.examples > 0
        curves[name] = torch.stack([found.confidence[some], found.accuracy[some]])
    curves["calibrated"] = torch.tensor([[0.1, 1.0], [0.1, 1.0]])
    save_figure(plot_curves(curves, xlabel="confidence", ylabel="accuracy"), out / "reliability.png")


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
