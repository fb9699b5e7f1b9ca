"""An operation of one's own, and its rule for the network engine: everything that a user has to write."""

import torch
from torch import Tensor

from pyro_l0.nn.engine import Maps, Operation, rule


@torch.library.custom_op("mine::swap_halves", mutates_args=())
def swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


swap_halves.register_autograd(lambda ctx, grad: grad.roll(-(grad.shape[-1] // 2), -1))


@rule("mine::swap_halves")
def swap_halves_rule(maps: Maps, operation: Operation) -> None:
    """Units stay, since their number says where the halves begin; the dimensions in front are the same."""
    x, output = operation.value("x"), operation.output
    for dim in range(x.rank - 1):
        maps.passes(x, dim, output, dim)
    maps.fixes(x, x.rank - 1)
    maps.fixes(output, output.rank - 1)
