"""The layers of an MLP by each method of ``comparators.py``: noise, penalty, and which units leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bench.pruning.comparator_noise import LogNormals, TruncatedLogNormal

__all__ = ["METHODS", "Convolution", "Layer"]

GLOBAL_SCALE = 1e-5  # of the half-Cauchy prior of a layer's common scale in BC-GHS


class Layer(nn.Module):
    """A dense layer behind noisy units; a method overrides what it needs. The base is the layer without noise."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")
        nn.init.zeros_(self.linear.bias)
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        """A noisy pass over a batch."""
        return self.linear(x)

    def penalty(self) -> Tensor:
        """What the method adds to the loss of the whole data set, in nats; shape ``()``."""
        return torch.zeros(())

    def after_step(self, progress: float) -> None:
        """What the method does to the weights after a step; ``progress`` is the share of training that is over."""

    def pruned(self) -> tuple[Tensor, Tensor]:
        """The deterministic weights, and for each unit read whether it stays."""
        return self.linear.weight.detach(), torch.ones(self.linear.in_features, dtype=torch.bool)


class Convolution(nn.Module):
    """A convolution by a method's layer, whose units are the maps that it reads.

    A linear layer makes of the maps at each pixel what they add to all outputs around it, and these are summed.
    """

    def __init__(self, layer: Layer, size: int) -> None:
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, maps, height, width)``, with the outputs for which all pixels are there."""
        height, width = x.shape[2:]
        parts = self.layer(x.flatten(2).mT).mT
        spread, rim = (height + self.size - 1, width + self.size - 1), self.size - 1
        return F.fold(parts, spread, self.size)[:, :, rim:-rim, rim:-rim]

    def as_filters(self, weight: Tensor) -> Tensor:
        """The layer's weights as those of a convolution."""
        return weight.view(-1, self.size, self.size, weight.shape[1]).flip(1, 2).permute(0, 3, 1, 2)


def units(x: Tensor) -> Tensor:
    """One number for each unit of each example; those of a map have the same noise at all pixels."""
    return x if x.dim() == 2 else x[:, :1]


class Dropout(Layer):
    """Dropout of 0.2 of the inputs and half of the hidden units."""

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.2 if self.linear.in_features == 784 else 0.5
        return self.linear(x * F.dropout(torch.ones_like(units(x)), rate))


class ConcreteDropout(Layer):
    """One learned rate per layer (Gal, Hron, Kendall 2017): a relaxed Bernoulli of temperature 0.1."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.logit = nn.Parameter(torch.tensor(-1.4))  # of dropping

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(units(x)).clamp(1e-6, 1 - 1e-6)
        dropped = torch.sigmoid((self.logit + torch.logit(u)) / 0.1)
        return self.linear(x * (1 - dropped) / torch.sigmoid(-self.logit))

    def penalty(self) -> Tensor:
        """Weights with a prior of length scale 0.01 over their keep rate, minus the entropy of the rate."""
        p = torch.sigmoid(self.logit)
        entropy = -(p * F.logsigmoid(self.logit) + (1 - p) * F.logsigmoid(-self.logit))
        weights = 0.5e-4 * self.linear.weight.square().sum() / (1 - p)
        return self.strength * (weights - self.linear.in_features * entropy)


class Generalized(Layer):
    """A rate per unit under a Beta prior, trained by straight-through draws (Srinivas and Babu 2016)."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.logit = nn.Parameter(torch.full((fan_in,), 1.4))

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.sigmoid(self.logit)
        draw = (torch.rand_like(units(x)) < rate).to(x)
        return self.linear(x * (draw + rate - rate.detach()))

    def penalty(self) -> Tensor:
        """Minus the log density of Beta(a, b) at the rates, a < b < 1: mass at both ends, and more at 0."""
        low = 10 * self.strength * self.linear.out_features / 100
        return low * (0.9 * F.logsigmoid(self.logit) + 0.1 * F.logsigmoid(-self.logit)).sum()

    def pruned(self) -> tuple[Tensor, Tensor]:
        return self.linear.weight.detach(), self.logit.detach() > 0


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL of N(mu, alpha mu^2) to the improper log-uniform prior, as fitted by Molchanov et al. (2017, eq. 14)."""
    fitted = 0.63576 * (torch.sigmoid(1.87320 + 1.48695 * log_alpha) - 1)
    return 0.5 * F.softplus(-log_alpha) - fitted


def noisy_product(linear: nn.Linear, x: Tensor, log_var: Tensor) -> Tensor:
    """What normal weights of these variances make of a batch, with the noise drawn where it arrives."""
    mean, variance = linear(x), F.linear(x.square(), log_var.exp())
    noisy: Tensor = mean + torch.sqrt(variance + 1e-8) * torch.randn_like(mean)
    return noisy


class SparseVD(Layer):
    """Gaussian noise per weight whose scale is learned (Molchanov, Ashukha, Vetrov 2017)."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.log_var = nn.Parameter(torch.full((fan_out, fan_in), -10.0))

    @property
    def log_alpha(self) -> Tensor:
        """Log of the variance over the squared mean."""
        return (self.log_var - torch.log(self.linear.weight.square() + 1e-8)).clamp(-10, 10)

    def forward(self, x: Tensor) -> Tensor:
        """A noisy pass over a batch, with the noise drawn where it arrives."""
        return noisy_product(self.linear, x, self.log_var)

    def penalty(self) -> Tensor:
        return self.strength * log_uniform_kl(self.log_alpha).sum()

    def pruned(self) -> tuple[Tensor, Tensor]:
        """Weights of log alpha above 3 are 0; a unit leaves when all its weights are."""
        weight = self.linear.weight.detach() * (self.log_alpha.detach() < 3)
        return weight, (weight != 0).any(0)


