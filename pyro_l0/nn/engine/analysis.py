"""What closed gates make of a recorded network: which entries of every tensor can leave, and why others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pyro_l0.nn.engine.record import Recording

__all__ = ["Analysis", "Fold", "GateMap", "ReducedNorm", "analyse"]


@dataclass(frozen=True)
class Fold:
    """Inputs of a layer that are the same for every example, and leave: their contribution goes into its bias.

    Attributes:
        path: the module that called the layer.
        weight: name of its weight.
        bias: name of its bias, None if there is none.
        dim: dimension of the weight that reads the inputs.
        units: which of the inputs leave, in the numbering of the full layer.
        constant: their values, shape ``(units,)``; or ``(units, *positions)`` where they differ from place to place.
        is_padded: whether the layer pads its input with zeros, so that the contribution is a map.
    """

    path: str
    weight: str
    bias: str | None
    dim: int
    units: Tensor
    constant: Tensor
    is_padded: bool

    @property
    def is_map(self) -> bool:
        """Whether the contribution differs from place to place, so that it fits one size of input alone."""
        return self.is_padded or self.constant.dim() > 1


@dataclass(frozen=True)
class GateMap:
    """The units in front of a gate and behind it, in the numbering of the full gate.

    Where they differ, the gate selects: a unit in front that is not behind ends here, and one behind that is not in
    front begins here, as zeros. Every unit that is in one alone is closed. All calls of a gate have one map.
    """

    kept_in: Tensor
    kept_out: Tensor


@dataclass(frozen=True)
class ReducedNorm:
    """A LayerNorm or RMSNorm some of whose units leave; those that left were zeros, and still count in its mean.

    Attributes:
        path: the module that called it.
        kind: ``"layer"`` or ``"rms"``.
        weight: name of its weight, None if there is none.
        size: number of units that there were.
        kept: those that stay.
    """

    path: str
    kind: str
    weight: str | None
    size: int
    kept: Tensor


@dataclass(frozen=True)
class Analysis:
    """Answer of :func:`analyse`. Indices are int64 on the CPU, in the numbering of the recorded network.

    Attributes:
        kept: by name of a parameter or buffer that was used (every name of a tied one), the indices that stay in
            each of its dimensions.
        folds: constant inputs that go into biases.
        gates: by site, what stays in front of and behind the gate.
        norms: norms over units of which some leave.
        zero_channels: by path of a BatchNorm, its channels (in the full numbering) whose input is zero; their running
            mean is to be set to 0, its limit.
        removed: by site, the units that leave behind the gate.
        reasons: by site, the closed units that stay behind the gate or in front of it, and why.
        barriers: operations without a rule that units would have to pass, and how often.
        shrunk: by module path, sizes of tensors that shrank while the module ran, and what they are now.
    """

    kept: dict[str, tuple[Tensor, ...]]
    folds: list[Fold]
    gates: dict[str, GateMap]
    norms: list[ReducedNorm]
    zero_channels: dict[str, Tensor]
    removed: dict[str, Tensor]
    reasons: dict[str, dict[int, str]]
    barriers: Counter[str]
    shrunk: dict[str, dict[int, int]]

    def multiply_adds(self, kept: bool = True) -> int:
        """Multiply-adds of the recorded contractions and convolutions, without scaled-dot-product attention.

        Args:
            kept: whether to count what stays, or the recorded network.
        """
        raise NotImplementedError

    def attention_multiply_adds(self, kept: bool = True) -> int:
        """Multiply-adds of scaled-dot-product attention, which torch's counter misses on some machines."""
        raise NotImplementedError


def analyse(
    recording: Recording,
    closed: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    folds: bool = True,
) -> Analysis:
    """Find the units that can leave a network whose closed gates are zero, so that its outputs stay as they are.

    Args:
        recording: the network, recorded.
        closed: by site, which gates are closed, bool of shape ``(size,)``; a missing site has none.
        values: by site, the values of gates that are fixed. Without them the gates that are not closed stay random,
            so that what they make of a constant varies; this is the way while training.
        folds: whether inputs of a layer that are constant may leave into its bias. While training they stay, since
            their derivatives would change.

    Raises:
        ValueError: a site is not recorded, or a shape does not fit.
    """
    raise NotImplementedError
