"""torch.compile of the pure functions: one graph, with the values and gradients of the plain program."""

import pytest
import torch

from pyro_l0.maths import hard_concrete, quadrature, rectified_normal, special
from pyro_l0.maths.hard_concrete_kl import same_stretch, same_temperature


def parameters(*values):
    """A batch of five around each value."""
    offsets = torch.linspace(-0.1, 0.1, 5)
    return tuple((offsets + value).requires_grad_() for value in values)


STRETCH = quadrature.make_stretch(-0.1, 1.1, torch.float32)
NODES = quadrature.stretch_nodes(STRETCH, 16, torch.float32, torch.device("cpu"))
RULE = quadrature.gauss_legendre(8, torch.float32)

# What is compiled, and with which inputs; the temperature once as a number and once as a tensor.
COMPILED = {
    "log1mexp": (special.log1mexp, parameters(1.0)),
    "psi": (special.psi, parameters(0.2)),
    "klterm": (special.klterm, parameters(-1.0, -2.0)),
    "hc_transform": (lambda e, a, b: hard_concrete.transform(e, a, b, STRETCH), parameters(0.3, 0.5, 0.7)),
    "hc_transform_number": (lambda e, a: hard_concrete.transform(e, a, 2 / 3, STRETCH), parameters(0.3, 0.5)),
    "hc_log_probs": (lambda a, b: torch.stack(hard_concrete.log_probs(a, b, STRETCH)), parameters(0.5, 0.7)),
    "hc_log_density": (lambda z, a, b: hard_concrete.log_density(z, a, b, STRETCH), parameters(0.5, 0.5, 0.7)),
    "hc_icdf": (lambda u, a, b: hard_concrete.icdf(u, a, b, STRETCH), parameters(0.5, 0.5, 0.7)),
    "hc_mean": (lambda a, b: hard_concrete.mean(a, b, NODES), parameters(0.5, 0.7)),
    "hc_variance": (lambda a, b: hard_concrete.variance(a, b, STRETCH, NODES), parameters(0.5, 0.7)),
    "hc_entropy": (lambda a, b: hard_concrete.entropy(a, b, STRETCH, NODES), parameters(0.5, 0.7)),
    "hc_kl_closed": (
        lambda q, p, b: same_temperature(q, p, b, STRETCH, RULE),
        parameters(0.5, -1.0, 0.7),
    ),
    "hc_kl_closed_number": (
        lambda q, p: same_temperature(q, p, 2 / 3, STRETCH, RULE),
        parameters(0.5, -1.0),
    ),
    "hc_kl_quadrature": (
        lambda q, b, p, c: same_stretch(q, b, p, c, STRETCH, NODES),
        parameters(0.5, 0.7, -1.0, 0.9),
    ),
    "rn_log_interior_prob": (rectified_normal.log_interior_prob, parameters(0.4, 0.5)),
    "rn_mean": (lambda m, s: torch.stack(rectified_normal.mean(m, s)), parameters(0.4, 0.5)),
    "rn_variance": (lambda m, s: rectified_normal.variance(m, s, RULE), parameters(0.4, 0.5)),
    "rn_entropy": (rectified_normal.entropy, parameters(0.4, 0.5)),
    "rn_kl": (rectified_normal.kl, parameters(0.4, 0.5, 0.2, 0.6)),
}


def value_and_gradients(function, inputs):
    """A function's value and the gradients of its sum."""
    value = function(*inputs)
    return value.detach(), torch.autograd.grad(value.sum(), inputs)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPILED)
def test_functions_are_one_graph(name, backend):
    """torch.compile(fullgraph=True) gives the values and gradients of eager execution; the eager backend is quick."""
    torch.compiler.reset()
    function, inputs = COMPILED[name]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    # Fused kernels may use other exp and log: a few float32 epsilons.
    expected, found = value_and_gradients(function, inputs), value_and_gradients(compiled, inputs)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
