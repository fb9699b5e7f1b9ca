"""torchvision's ResNet-18 at half of its latency: python tests/bench/pretrained/resnet18.py --data-dir FOLDER --out OUT

FOLDER has CIFAR-10's python batches; torchvision has to be installed. As torchvision's own weights are a download, the
same architecture is first trained on 10,000 of CIFAR-10's images of 32 x 32 pixels. Then ``prune`` takes it to half of
the time of a call with one image of 224 x 224, on one thread: with the gates that it chooses, and with gates on all
residual streams as well. A row for each: milliseconds, parameters, multiply-adds and test errors. Takes six minutes of
one core; what is in OUT is not repeated. ``--draw`` draws ``docs/images/resnet18_widths.png`` of the former.
``--minima`` only predicts the milliseconds with all gates open and with one unit open per gate, for gates inside blocks
and for all gates; it takes five minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.cifar import load_cifar
from common.figures import figure_axes, save_figure
from pyro_l0 import prune
from pyro_l0.nn import Gate, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names
from pyro_l0.pruning import Training
from pyro_l0.pruning.latency import Latency
from tests.bench.pruning import zoo  # declares the operators that torchvision's import asks for
from tests.bench.pruning.importance import train

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "resnet18_widths.png"
TRAIN, TEST, BATCH, DENSE_EPOCHS, EPOCHS, BUDGET = 10_000, 2_000, 64, 4, 3, 0.5
EXAMPLE = torch.zeros(1, 3, 224, 224)
GATES = ("chosen by prune", "with residual streams")


class Mirrored:
    """Passes over images in whole batches, half of each mirrored."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.x)).split(BATCH)[: len(self)]:
            x = self.x[chosen]
            yield torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x), self.y[chosen]


def trained(batches: Mirrored, file: Path) -> nn.Module:
    """The network that is pruned, read from where it was written when it was."""
    torch.manual_seed(0)
    network = zoo._torchvision("resnet18", "classification")[0]
    if file.exists():
        network.load_state_dict(torch.load(file, weights_only=True))
    else:
        train(network, batches, DENSE_EPOCHS * len(batches), F.cross_entropy)
        torch.save(network.state_dict(), file)
    return network


def with_streams(network: nn.Module) -> dict[str, Gate]:
    """All suggested gates, one for all locations of a stream."""
    gates: dict[str, Gate] = {}
    for location in suggest_gates(network, EXAMPLE).locations:
        shared = [gates[path] for path in location.coupled if path in gates]
        gates[location.path] = shared[0] if shared else location.gate
    return gates


def widths(network: nn.Module) -> dict[str, int]:
    return {path: layer.out_channels for path, layer in network.named_modules() if isinstance(layer, nn.Conv2d)}


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prune, and what came out."""
    images = load_cifar(options.data_dir)
    x, test_x = ((x.float() / 255 - 0.47) / 0.25 for x in (images.train_x[:TRAIN], images.test_x[:TEST]))
    batches = Mirrored(x, images.train_y[:TRAIN])
    network = trained(batches, options.out / "dense.pt")

    @torch.no_grad()
    def error(other: nn.Module) -> float:
        wrong = [
            other(x).argmax(1) != y for x, y in zip(test_x.split(500), images.test_y[:TEST].split(500), strict=True)
        ]
        return 100 * float(torch.cat(wrong).float().mean())

    pyro.set_rng_seed(0)
    start = time.process_time()
    found = prune(
        network,
        F.cross_entropy,
        batches,
        EXAMPLE,
        BUDGET,
        cost="latency",
        epochs=EPOCHS,
        gates=with_streams(network) if kind == GATES[1] else None,
        training=Training(evaluate=error, progress=True),
    )
    print(found.report, flush=True)
    return {
        "gates": kind,
        "left": found.report.left,
        "errors": [found.report.dense, found.report.cut, found.report.end],
        "seconds": time.process_time() - start,
        "certificate": found.certificate,
        "widths": [widths(network), widths(found.network)],
    }


def print_minima(network: nn.Module) -> None:
    """The predicted milliseconds with all units open, and with one for each gate."""
    suggested = suggest_gates(network, EXAMPLE)
    inside = {location.path: location.gate for location in suggested.locations if not location.coupled}
    for kind, gates in {"inside blocks": inside, "with residual streams": with_streams(network)}.items():
        gated = insert_gates(network, gates, EXAMPLE)
        predict, sizes = Latency(gated, EXAMPLE), {name: gate.size for name, gate in gate_names(gated).items()}
        times = (predict({name: (torch.arange(n) < most).float() for name, n in sizes.items()}) for most in (10**6, 1))
        print(kind, *(f"{float(time) / 1e3:.1f} ms" for time in times))


def draw(before: dict[str, int], after: dict[str, int]) -> None:
    """The outputs of each convolution, in the order of the network, as given and as left."""
    axes = figure_axes(figsize=(4.2, 3.2))
    places = range(len(before))
    axes.bar(places, list(before.values()), color="#c8c8c8", label="as given")
    axes.bar(places, list(after.values()), color="#1f6fb4", label="at half of the latency")
    names = [path.replace("layer", "").replace("downsample.0", "shortcut") for path in before]
    axes.set_xticks(places, names, rotation=90, fontsize=8)
    axes.set_ylabel("outputs of a convolution")
    axes.legend(frameon=False)
    save_figure(axes, PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gates", choices=GATES, nargs="+", default=GATES)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--minima", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.minima:
        print_minima(zoo._torchvision("resnet18", "classification")[0])
        return
    lines = [
        "| gates | ms | parameters | multiply-adds | error given, as cut, at the end, % |",
        "|---|---|---|---|---|",
    ]
    for kind in options.gates:
        file = options.out / f"{kind}.json"
        if not file.exists():
            file.write_text(json.dumps(run(kind, options)))
        row = json.loads(file.read_text())
        (ms, of_ms), (left, of), (macs, of_macs) = (row["left"][x] for x in ("latency", "parameters", "macs"))
        errors = ", ".join(f"{x:.1f}" for x in row["errors"])
        shares = f"{left / 1e6:.2f} of {of / 1e6:.2f} million | {macs / of_macs:.3f}"
        lines.append(f"| {kind} | {ms / 1e3:.1f} of {of_ms / 1e3:.1f} | {shares} | {errors} |")
    print("\n".join(lines))
    if options.draw:
        draw(*json.loads((options.out / f"{GATES[0]}.json").read_text())["widths"])


if __name__ == "__main__":
    main()
