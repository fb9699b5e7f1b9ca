"""How many bits the weights of a pruned network need, and how small its file gets.

``examples/mnist.py`` prunes a network and saves it; this takes its folder. The weights become the means of Gaussian
slabs and stay where they are; the spike-and-slab bound without gates (Eq. 20 of the L0 paper) finds their spread, and
that says to how many bits each layer's weights are rounded (arXiv:1705.08665). The table has the pruned network and
the rounded one, saved and loaded again:

- ``weights``: how many there are, and how many times less that is than before the pruning;
- ``bits``: of a weight, on average, and the rate with these bits in place of 32;
- ``bytes``: of the whole file, with biases and the places of units, and its rate to the original weights in 32 bits.

``python examples/mnist.py`` and then ``python examples/bayesian_bits.py`` take half a minute on the digits. For MNIST
give ``mnist.py`` a recipe of docs/lab/recipes_tables.md.

Writes ``rounded.npz.xz`` and ``table.md`` to ``--out``.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from common.bayesian import fit
from common.data import Images, load_images
from common.networks import build
from pyro_l0 import bayes
from pyro_l0.compaction import load_compacted

__all__ = ["Options", "main"]

LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        run: folder that ``examples/mnist.py`` wrote, on the same data.
        data_dir: folder with MNIST's four files, if the run was on MNIST; downloaded if not given.
        steps: of the training.
        nats: that rounding may cost, per weight.
        seed: of everything random.
        out: folder for the files.
    """

    run: Path = field(default=Path("runs/mnist"))
    data_dir: Path | None = None
    steps: int = 1200
    nats: float = 0.02
    seed: int = 1
    out: Path = field(default=Path("runs/bayesian_bits"))


def main(options: Options) -> dict[str, dict[str, float]]:
    """Train, write the files, print the table; returns its rows."""
    command.check(options)
    metrics = json.loads((options.run / "metrics.json").read_text())
    images = load_images(metrics["options"]["data"], options.data_dir)
    torch.manual_seed(options.seed)
    original = build(metrics["options"]["network"], images.train_x.shape[1])
    pruned = load_compacted(original, options.run / "pruned").network
    total = sum(p.numel() for p in original.parameters() if p.dim() > 1)
    with command.folder(options.out):
        weights = torch.cat([p.detach().flatten() for p in pruned.parameters() if p.dim() > 1])
        net = bayes.bayesian(pruned, bayes.SpikeSlabPrior(scale=float(weights.square().mean().sqrt())), gates=None)
        spread = [p for name, p in net.named_parameters() if name.endswith("log_scale")]
        fit(net, images, options.steps, torch.optim.Adam(spread, LEARNING_RATE), lambda: bayes.kl(net))

        precision = bayes.bit_precision(net, nats=options.nats)
        rounded, file = bayes.quantise(bayes.plain_network(net), precision), options.out / "rounded.npz.xz"
        size = bayes.save_quantised(rounded, precision, file)
        rounded.load_state_dict(bayes.load_quantised(file))
        numbers = {path: layer.weight.numel() for path in precision if (layer := rounded.get_submodule(path))}
        bits = sum(precision[path].bits * number for path, number in numbers.items())
        rows = {
            "pruned": _row(pruned, images, total, len(weights)),
            "rounded": _row(rounded, images, total, len(weights))
            | {"bits": bits / len(weights), "rate of bits": 32 * total / bits, "bytes": size, "rate": 4 * total / size},
        }
        text = _table(rows)
        (options.out / "table.md").write_text(text + "\n")
        print(text)
        print("bits by layer: " + ", ".join(f"{path} {of.bits}" for path, of in precision.items()))
    return rows


def _row(net: nn.Module, images: Images, total: int, weights: int) -> dict[str, float]:
    """Error in percent, weights, and how many times fewer there are than in the original."""
    error = bayes.scores(bayes.predictive([net.eval()], images.test_x), images.test_y).error
    return {"error, %": error, "weights": weights, "rate of weights": total / weights}


def _table(rows: dict[str, dict[str, float]]) -> str:
    """Rows as Markdown."""
    columns = list(rows["rounded"])
    lines = [f"| network | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = (f"{row[key]:,.{2 if row[key] < 100 else 0}f}" if key in row else "" for key in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
