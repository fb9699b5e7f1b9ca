"""Rules by the kind of operation; importing this package registers them."""

from pyro_l0.nn.engine.rules import (  # noqa: F401
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
