"""Training in epochs: a loop, checkpoints to resume from, and several processes that train together."""

from pyro_l0.training.checkpoint import Checkpoint
from pyro_l0.training.epochs import epochs
from pyro_l0.training.processes import process_group

__all__ = ["Checkpoint", "epochs", "process_group"]
