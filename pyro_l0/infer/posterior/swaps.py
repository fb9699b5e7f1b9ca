"""Whether features that could stand in for one another do so in a sample: coefficients change places.

A chain that stays in one mode, and all of its fellows in the same one, look as if they agreed. Where two features are
nearly the same, the coefficient of one may as well be the other's: from a draw of the posterior, an exchange that is
accepted by Metropolis's rule leads to a draw of the posterior. If probabilities move, the draws are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.infer.elbo.slabs import Places, Switch, gate_site, places_of
from pyro_l0.infer.posterior.log_joint import LogJoint

__all__ = ["gates_of_slabs", "moved_by_swaps"]

_MOST_DRAWS = 1000
_MOST_PAIRS = 200  # those in which one gate is open where the other is closed most often


class _Swap(NamedTuple):
    """Two gates and their coefficients change places: what a vector and a code are read at, and the vector's signs."""

    places: Tensor
    code: Tensor
    signs: Tensor


def gates_of_slabs(log_joint: LogJoint, slab: Mapping[str, Switch]) -> dict[str, Places]:
    """For each slab site how its gates multiply it.

    Raises:
        ValueError: ``slab`` names a site that the model does not have, or gates that do not fit.
    """
    sites = log_joint.sites
    for name in (*slab, *map(gate_site, slab.values())):
        if name not in log_joint.latent and name not in log_joint.switches and name not in _bases(log_joint):
            raise ValueError(
                f"Expected slab to name latent sites of the model, such as {sorted(log_joint.latent)}, but {name!r} is "
                "none."
            )
    return {name: places_of(name, switch, sites) for name, switch in slab.items()}


@torch.no_grad()
def moved_by_swaps(
    log_joint: LogJoint, vectors: Tensor, codes: Tensor, slab: Mapping[str, Switch]
) -> dict[str, Tensor]:
    """By how much P(z != 0) moves, by gate site, when gates of a site change places with their coefficients.

    Args:
        log_joint: the posterior.
        vectors: draws, shape ``(n, size)``.
        codes: gates of two values that were drawn with them.
        slab: the gate site of each slab site; gates without a slab are left where they are.
    """
    keep = torch.linspace(0, len(vectors) - 1, min(len(vectors), _MOST_DRAWS)).long()
    vectors, codes = vectors[keep], codes[keep]
    density, values = log_joint.many(vectors, codes)
    before = {gate: _active(values[gate]) for gate in sorted(set(map(gate_site, slab.values())))}
    for swap in _swaps(log_joint, slab, before):
        new_vectors, new_codes = vectors[:, swap.places] * swap.signs, codes[:, swap.code]
        new_density = log_joint.many(new_vectors, new_codes)[0]
        accepted = torch.rand_like(density).log() < new_density - density
        density = torch.where(accepted, new_density, density)
        vectors = torch.where(accepted.unsqueeze(-1), new_vectors, vectors)
        codes = torch.where(accepted.unsqueeze(-1), new_codes, codes)
    values = log_joint.many(vectors, codes)[1]
    return {gate: _active(values[gate]) - active for gate, active in before.items()}


def _active(gates: Tensor) -> Tensor:
    return (gates != 0).double().mean(0)


def _bases(log_joint: LogJoint) -> dict[str, str]:
    """The continuous site of each gate that is reparameterised."""
    return {gate: f"{gate}_base" for gate in log_joint.sites if f"{gate}_base" in log_joint.latent}


def _swaps(log_joint: LogJoint, slab: Mapping[str, Switch], active: Mapping[str, Tensor]) -> list[_Swap]:
    """Exchanges of gates in the order of how often they would change anything, with and without a change of sign."""
    places = gates_of_slabs(log_joint, slab)
    gates = {name: gate_site(switch) for name, switch in slab.items()}
    ranked: list[tuple[float, str, int, int]] = []
    for gate, probability in active.items():
        if any(log_joint.latent[w].shape != log_joint.sites[w]["value"].shape for w, z in gates.items() if z == gate):
            continue  # entries that are not independent on the real line
        p = probability.flatten()
        one_of_two = (p[:, None] * (1 - p)).triu(1) + (p * (1 - p[:, None])).triu(1)
        ranked += [(float(one_of_two[i, j]), gate, i, j) for i, j in torch.triu_indices(len(p), len(p), 1).T.tolist()]
    ranked.sort(reverse=True)
    swaps = []
    for _, gate, i, j in ranked[:_MOST_PAIRS]:
        slabs = {name: x for name, x in places.items() if gates[name] == gate}
        swaps += [_swap(log_joint, gate, slabs, i, j, sign) for sign in (1.0, -1.0)]
    return [swap for swap in swaps if swap is not None]


def _swap(log_joint: LogJoint, gate: str, slabs: Mapping[str, Places], i: int, j: int, sign: float) -> _Swap | None:
    """Gates i and j of a site change places, and so do the entries of its slabs; None if they have not as many."""
    swap = _Swap(
        torch.arange(len(log_joint.start)), torch.arange(log_joint.codes.shape[1]), torch.ones_like(log_joint.start)
    )
    if gate in log_joint.switches:
        row, gates = swap.code, log_joint.switches[gate].places
    else:
        row, gates = swap.places, log_joint.latent[_bases(log_joint)[gate]].places
    _exchange(row, gates[[i]], gates[[j]])
    like = log_joint.sites[gate]["value"]
    numbered = torch.arange(like.numel()).reshape(like.shape)
    for name, places in slabs.items():
        entries = log_joint.latent[name].places
        gate_of_entry = places.of(numbered).expand(log_joint.latent[name].shape).flatten()
        first, second = entries[gate_of_entry == i], entries[gate_of_entry == j]
        if len(first) != len(second):
            return None
        _exchange(swap.places, first, second)
        swap.signs[torch.cat((first, second))] = sign
    return swap


def _exchange(row: Tensor, first: Tensor, second: Tensor) -> None:
    """Places of a row that holds the numbers of its places."""
    row[first], row[second] = second, first
