"""Sites side by side in one vector, on the real line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Transform

from pyro_l0.distributions.gate import innermost
from pyro_l0.fast.record import Site

MEAN_FIELD = "use gates='mean_field' and slabs='independent', without hyper"  # advice where sites can't be correlated


class Layout:
    """Where the entries of each site of a run are in a vector of numbers on the real line.

    Transforms carry the real line to a site's support.
    """

    def __init__(self, sites: Mapping[str, Site], transforms: Mapping[str, Transform] | None = None) -> None:
        self.shapes = {name: site["value"].shape for name, site in sites.items()}
        self.event_dims = {name: site["fn"].event_dim for name, site in sites.items()}
        self.transforms = dict(transforms or {})
        self.real_shapes = {  # on the real line
            name: self.transforms[name].inverse_shape(shape) if name in self.transforms else shape
            for name, shape in self.shapes.items()
        }
        self.size = sum(shape.numel() for shape in self.real_shapes.values())

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """The entries of each site, shape ``(..., n)`` each, of a vector ``(..., size)``."""
        sizes = [shape.numel() for shape in self.real_shapes.values()]
        return dict(zip(self.real_shapes, flat.split(sizes, -1), strict=True))

    def positions(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Where the entries of each site are in the vector."""
        return self.pieces(torch.arange(self.size, device=device))

    def reals(self, flat: Tensor) -> dict[str, Tensor]:
        """Each site's value on the real line, of one vector."""
        return {name: x.reshape(self.real_shapes[name]) for name, x in self.pieces(flat).items()}

    def apart(self, flat: Tensor) -> dict[str, Tensor]:
        """Each site's value in its shape and support, of one vector."""
        return {
            name: self.transforms[name](x) if name in self.transforms else x for name, x in self.reals(flat).items()
        }

    def together(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector of values in their supports, with any dimensions in front."""
        flat = []
        for name, shape in self.real_shapes.items():
            x = self.transforms[name].inv(values[name]) if name in self.transforms else values[name]
            flat.append(x.reshape(*x.shape[: x.dim() - len(shape)], shape.numel()))
        return torch.cat(flat, -1)

    def log_jacobian(self, flat: Tensor) -> Tensor:
        """Log of the derivative of the map from one vector to the sites' supports, shape ``()``."""
        found = flat.new_zeros(())
        for name, real in self.reals(flat).items():
            if name in self.transforms:
                found = found + self.transforms[name].log_abs_det_jacobian(real, self.transforms[name](real)).sum()
        return found

    def normal(self, name: str, prior: object) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each entry of a site under its normal prior, shapes ``(n,)``."""
        inside = innermost(prior)
        if not isinstance(inside, torch.distributions.Normal):
            raise ValueError(
                f"Expected a Normal prior of slab site {name!r}, as it depends on other sites in this guide, but got "
                f"{prior}; {MEAN_FIELD}."
            )
        shape = self.shapes[name]
        return inside.loc.expand(shape).reshape(-1), inside.scale.expand(shape).reshape(-1)
