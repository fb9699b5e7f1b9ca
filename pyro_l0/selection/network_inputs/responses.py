"""What a network's outputs say of an observation: a normal mean, or the logits of classes."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.distributions import Categorical, Normal, TorchDistribution
from torch import Tensor, nn

__all__ = ["ClassResponse", "NormalResponse", "Response"]

_LEAST_NOISE = 1e-3  # standard deviations of the observations


class Response(nn.Module):
    """How observations are encoded, and their distribution given what a network returns for them."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Numbers that a network returns for an observation."""

    @abstractmethod
    def encode(self, y: NDArray[np.generic]) -> Tensor:
        """Observations as the distribution takes them, shape ``(n,)``."""

    @abstractmethod
    def output(self, raw: Tensor) -> Tensor:
        """A network's outputs in the shape that :meth:`distribution` takes; refuses outputs of another shape."""

    @abstractmethod
    def distribution(self, output: Tensor) -> TorchDistribution:
        """The distribution of encoded observations, batch shape ``(n,)``."""


class NormalResponse(Response):
    """Observations that are normal around the network's output, in units of their standard deviation."""

    def __init__(self, y: NDArray[np.float64]) -> None:
        super().__init__()
        self.mean, self.unit = float(y.mean()), float(y.std()) or 1.0
        self.log_noise = nn.Parameter(torch.zeros(()))

    @property
    def outputs(self) -> int:
        """One number, the mean."""
        return 1

    def encode(self, y: NDArray[np.generic]) -> Tensor:
        """Standardised observations."""
        return torch.as_tensor((y.astype(np.float64) - self.mean) / self.unit).to(self.log_noise)

    def output(self, raw: Tensor) -> Tensor:
        """The means, shape ``(n,)``."""
        if raw.dim() not in (1, 2) or raw.numel() != len(raw):
            raise ValueError(f"Expected a net that returns one number for each row, but got {tuple(raw.shape)}.")
        return raw.view(-1)

    def distribution(self, output: Tensor) -> TorchDistribution:
        """Normal with the noise that the held-out observations have."""
        noise = self.log_noise.clamp(min=math.log(_LEAST_NOISE)).exp()
        return Normal(output, noise, validate_args=False)

    def decode(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Means in the units of the observations."""
        return self.mean + self.unit * mean


class ClassResponse(Response):
    """Observations that are classes, given in their order, of which the network returns the logits."""

    def __init__(self, classes: NDArray[np.generic]) -> None:
        super().__init__()
        self.classes = classes

    @property
    def outputs(self) -> int:
        """One logit for each class."""
        return len(self.classes)

    def encode(self, y: NDArray[np.generic]) -> Tensor:
        """The number of each observation's class."""
        return torch.as_tensor(np.searchsorted(self.classes, y))

    def output(self, raw: Tensor) -> Tensor:
        """Logits, shape ``(n, C)``; a single logit per row is that of the second of two classes."""
        if self.outputs == 2 and raw.dim() in (1, 2) and raw.numel() == len(raw):
            logit = raw.view(-1)
            return torch.stack([torch.zeros_like(logit), logit], -1)
        if raw.dim() != 2 or raw.shape[1] != self.outputs:
            raise ValueError(
                f"Expected a net that returns {self.outputs} logits for each row, one for each class"
                f"{', or the logit of the second' if self.outputs == 2 else ''}, but got {tuple(raw.shape)}."
            )
        return raw

    def distribution(self, output: Tensor) -> TorchDistribution:
        """Categorical with these logits."""
        return Categorical(logits=output, validate_args=False)
