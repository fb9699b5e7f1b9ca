"""Responses that are not the library's, each written as a user would."""

import numpy as np
import torch
from torch.distributions import Beta, Gamma, HalfNormal

from pyro_l0.selection.families import Family

ONE = torch.ones((), dtype=torch.float64)


class GammaResponse(Family):
    """Positive numbers whose means have the logarithms eta, with a learned shape."""

    expected = "positive numbers"

    def takes(self, y):
        return y > 0

    def priors(self, y, unit):
        return {"shape": Gamma(2 * ONE, 0.5 * ONE)}

    def log_density(self, y, eta, shape):
        return shape * (shape.log() - eta + y.log()) - y.log() - shape.lgamma() - shape * y * (-eta).exp()

    def sample(self, eta, random, shape):
        return np.exp(eta) * random.gamma(np.broadcast_to(shape, eta.shape)) / shape

    def mean(self, eta, shape):
        return np.exp(eta)


class ZeroInflatedPoisson(Family):
    """Counts that are Poisson with log means eta, or zero with a learned probability."""

    expected = "whole numbers from 0"

    def takes(self, y):
        return (y >= 0) & (y == np.floor(y))

    def priors(self, y, unit):
        return {"zero": Beta(ONE, ONE)}

    def log_density(self, y, eta, zero):
        counts = (-zero).log1p() + y * eta - eta.exp() - (y + 1).lgamma()
        both = torch.stack(torch.broadcast_tensors(zero.log(), counts))
        return torch.where(y > 0, counts, torch.logsumexp(both, 0))

    def sample(self, eta, random, zero):
        return random.poisson(np.exp(eta)) * (random.random(eta.shape) > zero)

    def mean(self, eta, zero):
        return (1 - zero) * np.exp(eta)


class Exponential(Family):
    """Positive numbers whose means have the logarithms eta: a family without parameters of its own."""

    expected = "positive numbers"

    def takes(self, y):
        return y > 0

    def log_density(self, y, eta):
        return -eta - y * (-eta).exp()

    def sample(self, eta, random):
        return np.exp(eta) * random.exponential(size=eta.shape)

    def mean(self, eta):
        return np.exp(eta)

    def variance(self, eta):
        return np.exp(2 * eta)


class Laplace(Family):
    """Numbers around eta with Laplace noise of a learned scale, in the unit of y."""

    is_location = True

    def priors(self, y, unit):
        return {"noise_scale": HalfNormal(unit * ONE)}

    def log_density(self, y, eta, noise_scale):
        return -(y - eta).abs() / noise_scale - (2 * noise_scale).log()

    def derivatives(self, y, eta, noise_scale):
        return (y - eta).sign() / noise_scale, (noise_scale**-2).expand_as(eta)

    def sample(self, eta, random, noise_scale):
        return random.laplace(eta, noise_scale)

    def mean(self, eta, noise_scale):
        return eta

    def variance(self, eta, noise_scale):
        return np.broadcast_to(2 * noise_scale**2, eta.shape)
