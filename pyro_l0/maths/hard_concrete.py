"""The hard concrete: t(z) is the logit of the unstretched variable, a = temperature * t - log_alpha that of the cdf."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.backend import Context, transformed
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number, cat_flat, clamp_backward, last, log, log1mexp

_Context = Context[tuple[float, Stretch, Tensor, Tensor, Tensor, list[torch.Size]]]


def logistic_noise(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard logistic draws with their full tails.

    The logit of a 24-bit uniform stops at 16.6 and may be infinite in float32. In main memory the uniform is drawn in
    double, which reaches 36.7 (a draw beyond has probability 2e-16); elsewhere, where double may be slow or missing,
    the log of a ratio of two exponentials reaches beyond 80, but takes four times as long on a CPU.
    """
    if device.type == "cpu":
        return torch.rand(shape, dtype=torch.float64).logit_(2.0**-54).to(dtype)
    tiny = torch.finfo(dtype).tiny
    log_e = torch.empty((2, *shape), dtype=dtype, device=device).exponential_().clamp_(min=tiny).log_()
    return log_e[0] - log_e[1]


def transform(noise: Tensor, log_alpha: Tensor, temperature: Number, stretch: Stretch) -> Tensor:
    """The gate that standard logistic noise turns into (eq. 10-11 of the L0 paper)."""
    if isinstance(temperature, Tensor):
        y = (log_alpha + noise) / temperature
    else:
        y = torch.add(noise / temperature, log_alpha, alpha=1 / temperature)  # one operation in the graph
    return (stretch.gamma + stretch.width * torch.sigmoid(y)).clamp(0, 1)