class VIB(Layer):
    """Units as information bottlenecks: Gaussian noise around a learned multiplier (Dai et al. 2018)."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.mu = nn.Parameter(1 + 0.01 * torch.randn(fan_in))
        self.log_var = nn.Parameter(torch.full((fan_in,), -9.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * (self.mu + torch.exp(0.5 * self.log_var) * torch.randn_like(units(x))))

    def penalty(self) -> Tensor:
        """Half of log(1 + mu^2 / var), weighed by the units that read it."""
        information = 0.5 * torch.log1p(self.mu.square() / self.log_var.exp()).sum()
        return 2 * self.strength * self.linear.out_features**0.5 * information

    def pruned(self) -> tuple[Tensor, Tensor]:
        """A unit leaves when its noise exceeds its signal; the multiplier goes into the weights."""
        keep = self.log_var.detach() < torch.log(self.mu.detach().square())
        return self.linear.weight.detach() * self.mu.detach(), keep


class SBP(Layer):
    """Structured Bayesian pruning: truncated log-normal noise per unit."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.noise = TruncatedLogNormal(fan_in)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.noise.rsample(units(x).shape))

    def penalty(self) -> Tensor:
        return 8 * self.strength * self.noise.kl().sum()

    def pruned(self) -> tuple[Tensor, Tensor]:
        """A unit leaves when its signal is smaller than its noise; the mean goes into the weights."""
        mean, snr = self.noise.mean_and_snr()
        return self.linear.weight.detach() * mean.detach(), snr.detach() > 1


