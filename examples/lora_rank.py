"""How many ranks does the LoRA adapter of each layer need? One budget for all layers, beside AdaLoRA, SVD, equal ranks.

A small vision transformer of ``transformers`` learns scikit-learn's digits and is frozen. Then ``peft`` adapts it to
each of two other tasks by h = W x + B diag(z) A x in every dense layer (Hu et al., 2021, arXiv:2106.09685): to images
that are turned by 90 degrees ("rotated"), and to classes of which each is called by the next one's name ("renamed").
The gates z train with A and B until of eight ranks of a layer one is left on average. Beside them stand all ranks,
one in each layer, AdaLoRA (Zhang et al., 2023, arXiv:2303.10512), and the largest singular value of each layer's
trained B A by ``convert_to_lora`` of ``peft``, at the end or with a training behind it: all with as many ranks in the
end, after as many steps. Every adapter is saved, loaded by ``PeftModel.from_pretrained`` and merged into the network.

``pip install peft transformers`` first. ``python examples/lora_rank.py`` takes two to three minutes on one core and
writes ``lora_rank.png`` to ``--out``. With ``--seeds 0 1 2`` expect a test loss of 0.374 ± 0.063 by gates, 0.367 ±
0.033 by AdaLoRA and 0.424 ± 0.016 by equal ranks on rotated images, and 0.181 ± 0.014, 0.163 ± 0.010 and 0.278 ± 0.010
on renamed classes. With ``--seeds 0 1`` SVD after 60 % of the steps has 0.522 ± 0.027 and 0.297 ± 0.025.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import copy
import itertools
import statistics
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from common.data import load_digits
from common.figures import figure_axes, plot_bars, save_figure
from common.sweep import spread
from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import compact_lora_ranks, gate_lora_ranks

__all__ = ["Options", "Result", "main"]

BLOCKS, CLASSES = 2, 10
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")  # of each block, and then the classifier
RANK = 8  # of every layer at the start
GATED = 0.6  # of the steps, for gates and AdaLoRA; the rest trains the ranks that are left
BATCH = 64
LEARNING = 600  # steps in which the network learns the digits
NOISE = 0.2  # on the pixels while training
LEARNING_RATE = 0.02  # of adapters; at seed 100 the best of .02, .03 and .06, for gates of .01 to .03
BEFORE_SVD = {"SVD at end": 1.0, "SVD at 60 %": GATED}  # share of the steps that train all ranks
KINDS = ("all ranks", "equal ranks", *BEFORE_SVD, "AdaLoRA", "gates")
TASKS = {
    "rotated": lambda x, y: (x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1), y),
    "renamed": lambda x, y: (x, (y + 1) % CLASSES),
}

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        steps: of each adaptation.
        seeds: each a run.
        rank: how many ranks of a layer are left, on average.
        out: folder for the picture.
    """

    steps: int = 600
    seeds: tuple[int, ...] = (0,)
    rank: Literal[1, 2, 4] = 1
    out: Path = field(default=Path("runs/lora_rank"))


class Result(NamedTuple):  # of a merged network on the test images
    loss: float  # cross-entropy in nats
    error: float  # in percent
    ranks: dict[str, int]  # by layer
    merging: float  # largest difference of its outputs from those of the network with its adapter


def main(options: Options) -> dict[tuple[str, str], list[Result]]:
    """Print the table and draw the picture; returns the results of each seed by task and choice of the ranks."""
    command.check(options)
    _libraries()
    digits = load_digits()
    train, test = (digits.train_x, digits.train_y), (digits.test_x, digits.test_y)
    results: dict[tuple[str, str], list[Result]] = {key: [] for key in itertools.product(TASKS, KINDS)}
    with command.folder(options.out), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about names that transformers renames and AdaLoRA's empty layers
        command.plan(len(options.seeds) * (LEARNING + len(results) * options.steps))
        for seed in options.seeds:
            network = _learn_digits(train, seed)
            for task, kind in results:
                change = TASKS[task]
                results[task, kind].append(_adapt(network, kind, change(*train), change(*test), seed, options))
        print("task      ranks         number   test loss         error in %")
        for (task, kind), of_seeds in results.items():
            number = round(statistics.mean(sum(result.ranks.values()) for result in of_seeds))
            loss, error = spread([r.loss for r in of_seeds]), spread([r.error for r in of_seeds])
            print(f"{task}   {kind:11s}   {number:6d}   {loss}     {error}")
        merging = max(result.merging for of_seeds in results.values() for result in of_seeds)
        print(f"saving, loading and merging change no output by more than {merging:.1e}")
        _plot(results, options)
    return results


def _libraries() -> tuple[Any, Any]:
    """peft and transformers, which come with no extra of the examples."""
    try:
        import peft
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Expected peft and transformers, but {error.name} is not installed; run pip install peft transformers."
        ) from error
    return peft, transformers


def _learn_digits(train: Examples, seed: int) -> nn.Module:
    """A transformer over the 16 patches of an image that knows its digits."""
    _, transformers = _libraries()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "intermediate_size": 64}
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    network: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **image, **dropout))
    _train(network, train, LEARNING, 3e-3)
    return network


