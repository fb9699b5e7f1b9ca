"""Particles of a loss, evaluated one by one or all at once by ``torch.vmap``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_l0.fast.record import Record
from pyro_l0.infer.guides.drawn import Part


def over_particles(
    evaluate: Callable[[Record], dict[str, Tensor]],
    run_guide: Callable[[], Record],
    guide: object,
    number: int,
    mapped: bool,
) -> dict[str, Tensor]:
    """Numbers of a run for each of several particles, shape ``(number,)`` each.

    ``evaluate`` gives numbers of shape ``()`` by name, from a run of the guide. If ``mapped``, ``torch.vmap`` maps
    guide and model, which are written for one particle and need not broadcast; raises if it can't. The guide may have
    ``draw_together(number)``, which returns parts of joint draws by site, or None.
    """
    if not mapped:
        found = [evaluate(run_guide()) for _ in range(number)]
        return {name: torch.stack([values[name] for values in found]) for name in found[0]}
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        run_guide()  # its first call runs the model, which can't be mapped then
    draw_together: Callable[[int], dict[str, Part] | None] | None = getattr(guide, "draw_together", None)
    together = None if draw_together is None else draw_together(number)
    try:
        # Checks of values can't be mapped; a guide's first call runs the model with them.
        with pyro.validation_enabled(False):
            if together is None:
                each = torch.vmap(lambda _: evaluate(run_guide()), randomness="different")
                return each(torch.arange(number))
            # A row of parameters for each draw.
            tensors = {
                name: (part.values, *(x.expand(number, *x.shape[1:]) for x in part.parameters))
                for name, part in together.items()
            }

            def one(drawn: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
                record = Record()
                for name, (values, *parameters) in drawn.items():
                    part = together[name]._replace(values=values, parameters=tuple(parameters))
                    record.sample(name, *part.at_site({}))
                return evaluate(record)

            return torch.vmap(one, randomness="different")(tensors)
    except RuntimeError as error:
        if "vmap" not in str(error) and "functorch" not in str(error):
            raise
        raise ValueError(
            "Expected a model whose particles can be evaluated at once, but torch.vmap can't map it; set "
            f"vectorize_particles=False, which runs it once for each particle: {error}"
        ) from error


def can_be_mapped(
    evaluate: Callable[[Record], dict[str, Tensor]], run_guide: Callable[[], Record], guide: object
) -> bool:
    """Whether ``torch.vmap`` maps guide and model, with a warning if not; arguments as of :func:`over_particles`."""
    evaluate(run_guide())  # any other error is raised here
    try:
        over_particles(evaluate, run_guide, guide, 2, mapped=True)
    except ValueError as error:
        if "vectorize_particles" not in str(error):
            raise
        warnings.warn(f"Particles are evaluated one by one, which takes longer. {error}", stacklevel=4)
        return False
    return True


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of every row of a tensor: by ``torch.vmap``, or row by row where that can't map it."""

    def of_rows(rows: Tensor) -> Tensor:
        with pyro.validation_enabled(False):
            try:
                return torch.vmap(function)(rows)
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                return torch.stack([function(row) for row in rows])

    return of_rows
