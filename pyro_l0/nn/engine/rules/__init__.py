"""Rules by the kind of operation; importing this package registers them."""

from pyro_l0.nn.engine.rules import (
    attention,
    contraction,
    convolution,
    creation,
    embedding,
    gates,
    movement,
    norms,
    pointwise,
    pooling,
    recurrent,
    reductions,
)

__all__ = [
    "attention",
    "contraction",
    "convolution",
    "creation",
    "embedding",
    "gates",
    "movement",
    "norms",
    "pointwise",
    "pooling",
    "recurrent",
    "reductions",
]
