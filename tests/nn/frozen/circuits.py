"""Small networks of transformers, and path patching in them by hooks that know each architecture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

WORDS, WIDTH, HEADS, SIZE = 11, 16, 4, 4
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SHARED = {**_SIZES, "num_key_value_heads": 2}
_GPT2 = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 16, "vocab_size": WORDS}
NETWORKS = {  # by name, the class, its configuration and sizes
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SHARED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_SHARED, "head_dim": SIZE}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_SHARED, "head_dim": SIZE}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SHARED, "head_dim": SIZE}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _SHARED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SHARED, "head_dim": SIZE}),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
}


def small(transformers: object, name: str) -> nn.Module:
    """A network in double precision, whose weights are large enough for each edge to change the outputs."""
    kind, config, sizes = NETWORKS[name]
    network = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return network.requires_grad_(False)


@dataclass
class Reader:
    """Where an architecture reads its stream.

    Attributes:
        module: what takes the sum, behind ``norm``.
        norm: path of the norm in front; empty where there is none, or where the module is the norm.
        rows: of the module's output; None for all, where the module's input is patched itself.
    """

    module: str
    norm: str = ""
    rows: range | None = None


@dataclass
class Paths:
    """The modules of an architecture, by layer."""

    embeddings: dict[str, str]
    projection: str
    block: str
    read: Callable[[int, str, int], Reader]  # of layer, letter and head
    into_block: Reader
    output: str
    others: dict[str, str] = field(default_factory=dict)  # norms that write, and are read, themselves


def _rows(start: int) -> range:
    return range(start, start + SIZE)


def _llama(k: int, letter: str, head: int) -> Reader:
    layer = f"model.layers.{k}"
    return Reader(f"{layer}.self_attn.{letter}_proj", f"{layer}.input_layernorm", _rows(SIZE * head))


_LIKE_LLAMA = Paths(
    {"model.embed_tokens": "model.embed_tokens"},
    "model.layers.{}.self_attn.o_proj",
    "model.layers.{}.mlp",
    _llama,
    Reader("model.layers.{}.post_attention_layernorm"),
    "model.norm",
)
_BERT_LAYER = "bert.encoder.layer.{}"
PATHS = {
    "gpt2": Paths(
        {"transformer.wte": "transformer.wte", "transformer.wpe": "transformer.wpe"},
        "transformer.h.{}.attn.c_proj",
        "transformer.h.{}.mlp",
        lambda k, letter, head: Reader(
            f"transformer.h.{k}.attn.c_attn",
            f"transformer.h.{k}.ln_1",
            _rows(WIDTH * "qkv".index(letter) + SIZE * head),
        ),
        Reader("transformer.h.{}.ln_2"),
        "transformer.ln_f",
    ),
    "neox": Paths(
        {"gpt_neox.embed_in": "gpt_neox.embed_in"},
        "gpt_neox.layers.{}.attention.dense",
        "gpt_neox.layers.{}.mlp",
        lambda k, letter, head: Reader(
            f"gpt_neox.layers.{k}.attention.query_key_value",
            f"gpt_neox.layers.{k}.input_layernorm",
            _rows(3 * SIZE * head + SIZE * "qkv".index(letter)),
        ),
        Reader("gpt_neox.layers.{}.post_attention_layernorm"),
        "gpt_neox.final_layer_norm",
    ),
    "llama": _LIKE_LLAMA,
    "gemma": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
    "qwen3": _LIKE_LLAMA,
    "bert": Paths(
        {"bert.embeddings.LayerNorm": "bert.embeddings.LayerNorm"},
        f"{_BERT_LAYER}.attention.output.dense",
        f"{_BERT_LAYER}.output.dense",
        lambda k, letter, head: Reader(
            f"bert.encoder.layer.{k}.attention.self.{dict(q='query', k='key', v='value')[letter]}",
            rows=_rows(SIZE * head),
        ),
        Reader(f"{_BERT_LAYER}.intermediate.dense"),
        "bert.encoder.layer.1.output.LayerNorm",
    ),
}


def contribution(network: nn.Module, paths: Paths, ids: Tensor, writer: str) -> Tensor:
    """What a writer adds to the stream."""
    found: list[Tensor] = []
    if writer.startswith("a") and ".h" in writer:
        k, head = (int(x[1:]) for x in writer.split("."))
        module = network.get_submodule(paths.projection.format(k))
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        rows = list(_rows(SIZE * head))
        handle = module.register_forward_pre_hook(lambda m, args: found.append(args[0][..., rows] @ weight[rows]))
    else:
        path = paths.embeddings.get(writer) or (paths.block.format(writer[1:]) if writer[1:].isdigit() else writer)
        handle = network.get_submodule(path).register_forward_hook(lambda m, args, out: found.append(out))
    network(input_ids=ids)
    handle.remove()
    return found[0]


def patched(network: nn.Module, name: str, ids: Tensor, edge: tuple[str, str], corrupted: Tensor | None) -> Tensor:
    """The logits where a reader sees a writer's contribution at a corrupted input, or none."""
    paths, (writer, reader) = PATHS[name], edge
    change = -contribution(network, paths, ids, writer)
    if corrupted is not None:
        change = change + contribution(network, paths, corrupted, writer)
    if reader == "output":
        place = Reader(paths.output)
    elif reader.startswith("m") and reader[1:].isdigit():
        place = Reader(paths.into_block.module.format(reader[1:]))
    elif "<" in reader:
        k, rest = reader.removeprefix("a").split(".h")
        head, letter = rest[:-3].split("-")[0], rest[-2]
        shared = 2 if paths is _LIKE_LLAMA and letter in "kv" else 1
        place = paths.read(int(k), letter, int(head) // shared)
    else:
        place = Reader(reader)
    module, sums = network.get_submodule(place.module), list[Tensor]()

    def rewrite(m: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = sums[0] + change if sums else args[0] + change
        normed = network.get_submodule(place.norm).forward(x) if place.norm else x
        new = out.clone()
        new[..., list(place.rows)] = module.forward(normed)[..., list(place.rows)]
        return new

    with ExitStack() as stack:
        if place.norm:
            norm = network.get_submodule(place.norm)
            stack.callback(norm.register_forward_pre_hook(lambda m, args: sums.append(args[0])).remove)
        if place.rows is None:
            hook = module.register_forward_pre_hook(lambda m, args: (args[0] + change, *args[1:]))
        else:
            hook = module.register_forward_hook(rewrite)
        stack.callback(hook.remove)
        return network(input_ids=ids)[0]
