"""One recorded run of a guide or a model, errors that say what failed, and log probabilities of its sites."""

from __future__ import annotations

from collections.abc import Mapping

from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor

from pyro_l0.fast.record import Record, Site, is_likelihood
from pyro_l0.infer.elbo.pairs import Args, Kwargs, Program, odd_arguments, refuse_without_likelihood


def log_prob(site: Site) -> Tensor:
    """Log probability of a recorded site's value under its scale and mask, in the shape of its batch."""
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    scaled: Tensor = scale_and_mask(log_prob, site["scale"], site["mask"])
    return scaled


def record_run(
    program: Program, args: Args, kwargs: Kwargs, step: int, values: Mapping[str, Site] | None = None
) -> Record:
    """Record a guide, or a model with the guide's values.

    Args:
        program: the guide or the model.
        args: its arguments.
        kwargs: its keyword arguments.
        step: of the training, for messages.
        values: the guide's sites; None for the guide itself.
    """
    record = Record(values)
    try:
        with record:
            returned = program(*args, **kwargs)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        seen = Trace()
        for name, site in record.sites.items():
            seen.add_node(name, **site)
        error.add_note(seen.format_shapes())
        # A guide of Pyro's runs the model at its first call, and takes the model's arguments.
        model = program.model if isinstance(program, AutoGuide) else program
        first = isinstance(program, AutoGuide) and program.prototype_trace is None
        odd = "; ".join(odd_arguments(model, args, kwargs))
        if not odd and "found invalid values" not in str(error):  # of torch's validation, which names no site
            raise
        what = "guide" if values is None and not first else "likelihood (nll) of the model"
        where = f", where {odd}" if odd else ""
        raise ValueError(f"The {what} failed at step {step}{where}: {error}") from error
    if values is not None and not any(map(is_likelihood, record.sites.values())):
        refuse_without_likelihood(program, record.sites, returned, args, kwargs)
    return record
