"""Networks whose gates are open by chance, and what compacting them says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.compaction import compact
from pyro_l0.nn import gate_heads, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names, name_gates
from tests.engine.zoo.libraries import LIBRARIES

__all__ = ["MODELS", "RATES", "gated", "random_gates", "refusals"]

RATES = (0.3, 0.5, 0.8)
_Made = tuple[nn.Module, Any]


def random_gates(network: nn.Module, rate: float, seed: int) -> dict[str, Tensor]:
    """Gates that are open at a rate, the first of each site always."""
    generator = torch.Generator().manual_seed(seed)
    gates = {}
    for site, gate in gate_names(network).items():
        gates[site] = (torch.rand(gate.size, generator=generator) < rate).double()
        gates[site][0] = 1.0
    return gates


def refusals(network: nn.Module, example: object, cuts: int, first: int = 0) -> Iterator[str]:
    """What compaction says of the random cuts, at the rates by turns, that it refuses or certifies badly."""
    for seed in range(first, first + cuts):
        rate = RATES[seed % len(RATES)]
        try:
            certificate = compact(network, random_gates(network, rate, seed), example).certificate
        except Exception as error:
            yield f"rate {rate}, seed {seed}: {error}"
        else:
            if not certificate < 1e-6:
                yield f"rate {rate}, seed {seed}: certificate {certificate}"


def gated(name: str, with_heads: bool) -> _Made:
    """A model with all gates that are suggested for it, or with those of heads and of units that leave alone."""
    torch.manual_seed(0)
    network, example = MODELS[name]()
    network.eval()
    suggested = suggest_gates(network, example)
    gates = dict(suggested)
    if with_heads:
        heads = suggested.heads | {
            f"{path}.out_proj": module.num_heads
            for path, module in network.named_modules()
            if isinstance(module, nn.MultiheadAttention)
        }
        network = gate_heads(network, heads)
        gates = {x.path: x.gate for x in suggested.locations if not x.is_composite and not x.coupled}
    network = insert_gates(network, gates)
    name_gates(network)
    return network, example


def _of_zoo(model: str) -> Callable[[], _Made]:
    def make() -> _Made:
        network, inputs = LIBRARIES["transformers"]()[model]()
        return network, inputs(2)

    return make


def torch_encoder() -> _Made:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2), torch.randn(2, 7, 48)


MODELS: dict[str, Callable[[], _Made]] = {
    "GPT-2": _of_zoo("GPT2LMHeadModel"),
    "BERT": _of_zoo("BertForSequenceClassification"),
    "ALBERT": _of_zoo("AlbertForSequenceClassification"),
    "DistilBERT": _of_zoo("DistilBertForSequenceClassification"),
    "Llama": _of_zoo("LlamaForCausalLM"),
    "Mistral": _of_zoo("MistralForCausalLM"),
    "T5": _of_zoo("T5ForConditionalGeneration"),
    "ViT": _of_zoo("ViTForImageClassification"),
    "nn.TransformerEncoder": torch_encoder,
}
