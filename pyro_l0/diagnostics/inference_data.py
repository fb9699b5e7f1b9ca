"""Draws of a posterior in the form that arviz summarises, compares and draws."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from arviz import InferenceData  # takes seconds to import

__all__ = ["inclusion_name", "inference_data"]

_Arrays = dict[str, NDArray[Any]]


def inclusion_name(gate: str) -> str:
    """The name under which the inclusion probabilities of a gate are kept, such as ``"P(z != 0)"``."""
    return f"P({gate} != 0)"


def inference_data(
    posterior: Mapping[str, ArrayLike],
    *,
    log_likelihood: Mapping[str, ArrayLike] | None = None,
    posterior_predictive: Mapping[str, ArrayLike] | None = None,
    observed_data: Mapping[str, ArrayLike] | None = None,
    constant_data: Mapping[str, ArrayLike] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> InferenceData:
    """Arrays by name as arviz's InferenceData, or as its DataTree where arviz is of version 1.

    What is true or false is stored as int8, since netCDF has no such type, and a slash in a name as a dot. Groups that
    are not given, or are empty, are left out.

    Args:
        posterior: draws of every variable, shape ``(chains, draws, *shape)``; one chain for independent draws.
        log_likelihood: log probability of every observation in nats, shape ``(chains, draws, *observations)``.
        posterior_predictive: draws of what was observed, shape ``(chains, draws, *shape)``.
        observed_data: what was observed.
        constant_data: arrays without draws, such as inclusion probabilities.
        coords: labels along dimensions, by the dimensions' names.
        dims: names of the dimensions of each variable behind chains and draws; those not given are made up by arviz.

    Raises:
        ValueError: variables differ in their chains or draws.

    Example:
        >>> found = inference_data(
        ...     {"z": np.ones((1, 100, 2), dtype=bool)},
        ...     constant_data={"P(z != 0)": np.array([1.0, 1.0])},
        ...     dims={"z": ["feature"]},
        ...     coords={"feature": ["age", "bmi"]},
        ... )
        >>> found["posterior"]["z"].sel(feature="bmi").shape
        (1, 100)
        >>> found["constant_data"]["P(z != 0)"].shape
        (2,)
    """
    drawn = {"posterior": posterior, "log_likelihood": log_likelihood, "posterior_predictive": posterior_predictive}
    fixed = {"observed_data": observed_data, "constant_data": constant_data}
    groups = {name: _legal(arrays) for name, arrays in {**drawn, **fixed}.items() if arrays}
    _check_draws({f"{group}[{name!r}]": x.shape[:2] for group in drawn for name, x in groups.get(group, {}).items()})
    labels: dict[str, Any] = {"coords": coords, "dims": _legal_names(dims or {})}
    arviz = _arviz()
    if int(arviz.__version__.split(".")[0]) >= 1:
        found: InferenceData = arviz.from_dict(groups, **labels)
    else:
        found = arviz.from_dict(**groups, **labels)
    return found


def _arviz() -> Any:
    """The library, without its word on changes to come, which it has at its first import of a day."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        import arviz
    return arviz


def _legal(arrays: Mapping[str, ArrayLike]) -> _Arrays:
    found = {name: np.asarray(x) for name, x in _legal_names(arrays).items()}
    return {name: x.astype(np.int8) if x.dtype == bool else x for name, x in found.items()}


def _legal_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("/", "."): value for name, value in values.items()}


def _check_draws(leads: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse variables whose first two dimensions are not the same chains and draws."""
    if len(set(leads.values())) != 1 or any(len(lead) != 2 for lead in leads.values()):
        raise ValueError(
            "Expected arrays of shape (chains, draws, *shape) with the same chains and draws of every variable, but "
            f"got {', '.join(f'{lead} at {name}' for name, lead in leads.items())}."
        )
