"""Public architectures of libraries that need the extra ``zoo``, small and with random weights; without gates.

All of torchvision's builders for classification, segmentation and video, and small or tiny networks of timm,
transformers, diffusers, torch_geometric and segmentation_models_pytorch.

torchvision 0.28.0 does not load beside torch 2.13's build for processors ("operator torchvision::nms does not exist"):
its compiled operators are missing. No network here calls one, so the two that its import asks for are declared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # no weights are downloaded
CLASSES, WORDS = 10, 99
Inputs = Callable[[int], Tensor | tuple[Tensor, ...] | dict[str, Tensor]]  # by the size of a batch
Model = Callable[[], tuple[nn.Module, Inputs]]


@cache
def _declare_operators() -> None:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def library(name: str) -> ModuleType:
    """One of those below, with torchvision's operators unless it does without torchvision."""
    if name != "transformers":
        _declare_operators()
    return import_module(name)


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


def torchvision(name: str, task: str) -> tuple[nn.Module, Inputs]:
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
    return library("torchvision.models").get_model(name, weights=None, **given), _images(*size)


def _all_of_torchvision() -> Iterator[tuple[str, Model]]:
    models = library("torchvision.models")
    for module in (models, models.segmentation, models.video):
        for name in models.list_models(module=module):
            yield name, partial(torchvision, name, module.__name__.rpartition(".")[2])


def timm(name: str, side: int = 64, **given: object) -> tuple[nn.Module, Inputs]:
    return library("timm").create_model(name, num_classes=CLASSES, **given), _images(3, side, side)


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
    model = getattr(library("transformers"), name)
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
    model = getattr(library("diffusers"), name)
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
    network = getattr(library("torch_geometric.nn"), name)(8, 16, 3, CLASSES)
    return network, lambda batch: (torch.randn(12, 8), edges)


def _unet() -> tuple[nn.Module, Inputs]:
    return library("segmentation_models_pytorch").Unet("resnet18", encoder_weights=None), _images(3, 64, 64)


LIBRARIES: dict[str, Callable[[], dict[str, Model]]] = {
    "torchvision": lambda: dict(_all_of_torchvision()),
    "timm": lambda: {name: partial(timm, name, **given) for name, given in TIMM.items()},
    "transformers": lambda: {name: partial(_transformers, name, **given) for name, given in TRANSFORMERS.items()},
    "diffusers": lambda: {
        "UNet2DModel": partial(_diffusers, "UNet2DModel", _noisy, **_DOWN),
        "UNet2DConditionModel": partial(_diffusers, "UNet2DConditionModel", _prompted, **_CROSS),
        "AutoencoderKL": partial(_diffusers, "AutoencoderKL", _images(3, 16, 16), **_CODES, latent_channels=4),
    },
    "torch_geometric": lambda: {name: partial(_graph, name) for name in ("GCN", "GAT")},
    "segmentation_models_pytorch": lambda: {"Unet": _unet},
}
