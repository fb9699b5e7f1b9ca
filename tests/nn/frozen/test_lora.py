"""Gates on the ranks of peft's LoRA: what they compute, and the adapter that is left, saved, loaded and merged."""

import copy

import pytest
import torch
from torch import nn

from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkGates, insert_gates
from pyro_l0.nn.frozen.lora import compact_lora_ranks, gate_lora_ranks

# What peft and its users have to call with transformers 5.23, which renames it.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* is deprecated:FutureWarning")
LAYERS = {"conv": "conv", "block.fc": "block.fc", "block.out": "block.out", "fc": "fc"}


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="LoRA is tested where peft is installed (pip install peft)")


class Network(nn.Module):
    """Layers of several kinds, of which two have a path that ends alike."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 6, 3)
        self.block = nn.ModuleDict({"fc": nn.Linear(24, 10), "out": nn.Linear(10, 10)})
        self.fc = nn.Linear(10, 3)
        self.double()

    def forward(self, x):
        x = self.conv(x).relu().flatten(1)
        return self.fc(self.block["out"](self.block["fc"](x).relu()).relu())


X = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1)).double()


def adapted(peft, **options):
    """A model with an adapter that changes its outputs."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": list(LAYERS.values())} | options
    torch.manual_seed(2)
    model = peft.get_peft_model(Network(), peft.LoraConfig(**options), autocast_adapter_dtype=False).double()
    return with_changes(model)


def with_changes(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def bert(transformers, words, **options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=words, max_position_embeddings=8, num_labels=2, **sizes, **options)
    return transformers.BertForSequenceClassification(config)


def adapted_bert(peft, network):
    return peft.get_peft_model(
        network, peft.LoraConfig(r=4, target_modules=["query", "value", "dense"], task_type="SEQ_CLS")
    )


def set_gates(model, values):
    """Test gates of some values, in [0, 1], and the values."""
    gate, values = model.lora_ranks, torch.tensor(values)
    drawn = (values - gate.distribution.gamma) / (gate.distribution.zeta - gate.distribution.gamma)
    with torch.no_grad():
        gate.location.copy_(torch.where(values == 0, torch.tensor(-4.0), drawn.clamp(max=0.99).logit()))
    return gate.test_gate.detach().double()


# Of convolution, fc inside, out, fc; the third is left without a rank.
OPEN = [1.0, 0.0, 0.4, 0.0, 0.0, 0.7, 0.9, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.2]


def test_gates_multiply_the_ranks(peft):
    """Beside the formula, for deterministic gates and for a draw."""
    model = adapted(peft, target_modules=["block.out"], lora_dropout=0.2)
    gates = gate_lora_ranks(model)
    assert list(gates.sites) == ["lora_ranks"]
    assert gates.sites["lora_ranks"].shape == (4,)
    layer = model.get_base_model().block["out"]
    x = torch.randn(7, 10).double()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    z = set_gates(model, [1.0, 0.0, 0.4, 0.0])
    layer.eval()
    model.lora_ranks.eval()
    expected = layer.base_layer(x) + 6 / 4 * (x @ a.T * z) @ b.T
    assert torch.allclose(layer(x), expected, atol=1e-12)
    model.lora_ranks.train()
    torch.manual_seed(0)
    found = layer(x)
    torch.manual_seed(0)
    z = model.lora_ranks().double()
    assert torch.allclose(found, layer.base_layer(x) + 6 / 4 * (x @ a.T * z) @ b.T, atol=1e-6)
    found.sum().backward()
    assert model.lora_ranks.location.grad.abs().max() > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"lora_dropout": 0.3},
        {"rank_pattern": {"fc": 6, "conv": 2, "^block.out": 2}, "alpha_pattern": {"fc": 3}},
        {"target_modules": "conv|.*out|.*fc"},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_the_result_is_an_adapter_like_any(peft, tmp_path, options):
    """What is left, saved, loaded and merged computes what the gated model did, with every layer's scale."""
    model = adapted(peft, **options).eval()
    scales = {path: model.get_base_model().get_submodule(path).scaling["default"] for path in LAYERS}
    gate_lora_ranks(model)
    set_gates(model, OPEN)
    expected = model(X)
    ranks = compact_lora_ranks(model)
    assert ranks["block.out"] == 0 or options.get("rank_pattern")
    assert sum(ranks.values()) == sum(z > 0 for z in OPEN)
    assert not [module for module in model.modules() if isinstance(module, L0Gate)]
    assert model.get_base_model().fc.lora_B["default"].in_features == ranks["fc"]
    assert model.get_base_model().conv.lora_A["default"].out_channels == ranks["conv"]
    assert torch.allclose(model(X), expected, atol=1e-7)  # gates are of float32
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Network(), tmp_path, autocast_adapter_dtype=False).double().eval()
    assert torch.allclose(loaded(X), model(X), atol=1e-12)
    assert peft.get_peft_model_state_dict(loaded).keys() == peft.get_peft_model_state_dict(model).keys()
    for path, rank in ranks.items():
        layer = loaded.get_base_model().get_submodule(path)
        if not rank:
            assert isinstance(layer, nn.Linear)
            continue
        assert layer.scaling["default"] == pytest.approx(scales[path], rel=1e-12)
        assert layer.r["default"] == layer.lora_A["default"].weight.shape[0] == rank
    merged = loaded.merge_and_unload()
    assert type(merged) is Network
    assert torch.allclose(merged(X), model(X), atol=1e-12)


