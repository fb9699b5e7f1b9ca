"""Training in epochs: a loop, checkpoints to resume from, and several processes that train together."""

from pyro_l0.training.epochs import Checkpoint, epochs
from pyro_l0.training.processes import process_group

__all__ = ["Checkpoint", "epochs", "process_group"]
