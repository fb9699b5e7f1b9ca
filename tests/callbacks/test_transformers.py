"""A budget in the loop of transformers' Trainer, from the first step to the small model."""

import pytest
import torch

from pyro_l0.compaction import load_compacted
from pyro_l0.nn import L0Gate, insert_gates

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
BudgetCallback = pytest.importorskip("pyro_l0.callbacks.transformers").BudgetCallback
TOKENS = torch.arange(40 * 8).view(40, 8) * 7 % 31
DATA = [{"input_ids": row, "labels": int(row[0]) % 2} for row in TOKENS]
EXAMPLE = {"input_ids": TOKENS[:2]}
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=31, max_position_embeddings=8, num_labels=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    gates = {f"bert.encoder.layer.{i}.intermediate": L0Gate(24) for i in range(2)}
    return insert_gates(model, gates, EXAMPLE)


def trainer(folder, model, **options):
    options = {"num_train_epochs": 12, "learning_rate": 5e-3, "logging_steps": 10, "save_strategy": "no"} | options
    options = {"weight_decay": 0.1, "report_to": "none", "use_cpu": True, "disable_tqdm": True} | options
    args = transformers.TrainingArguments(folder, per_device_train_batch_size=8, **options)
    return transformers.Trainer(model, args, train_dataset=DATA, eval_dataset=DATA)


@pytest.mark.slow
def test_a_model_within_the_budget_replaces_the_other(tmp_path):
    model = classifier()
    of = trainer(tmp_path, model)
    callback = BudgetCallback(of, EXAMPLE, 0.8, pretrained=True)
    of.add_callback(callback)
    of.train()
    assert callback.target.step == callback.target.steps == 60
    assert 0.75 < float(callback.target.fraction()) <= 0.8
    small = of.model
    assert small is callback.compacted.network
    assert not [m for m in small.modules() if isinstance(m, L0Gate)]
    assert torch.allclose(small(TOKENS).logits, model.eval()(TOKENS).logits, atol=1e-5)
    logged = [row for row in of.state.log_history if "l0/fraction" in row]
    assert [row["step"] for row in logged] == [10, 20, 30, 40, 50, 60]
    assert logged[-1]["l0/fraction"] == float(callback.target.fraction())
    assert logged[-1]["l0/open_gates"] == sum(x.intermediate.dense.out_features for x in small.bert.encoder.layer)
    assert len([row for row in of.state.log_history if "loss" in row]) == 6
    assert of.evaluate()["eval_loss"] > 0
    callback.compacted.save(tmp_path / "small")
    assert torch.equal(load_compacted(classifier(), tmp_path / "small").network(TOKENS).logits, small(TOKENS).logits)


@pytest.mark.slow
def test_accumulation_and_bfloat16(tmp_path):
    of = trainer(tmp_path, classifier(), gradient_accumulation_steps=2, bf16=True, max_grad_norm=0.1, max_steps=40)
    callback = BudgetCallback(of, EXAMPLE, 0.8, "weights")
    of.add_callback(callback)
    of.train()
    assert callback.target.steps == 40
    assert 0.7 < float(callback.target.fraction()) <= 0.8


@pytest.mark.slow
def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    found = []
    for checkpoint in (None, tmp_path / "checkpoint-30"):
        of = trainer(tmp_path, classifier(), save_strategy="steps", save_steps=30)
        callback = BudgetCallback(of, EXAMPLE, 0.8)
        of.add_callback(callback)
        of.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        assert callback.target.step == 60
        found.append(of.model(TOKENS).logits)
    assert torch.equal(*found)
    of = trainer(tmp_path, classifier(), num_train_epochs=20)
    of.add_callback(BudgetCallback(of, EXAMPLE, 0.8))
    with pytest.raises(ValueError, match=r"after 30 of 60 steps, .* but the trainer is at 30 of 100"):
        of.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))


def test_a_trainer_that_would_return_another_model_is_refused(tmp_path):
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    with pytest.raises(ValueError, match="Expected a Trainer without load_best_model_at_end"):
        BudgetCallback(trainer(tmp_path, classifier(), **options), EXAMPLE, 0.8)
