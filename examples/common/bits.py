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
from pyro_l0.compaction.storage import replace_file

__all__ = ["Precision", "bit_precision", "load_quantised", "quantise", "save_quantised"]

_STEP = "#step"


class Precision(NamedTuple):
    """Step of a layer's rounded weights, and bits of each that is not zero, its sign included."""

    step: float
    bits: int


@torch.no_grad()
def bit_precision(
    network: nn.Module, keep: Mapping[str, Tensor] | None = None, nats: float = 0.05
) -> dict[str, Precision]:
    """Find the coarsest rounding of each layer's weights that the posterior allows, by path of the layer.

    Rounding to multiples of delta changes a weight by a variance of delta^2 / 12. At a maximum of the bound the
    curvature of the loss is about 1 / s^2, so that this costs delta^2 / (24 s^2) nats. The step is where the mean of
    that over the layer's weights is ``nats``; the posterior's own noise costs 1/2. ``keep`` says which weights count,
    by default those of the median probability model. Louizos, Ullrich, Welling (2017), Section 3.3, take the bits from
    the variances, too.
    """
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
    """Round the weights and biases of a plain network, in place, to multiples of the layers' steps."""
    for path, (step, _) in precision.items():
        for parameter in network.get_submodule(path).parameters():
            parameter.copy_((parameter / step).round() * step)
    return network


def save_quantised(network: nn.Module, precision: Mapping[str, Precision], path: Path | str) -> int:
    """Save a rounded network as integers, in a NumPy file that ``lzma`` compresses; returns its size in bytes."""
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
    """Read a network that ``save_quantised`` saved, as a state dict for one of the same shapes."""
    with lzma.open(path) as file, np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    steps = {name.removesuffix(_STEP): found.pop(name) for name in list(found) if name.endswith(_STEP)}
    return {name: value * steps[name] if name in steps else value for name, value in found.items()}
