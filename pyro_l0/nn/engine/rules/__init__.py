"""Rules by the kind of operation; importing this package registers them."""

from pyro_l0.nn.engine.rules import movement, norms, pointwise, products, recurrent  # noqa: F401
