"""A log probability that a model adds to its own."""

from __future__ import annotations

import pyro
from pyro.distributions import Unit
from torch import Tensor

from pyro_l0.fast.record import sole_record


def factor(name: str, log_factor: Tensor) -> None:
    """Add a log probability to a model, such as a minibatch's log likelihood times the number of minibatches.

    Use it instead of ``pyro.factor``, whose check of the value makes the host wait for an accelerator in every step.

    Args:
        name: name of the site.
        log_factor: log probability in nats, of the shape of the plates around it; outside of plates it is summed.

    Raises:
        TypeError: ``log_factor`` is not a tensor.

    Example:
        >>> import torch
        >>> from pyro_l0.infer import L0_ELBO
        >>> L0_ELBO("l0").loss(lambda: factor("y", torch.tensor(-2.5)), lambda: None)
        2.5
    """
    if not isinstance(log_factor, Tensor):
        raise TypeError(f"Expected log_factor to be a tensor, but got {type(log_factor).__name__}.")
    fn = Unit(log_factor, validate_args=False)
    no_data = fn.sample()
    record = sole_record()
    if record is not None:
        record.observe(name, fn, no_data)
    else:
        pyro.sample(name, fn, obs=no_data)
