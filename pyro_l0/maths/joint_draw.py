"""Hard concretes of several sites drawn at once, with one node in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_l0.maths import hard_concrete
from pyro_l0.maths.host import Context, transformed
from pyro_l0.maths.quadrature import Stretch
from pyro_l0.maths.special import cat_flat, clamp_backward

_Context = Context[tuple[float, Stretch]]


class _HardConcreteDraw(torch.autograd.Function):
    """P(z != 0) of all gates in one vector, and a draw of each."""

    @staticmethod
    def forward(
        ctx: _Context, noise: Tensor, temperature: float, stretch: Stretch, *log_alphas: Tensor
    ) -> tuple[Tensor, ...]:
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        s, active = torch.sigmoid(y), torch.sigmoid(x)
        z = (s * stretch.width).add_(stretch.gamma).clamp_(0, 1)
        ctx.save_for_backward(noise, y, s, z, x, active, *log_alphas)
        ctx.options = temperature, stretch
        ctx.set_materialize_grads(False)
        return active, *_split_like(z, log_alphas)

    @staticmethod
    def backward(ctx: _Context, of_active: Tensor | None, *of_z: Tensor | None) -> tuple[Tensor | None, ...]:
        noise, y, s, z, x, active, *log_alphas = ctx.saved_tensors
        temperature, stretch = ctx.options
        if torch.is_grad_enabled():  # a graph of this gradient is being built
            y, x = _draw_logits(noise, temperature, stretch, log_alphas)
            s, active = torch.sigmoid(y), torch.sigmoid(x)
        pieces = zip(of_z, log_alphas, strict=True)
        grad = cat_flat([torch.zeros_like(a) if g is None else g for g, a in pieces])
        # The derivative of clamp at its result, 0 at the atoms; and sigmoid(-y), as 1 - s cancels near one.
        slope = (s * torch.sigmoid(-y)).mul_(stretch.width / temperature)
        grad = clamp_backward(grad, z, 0, 1).mul_(slope)
        if of_active is not None:
            grad.addcmul_(of_active, active * torch.sigmoid(-x))
        return None, None, None, *_split_like(grad, log_alphas)


def _draw_logits(
    noise: Tensor, temperature: float, stretch: Stretch, log_alphas: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of the stretched variable and of P(z != 0)."""
    log_alpha = cat_flat(log_alphas)
    return torch.add(noise, log_alpha).div_(temperature), log_alpha - temperature * stretch.t0


def _split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([x.numel() for x in like])
    return [piece if x.dim() == 1 else piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def hard_concretes(log_alphas: Sequence[Tensor], temperature: float, stretch: Stretch) -> tuple[list[Tensor], Tensor]:
    """Draw hard concretes of several sites with one temperature and stretch, given as numbers.

    A layer has few gates, so that a formula takes as long as its operations take to be called and to be recorded for
    the gradient. Here both happen once for all sites, and the graph has one node.

    Returns:
        The draws, each in the shape of its log alpha; P(z != 0) of all gates in one vector.
    """
    size = torch.Size([sum(a.numel() for a in log_alphas)])
    noise = hard_concrete.logistic_noise(size, log_alphas[0].dtype, log_alphas[0].device)
    if transformed():
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        z = (stretch.gamma + stretch.width * torch.sigmoid(y)).clamp(0, 1)
        return _split_like(z, log_alphas), torch.sigmoid(x)
    active, *draws = _HardConcreteDraw.apply(  # type: ignore[no-untyped-call]
        noise, temperature, stretch, *log_alphas
    )
    return draws, active
