"""A budget over L0Gates as a callback of Lightning (``pip install lightning``)."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from pyro_l0.callbacks.budget import NetworkBudget

__all__ = ["BudgetCallback"]


class BudgetCallback(NetworkBudget, Callback):
    """Keeps a network in a LightningModule to a budget, and replaces it by the compacted one at the end of ``fit``.

    The gates move at every step of the trainer, by an optimiser of their own: ``configure_optimizers`` may take
    ``self.parameters()``, and neither learning rate, schedule, weight decay nor clipping affects the gates. At the
    trainer's ``log_every_n_steps`` it logs ``l0/fraction`` (of the full network's cost), ``l0/multiplier`` (nats per
    unit of cost) and ``l0/open_gates``. Accumulated gradients, mixed precision and DDP are supported, and
    ``fit(ckpt_path=...)`` continues from Lightning's checkpoints. After ``fit`` these no longer fit into the module;
    save the result with ``callback.compacted.save``.

    Args:
        network: the network with L0Gates, an attribute of the module or part of one. If it is the module itself, the
            result is only in ``compacted``.
        example, budget, cost, pretrained, at_least, multiple_of: as for
            :class:`~pyro_l0.callbacks.NetworkBudget`.
        on_budget: is called with each budget that is met.

    Raises:
        ValueError: as NetworkBudget; at the start of ``fit``, the module has several optimisers or manual optimisation,
            the number of steps is unknown, a checkpoint is of a training without this callback or of another length, or
            the gates are not trained.

    Example:
        ``Trainer(max_epochs=20, callbacks=[BudgetCallback(module.net, x[:2], 0.3)]).fit(module, loader)``
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the gates, or continue from a checkpoint."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ValueError(
                "Expected automatic optimisation by one optimiser, but the module has "
                f"{len(trainer.optimizers)}{'' if pl_module.automatic_optimization else ' and steps by itself'}. Use "
                "SparsityTarget in its own loop."
            )
        trained = pl_module.parameters()
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            (optimizer,) = trainer.optimizers  # whose gradients are unscaled, unless it does so by itself
            is_late = getattr(optimizer, "_step_supports_amp_scaling", False)
            trained = iter([] if is_late else [p for group in optimizer.param_groups for p in group["params"]])
        self.start(trainer.estimated_stepping_batches, trainer.global_step, trained)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Move the gates; their gradients are accumulated and unscaled, and not yet clipped."""
        self.step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Log fraction, multiplier and open gates as often as the Trainer logs, while gates train."""
        every = trainer.log_every_n_steps
        if self.is_training and every and trainer.global_step % every == 0:
            pl_module.log_dict(self.metrics())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compact, after the last checkpoint was written."""
        if not self.is_training:
            return
        small = self.finish().train(self._network.training)
        for path, module in list(pl_module.named_modules(remove_duplicate=False)):
            if module is self._network and path:
                pl_module.set_submodule(path, small)