def log_probs(log_alpha: Tensor, temperature: Number, stretch: Stretch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log P(z = 0), log P(z = 1), log P(0 < z < 1) and log P(z != 0) (eq. 12, 24)."""
    a0 = temperature * stretch.t0 - log_alpha
    a1 = temperature * stretch.t1 - log_alpha
    log_active = F.logsigmoid(-a0)
    gap = torch.as_tensor(temperature * (stretch.t1 - stretch.t0), dtype=log_alpha.dtype, device=log_alpha.device)
    log_interior = F.logsigmoid(a1) + log_active + log1mexp(gap)
    return F.logsigmoid(a0), F.logsigmoid(-a1), log_interior, log_active


def log_density(z: Tensor, log_alpha: Tensor, temperature: Number, stretch: Stretch) -> Tensor:
    """Log density at 0 < z < 1 with respect to dz (eq. 23 stretched, eq. 26 before truncation)."""
    log_low = torch.log(z - stretch.gamma)
    log_high = torch.log(stretch.zeta - z)
    a = temperature * (log_low - log_high) - log_alpha
    return log(temperature) + log(stretch.width) - log_low - log_high + F.logsigmoid(a) + F.logsigmoid(-a)


def log_density_in_t(t: Tensor, log_alpha: Tensor, temperature: Number) -> Tensor:
    """Log density with respect to dt, t the logit of the unstretched variable."""
    a = temperature * t - log_alpha
    return log(temperature) + F.logsigmoid(a) + F.logsigmoid(-a)


def cdf_logit(z: Tensor, log_alpha: Tensor, temperature: Number, stretch: Stretch) -> Tensor:
    """Logit of P(Z <= z) at 0 <= z < 1 and of P(Z < 1) at z = 1 (eq. 24), broadcast."""
    return temperature * (torch.log(z - stretch.gamma) - torch.log(stretch.zeta - z)) - log_alpha


def icdf(p: Tensor, log_alpha: Tensor, temperature: Number, stretch: Stretch) -> Tensor:
    """The smallest z with F(z) >= p."""
    return transform(torch.log(p) - torch.log1p(-p), log_alpha, temperature, stretch)


def mean(log_alpha: Tensor, temperature: Number, nodes: Nodes) -> Tensor:
    """E[z], the integral of the survival function."""
    a = last(temperature) * nodes.t - log_alpha.unsqueeze(-1)
    measure = nodes.weight * nodes.slope
    mean, co_mean = (measure * torch.sigmoid(-a)).sum(-1), (measure * torch.sigmoid(a)).sum(-1)
    # Near 1 the slope of the mean is that of 1 - E[1 - z], whose terms are small instead of close to one.
    return torch.where(mean < 0.5, mean, 1 - co_mean)


def variance(log_alpha: Tensor, temperature: Number, stretch: Stretch, nodes: Nodes) -> Tensor:
    """Var[z] as a sum of non-negative terms, so that small variances keep their relative accuracy."""
    a = last(temperature) * nodes.t - log_alpha.unsqueeze(-1)
    below, above = torch.sigmoid(a), torch.sigmoid(-a)
    mean = (nodes.weight * nodes.slope * above).sum(-1)
    co_mean = (nodes.weight * nodes.slope * below).sum(-1)
    log_zero, log_one, _, _ = log_probs(log_alpha, temperature, stretch)
    m, m_bar = mean.unsqueeze(-1), co_mean.unsqueeze(-1)
    distance = torch.where(m < 0.5, nodes.z - m, m_bar - nodes.one_minus_z)
    interior = (nodes.weight * (last(temperature) * below * above * distance.square())).sum(-1)
    return torch.exp(log_zero) * mean.square() + torch.exp(log_one) * co_mean.square() + interior


def entropy(log_alpha: Tensor, temperature: Number, stretch: Stretch, nodes: Nodes) -> Tensor:
    """Entropy with respect to the mixed measure; it may be negative."""
    log_zero, log_one, _, _ = log_probs(log_alpha, temperature, stretch)
    log_density = log_density_in_t(nodes.t, log_alpha.unsqueeze(-1), last(temperature))
    interior = (nodes.weight * torch.exp(log_density) * (log_density - torch.log(nodes.slope))).sum(-1)
    return -torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one - interior


class _HardConcreteDraw(torch.autograd.Function):
    """P(z != 0) of all gates in one vector, and a draw of each."""

    @staticmethod
    def forward(
        ctx: _Context, noise: Tensor, temperature: float, stretch: Stretch, *log_alphas: Tensor
    ) -> tuple[Tensor, ...]:
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        s, active = torch.sigmoid(y), torch.sigmoid(x)
        z = (s * stretch.width).add_(stretch.gamma).clamp_(0, 1)
        ctx.save_for_backward(noise, *log_alphas)
        # Not as saved tensors, which one backward pass frees: a loss and a price may have one each.
        ctx.options = temperature, stretch, y, s, x, [a.shape for a in log_alphas]
        ctx.set_materialize_grads(False)
        return active, *_split_to(z, [a.shape for a in log_alphas])

    @staticmethod
    def backward(ctx: _Context, of_active: Tensor | None, *of_z: Tensor | None) -> tuple[Tensor | None, ...]:
        temperature, stretch, y, s, x, shapes = ctx.options
        if torch.is_grad_enabled():  # a graph of this gradient is being built
            noise, *log_alphas = ctx.saved_tensors
            y, x = _draw_logits(noise, temperature, stretch, log_alphas)
            s = torch.sigmoid(y)
        pieces = zip(of_z, shapes, strict=True)
        grad = cat_flat([x.new_zeros(shape) if g is None else g for g, shape in pieces])
        # The derivative of clamp at its result, 0 at the atoms; and sigmoid(-y), as 1 - s cancels near one.
        slope = (s * torch.sigmoid(-y)).mul_(stretch.width / temperature)
        grad = clamp_backward(grad, (s * stretch.width).add_(stretch.gamma), 0, 1).mul_(slope)
        if of_active is not None:
            grad.addcmul_(of_active, torch.sigmoid(x) * torch.sigmoid(-x))
        return None, None, None, *_split_to(grad, shapes)


def _draw_logits(
    noise: Tensor, temperature: float, stretch: Stretch, log_alphas: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of the variable on (0, 1) before it is stretched, and of P(z != 0), of all gates in one vector each."""
    log_alpha = cat_flat(log_alphas)
    return torch.add(noise, log_alpha).div_(temperature), log_alpha - temperature * stretch.t0


def _split_to(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def draw_jointly(log_alphas: Sequence[Tensor], temperature: float, stretch: Stretch) -> tuple[list[Tensor], Tensor]:
    """Draw hard concretes of several sites with one temperature and stretch, given as numbers.

    Gives the draws, each in the shape of its log alpha, and P(z != 0) of all gates in one vector. A layer has few
    gates, so that a formula takes as long as its operations take to be called and to be recorded for the gradient. Here
    both happen once for all sites, and the graph has one node.
    """
    size = torch.Size([sum(a.numel() for a in log_alphas)])
    noise = logistic_noise(size, log_alphas[0].dtype, log_alphas[0].device)
    if transformed():
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        z = (stretch.gamma + stretch.width * torch.sigmoid(y)).clamp(0, 1)
        return _split_to(z, [a.shape for a in log_alphas]), torch.sigmoid(x)
    active, *draws = _HardConcreteDraw.apply(  # type: ignore[no-untyped-call]
        noise, temperature, stretch, *log_alphas
    )
    return draws, active
