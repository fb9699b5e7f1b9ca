"""Networks whose gates are open by chance, and what compacting them says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import Tensor, nn

from pyro_l0.compaction import compact
from pyro_l0.nn import gate_heads, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names, name_gates

__all__ = ["MODELS", "RATES", "gated", "random_gates", "refusals"]

RATES = (0.3, 0.5, 0.8)
WORDS = 40
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_GPT2 = {"n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
_DISTILBERT = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
_TEXT = {"max_position_embeddings": 16}
_Made = tuple[nn.Module, Tensor | dict[str, Tensor]]


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


def _words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(WORDS, (2, 7))}


def _of_words(model: str, **sizes: object) -> Callable[[], _Made]:
    """A model of the library transformers, with its configuration's own names of sizes."""

    def make() -> _Made:
        hf = import_module("transformers")
        config = getattr(hf, re.sub("(LMHeadModel|For[A-Z].*)$", "Config", model))
        return getattr(hf, model)(config(vocab_size=WORDS, **sizes)), _words()

    return make


def t5() -> _Made:
    hf = import_module("transformers")
    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    network = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0, **sizes)
    )
    return network, {**_words(), "decoder_input_ids": torch.randint(WORDS, (2, 5))}


def vit() -> _Made:
    hf = import_module("transformers")
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **_SIZES)), {
        "pixel_values": torch.randn(2, 3, 8, 8)
    }


def torch_encoder() -> _Made:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2), torch.randn(2, 7, 48)


MODELS: dict[str, Callable[[], _Made]] = {
    "GPT-2": _of_words("GPT2LMHeadModel", **_GPT2),
    "BERT": _of_words("BertForSequenceClassification", **_TEXT, **_SIZES),
    "ALBERT": _of_words("AlbertForSequenceClassification", embedding_size=24, **_TEXT, **_SIZES),
    "DistilBERT": _of_words("DistilBertForSequenceClassification", **_TEXT, **_DISTILBERT),
    "Llama": _of_words("LlamaForCausalLM", **_TEXT, **_SIZES, num_key_value_heads=2),
    "Mistral": _of_words("MistralForCausalLM", **_TEXT, **_SIZES, num_key_value_heads=2),
    "T5": t5,
    "ViT": vit,
    "nn.TransformerEncoder": torch_encoder,
}
