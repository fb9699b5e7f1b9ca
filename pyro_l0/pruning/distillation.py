"""Distillation: a pruned network learns from the network that was given, beside the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Distil", "Distillation"]

_SUM = 1e-3  # how far sums of probabilities are from 1, at most
Distil = tuple[float, float | Callable[..., Tensor]]


@dataclass(frozen=True)
class Distillation:
    r"""A loss that also compares a network's outputs with those of a teacher; ``prune(..., distil=...)`` makes it.

    .. math:: (1 - w) L + w T^2 \operatorname{KL}(\operatorname{softmax}(t / T) \,\|\, \operatorname{softmax}(s / T)),

    where L is the loss on the targets, s and t are the class logits of network and teacher, and the KL in nats is a
    mean over examples and positions. A function of both outputs can replace T; it returns the factor of w.

    Class logits are the outputs, or their entry ``logits``; targets are the batch's, or their entry ``labels``. There
    is an integer target for each vector of logits, whose dimension is the second or the last one; negative targets,
    such as transformers' -100, are left out of the mean.

    Attributes:
        teacher: the teacher, in evaluation mode.
        weight: w, in (0, 1].
        by: the temperature, or a function of the network's and the teacher's outputs that returns shape ``()``.

    Example:
        >>> distillation = Distillation(nn.Linear(2, 3), weight=0.5, by=2.0)
        >>> logits, targets = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])
        >>> float(distillation.divergence(logits, logits, targets))
        0.0

    References:
        Hinton, Vinyals, Dean (2015), arXiv:1503.02531; section 2.
    """

    teacher: nn.Module
    weight: float
    by: float | Callable[..., Tensor]

    def divergence(self, outputs: object, taught: object, targets: object) -> Tensor:
        """The factor of w, shape ``()``: T² KL in nats, or the function's value."""
        if callable(self.by):
            return self.by(outputs, taught)
        logits, other = _entry(outputs, "logits"), _entry(taught, "logits")
        dim, is_counted = _classes(logits, _entry(targets, "labels"))
        assert isinstance(logits, Tensor)
        assert isinstance(other, Tensor)
        student, teacher = (
            F.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)) / self.by, dim) for x in (logits, other)
        )
        each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim)
        return self.by**2 * (each * is_counted).sum() / is_counted.sum().clamp(min=1)

    def check(self, taught: object) -> None:
        """Refuse outputs that are probabilities already, of which a softmax makes others."""
        logits = None if callable(self.by) else _entry(taught, "logits")
        if isinstance(logits, Tensor) and logits.dim() > 1 and bool((logits >= 0).all()):
            sums = (logits.sum(dim) - 1 for dim in (1, -1))
            if any(bool((far.abs() < _SUM).all()) for far in sums):
                raise ValueError(
                    "Expected class logits to distil from, but the network returns probabilities; return the logits, "
                    "or give distil=(weight, function) with a function of the network's and the teacher's outputs."
                )


def _entry(value: object, name: str) -> object:
    """What a dict or a data class has under a name, or the value itself."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, value)


def _classes(logits: object, targets: object) -> tuple[int, Tensor]:
    """The dimension of the classes, and which positions count."""
    if isinstance(logits, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point():
        shape = tuple(logits.shape)
        dims = {dim for dim in (1, len(shape) - 1) if dim < len(shape) > 1 < shape[dim]}
        fitting = [dim for dim in dims if shape[:dim] + shape[dim + 1 :] == tuple(targets.shape)]
        if len(fitting) == 1:
            return fitting[0], targets >= 0
    got = [
        f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in (logits, targets)
    ]
    raise ValueError(
        f"Expected class logits to distil from, and for each vector of them an integer target, but got {got[0]} and "
        f"{got[1]}; for other outputs give distil=(weight, function) with a function of the network's and the "
        "teacher's outputs, such as torch.nn.functional.mse_loss."
    )
