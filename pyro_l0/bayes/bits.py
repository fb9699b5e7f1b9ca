"""Bits that a weight needs, by how sure the posterior is of it, and files of rounded networks."""

from __future__ import annotations

import io
import lzma
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.bayes.network import bayesian_layers
from pyro_l0.compaction.files import replace_file

__all__ = ["Precision", "bit_precision", "load_quantised", "quantise", "save_quantised"]

_STEP = "#step"


class Precision(NamedTuple):
    """Step and bits of a layer's rounded weights; :func:`bit_precision` has an example.

    Attributes:
        step: Distance between neighbouring values.
        bits: Bits of each weight that is not zero, its sign included.
    """

    step: float
    bits: int


@torch.no_grad()
def bit_precision(
    network: nn.Module, keep: Mapping[str, Tensor] | None = None, nats: float = 0.05
) -> dict[str, Precision]:
    r"""Find the coarsest rounding of each layer's weights that the posterior allows.

    Rounding to multiples of :math:`\delta` changes a weight by a variance of :math:`\delta^2 / 12`. At a maximum of the
    bound the curvature of the loss is about :math:`1 / s^2`, so that this costs :math:`\delta^2 / (24 s^2)` nats. The
    step is where the mean of that over the layer's weights is ``nats``; what the posterior's own noise costs is 1/2.

    Args:
        network: The trained result of :func:`~pyro_l0.bayes.bayesian`.
        keep: Which weights count, by path of each Bayesian layer, such as the result of
            :func:`~pyro_l0.bayes.active_weights`; by default those of the median probability model.
        nats: Mean cost of rounding a weight, in nats.

    Returns:
        The precision by path of each Bayesian layer; a layer that has no weights left has 0 bits.

    Raises:
        ValueError: ``nats`` is not positive, or the network has no Bayesian layers.

    Example:
        Round a network, save it, and load it into one of the same shapes:

        >>> import tempfile
        >>> from pyro_l0.bayes import bayesian, plain_network
        >>> net = bayesian(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), init_active_prob=0.9)
        >>> precision = bit_precision(net)
        >>> rounded = quantise(plain_network(net), precision)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save_quantised(rounded, precision, f"{folder}/weights.npz.xz")
        ...     state = load_quantised(f"{folder}/weights.npz.xz")
        >>> plain_network(net).load_state_dict(state)
        <All keys matched successfully>

    References:
        Louizos, Ullrich, Welling (2017), arXiv:1705.08665, Section 3.3, takes the bits from the variances, too.
    """
    if not 0 < nats < math.inf:
        raise ValueError(f"Expected nats to be positive and finite, but got {nats}.")
    found = {}
    for path, layer in bayesian_layers(network).items():
        counts = layer.active_prob > 0.5 if keep is None else keep[path]
        weights, scale = layer.mean[counts], layer.slab.scale[counts]
        if not len(weights):
            found[path] = Precision(1.0, 0)
            continue
        step = math.sqrt(24 * nats / float(scale.double().pow(-2).mean()))
        largest = round(float(weights.abs().max()) / step)
        found[path] = Precision(step, 1 + max(1, largest).bit_length())
    return found


@torch.no_grad()
def quantise(network: nn.Module, precision: Mapping[str, Precision]) -> nn.Module:
    """Round the weights and biases of a plain network, in place, to multiples of the layers' steps.

    Args:
        network: The result of :func:`~pyro_l0.bayes.plain_network`; :func:`bit_precision` has an example.
        precision: The result of :func:`bit_precision`.

    Returns:
        The same network.
    """
    for path, (step, _) in precision.items():
        for parameter in network.get_submodule(path).parameters():
            parameter.copy_((parameter / step).round() * step)
    return network


def save_quantised(network: nn.Module, precision: Mapping[str, Precision], path: Path | str) -> int:
    """Save a rounded network as integers, in a NumPy file that ``lzma`` compresses.

    Args:
        network: The result of :func:`quantise`; :func:`bit_precision` has an example.
        precision: What it was rounded with.
        path: The file to write, such as ``weights.npz.xz``.

    Returns:
        The size of the file in bytes.

    Raises:
        ValueError: A weight is not a multiple of its layer's step.
    """
    arrays = {}
    for name, value in network.state_dict().items():
        step = precision[layer].step if (layer := name.rpartition(".")[0]) in precision else None
        if step is None:
            arrays[name] = value.numpy(force=True)
            continue
        codes = (value.double() / step).round()
        if not torch.allclose(codes * step, value.double(), rtol=1e-5, atol=1e-6 * step):
            raise ValueError(
                f"Expected {name!r} to be multiples of {step:g}, but it is not; quantise the network first."
            )
        arrays[name] = codes.numpy(force=True).astype(np.min_scalar_type(-1 - int(codes.abs().max())))
        arrays[name + _STEP] = np.float32(step)
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # whose headers repeat each other, so that the whole is packed and not each array
    packed = lzma.compress(stream.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    replace_file(Path(path), packed)
    return len(packed)


def load_quantised(path: Path | str) -> dict[str, Tensor]:
    """Read a network that :func:`save_quantised` saved; :func:`bit_precision` has an example.

    Args:
        path: The file.

    Returns:
        A state dict for a plain network of the same shapes.
    """
    with lzma.open(path) as file, np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    steps = {name.removesuffix(_STEP): found.pop(name) for name in list(found) if name.endswith(_STEP)}
    return {name: value * steps[name] if name in steps else value for name, value in found.items()}
