"""Which inputs does a trained classifier need for one decision? Gates for each example, computed by a second network.

As in DiffMask (De Cao et al., 2020, arXiv:2004.14992), a network reads an example and returns the logits of a gate for
each input; a closed gate replaces its input by the mean over the data. It is trained once, for all examples: what the
frozen classifier predicts should stay the same (KL), and an open gate has a price. Two classifiers are asked, one of
tokens (of 12 two are marked, anywhere, and the class is the sum of their values modulo 5: these two are needed), and
one of scikit-learn's digits (64 pixels, each an input; test images).

Beside the masks stands gradient x input. Inputs are removed in the order of their scores, highest first, and the
probability of the class is averaged over all numbers of removed inputs: lower is better (deletion). In the same order
they are put back into an example without inputs: higher is better (insertion).

``python examples/input_masks.py`` takes 45 seconds a seed on one core and writes ``input_masks.png`` to ``--out``.
Expect masks of exactly the two needed tokens; on digits gradient x input is better in deletion (0.120 against 0.174).
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from common.data import load_digits
from common.figures import figure_axes, plot_curves, save_figure
from common.sweep import spread
from pyro_l0.nn import L0Gate
from pyro_l0.plots import plot_gates

__all__ = ["Options", "Result", "main"]

TOKENS, VALUES, MARKED = 12, 5, 2
WIDTH, BATCH, LEARNING_RATE = 48, 128, 3e-3
SMOOTHING = 0.1  # of the labels; the KL of a classifier that is always sure says little about what an input matters


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        steps: of each classifier and of each network of masks.
        seeds: each a run.
        out: folder for the picture.
    """

    steps: int = 1500
    seeds: tuple[int, ...] = (0,)
    out: Path = field(default=Path("runs/input_masks"))


class Task(NamedTuple):
    draw: Callable[[], tuple[Tensor, Tensor]]  # a minibatch: examples (n, inputs, features) of mean 0, and classes
    x: Tensor  # test examples
    y: Tensor
    needed: Tensor | None  # whether each of their inputs is, if known
    price: float  # of an open gate in nats


class Result(NamedTuple):  # of test examples
    accuracy: float  # of the classifier
    kept: float  # open gates per example
    found: dict[str, list[float]]  # by score: the share of examples in which it tells the needed inputs, if known
    curves: dict[str, Tensor]  # by score: probability of the class in deletion and insertion, shape (2, inputs + 1)


def main(options: Options) -> dict[str, list[Result]]:
    """Print the table and draw the picture; returns the results of each seed by task."""
    command.check(options)
    results: dict[str, list[Result]] = {"tokens": [], "digits": []}
    with command.folder(options.out):
        command.plan(2 * 2 * len(options.seeds) * options.steps)  # tasks, and networks of each
        for seed in options.seeds:
            for name, make in {"tokens": _tokens, "digits": _digits}.items():
                torch.manual_seed(seed)
                masks, result = _run(make(), options.steps)
                results[name].append(result)
        print("task     score              deletion        insertion       needed inputs found")
        for name, of_seeds in results.items():
            for score in of_seeds[0].curves:
                columns = zip(*((*r.curves[score].mean(1).tolist(), *r.found[score]) for r in of_seeds), strict=True)
                print(f"{name}   {score:16s}", *map(spread, columns), sep="   ")
            accuracy, kept = [result.accuracy for result in of_seeds], [result.kept for result in of_seeds]
            print(f"{name}   accuracy of the classifier {spread(accuracy)}, inputs kept {spread(kept)}")
        _plot(results, masks, options.out / "input_masks.png")
    return results


