"""Models of transformers as they are, down to 40 % of their multiply-adds."""

import pytest
import torch
import torch.nn.functional as F

from pyro_l0 import prune

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # few steps, an untrained network
SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
TOKENS = dict(vocab_size=64, max_position_embeddings=16)


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **TOKENS, **SIZES))


def distilbert():
    config = transformers.DistilBertConfig(num_labels=3, dim=48, n_layers=2, n_heads=4, hidden_dim=96, **TOKENS)
    return transformers.DistilBertForSequenceClassification(config)


def albert():
    """One layer that is called twice."""
    config = transformers.AlbertConfig(embedding_size=24, num_labels=3, **TOKENS, **SIZES)
    return transformers.AlbertForSequenceClassification(config)


def vit():
    """It reads the weight of a module whose units have gates."""
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **TOKENS, **SIZES))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(num_key_value_heads=2, **TOKENS, **SIZES))


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def batches(make):
    """Inputs by keyword, and targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (12, 16, 8), generator=generator)
    if make is vit:
        images = torch.randn(12, 16, 1, 8, 8, generator=generator)
        return [({"pixel_values": x}, (x.mean((1, 2, 3)) > 0).long()) for x in images]
    if make in (bert, distilbert, albert):
        return [({"input_ids": x}, (x[:, 0] > 32).long()) for x in ids]
    more = {"use_cache": False}
    return [({"input_ids": x, **({"decoder_input_ids": x} if make is t5 else {}), **more}, x) for x in ids]


def loss(outputs, targets):
    return F.cross_entropy(outputs.logits.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("make", [bert, distilbert, albert, vit, gpt2, llama, mistral, t5])
def test_to_40_per_cent(make):
    """It computes what the gates said, and still generates."""
    torch.manual_seed(0)
    network, data = make(), batches(make)
    example = {name: x[:2] if isinstance(x, torch.Tensor) else x for name, x in data[0][0].items()}
    result = prune(network, loss, data, example, 0.4, epochs=25, pretrained=False)
    left, full = result.report.left["macs"]
    assert 0.35 < left / full <= 0.4
    assert result.certificate < 1e-6
    assert type(result.network) is type(network)
    assert {name for name in result.network.state_dict() if "l0_gates" not in name} == network.state_dict().keys()
    if make in (gpt2, llama, mistral, t5):
        generated = result.network.generate(data[0][1][:1, :4], max_new_tokens=4, do_sample=False)
        assert generated.shape[1] > 4


def test_a_model_that_returns_its_own_loss():
    """Batches are dicts of keywords, collated by a loader."""
    torch.manual_seed(0)
    words = torch.randint(1, 64, (320, 8))
    data = [{"input_ids": w, "attention_mask": torch.ones(8, dtype=torch.long), "labels": w[0] % 2} for w in words]
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    example = {"input_ids": words[:2], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    network = bert()
    result = prune(network, lambda outputs, batch: outputs.loss, loader, example, 0.4, epochs=3)
    assert [name for name, _ in result.network.named_parameters()] == [name for name, _ in network.named_parameters()]
    left, full = result.report.left["macs"]
    assert left <= 0.4 * full
