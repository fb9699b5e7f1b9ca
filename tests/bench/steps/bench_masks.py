"""Time of the gradient of masks over frozen weights: python tests/bench/steps/bench_masks.py

GPT-2, Llama and a ViT of transformers, untrained, four layers of width 256, 8 sequences of 64 tokens or 8 images of 65
patches, float32, one thread. A step with masks is the forward and backward pass of the frozen network with a gate on
each head, each unit and each block, drawn once, for the gradient of the gates. Its baseline is the forward and backward
pass of the frozen network without gates, for the gradient of its inputs (of the embeddings of tokens) alone. All take
turns within one process; the ratios are those of the medians of processor time over ``--rounds`` rounds. Optimiser and
budget are left out of both. The last line is the largest ratio, which is to be at most 1.15.
"""

from __future__ import annotations

import platform
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.nn import L0Gate, NetworkGates, gate_heads, insert_gates
from tests.bench.timing import Step, medians, options_of, seconds_in_turn

LAYERS, WIDTH, HEADS, WORDS, BATCH, LENGTH = 4, 256, 4, 512, 8, 64
Inputs = dict[str, Tensor]
# By model: a layer, its projection of heads, its units behind their activation, what else its block adds.
PATHS = {
    "GPT-2": ("transformer.h", "attn.c_proj", "mlp.act", "mlp"),
    "Llama": ("model.layers", "self_attn.o_proj", "mlp.act_fn", "mlp"),
    "ViT": ("vit.layers", "attention.o_proj", "mlp.activation_fn", "mlp"),
}


def models(layers: int = LAYERS, width: int = WIDTH, length: int = LENGTH) -> dict[str, tuple[nn.Module, Inputs]]:
    """The networks, with inputs that may have gradients."""
    transformers: Any = import_module("transformers")  # of an extra that the tests do without
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": HEADS}
    inner = {"intermediate_size": 4 * width}
    gpt2 = transformers.GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes)
    llama = transformers.LlamaConfig(vocab_size=WORDS, **sizes, **inner)
    vit = transformers.ViTConfig(image_size=64, patch_size=8, **sizes, **inner)
    embedded = {"inputs_embeds": torch.randn(BATCH, length, width)}
    return {
        "GPT-2": (transformers.GPT2LMHeadModel(gpt2), embedded),
        "Llama": (transformers.LlamaForCausalLM(llama), embedded),
        "ViT": (transformers.ViTForImageClassification(vit), {"pixel_values": torch.randn(BATCH, 3, 64, 64)}),
    }


def with_masks(name: str, network: nn.Module) -> nn.Module:
    """A copy with gates on heads, units and blocks; those of a block's two branches are one."""
    layers, projection, units, branch = PATHS[name]
    gates: dict[str, L0Gate] = {}
    heads: dict[str, int] = {}
    for i in range(len(network.get_submodule(layers))):  # type: ignore[arg-type]
        block, path = L0Gate(1), f"{layers}.{i}"
        heads[f"{path}.{projection}"] = HEADS
        gates |= {f"{path}.{units}": L0Gate(4 * network.config.hidden_size), f"{path}.{projection}": block}
        gates[f"{path}.{branch}"] = block
    return insert_gates(gate_heads(network, heads), gates)


def step(network: nn.Module, inputs: Inputs, wanted: list[Tensor]) -> Step:
    """A forward and backward pass, for some gradients alone."""

    def run() -> Any:
        logits = network(**inputs).logits
        return torch.autograd.grad(logits.square().mean(), wanted)

    return run


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps: dict[str, Step] = {}
    for name, (network, inputs) in models().items():
        network.eval().requires_grad_(False)
        asked = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        masked = with_masks(name, network)
        gates = NetworkGates(masked).train()
        steps |= {f"{name}, inputs": step(network, asked, [*asked.values()])}
        steps |= {f"{name}, masks": step(masked, inputs, [*gates.parameters()])}
    seconds = medians(seconds_in_turn(steps, options.rounds, 1, time.process_time))
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {options.rounds} rounds in turn")
    ratios = []
    for name in PATHS:
        inputs_alone, masks = seconds[f"{name}, inputs"], seconds[f"{name}, masks"]
        ratios.append(masks / inputs_alone)
        print(f"{name}: inputs {1e3 * inputs_alone:.1f} ms, masks {1e3 * masks:.1f} ms, ratio {ratios[-1]:.3f}")
    print(f"largest ratio {max(ratios):.3f}")


if __name__ == "__main__":
    main()
