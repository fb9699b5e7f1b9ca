"""Budgets in two processes under DDP, as the libraries set it up."""

import pytest

from tests.examples.test_processes import torchrun

START = """
import sys
import torch
import torch.distributed.nn  # before there is a group, whose threads it would keep alive
from torch import distributed, nn
from pyro_l0.nn import L0Gate, insert_gates

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.linspace(-1, 1, 480).view(80, 6).sin()
y = (x.sum(1) > 0).long()
"""
LIGHTNING = """
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from pyro_l0.callbacks.lightning import BudgetCallback

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = nn.Linear(6, 10), nn.ReLU(), L0Gate(10), nn.Linear(10, 7), nn.ReLU(), L0Gate(7)
        self.net = nn.Sequential(*hidden, nn.Linear(7, 2))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

module = Classifier()
callback = BudgetCallback(module.net, x[:2], 0.4)
options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = pl.Trainer(max_epochs=12, callbacks=[callback], accelerator="cpu", devices=2, strategy="ddp", **options)
trainer.fit(module, DataLoader(TensorDataset(x, y), 8, shuffle=True))
small = module.net
"""
TRANSFORMERS = """
import transformers
from pyro_l0.callbacks.transformers import BudgetCallback

sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
config = transformers.BertConfig(vocab_size=31, max_position_embeddings=6, num_labels=2, **sizes)
model = transformers.BertForSequenceClassification(config)
tokens = (15 + 15 * x).long()
example = {"input_ids": tokens[:2]}
model = insert_gates(model, {"bert.encoder.layer.0.intermediate": L0Gate(24)}, example)
options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
arguments = transformers.TrainingArguments("out", max_steps=60, per_device_train_batch_size=8, **options)
data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, y)]
trainer = transformers.Trainer(model, arguments, train_dataset=data)
callback = BudgetCallback(trainer, example, 0.8)
trainer.add_callback(callback)
trainer.train()
small = trainer.model
"""
END = """
own = torch.cat([p.detach().flatten() for p in small.parameters()])
both = [torch.empty_like(own) for _ in range(2)]
distributed.all_gather(both, own)
fraction = float(callback.target.fraction())
assert callback.target.step == 60 and 0.9 * callback.target.budget <= fraction <= callback.target.budget, fraction
assert torch.equal(*both) and len(own) < sum(p.numel() for p in callback._network.parameters())
print("as it should be")
distributed.destroy_process_group()
"""


@pytest.mark.slow  # starts two processes
@pytest.mark.parametrize(("needs", "program"), [("lightning", LIGHTNING), ("accelerate", TRANSFORMERS)])
def test_two_processes_end_with_the_same_small_network(needs, program, tmp_path):
    pytest.importorskip(needs)
    (tmp_path / "program.py").write_text(START + program + END)
    assert torchrun("program.py", cwd=tmp_path).count("as it should be") == 2
