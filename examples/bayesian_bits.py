"""How many bits the weights of a pruned network need, and how small its file gets.

``examples/mnist.py`` prunes a network and saves it; this takes its folder. The weights become the means of Gaussian
slabs and stay where they are. The spike-and-slab ELBO (Louizos et al., Eq. 20) trains the slabs' spread and, with
``--prior-active-prob``, a gate for each weight. The spread says to how many bits each layer's weights are rounded
(arXiv:1705.08665). The table has the pruned network, draws of the posterior, the median probability model, and that
rounded, saved and loaded:

- ``weights``: how many are not zero, and how many times less that is than before the pruning;
- ``bits``: of a weight, on average, and the rate with these bits in place of 32;
- ``bytes``: of the whole file, with biases and indices, and its rate to the original weights in 32 bits.

``python examples/mnist.py`` and then ``python examples/bayesian_bits.py`` take half a minute on the digits. For MNIST
give ``mnist.py`` a recipe of docs/lab/recipes_tables.md.

Writes ``rounded.npz.xz`` and ``table.md`` to ``--out``.
"""

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from common.bayesian import fit
from common.bits import bit_precision, load_quantised, quantise, save_quantised
from common.data import Images, load_images
from common.networks import build
from common.paths import active_weights
from common.scores import predictive, scores
from pyro_l0 import bayes
from pyro_l0.compaction import load_compacted

__all__ = ["Options", "main"]

LEARNING_RATE, DRAWS = 1e-2, 20


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        run: folder that ``examples/mnist.py`` wrote, on the same data.
        data_dir: folder with MNIST's four files, if the run was on MNIST; downloaded if not given.
        steps: of the training.
        prior_active_prob: prior probability that a weight is not zero; without, weights have no gates.
        nats: that rounding may cost, per weight.
        seed: of everything random.
        out: folder for the files.
    """

    run: Path = field(default=Path("runs/mnist"))
    data_dir: Path | None = None
    steps: int = 1200
    prior_active_prob: float | None = None
    nats: float = 0.02
    seed: int = 1
    out: Path = field(default=Path("runs/bayesian_bits"))


def main(options: Options) -> dict[str, dict[str, float]]:
    """Train, write the files, print the table; returns its rows."""
    command.check(options)
    if not (options.run / "metrics.json").exists():
        raise ValueError(f"Expected run to be a folder of examples/mnist.py, but got {options.run}; run that first.")
    metrics = json.loads((options.run / "metrics.json").read_text())
    images = load_images(metrics["options"]["data"], options.data_dir)
    torch.manual_seed(options.seed)
    original = build(metrics["options"]["network"], images.train_x.shape[1])
    pruned = load_compacted(original, options.run / "pruned").network
    total = sum(p.numel() for p in original.parameters() if p.dim() > 1)
    with command.folder(options.out):
        weights = torch.cat([p.detach().flatten() for p in pruned.parameters() if p.dim() > 1])
        net = bayes.bayesian(
            pruned,
            bayes.SpikeSlabPrior(options.prior_active_prob or 0.5, float(weights.square().mean().sqrt())),
            gates="weight" if options.prior_active_prob else None,
            init_active_prob=0.9,
            init_scale=0.02,
        )
        trained = [p for name, p in net.named_parameters() if name.endswith(("log_scale", "logits"))]
        optimiser = torch.optim.Adam(trained, LEARNING_RATE)
        command.plan(options.steps)
        fit(net, images, options.steps, optimiser, lambda: bayes.kl(net))

        active = active_weights(net, images.train_x[:2])
        numbers = {path: int(on.sum()) for path, on in active.items()}
        if not any(numbers.values()):
            raise ValueError("Expected some weights to stay, but all gates closed; raise prior_active_prob.")
        precision = bit_precision(net, active, options.nats)
        median, file = bayes.plain_network(net, keep=active), options.out / "rounded.npz.xz"
        draws = [bayes.plain_network(net, sample=True, keep=active) for _ in range(DRAWS)]
        rounded = quantise(copy.deepcopy(median), precision)
        size = save_quantised(rounded, precision, file)
        rounded.load_state_dict(load_quantised(file))
        number, bits = sum(numbers.values()), sum(precision[path].bits * n for path, n in numbers.items())
        small = {"bits": bits / number, "rate of bits": 32 * total / bits, "bytes": size, "rate": 4 * total / size}
        rows = {
            "pruned": _row([pruned], images, total, len(weights)),
            "draws": _row(draws, images, total, number),
            "median": _row([median], images, total, number),
            "rounded": _row([rounded], images, total, number) | small,
        }
        text = _table(rows)
        (options.out / "table.md").write_text(text + "\n")
        print(text)
        print("bits by layer: " + ", ".join(f"{path} {of.bits}" for path, of in precision.items()))
    return rows


def _row(nets: list[nn.Module], images: Images, total: int, weights: int) -> dict[str, float]:
    """Scores of networks together, weights of each, and how many times fewer there are than in the original."""
    found = scores(predictive([net.eval() for net in nets], images.test_x), images.test_y)
    row = {"error, %": found.error, "nll": found.nll, "ece": found.ece}
    return row | {"weights": weights, "rate of weights": total / weights}


def _table(rows: dict[str, dict[str, float]]) -> str:
    """Rows as Markdown."""
    columns = list(rows["rounded"])

    def digits(value: float) -> int:
        return 3 if value < 0.1 else 2 if value < 100 else 0

    lines = [f"| network | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = (f"{row[key]:,.{digits(row[key])}f}" if key in row else "" for key in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