def test_transposed_layers(peft, tmp_path):
    """GPT-2's Conv1D holds its weight as inputs by outputs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=11, n_positions=8)
    plain = transformers.GPT2LMHeadModel(config).double().eval()
    options = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(plain), options, autocast_adapter_dtype=False).double()
    with_changes(model).eval()
    gate_lora_ranks(model)
    set_gates(model, [1.0, 0.0, 0.0, 0.5, 0.0, 0.3, 0.0, 0.0])
    tokens = torch.arange(6)[None]
    expected = model(tokens).logits
    assert compact_lora_ranks(model) == {"transformer.h.0.attn.c_attn": 2, "transformer.h.0.mlp.c_fc": 1}
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path, autocast_adapter_dtype=False)
    assert torch.allclose(loaded.merge_and_unload()(tokens).logits, expected, atol=1e-7)


def test_one_budget_for_all_layers(peft):
    """Exactly a quarter of the ranks is left, where they lower the loss: at a layer that has to change."""
    model = adapted(peft, target_modules=["block.fc", "fc"], r=8)
    wanted = Network()
    with torch.no_grad():
        wanted.fc.weight += torch.randn_like(wanted.fc.weight)
    gates = gate_lora_ranks(model)
    target = SparsityTarget(gates, {"lora_ranks": 0.25}, steps=80)
    weights = [x for name, x in model.named_parameters() if x.requires_grad and "lora_ranks" not in name]
    groups = [{"params": weights}, {"params": gates.locations(), **target.optimiser_options}]
    optimiser = torch.optim.Adam(groups, lr=0.02)
    for _ in range(80):
        optimiser.zero_grad()
        x = torch.randn(32, 2, 4, 4).double()
        (model(x) - wanted(x)).square().mean().backward()
        target.add_gradient()
        optimiser.step()
        target.ascend()
    ranks = compact_lora_ranks(model)
    assert sum(ranks.values()) == 4
    assert ranks["fc"] > ranks["block.fc"]


def test_other_adapters_stay(peft, tmp_path):
    model = adapted(peft).eval()
    other = peft.LoraConfig(r=3, target_modules=["block.out", "fc"])
    model.add_adapter("other", other, autocast_adapter_dtype=False)
    with_changes(model.double()).set_adapter("other")
    before = model(X)
    model.set_adapter("default")
    gate_lora_ranks(model)
    set_gates(model, OPEN)
    expected = model(X)
    model.set_adapter("other")
    assert torch.equal(model(X), before)
    with pytest.raises(ValueError, match="gates on the ranks of 'other', but there are none"):
        compact_lora_ranks(model)
    model.set_adapter("default")
    compact_lora_ranks(model)
    assert torch.allclose(model(X), expected, atol=1e-7)
    model.set_adapter("other")
    assert torch.equal(model(X), before)
    assert not model.peft_config["other"].rank_pattern
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"one active adapter, but there are \['default', 'other'\]"):
        gate_lora_ranks(model)


def test_all_layers_share_a_draw_when_blocks_run_again(peft):
    """Gradients are those of a model without checkpointed blocks."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain = bert(transformers, 11, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(1)
        model = with_changes(adapted_bert(peft, copy.deepcopy(plain))).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        gates = gate_lora_ranks(model)
        torch.manual_seed(2)
        model(torch.arange(12).view(2, 6) % 11, labels=torch.tensor([0, 1])).loss.backward()
        found.append([gates.locations()[0].grad, *(x.grad for n, x in model.named_parameters() if "lora_A" in n)])
    assert found[0][0].abs().max() > 0
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_copy_has_its_own_gates(peft):
    """And other gates of a network are beside them."""
    model = adapted(peft).eval()
    gate_lora_ranks(model)
    set_gates(model, OPEN)
    expected = model(X)
    new = insert_gates(model, {"base_model.model.fc": L0Gate(3)})
    set_gates(model, [1.0] * 16)
    with torch.no_grad():
        new.get_submodule("l0_gates.base_model.model.fc.1").location.fill_(9.0)
    assert torch.allclose(new(X), expected, atol=1e-12)
    assert set(NetworkGates(new).sites) == {"lora_ranks", "base_model.model.fc.1"}
    compact_lora_ranks(new)
    assert torch.allclose(new(X), expected, atol=1e-7)
    assert not torch.allclose(model(X), expected, atol=1e-3)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attend, self.fc = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("LoraConfig", {"use_dora": True, "target_modules": ["fc"]}, "is a DoraLinearVariant at 'fc'"),
        ("LoraConfig", {"target_modules": ["embed"]}, r"adapts 'embed' of a kind .* \(Embedding\)"),
        ("LoraConfig", {"target_modules": ["attend"]}, r"adapts 'attend' of a kind .* \(MultiheadAttention\)"),
        ("LoraConfig", {"target_parameters": ["fc.weight"]}, r"adapts 'fc' of a kind .* \(ParamWrapper\)"),
        ("LoraConfig", {"init_lora_weights": "pissa", "target_modules": ["fc"]}, "has init_lora_weights='pissa'"),
        ("LoraConfig", {"lora_bias": True, "target_modules": ["fc"]}, "trains biases"),
        ("LoraConfig", {"bias": "all", "target_modules": ["fc"]}, "trains biases"),
        ("AdaLoraConfig", {"total_step": 10, "target_modules": ["fc"]}, "is of the kind ADALORA"),
        ("IA3Config", {"target_modules": ["fc"], "feedforward_modules": []}, "is of the kind IA3"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_is_refused_by_name(peft, kind, options, message):
    model = peft.get_peft_model(Embedded(), getattr(peft, kind)(**options))
    with pytest.raises(ValueError, match=f"Expected an adapter whose ranks can have gates, but 'default' {message}"):
        gate_lora_ranks(model)


def test_what_is_refused(peft):
    model = adapted(peft)
    with pytest.raises(ValueError, match="gates on the ranks of 'default', but there are none"):
        compact_lora_ranks(model)
    gate_lora_ranks(model)
    with pytest.raises(ValueError, match="without gates on ranks, but it has some"):
        gate_lora_ranks(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"is merged into 'conv' \(call model.unmerge_adapter\(\)\)"):
        compact_lora_ranks(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_a_trainer_keeps_to_the_budget_and_resumes(peft, tmp_path):
    """Adapters in its checkpoints have no gates; the callback restores them."""
    transformers = pytest.importorskip("transformers")
    callbacks = pytest.importorskip("pyro_l0.callbacks.transformers")
    tokens = torch.arange(40 * 8).view(40, 8) * 7 % 31
    data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in tokens]
    found = []
    for checkpoint in (None, str(tmp_path / "checkpoint-20")):
        torch.manual_seed(0)
        model = adapted_bert(peft, bert(transformers, 31))
        gate_lora_ranks(model)
        loop = {"max_steps": 40, "learning_rate": 1e-2, "save_steps": 20, "report_to": "none", "use_cpu": True}
        arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, logging_steps=10, **loop)
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(callbacks.BudgetCallback(trainer, None, {"lora_ranks": 0.25}))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.model is model
        ranks = compact_lora_ranks(model)
        assert sum(ranks.values()) == len(ranks) == 11
        found.append(model.eval()(tokens).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "model"], ids=["a plain network", "a string"])
def test_other_kinds_are_refused(model):
    """Without peft, too."""
    for function in (gate_lora_ranks, compact_lora_ranks):
        with pytest.raises(TypeError, match=r"a model of peft.get_peft_model \(pip install peft\), but got a (Li|st)"):
            function(model)
