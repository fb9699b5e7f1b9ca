"""Polya-Gamma draws against their Laplace transform, their moments and the other regime's sampler."""

import math

import numpy as np
import pytest
import torch

from pyro_l0.selection.families.polya_gamma import draw_polya_gamma
from tests.maths.spike_and_slab import seeded

N = 40_000


@pytest.mark.parametrize("tilt", [0.0, 0.3, 2.0, 3.0, 3.2, 8.0, 60.0, 2000.0])
def test_laplace_transform(tilt):
    """E exp(-t w) = cosh(c / 2) / cosh(sqrt(c^2 / 4 + t / 2)), at three points about its mean; five standard errors."""
    draws = draw_polya_gamma(torch.full((N,), tilt, dtype=torch.float64), seeded(1)).numpy()
    mean = 0.25 if tilt == 0 else math.tanh(tilt / 2) / (2 * tilt)
    assert abs(draws.mean() - mean) < 5 * draws.std() / math.sqrt(N)
    for t in (0.3 / mean, 1 / mean, 3 / mean):
        inner = math.sqrt(tilt**2 / 4 + t / 2)
        # The logarithm of the ratio of the cosh, which overflow.
        log = tilt / 2 - inner + math.log1p(math.exp(-tilt)) - math.log1p(math.exp(-2 * inner))
        values = np.exp(-t * draws)
        assert abs(values.mean() - math.exp(log)) < 5 * values.std() / math.sqrt(N)


def test_signs_and_shapes():
    """Only the size of a tilt counts, and every draw belongs to its own tilt."""
    tilt = torch.tensor([[-30.0, 0.0], [30.0, 300.0]], dtype=torch.float64).expand(500, 2, 2)
    mean = draw_polya_gamma(tilt, seeded(2)).mean(0)
    known = torch.tensor([[1 / 60, 0.25], [1 / 60, 1 / 600]], dtype=torch.float64)
    torch.testing.assert_close(mean, known, rtol=0.15, atol=0)
