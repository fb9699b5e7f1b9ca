"""Public architectures: gates where they are suggested, two random cuts, and Torch-Pruning on the same.

``python tests/bench/pruning/zoo.py --out zoo.jsonl`` needs the extra ``zoo`` and about four hours of one processor.
It takes all of torchvision's builders for classification, segmentation and video, and small or tiny networks of timm,
transformers, diffusers, torch_geometric and segmentation_models_pytorch, all with random weights and in float64.

For each network it closes half of the units of each suggested site and calls ``compact``, once with one pattern for
every eight units, which closes as many in each head, and once at random. It compares the outputs with those of the
gated network on another batch. Then Torch-Pruning prunes the network by half, with the layers that make its outputs
left out, and is asked whether the network still runs and returns the same shapes.

``--tools zeros`` instead lets ``torch.nn.utils.prune.ln_structured`` set half of the outputs of each layer to zero, and
compares the pruned network with what ``compact_zeros`` makes of it; ``--tools zeros --table`` prints what came out.

Each network is a line of JSON in ``--out``, the last of its name; what is there already is not repeated, unless
``--only`` names the network. Each tool has a process of its own per network, with ``--seconds`` of processor time and
``--memory`` GB. Networks of more than 30 million weights are left out unless ``--large`` is given. ``--table`` prints
what is in the file.

torchvision 0.28.0 does not load beside torch 2.13's build for processors ("operator torchvision::nms does not exist"):
its compiled operators are missing. No network here calls one, so the two that its import asks for are declared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.compaction import compact, compact_zeros
from pyro_l0.nn import NetworkCost, fix_gates, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names, name_gates

os.environ["HF_HUB_OFFLINE"] = "1"  # no weights are downloaded
for _operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CLASSES, WORDS = 10, 99
LARGE = 30_000_000
EXACT = 1e-9  # relative to the largest output; rounding in float64 makes less
# Of float32, as networks have. Random inputs of three times the example's size, which a certificate has too, are more
# than EfficientNet-B5 takes with statistics of three images: there, its outputs change by 1e-6 if one digit does.
TOLERANCE = 1e-5
Line = dict[str, Any]
Inputs = Callable[[int], Tensor | tuple[Tensor, ...] | dict[str, Tensor]]  # by the size of a batch
Model = Callable[[], tuple[nn.Module, Inputs]]


def _images(*shape: int) -> Inputs:
    return lambda batch: torch.randn(batch, *shape)


def _pixels(side: int, name: str = "pixel_values") -> Inputs:
    return lambda batch: {name: torch.randn(batch, 3, side, side)}


def _numbers(name: str, *shape: int) -> Inputs:
    return lambda batch: {name: torch.randn(batch, *shape)}


def _words(batch: int, name: str = "input_ids", length: int = 7) -> dict[str, Tensor]:
    return {name: torch.randint(3, WORDS, (batch, length))}


def _answers(batch: int) -> dict[str, Tensor]:
    return _words(batch, "decoder_input_ids", 5)


def _torchvision(name: str, task: str) -> tuple[nn.Module, Inputs]:
    """Images are as small as the architecture takes them."""
    given: dict[str, object] = {"num_classes": CLASSES}
    size: tuple[int, ...] = (3, 64, 64)
    if task == "segmentation":
        given |= {"weights_backbone": None, "aux_loss": None}
    elif task == "video":
        size = {"s3d": (3, 16, 224, 224), "mvit": (3, 16, 224, 224)}.get(name.partition("_")[0], (3, 4, 64, 64))
    elif name in ("inception_v3", "googlenet"):
        given, size = given | {"aux_logits": False, "init_weights": False}, (3, 96, 96)
    elif name == "maxvit_t":
        size = (3, 224, 224)
    elif name.startswith("vit"):
        side = 2 * int(name.rpartition("_")[2])
        given, size = given | {"image_size": side}, (3, side, side)
    return import_module("torchvision.models").get_model(name, weights=None, **given), _images(*size)


def _all_of_torchvision() -> Iterator[tuple[str, Model]]:
    models = import_module("torchvision.models")
    for module in (models, models.segmentation, models.video):
        for name in models.list_models(module=module):
            yield name, partial(_torchvision, name, module.__name__.rpartition(".")[2])


def _timm(name: str, side: int = 64, **given: object) -> tuple[nn.Module, Inputs]:
    return import_module("timm").create_model(name, num_classes=CLASSES, **given), _images(3, side, side)


# Models of other sides have no choice of them; widths and depths are reduced where timm takes them.
TIMM: dict[str, dict[str, object]] = {
    "resnet10t": {}, "resnetv2_50d_gn": {}, "seresnext26t_32x4d": {}, "skresnet18": {}, "resnest14d": {},
    "res2net50_26w_4s": {}, "regnetx_002": {}, "nf_resnet26": {}, "nf_regnet_b0": {}, "dpn48b": {},
    "dla46_c": {}, "ese_vovnet19b_slim": {}, "cspresnet50": {}, "hrnet_w18_small": {}, "repvgg_a0": {},
    "mobileone_s0": {}, "mobilenetv3_small_050": {}, "efficientnet_lite0": {}, "ghostnet_050": {}, "rexnet_100": {},
    "hgnetv2_b0": {}, "starnet_s1": {}, "fasternet_t0": {}, "convnext_atto": {}, "convnextv2_atto": {},
    "inception_next_atto": {}, "mambaout_femto": {}, "poolformer_s12": {}, "convmixer_768_32": {}, "mixer_s32_224":
    {"side": 224}, "gmlp_ti16_224": {"side": 224}, "resmlp_12_224": {"side": 224}, "sequencer2d_s": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 3},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "eva02_tiny_patch14_224": {"side": 56, "img_size": 56, "depth": 3},
    "cait_xxs24_224": {"img_size": 64, "depth": 3}, "xcit_nano_12_p16_224": {"img_size": 64, "depth": 3},
    "convit_tiny": {"img_size": 64, "depth": 4}, "tnt_s_legacy_patch16_224": {"img_size": 64, "depth": 3},
    "swin_tiny_patch4_window7_224": {"side": 56, "img_size": 56, "embed_dim": 48, "depths": (1, 1, 2, 1)},
    "swinv2_cr_tiny_224": {"img_size": 64, "embed_dim": 48, "depths": (1, 1, 2, 1)},
    "mobilevit_xxs": {}, "mobilevitv2_050": {}, "edgenext_xx_small": {}, "efficientvit_b0": {}, "repvit_m0_9": {},
    "pvt_v2_b0": {}, "coatnet_pico_rw_224": {"img_size": 64}, "efficientformerv2_s0": {"side": 224},
    "levit_128s": {"side": 224}, "maxvit_rmlp_pico_rw_256": {"img_size": 64}, "pit_ti_224": {"side": 224},
    "tiny_vit_5m_224": {"side": 224}, "visformer_tiny": {"side": 224}, "crossvit_tiny_240": {"side": 240},
    "twins_svt_small": {"side": 224}, "focalnet_tiny_srf": {}, "davit_tiny": {}, "swiftformer_xs": {"side": 224},
}  # fmt: skip


def _transformers(name: str, inputs: Inputs = _words, **sizes: object) -> tuple[nn.Module, Inputs]:
    """Experts are called one by one, as the joint kernel has no float64."""
    model = getattr(import_module("transformers"), name)
    config = model.config_class(use_cache=False, **sizes)
    config._experts_implementation = "eager"
    return model(config), inputs


_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BODY = _WIDE | {"intermediate_size": 64}
_TEXT = _BODY | {"vocab_size": WORDS, "max_position_embeddings": 32}
_NARROW = _TEXT | {"embedding_size": 16}
_SHARED = _TEXT | {"num_key_value_heads": 2}
_OWN = _SHARED | {"head_dim": 8}
_GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}
_PICTURE = _BODY | {"image_size": 16, "patch_size": 4, "inputs": _pixels(16)}
_STAGES = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "inputs": _pixels(64)}
_WINDOWS = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
    "inputs": lambda batch: _words(batch) | _answers(batch),
}  # fmt: skip
_SOUND = _BODY | {
    "vocab_size": WORDS, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "inputs": _numbers("input_values", 2000),
}  # fmt: skip
_DEEPSEEK = _TEXT | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
_CLIP = {"text_config": _TEXT | {"eos_token_id": 2}, "vision_config": _BODY | {"image_size": 16, "patch_size": 4}}
_MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}

TRANSFORMERS: dict[str, dict[str, object]] = {
    "BertForSequenceClassification": _TEXT,
    "RobertaForMaskedLM": _TEXT,
    "DistilBertForSequenceClassification": {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4,
                                            "hidden_dim": 64},
    "AlbertForSequenceClassification": _NARROW,
    "ElectraForSequenceClassification": _NARROW,
    "DebertaV2ForSequenceClassification": _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "MPNetForSequenceClassification": _TEXT,
    "RoFormerForSequenceClassification": _TEXT | {"embedding_size": 32},
    "ModernBertForSequenceClassification": _TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "ConvBertForSequenceClassification": _TEXT | {"embedding_size": 32},
    "XLNetForSequenceClassification": {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "FunnelForSequenceClassification": {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32, "n_head": 4,
                                        "d_head": 8, "d_inner": 64},
    "GPT2LMHeadModel": _GPT | {"n_positions": 32},
    "GPTNeoForCausalLM": _BODY | {"vocab_size": WORDS, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "GPTJForCausalLM": _GPT | {"rotary_dim": 4, "n_positions": 32},
    "GPTNeoXForCausalLM": _TEXT,
    "OPTForCausalLM": _WIDE | {"vocab_size": WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": _SHARED,
    "MistralForCausalLM": _SHARED,
    "MixtralForCausalLM": _SHARED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": _SHARED,
    "Qwen3ForCausalLM": _OWN,
    "Qwen3MoeForCausalLM": _OWN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma2ForCausalLM": _OWN,
    "PhiForCausalLM": _TEXT,
    "Phi3ForCausalLM": _SHARED | {"pad_token_id": 0},
    "FalconForCausalLM": _WIDE | {"vocab_size": WORDS},
    "MptForCausalLM": {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "StableLmForCausalLM": _SHARED,
    "CohereForCausalLM": _SHARED,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "MambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "RwkvForCausalLM": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    "T5ForConditionalGeneration": _T5 | {"vocab_size": WORDS, "d_model": 32, "inputs": _BART["inputs"]},
    "BartForConditionalGeneration": _BART,
    "WhisperForConditionalGeneration": _BART | {
        "max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 8,
        "inputs": lambda batch: _numbers("input_features", 8, 40)(batch) | _answers(batch),
    },
    "ViTForImageClassification": _PICTURE,
    "BeitForImageClassification": _PICTURE,
    "Dinov2ForImageClassification": _PICTURE,
    "SiglipForImageClassification": {"vision_config": _CLIP["vision_config"], "inputs": _pixels(16)},
    "CLIPModel": _CLIP | {"projection_dim": 16, "inputs": lambda batch: _words(batch) | _pixels(16)(batch)},
    "SwinForImageClassification": _WINDOWS | {"inputs": _pixels(32)},
    "Swinv2ForImageClassification": _WINDOWS | {"inputs": _pixels(32)},
    "SegformerForSemanticSegmentation": _STAGES | {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32},
    "ConvNextForImageClassification": _STAGES,
    "PvtForImageClassification": _STAGES | {"image_size": 64, "num_attention_heads": [1, 1, 2, 2]},
    "Wav2Vec2ForCTC": _SOUND,
    "PatchTSTForPrediction": {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
                              "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
                              "prediction_length": 4, "inputs": _numbers("past_values", 16, 2)},
}  # fmt: skip


def _diffusers(name: str, inputs: Inputs, **sizes: object) -> tuple[nn.Module, Inputs]:
    model = getattr(import_module("diffusers"), name)
    return model(sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **sizes), inputs


def _noisy(batch: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(batch, 3, 16, 16), "timestep": torch.arange(batch)}


def _prompted(batch: int) -> dict[str, Tensor]:
    return _noisy(batch) | {"encoder_hidden_states": torch.randn(batch, 5, 24)}


_DOWN = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "in_channels": 3, "out_channels": 3, "cross_attention_dim": 24, "attention_head_dim": 8,
}  # fmt: skip
_CODES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


def _graph(name: str) -> tuple[nn.Module, Inputs]:
    edges = torch.randint(12, (2, 30), generator=torch.Generator().manual_seed(0))
    network = getattr(import_module("torch_geometric.nn"), name)(8, 16, 3, CLASSES)
    return network, lambda batch: (torch.randn(12, 8), edges)


def _unet() -> tuple[nn.Module, Inputs]:
    return import_module("segmentation_models_pytorch").Unet("resnet18", encoder_weights=None), _images(3, 64, 64)


LIBRARIES: dict[str, dict[str, Model]] = {
    "torchvision": dict(_all_of_torchvision()),
    "timm": {name: partial(_timm, name, **given) for name, given in TIMM.items()},
    "transformers": {name: partial(_transformers, name, **given) for name, given in TRANSFORMERS.items()},
    "diffusers": {
        "UNet2DModel": partial(_diffusers, "UNet2DModel", _noisy, **_DOWN),
        "UNet2DConditionModel": partial(_diffusers, "UNet2DConditionModel", _prompted, **_CROSS),
        "AutoencoderKL": partial(_diffusers, "AutoencoderKL", _images(3, 16, 16), **_CODES, latent_channels=4),
    },
    "torch_geometric": {name: partial(_graph, name) for name in ("GCN", "GAT")},
    "segmentation_models_pytorch": {"Unet": _unet},
}


def calls(inputs: Inputs, dtype: torch.dtype) -> tuple[Any, Any]:
    """An example, and another batch, of other numbers and more rows."""
    torch.manual_seed(1)
    return tuple(
        tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs(n)) for n in (2, 3)
    )


def outputs(network: nn.Module, call: Any) -> list[Tensor]:
    with torch.no_grad():
        output = network(**call) if isinstance(call, dict) else network(*(call if isinstance(call, tuple) else (call,)))
    return [
        x for x in tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output) if isinstance(x, Tensor)
    ]


@torch.no_grad()
def vary(network: nn.Module) -> None:
    """Draw what starts at one number, where a mistake would not show: biases, scales, running statistics."""
    for name, x in [*network.named_parameters(), *network.named_buffers()]:
        if x.is_floating_point() and x.numel() > 1 and bool((x == x.flatten()[0]).all()):
            if name.endswith(("bias", "running_mean")) or x.squeeze().dim() > 1:
                x.normal_(std=0.1)
            elif isinstance(x, nn.Parameter) or name.endswith("running_var"):
                x.uniform_(0.5, 1.5)


@torch.no_grad()
def settle(gated: nn.Module, gates: dict[str, Tensor], call: Any) -> None:
    """Take running statistics of the cut network, through which nothing of a deep one's input would come otherwise."""
    fixed = fix_gates(gated, gates).train()
    for module in fixed.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.momentum = None
            module.reset_running_stats()
    outputs(fixed, call)
    found = dict(fixed.named_buffers())
    for name, x in gated.named_buffers():
        if "running_" in name:
            x.copy_(found[name])


