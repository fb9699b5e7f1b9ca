"""What of a network stays, by the names of its parameters and modules: numbers and names alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pyro_l0.compaction.routes import GateChange
from pyro_l0.compaction.slice import named_tensors
from pyro_l0.nn.hooks import new_name, old_names

__all__ = ["LayerFold", "Plan", "Size", "names_before"]

_Entry = TypeVar("_Entry")

_FORMAT = 2
Size = int | tuple[int, ...]


@dataclass(frozen=True)
class LayerFold:
    """Inputs of a layer that are the same for every example and leave into its bias, or into a map.

    Attributes:
        layer: path of the layer.
        units: which of its inputs leave.
        shape: of the map, for one example and the outputs that stay; None where one value per output is enough.
    """

    layer: str
    units: tuple[int, ...]
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Plan:
    """What of a network stays, as numbers and names alone.

    Attributes:
        gates: value of every gate by site.
        kept: by name of a parameter or buffer of which something leaves, the places that stay along each dimension;
            None for all of them.
        changes: by path of a gate, what becomes of it.
        folds: constant inputs of layers that leave into biases and maps.
        factors: by name of a weight, factors of its inputs: gates between 0 and 1 that went into it.
        norms: by path of a normalisation of which units leave, how many there were at the start.
        zero_channels: by path of a BatchNorm, channels whose running mean is set to 0, its limit.
        attributes: by path of a module, its integers that change.
        indices: by name of a buffer that holds places of units, the new places.
        input_sizes: sizes of one example's inputs if the smaller network takes no others, since constants of units
            that left depend on them.
    """

    gates: dict[str, tuple[float, ...]]
    kept: dict[str, tuple[tuple[int, ...] | None, ...]]
    changes: dict[str, GateChange]
    folds: tuple[LayerFold, ...]
    factors: dict[str, tuple[float, ...]]
    norms: dict[str, int]
    zero_channels: dict[str, tuple[int, ...]]
    attributes: dict[str, dict[str, Size]]
    indices: dict[str, tuple[int, ...]]
    input_sizes: tuple[tuple[int, ...], ...] | None = None

    @property
    def keeps_gates(self) -> bool:
        """Whether gates stay sites of a model, as while training."""
        return any(change.random for change in self.changes.values())

    def places(self) -> dict[str, tuple[Tensor | None, ...]]:
        """``kept`` as tensors of indices."""
        return {
            name: tuple(None if index is None else torch.tensor(index, dtype=torch.long) for index in indices)
            for name, indices in self.kept.items()
        }

    def renamed(self, old: Mapping[str, str]) -> Plan:
        """This plan with the names of now, by :func:`names_before`."""

        def of(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
            return {new_name(name, old): entry for name, entry in entries.items()}

        return replace(
            self,
            kept=of(self.kept),
            changes=of(self.changes),
            folds=tuple(replace(fold, layer=new_name(fold.layer, old)) for fold in self.folds),
            factors=of(self.factors),
            norms=of(self.norms),
            zero_channels=of(self.zero_channels),
            attributes=of(self.attributes),
            indices=of(self.indices),
        )

    def to_json(self) -> str:
        """This plan as JSON; floats keep every digit."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from :meth:`to_json`.

        Raises:
            ValueError: the text is no plan, or one of an earlier version, which went by the steps of a traced network.
        """
        try:
            values = json.loads(text)
            number = values.pop("format")
            if number == 1:
                raise ValueError("it is of an earlier version; compact the network again")
            if number != _FORMAT:
                raise ValueError("another format")
            return cls(
                gates=_tuples(values["gates"]),
                kept=_tuples(values["kept"]),
                changes={path: GateChange(**_tuples(change)) for path, change in values["changes"].items()},
                folds=tuple(LayerFold(**_tuples(fold)) for fold in values["folds"]),
                factors=_tuples(values["factors"]),
                norms={path: int(size) for path, size in values["norms"].items()},
                zero_channels=_tuples(values["zero_channels"]),
                attributes={path: _tuples(new) for path, new in values["attributes"].items()},
                indices=_tuples(values["indices"]),
                input_sizes=_tuple(values["input_sizes"]),
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"Expected the JSON of a compaction plan, but got {text[:60]!r} ({error}).") from error


def names_before(plans: Sequence[Plan], network: nn.Module) -> dict[str, str]:
    """By module path in plans of an earlier version, the path in their network now; empty for plans of this version."""
    old = old_names(network)
    own = {name for name, _ in (*network.named_modules(), *named_tensors(network))}
    names = {name for plan in plans for name in (*plan.kept, *plan.changes)}
    return old if any(name not in own and new_name(name, old) in own for name in names) else {}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in values.items()}