def _adapt(network: nn.Module, kind: str, train: Examples, test: Examples, seed: int, options: Options) -> Result:
    """Adapt a copy of the network to a task, save and load the adapter, merge it and test."""
    peft, _ = _libraries()
    torch.manual_seed(seed)
    steps, rank = options.steps, options.rank if kind == "equal ranks" else RANK
    layers = {"target_modules": [*DENSE, "classifier"], "lora_alpha": rank}  # a scale of 1
    if kind == "AdaLoRA":
        times = {"total_step": steps, "tinit": steps // 10, "tfinal": round((1 - GATED) * steps), "deltaT": 10}
        config = peft.AdaLoraConfig(init_r=rank, target_r=options.rank, **times, **layers)
    else:
        config = peft.LoraConfig(r=rank, **layers)
    model = peft.get_peft_model(copy.deepcopy(network), config)
    target = None
    if kind == "gates":
        target = SparsityTarget(gate_lora_ranks(model), {"lora_ranks": options.rank / RANK}, steps=int(GATED * steps))
    before = round(BEFORE_SVD.get(kind, 1.0) * steps)
    _train(model, train, before, LEARNING_RATE, target)
    path = options.out / "adapter"
    if target:
        compact_lora_ranks(model)
    if kind in BEFORE_SVD:
        peft.save_as_lora(path, model, rank=options.rank)
        model = peft.PeftModel.from_pretrained(copy.deepcopy(network), path, is_trainable=True)
        if before < steps:
            _train(model, train, steps - before, LEARNING_RATE)
    model.save_pretrained(path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(network), path)
    ranks = _ranks(model)
    merged = loaded.merge_and_unload()
    with torch.no_grad():
        outputs, found = (x.eval()(pixel_values=_images(test[0])).logits for x in (model, merged))
    error = 100 * float((found.argmax(1) != test[1]).float().mean())
    return Result(float(F.cross_entropy(found, test[1])), error, ranks, float((found - outputs).abs().max()))


def _train(
    network: Any, train: Examples, steps: int, learning_rate: float, target: SparsityTarget | None = None
) -> None:
    """Train weights, and with a target gates, in place."""
    locations = target.guide.locations() if target else []
    weights = [w for w in network.parameters() if w.requires_grad and not any(w is gate for gate in locations)]
    optimiser = torch.optim.Adam(weights, learning_rate)
    schedule = LambdaLR(optimiser, lambda step: 1 - step / steps)
    if target:  # the gates' step size is the target's throughout
        optimiser_of_gates = torch.optim.Adam(locations, **target.optimiser_options)
    allocate = getattr(getattr(network, "base_model", None), "update_and_allocate", None)  # of AdaLoRA
    network.train()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(train[0]), (BATCH,))
        x, y = train[0][chosen], train[1][chosen]
        network.zero_grad()
        network(pixel_values=_images(x + NOISE * torch.randn_like(x)), labels=y).loss.backward()
        optimiser.step()
        schedule.step()
        if target:
            target.add_gradient()
            optimiser_of_gates.step()
            target.ascend()
        if allocate:
            allocate(step)
        command.advance()


def _images(x: Tensor) -> Tensor:
    return x.view(-1, 1, 8, 8)


def _ranks(model: Any) -> dict[str, int]:
    """The ranks of every layer; AdaLoRA's closed ones are zeros in a vector E."""
    layers = {path: x for path, x in model.get_base_model().named_modules() if hasattr(x, "lora_A")}
    return {
        path: int((x.lora_E["default"] != 0).sum()) if hasattr(x, "lora_E") else x.r.get("default", 0)
        for path, x in layers.items()
    }


def _plot(results: dict[tuple[str, str], list[Result]], options: Options) -> None:
    """The mean ranks of the layers of each block, by gates, beside the losses with their deviations."""
    ranks, losses = figure_axes(1, 2, figsize=(9, 3.4))
    parts = {f"block {i + 1}": f"layers.{i}." for i in range(BLOCKS)} | {"classifier": "classifier"}
    left = {
        task: [
            statistics.mean(rank for r in results[task, "gates"] for name, rank in r.ranks.items() if part in name)
            for part in parts.values()
        ]
        for task in TASKS
    }
    plot_bars(left, list(parts), ylabel=f"mean rank of a layer, of {RANK}", axes=ranks)
    ranks.axhline(options.rank, color="0.5", lw=0.8)  # equal ranks
    kinds = [kind for kind in KINDS if kind not in BEFORE_SVD]  # whose losses would hide the others' differences
    found = {task: [[result.loss for result in results[task, kind]] for kind in kinds] for task in TASKS}
    means = {task: [statistics.mean(values) for values in of_kinds] for task, of_kinds in found.items()}
    spreads = {
        task: [statistics.stdev(values) if len(values) > 1 else 0.0 for values in of_kinds]
        for task, of_kinds in found.items()
    }
    plot_bars(means, kinds, ylabel="test loss, nats", spreads=spreads, axes=losses)
    save_figure((ranks, losses), options.out / "lora_rank.png")


if __name__ == "__main__":
    command.run(main, Options, __doc__)