def weights(network: nn.Module) -> int:
    return sum(x.numel() for x in network.parameters())


def equal_cut(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Closes the same four of every eight units, so that heads of eight or more keep as many as another."""
    pattern = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.float64)
    return {site: pattern.repeat(-(-size // 8))[:size] if size > 1 else torch.ones(1) for site, size in sizes.items()}


def unequal_cut(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Closes half of each site at random, one more or one less by turns; open gates are in [0.9, 1]."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for k, (site, size) in enumerate(sizes.items()):
        closed = torch.randperm(size, generator=generator)[: min(max(1, size // 2 + k % 3 - 1), size - 1)]
        found[site] = 1 - 0.1 * torch.rand(size, generator=generator, dtype=torch.float64)
        found[site][closed] = 0
    return found


CUTS = {"equal": equal_cut, "unequal": unequal_cut}


def ours(network: nn.Module, inputs: Inputs) -> Iterator[Line]:
    """What is known after each step."""
    network.double()
    vary(network)
    example, other = calls(inputs, torch.float64)
    if not all(bool(x.isfinite().all()) for x in outputs(network, example)):
        raise FloatingPointError("the network's outputs are not finite")
    line: Line = {"at": "suggest"}
    yield line
    start = time.process_time()
    suggested = suggest_gates(network, example)
    line |= {"suggested": len(suggested), "suggest_seconds": round(time.process_time() - start, 1)}
    if suggested:
        gated = insert_gates(network, suggested)
        name_gates(gated)
        sizes = {site: gate.size for site, gate in gate_names(gated).items()}
        for name, cut in CUTS.items():
            yield line | {"at": name}
            line[name] = one_cut(gated, cut(sizes), example, other)
    yield line | {"at": "end"}


def one_cut(gated: nn.Module, gates: dict[str, Tensor], example: Any, other: Any) -> Line:
    """Compact once: the largest difference of outputs on another batch, or what was raised."""
    settle(gated, gates, other)
    start = time.process_time()
    try:
        small = compact(gated, gates, example, tolerance=TOLERANCE).network
    except Exception as error:
        return {"error": described(error), "seconds": round(time.process_time() - start, 1)}
    seconds = round(time.process_time() - start, 1)
    return compared(fix_gates(gated, gates).eval(), small, other) | {"weights": weights(small), "seconds": seconds}


def compared(whole: nn.Module, small: nn.Module, other: Any) -> Line:
    """The largest difference of outputs, and how much they differ between examples: 0 would show nothing."""
    pairs = list(zip(outputs(whole, other), outputs(small, other), strict=True))
    apart = max(float((x - y).abs().max() / x.abs().max().clamp(min=1e-300)) for x, y in pairs)
    return {
        "difference": apart,
        "spread": max(float(x.std(0).max() / x.abs().max().clamp(min=1e-300)) for x, _ in pairs),
    }


def zeros(network: nn.Module, inputs: Inputs) -> Iterator[Line]:
    """Let torch set half of the outputs of each layer to zero, those of smallest norm, and compact what is left."""
    network.double()
    vary(network)
    example, other = calls(inputs, torch.float64)
    pruned = 0
    ends = last_layers(network, example)
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module not in ends:
            prune.ln_structured(module, "weight", 0.5, n=2, dim=0)
            pruned += round(len(module.weight) / 2)
    settle(network, {}, other)
    yield {"at": "zeros", "zero": pruned}
    start = time.process_time()
    small = compact_zeros(network, example, tolerance=TOLERANCE).network
    seconds = round(time.process_time() - start, 1)
    sizes = [sum(len(x) for x in net.parameters() if x.dim() > 1) for net in (network, small)]
    macs = [NetworkCost(net, example).total_macs for net in (network, small)]
    yield {
        "at": "end",
        "zero": pruned,
        "removed": sizes[0] - sizes[1],
        "macs": macs[1] / macs[0],
        "seconds": seconds,
        **compared(network, small, other),
    }


def torch_pruning(network: nn.Module, inputs: Inputs) -> Iterator[Line]:
    """Prune by half once."""
    import torch_pruning as tp

    example, other = calls(inputs, torch.float32)
    shapes, before = [x.shape for x in outputs(network, other)], weights(network)
    yield {"at": "prune"}
    start = time.process_time()
    pruner = tp.pruner.BasePruner(
        network,
        example,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=last_layers(network, example),
        output_transform=lambda output: sum(x.sum() for x in tree_leaves(output) if isinstance(x, Tensor)),
    )
    pruner.step()
    same = [x.shape for x in outputs(network, other)] == shapes
    seconds = round(time.process_time() - start, 1)
    yield {"at": "end", "runs": True, "same_shapes": same, "cut": weights(network) < before, "seconds": seconds}


def last_layers(network: nn.Module, example: Any) -> list[nn.Module]:
    """The layers whose outputs are the network's, or the last one that was called."""
    made: dict[nn.Module, torch.UntypedStorage] = {}  # held, so that no other tensor gets its address

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and next(module.parameters(recurse=False), None) is not None:
            made[module] = output.untyped_storage()

    hooks = [module.register_forward_hook(note) for module in network.modules()]
    returned = {x.untyped_storage().data_ptr() for x in outputs(network, example)}
    for hook in hooks:
        hook.remove()
    return [module for module, storage in made.items() if storage.data_ptr() in returned] or [*made][-1:]


TOOLS = {"ours": ours, "torch_pruning": torch_pruning, "zeros": zeros}


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def child(model: Model, tool: str, options: argparse.Namespace, note: Connection) -> None:
    """Send what is known after each step; the last one counts."""
    resource.setrlimit(resource.RLIMIT_CPU, (options.seconds, options.seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    line: Line = {"at": "build"}
    try:
        network, inputs = model()
        count = weights(network.eval())
        line = {"at": "large", "count": count}
        if count <= LARGE or options.large:
            for found in TOOLS[tool](network, inputs):
                line = {"count": count, **found}
                note.send(line)
    except Exception as error:
        line |= {"error": described(error)}
    note.send(line)


def run(model: Model, tool: str, options: argparse.Namespace) -> Line:
    """A tool on a network in a process of its own, which is forked, as the libraries take long to import."""
    ours, theirs = Pipe(duplex=False)
    process = get_context("fork").Process(target=child, args=(model, tool, options, theirs))
    process.start()
    theirs.close()
    line: Line = {"at": "build"}
    with suppress(EOFError):
        while True:
            line = ours.recv()
    process.join()
    return line if process.exitcode == 0 else line | {"error": f"ended by exit code {process.exitcode}"}


def verdict(line: Line) -> str:
    """In a word, what became of a network with our gates."""
    found = line.get("ours", {"at": "build"})
    cuts = [found[name] for name in CUTS if name in found]
    if found["at"] == "large":
        return "large"
    if found["at"] == "build":
        return "not built"
    if "error" in found:
        return "out of time" if "exit code" in found["error"] else "not analysed"
    if not found["suggested"]:
        return "nothing suggested"
    if any("error" in cut for cut in cuts):
        return "refused"
    return (
        "exact"
        if all(cut["difference"] < EXACT < cut["spread"] and cut["weights"] < found["count"] for cut in cuts)
        else "wrong"
    )


def seconds(line: Line) -> float:
    found = line["ours"]
    return found.get("suggest_seconds", 0.0) + sum(found.get(name, {}).get("seconds", 0.0) for name in CUTS)


def print_table(lines: Mapping[str, Line]) -> None:
    """A row per library, and the networks that are not exact."""
    words = ("exact", "refused", "wrong", "nothing suggested", "not analysed", "out of time")
    print(f"| library | networks | {' | '.join(words)} | most seconds | Torch-Pruning runs, same shapes |")
    print("|" + "---|" * (len(words) + 4))
    measured = [line for line in lines.values() if verdict(line) not in ("large", "not built")]
    for library in [*dict.fromkeys(line["library"] for line in measured), "all"]:
        rows = [line for line in measured if library in (line["library"], "all")]
        counts = [sum(verdict(line) == word for line in rows) for word in words]
        theirs = sum(bool((they := x.get("torch_pruning", {})).get("same_shapes") and they["cut"]) for x in rows)
        longest = max(seconds(line) for line in rows)
        print(f"| {library} | {len(rows)} | {' | '.join(map(str, counts))} | {longest:.0f} | {theirs} |")
    for name, line in lines.items():
        if verdict(line) not in ("exact", "large"):
            errors = [x["error"] for x in (line["ours"], *(line["ours"].get(cut, {}) for cut in CUTS)) if "error" in x]
            print(f"- {name}: {verdict(line)} {errors[0] if errors else ''}")
    print("large, left out:", ", ".join(name for name, line in lines.items() if verdict(line) == "large"))


def print_zeros(lines: Mapping[str, Line]) -> None:
    """A row per network that torch pruned."""
    print("| network | outputs: zero, removed | weights, millions | multiply-adds left | difference | seconds |")
    print("|" + "---|" * 6)
    for name, line in lines.items():
        found = line["zeros"]
        if "difference" not in found:
            print(f"| {name} | {found.get('error', found['at'])} |")
            continue
        counts = f"{found['zero']:,}, {found['removed']:,} | {found['count'] / 1e6:.2f} | {100 * found['macs']:.0f} %"
        print(f"| {name} | {counts} | {found['difference']:.1e} | {found['seconds']} |")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--library", nargs="+", default=[])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS)[:2])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--memory", type=int, default=10)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = options.out.read_text().splitlines() if options.out.exists() else []
    lines = {line["model"]: line for line in map(json.loads, texts)}
    if options.large:
        lines = {name: line for name, line in lines.items() if verdict(line) != "large"}
    if options.table:
        return print_zeros(lines) if options.tools == ["zeros"] else print_table(lines)
    for library, models in LIBRARIES.items():
        import_module(library)
        for name, model in models.items():
            line = {"model": name, "library": library} | lines.get(name, {})
            left = [tool for tool in options.tools if name in options.only or tool not in line]
            asked = name in options.only or (not options.only and library in (options.library or LIBRARIES))
            if asked and left:
                line |= {tool: run(model, tool, options) for tool in left}
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(name, json.dumps({tool: line[tool] for tool in left}), flush=True)


if __name__ == "__main__":
    main()
