"""Training in epochs: a loop, checkpoints to resume from, and several processes that train together."""

from pyro_l0.training.epochs import Checkpoint, epochs
from pyro_l0.training.epochs import Trainable as Trainable
from pyro_l0.training.processes import average_gradients as average_gradients
from pyro_l0.training.processes import process_group

# What a star brings; what is imported "as" itself is public, too.
__all__ = ["Checkpoint", "epochs", "process_group"]
