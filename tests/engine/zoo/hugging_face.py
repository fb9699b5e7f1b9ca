"""Tiny random models of the library transformers, gated by replacing modules of theirs; nothing is downloaded."""

import importlib

import torch
from torch import nn

from pyro_l0.nn import Gate, gate_heads
from tests.engine.zoo.attention import tokens
from tests.engine.zoo.convolutional import images
from tests.engine.zoo.entry import Entry

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def _build(model, config, **options):
    transformers = importlib.import_module("transformers")
    options |= {"attn_implementation": "eager"}
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def bert():
    model = _build("BertForSequenceClassification", "BertConfig", vocab_size=20, max_position_embeddings=8, **SIZES)
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.Sequential(nn.GELU(), Gate(32))
    return gate_heads(model, {f"bert.encoder.layer.{k}.attention.output.dense": 4 for k in range(2)})


def gpt2():
    model = _build(
        "GPT2LMHeadModel", "GPT2Config",
        vocab_size=20, n_positions=8, n_embd=24, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    for layer in model.transformer.h:
        layer.mlp.act = nn.Sequential(layer.mlp.act, Gate(96))
    return gate_heads(model, {f"transformer.h.{k}.attn.c_proj": 4 for k in range(2)})


def llama():
    model = _build(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=20, max_position_embeddings=8, num_key_value_heads=2, **SIZES
    )
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, Gate(32))
    return gate_heads(model, {f"model.layers.{k}.self_attn.o_proj": 4 for k in range(2)})


def vision():
    model = _build("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, num_labels=3, **SIZES)
    for layer in model.vit.layers:
        layer.mlp.activation_fn = nn.Sequential(layer.mlp.activation_fn, Gate(32))
    return gate_heads(model, {f"vit.layers.{k}.attention.o_proj": 4 for k in range(2)})


def _with_mask(batch):
    return {"input_ids": tokens(batch), "attention_mask": torch.ones(batch, 6, dtype=torch.long)}


def _without_cache(batch):
    return {"input_ids": tokens(batch), "use_cache": False}


ENTRIES = {
    "bert": Entry(
        bert, _with_mask, needs="transformers",
        shapes={
            "bert.encoder.layer.0.attention.self.query.weight": (12, 24),
            "bert.encoder.layer.1.intermediate.dense.weight": (16, 24),
        },
    ),
    "gpt2": Entry(
        gpt2, _without_cache, needs="transformers",
        shapes={"transformer.h.0.attn.c_attn.weight": (24, 36), "transformer.h.1.mlp.c_fc.weight": (24, 48)},
    ),
    "llama": Entry(
        llama, _without_cache, needs="transformers", shapes={"model.layers.0.mlp.up_proj.weight": (16, 24)},
    ),
    "vit": Entry(
        vision, images(), needs="transformers",
        shapes={"vit.layers.1.attention.v_proj.weight": (12, 24), "vit.layers.0.mlp.fc2.weight": (24, 16)},
    ),
}  # fmt: skip
