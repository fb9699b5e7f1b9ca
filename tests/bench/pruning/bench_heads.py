"""Does a budget find the heads that a frozen network needs? python tests/bench/pruning/bench_heads.py

A GPT-2 of two layers of four heads has random weights, but three heads write twenty times as strongly as the others:
without the other five its outputs hardly change. Gates on all heads, which the network teaches, keep three of them. A
row is a run of so many steps, each with the losses of so many draws: how many of the three it keeps, by seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import NetworkGates, gate_heads
from tests.bench.timing import options_of, table_head, table_row

LAYERS, HEADS, WIDTH = 2, 4, 8  # of a head
NEEDED = {(0, 1), (1, 0), (1, 3)}
STRONG, WEAK, SHARP = 40.0, 2.0, 10.0  # factors of what heads write, and of their values


def planted() -> GPT2LMHeadModel:
    """The network, frozen."""
    torch.manual_seed(0)
    size = LAYERS, HEADS, HEADS * WIDTH
    sizes = dict(zip(("n_layer", "n_head", "n_embd"), size, strict=True))
    network = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0, **sizes))
    with torch.no_grad():
        for layer, block in enumerate(network.transformer.h):
            block.attn.c_attn.weight[:, -HEADS * WIDTH :] *= SHARP
            for head in range(HEADS):
                rows = slice(WIDTH * head, WIDTH * (head + 1))
                block.attn.c_proj.weight[rows] *= STRONG if (layer, head) in NEEDED else WEAK
    return network.eval().requires_grad_(False)


def apart(network: GPT2LMHeadModel, masked: torch.nn.Module, tokens: Tensor) -> Tensor:
    """KL in nats a token from the network to its masked copy."""
    own, other = (net(tokens).logits.log_softmax(-1).flatten(0, 1) for net in (masked, network))
    return F.kl_div(own, other, reduction="batchmean", log_target=True)


def with_gates(network: GPT2LMHeadModel, tokens: Tensor) -> torch.nn.Module:
    """The network with a gate for each head."""
    sites = {f"transformer.h.{layer}.attn.c_proj": HEADS for layer in range(LAYERS)}
    return gate_heads(network, sites, tokens).eval()


def kept(network: GPT2LMHeadModel, steps: int, draws: int, seed: int) -> int:
    """How many of the needed heads stay."""
    torch.manual_seed(seed)
    batches = torch.randint(64, (20, 8, 12))
    masked = with_gates(network, batches[0])
    masks = NetworkGates(masked).train()
    budget = len(NEEDED) / (LAYERS * HEADS)
    target = SparsityTarget(masks, budget, lambda z: sum(x.sum() for x in z.values()), steps=steps, pretrained=True)
    optimiser = torch.optim.Adam([{"params": masks.locations(), **target.optimiser_options}])
    for step in range(steps):
        optimiser.zero_grad()
        for _ in range(draws):
            (apart(network, masked, batches[step % len(batches)]) / draws).backward()
        target.add_gradient()
        optimiser.step()
        target.ascend()
    gates = list(masks.test_gates().values())
    return sum(bool(gates[layer][head]) for layer, head in NEEDED)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--runs", nargs="+", default=["200x1", "1000x1", "200x5"], help="steps x draws")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = planted()
    table_head("steps", "draws a step", "of three, by seed", "mean")
    for run in options.runs:
        steps, draws = map(int, run.split("x"))
        numbers = [kept(network, steps, draws, seed) for seed in range(options.seeds)]
        table_row(steps, draws, " ".join(map(str, numbers)), f"{np.mean(numbers):.2f}")


if __name__ == "__main__":
    main()
