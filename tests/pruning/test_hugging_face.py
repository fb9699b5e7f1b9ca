"""Models of transformers as they are, down to 40 % of their multiply-adds."""

import pytest
import torch
import torch.nn.functional as F

from pyro_l0 import prune
from tests.compaction.random_cuts import MODELS
from tests.engine.zoo.libraries import WORDS

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # few steps, an untrained network
GENERATING = ("GPT-2", "Llama", "Mistral", "T5")


def batches(name):
    """Inputs by keyword, and targets: the words themselves, or classes of pictures and of first words."""
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        images = torch.randn(12, 16, 3, 16, 16, generator=generator)
        return [({"pixel_values": x}, (x.mean((1, 2, 3)) > 0).long()) for x in images]
    ids = torch.randint(1, WORDS, (12, 16, 8), generator=generator)
    if name not in GENERATING:
        return [({"input_ids": x}, (x[:, 0] > WORDS // 2).long()) for x in ids]
    more = {"use_cache": False}
    return [({"input_ids": x, **({"decoder_input_ids": x} if name == "T5" else {}), **more}, x) for x in ids]


def loss(outputs, targets):
    return F.cross_entropy(outputs.logits.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("nn.")])
def test_to_40_per_cent(name):
    """It computes what the gates said, and still generates."""
    torch.manual_seed(0)
    (network, _), data = MODELS[name](), batches(name)
    example = {key: x[:2] if isinstance(x, torch.Tensor) else x for key, x in data[0][0].items()}
    result = prune(network, loss, data, example, 0.4, epochs=25, pretrained=False)
    left, full = result.report.left["macs"]
    assert 0.35 < left / full <= 0.4
    assert result.certificate < 1e-6
    assert type(result.network) is type(network)
    assert {name for name in result.network.state_dict() if "l0_gates" not in name} == network.state_dict().keys()
    if name in GENERATING:
        generated = result.network.generate(data[0][1][:1, :4], max_new_tokens=4, do_sample=False)
        assert generated.shape[1] > 4


def test_a_model_that_returns_its_own_loss():
    """Batches are dicts of keywords, collated by a loader."""
    torch.manual_seed(0)
    words = torch.randint(1, WORDS, (320, 8))
    data = [{"input_ids": w, "attention_mask": torch.ones(8, dtype=torch.long), "labels": w[0] % 2} for w in words]
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    example = {"input_ids": words[:2], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    network, _ = MODELS["BERT"]()
    result = prune(network, lambda outputs, batch: outputs.loss, loader, example, 0.4, epochs=3)
    assert [name for name, _ in result.network.named_parameters()] == [name for name, _ in network.named_parameters()]
    left, full = result.report.left["macs"]
    assert left <= 0.4 * full
