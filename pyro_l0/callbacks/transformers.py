"""A budget over L0Gates as a callback of transformers' Trainer (``pip install transformers accelerate``)."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.infer.control.budget import Budgets
from pyro_l0.nn.engine import Example

__all__ = ["BudgetCallback"]


class BudgetCallback(NetworkBudget, TrainerCallback, ExportableState):
    """Keeps a Trainer's model to a budget, and replaces it by the compacted one at the end of ``train``.

    The gates move at every step of the Trainer, by an optimiser of their own: neither learning rate, schedule nor
    weight decay affects them. With the Trainer's own logs it logs ``l0/fraction`` (of the full model's cost),
    ``l0/multiplier`` (nats per unit of cost) and ``l0/open_gates`` by ``trainer.log``. Accumulated gradients, mixed
    precision and DDP are supported, and ``train(resume_from_checkpoint=...)`` continues from the Trainer's checkpoints.
    Afterwards ``trainer.model`` is the small model; save it with ``callback.compacted.save``, because its configuration
    is still that of the large one.

    Args:
        trainer: the Trainer of a model with L0Gates.
        example: what the model is called with, such as a dict of ``input_ids`` and ``attention_mask``; None as for
            :class:`~pyro_l0.callbacks.NetworkBudget`.
        budget: largest fraction of the full model's cost, in (0, 1), or several, as for NetworkBudget.
        *args: the cost, as for NetworkBudget.
        **options: of NetworkBudget, such as ``pretrained=True``.

    Raises:
        ValueError: as NetworkBudget, or the Trainer would load another model at the end, or restore callbacks from a
            checkpoint; at the start of ``train``, a checkpoint is of a training without this callback or of another
            length.

    Example:
        ``trainer.add_callback(BudgetCallback(trainer, {"input_ids": tokens[:2]}, 0.3, pretrained=True))``
    """

    def __init__(self, trainer: Trainer, example: Example | None, budget: Budgets, *args: Any, **options: Any) -> None:
        super().__init__(trainer.model, example, budget, *args, **options)
        for name in ("load_best_model_at_end", "restore_callback_states_from_checkpoint"):
            if getattr(trainer.args, name):
                raise ValueError(
                    f"Expected a Trainer without {name}, but it has it. Leave it out: the last model is the one within "
                    "the budget, and this callback resumes by itself."
                )
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the gates, or continue from a checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if isinstance(saved, dict) and saved["attributes"]:
            data = io.BytesIO(base64.b64decode(saved["attributes"]["state"]))
            self.load_state_dict(torch.load(data, weights_only=True, map_location=args.device))
        groups = kwargs["optimizer"].param_groups  # whose gradients alone a scaler unscales
        of_optimizer = [p for group in groups for p in group["params"]]
        self.start(state.max_steps, state.global_step, of_optimizer if args.fp16 else self._network.parameters())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the gates; their gradients are accumulated, unscaled and clipped."""
        self.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log fraction, multiplier and open gates with the Trainer's own entries, while gates train."""
        if self.is_training and control.should_log:
            self._trainer.log(self.metrics())
            control.should_log = True  # which the line before has reset

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the compact network in the model's place; nothing if the gates had not begun to train."""
        if self.is_training:
            self._trainer.model = self._trainer.model_wrapped = self.finish()

    def state(self) -> dict[str, Any]:
        """What the Trainer's checkpoint keeps, as text."""
        data, state = io.BytesIO(), self.state_dict()
        torch.save(state, data)
        return {"args": {}, "attributes": {"state": base64.b64encode(data.getvalue()).decode()} if state else {}}