class BCGNJ(Layer):
    """Group noise under a normal-Jeffreys prior with Gaussian weights (Louizos, Ullrich, Welling 2017)."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.mu = nn.Parameter(1 + 0.01 * torch.randn(fan_in))
        self.log_var = nn.Parameter(torch.full((fan_in,), -9.0))
        self.weight_log_var = nn.Parameter(torch.full((fan_out, fan_in), -9.0))

    @property
    def log_alpha(self) -> Tensor:
        """Log of the groups' variance over the squared mean."""
        return self.log_var - torch.log(self.mu.square() + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * (self.mu + torch.exp(0.5 * self.log_var) * torch.randn_like(units(x)))
        return noisy_product(self.linear, scaled, self.weight_log_var)

    def penalty(self) -> Tensor:
        """KL of the groups, and of the weights to a standard normal."""
        groups = log_uniform_kl(self.log_alpha).sum()
        log_var = self.weight_log_var
        weights = 0.5 * (log_var.exp() + self.linear.weight.square() - 1 - log_var).sum()
        return self.strength * (groups + weights)

    def pruned(self) -> tuple[Tensor, Tensor]:
        """A unit leaves when log alpha of its group is above 3, or its group is next to 0."""
        return self.linear.weight.detach() * self.mu.detach(), self.log_alpha.detach() < 3


class BCGHS(Layer):
    """Group noise under half-Cauchy priors, of each group and of all, with Gaussian weights (Louizos et al. 2017)."""

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.groups, self.all = LogNormals(fan_in, 1.0), LogNormals(1, GLOBAL_SCALE)
        with torch.no_grad():
            self.all.tenth_loc[1] = -self.all.tenth_loc[0]  # so that the scales start at 1
        self.weight_log_var = nn.Parameter(torch.full((fan_out, fan_in), -9.0))

    def log_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logarithm of each group's scale."""
        (mean, var), (of_all, var_of_all) = self.groups.log_moments(), self.all.log_moments()
        return mean + of_all, var + var_of_all

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.log_moments()
        scaled = x * torch.exp(mean + var.sqrt() * torch.randn_like(units(x)))
        return noisy_product(self.linear, scaled, self.weight_log_var)

    def penalty(self) -> Tensor:
        """KL of the scales, and of the weights to a standard normal."""
        log_var = self.weight_log_var
        weights = 0.5 * (log_var.exp() + self.linear.weight.square() - 1 - log_var).sum()
        return self.strength * (self.groups.kl().sum() + self.all.kl().sum() + weights)

    def pruned(self) -> tuple[Tensor, Tensor]:
        """A unit leaves when the mode of its scale is below a twentieth; the paper reads its threshold off a plot."""
        mean, var = (x.detach() for x in self.log_moments())
        return self.linear.weight.detach() * torch.exp(mean + var / 2), mean - var > -3


class GroupLasso(Layer):
    """The norm of each unit's outgoing weights, by proximal steps after the optimiser's."""

    def after_step(self, progress: float) -> None:
        """Shrink each group by the same length, and to 0 if it is shorter."""
        step = 1e-3 * 0.006 * self.strength * self.linear.out_features**0.5
        with torch.no_grad():
            norms = self.linear.weight.norm(dim=0)
            self.linear.weight *= (1 - step / norms.clamp(min=1e-12)).clamp(min=0)

    def pruned(self) -> tuple[Tensor, Tensor]:
        """Groups of exact zeros leave."""
        return self.linear.weight.detach(), self.linear.weight.detach().norm(dim=0) > 0


class ADMM(Layer):
    """Weights are drawn to a copy in which the units of the smallest groups are 0; at the end these leave.

    Over the last third of training the units that leave stay at 0 and the others are trained on.
    """

    keep = 0.3  # of a layer's units

    def __init__(self, fan_in: int, fan_out: int, strength: float) -> None:
        super().__init__(fan_in, fan_out, strength)
        self.register_buffer("dual", torch.zeros(fan_out, fan_in))
        self.register_buffer("copy", self.linear.weight.detach().clone())
        self.dual: Tensor
        self.copy: Tensor
        self.mask: Tensor | None = None
        self.steps = 0

    def _largest(self, weight: Tensor) -> Tensor:
        count = max(1, round(self.keep * weight.shape[1] / self.strength))
        norms = weight.norm(dim=0)
        return norms >= norms.topk(min(count, len(norms))).values[-1]

    def penalty(self) -> Tensor:
        """Half of the squared distance, per example."""
        if self.mask is not None:
            return torch.zeros(())
        return 60_000 * 0.5 * 3e-3 * (self.linear.weight - self.copy + self.dual).square().sum()

    def after_step(self, progress: float) -> None:
        """Every 500 steps: project the copy, then raise the duals; at two thirds: prune."""
        self.steps += 1
        with torch.no_grad():
            if progress > 2 / 3:
                if self.mask is None:
                    self.mask = self._largest(self.linear.weight)
                self.linear.weight *= self.mask
            elif self.steps % 500 == 0:
                moved = self.linear.weight + self.dual
                self.copy.copy_(moved * self._largest(moved))
                self.dual.add_(self.linear.weight - self.copy)

    def pruned(self) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight.detach()
        return weight, self._largest(weight) if self.mask is None else self.mask


METHODS: dict[str, type[Layer]] = {
    "dropout": Dropout,
    "concrete_dropout": ConcreteDropout,
    "generalized": Generalized,
    "sparse_vd": SparseVD,
    "vibnet": VIB,
    "sbp": SBP,
    "bc_gnj": BCGNJ,
    "bc_ghs": BCGHS,
    "group_lasso": GroupLasso,
    "admm": ADMM,
}