def _tokens() -> Task:
    def draw(number: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.randint(VALUES, (number, TOKENS))
        marks = torch.zeros(number, TOKENS).scatter_(1, torch.rand(number, TOKENS).topk(MARKED).indices, 1.0)
        x = torch.cat([F.one_hot(values, VALUES) - 1 / VALUES, (marks - MARKED / TOKENS).unsqueeze(-1)], -1)
        return x, (values * marks.long()).sum(1) % VALUES, marks > 0

    return Task(lambda: draw()[:2], *draw(1000), price=0.3)


def _digits() -> Task:
    images = load_digits()
    train, test = ((x - images.train_x.mean(0)).unsqueeze(-1) for x in (images.train_x, images.test_x))
    pairs = TensorDataset(train, images.train_y)
    return Task(lambda: pairs[torch.randint(len(pairs), (BATCH,))], test, images.test_y, None, price=0.03)


class Network(nn.Module):
    """Each input by itself and a sum over all: the logits of the classes, or without these of a gate per input."""

    def __init__(self, task: Task, classes: int | None) -> None:
        super().__init__()
        _, inputs, features = task.x.shape
        self.embed = nn.Linear(features, WIDTH)
        self.gain = nn.Parameter(1 + torch.randn(inputs, WIDTH))
        self.position = nn.Parameter(0.1 * torch.randn(inputs, WIDTH))
        self.each = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.together = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes or 1))
        # Which gates are high is learned apart from how high all are. Otherwise all open or close before the network
        # knows which are needed, and gates that are surely open or closed have no gradient.
        self.level = None if classes else nn.BatchNorm1d(1)
        if self.level:
            nn.init.constant_(self.level.weight, 2.0)  # standard deviation of the logits at the start

    def forward(self, x: Tensor) -> Tensor:
        each = self.each(self.embed(x) * self.gain + self.position)
        together = self.together(each.sum(1) / each.shape[1] ** 0.5)
        if self.level is None:
            return self.out(together)
        return self.level(self.out(each + together.unsqueeze(1)).flatten(0, 1)).view(x.shape[:2])


def _run(task: Task, steps: int) -> tuple[Network, Result]:
    classifier, masks = Network(task, int(task.y.max()) + 1), Network(task, None)

    def disagreement(x: Tensor, _: Tensor) -> Tensor:
        gate = L0Gate.from_logits(masks(x), dim=1)
        masked, whole = (classifier(inputs).log_softmax(1) for inputs in (gate(x), x))
        kl = F.kl_div(masked, whole, log_target=True, reduction="batchmean")
        return kl + task.price * gate.expected_l0() / len(x)

    _train(classifier, lambda x, y: F.cross_entropy(classifier(x), y, label_smoothing=SMOOTHING), task, steps)
    classifier.requires_grad_(False)
    _train(masks, disagreement, task, steps)
    x = task.x.clone().requires_grad_()
    log_probs, classes = classifier(x).log_softmax(1).max(1)
    gradient = torch.autograd.grad(log_probs.sum(), x)[0]
    logits = masks.eval()(task.x).detach()
    is_open = L0Gate.from_logits(logits).test_gate != 0
    scores = {"L0 masks": logits, "gradient x input": (gradient * task.x).sum(-1), "random": torch.rand_like(logits)}
    chosen = {name: score >= score.topk(MARKED).values[:, -1:] for name, score in scores.items()}
    chosen["L0 masks"] = is_open  # the masks say how many inputs are needed; the other scores are given it
    known = [] if task.needed is None else [task.needed]
    found = {name: [(these == n).all(1).float().mean().item() for n in known] for name, these in chosen.items()}
    curves, rows = {}, torch.arange(len(x))
    for name, score in scores.items():
        rank = score.argsort(1, descending=True).argsort(1).unsqueeze(-1)
        kept = [(rank >= number, rank < number) for number in range(rank.shape[1] + 1)]
        probs = [[classifier(task.x * z).softmax(1)[rows, classes].mean() for z in both] for both in kept]
        curves[name] = torch.tensor(probs).T
    return masks, Result((classes == task.y).float().mean().item(), is_open.float().sum(1).mean().item(), found, curves)


def _train(network: Network, loss: Callable[[Tensor, Tensor], Tensor], task: Task, steps: int) -> None:
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    schedule = OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps, cycle_momentum=False)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(*task.draw()).backward()
        optimiser.step()
        schedule.step()
        command.advance()


def _plot(results: dict[str, list[Result]], masks: Network, path: Path) -> None:
    """Deletion curves, means over the seeds, and the pixels that the masks of the last seed keep in test images."""
    axes = figure_axes(2, 3, figsize=(9, 5.6), width_ratios=(2, 1, 1))
    labels = {"xlabel": "inputs removed", "ylabel": "probability of the class"}
    for panel, (name, of_seeds) in zip(axes[:, 0], results.items(), strict=True):
        curves = {
            score: torch.stack([result.curves[score][0] for result in of_seeds]).mean(0) for score in of_seeds[0].curves
        }
        removed = range(len(next(iter(curves.values()))))
        plot_curves(curves, removed, title=name, axes=panel, **labels).set_ylim(0, 1)
    images = _digits().x[:4]
    test_gates = L0Gate.from_logits(masks(images).detach()).test_gate
    for panel, image, gates in zip(axes[:, 1:].flat, images, test_gates, strict=True):
        plot_gates(gates, image=image.view(8, 8), axes=panel)
    save_figure(axes, path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
