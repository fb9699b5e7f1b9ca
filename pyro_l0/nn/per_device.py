"""Constants that are used on several devices."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PerDevice"]


class PerDevice:
    """A constant on the CPU that is moved to each device only once, as the host waits for that."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._moved = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        """The same on a device."""
        if device not in self._moved:
            self._moved[device] = self._value.to(device)
        return self._moved[device]
