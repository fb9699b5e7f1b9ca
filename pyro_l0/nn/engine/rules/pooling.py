"""Rules of pooling, resizing and padding of images."""

from __future__ import annotations

import re

from pyro_l0.nn.engine.maps import Maps, rule
from pyro_l0.nn.engine.tape import Operation

__all__: list[str] = []

_POOLS = """max_pool{n}d avg_pool{n}d max_pool{n}d_with_indices _adaptive_avg_pool{n}d adaptive_avg_pool{n}d
adaptive_max_pool{n}d reflection_pad{n}d replication_pad{n}d mkldnn_max_pool{n}d upsample_nearest{n}d
_upsample_nearest_exact{n}d fractional_max_pool{n}d quantized_max_pool{n}d"""
_RESIZES = "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa"


@rule(
    *(f"aten::{name.format(n=n)}" for name in _POOLS.split() for n in (1, 2, 3)),
    *(f"aten::{name}" for name in _RESIZES.split()),
)
def pool(maps: Maps, operation: Operation) -> None:
    """Images stay; channels pass, each by itself, and one that is zero or constant is so afterwards."""
    x = operation.inputs[0]
    match = re.search(r"(\d)d", operation.name)
    assert match is not None
    image = range(-int(match[1]), 0)
    maps.fixes(x, *image)
    for output in operation.made:
        maps.set_state(output, maps.state(x))
        maps.passes_rest(x, output, *image)
        maps.fixes(output, *image)
