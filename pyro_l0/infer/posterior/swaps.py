"""Checks whether features that could stand in for one another do so in a sample: coefficients are exchanged.

A chain that stays in one mode, and all of its fellows in the same one, look as if they agreed. Where two features are
nearly the same, the coefficient of one may as well be the other's: from a draw of the posterior, an exchange that is
accepted by Metropolis's rule leads to a draw of the posterior. If probabilities move, the draws are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.infer.elbo.slabs import Alignment, Switch, alignment_of, gate_site
from pyro_l0.infer.posterior.log_joint import LogJoint

__all__ = ["GatedSlab", "moved_by_swaps", "slabs_of"]

_MOST_DRAWS = 1000
_MOST_PAIRS = 200  # those in which one gate is open where the other is closed most often


class GatedSlab(NamedTuple):
    """A slab site, its gate site, and where its gates lie."""

    name: str
    gate: str
    alignment: Alignment


class _Swap(NamedTuple):
    """An exchange of two gates and their coefficients: what a vector and a code are read at, and the vector's signs."""

    vector: Tensor
    code: Tensor
    signs: Tensor


def slabs_of(log_joint: LogJoint, slab: Mapping[str, Switch]) -> list[GatedSlab]:
    """The slabs with their gates; refuses sites that the model does not have, and gates that do not fit."""
    latent = log_joint.latent.shapes
    for name in (*slab, *map(gate_site, slab.values())):
        if not {name, f"{name}_base"} & {*latent, *log_joint.switches.shapes}:
            raise ValueError(
                f"Expected slab to name latent sites of the model, such as {sorted(latent)}, but {name!r} is none."
            )
    return [GatedSlab(name, gate_site(x), alignment_of(name, x, log_joint.sites)) for name, x in slab.items()]


@torch.no_grad()
def moved_by_swaps(
    log_joint: LogJoint, vectors: Tensor, codes: Tensor, slabs: Sequence[GatedSlab]
) -> dict[str, Tensor]:
    """By how much P(z != 0) moves, by gate site, when gates of a site are exchanged with their coefficients.

    The n draws are ``vectors``, shape ``(n, size)``, and their binary gates ``codes``. Gates without a slab stay.
    """
    keep = torch.linspace(0, len(vectors) - 1, min(len(vectors), _MOST_DRAWS)).long()
    vectors, codes = vectors[keep], codes[keep]
    density, values = log_joint.many(vectors, codes)
    before = {gate: _active(values[gate]) for gate in sorted({slab.gate for slab in slabs})}
    for swap in _swaps(log_joint, slabs, before):
        new_vectors, new_codes = vectors[:, swap.vector] * swap.signs, codes[:, swap.code]
        new_density = log_joint.many(new_vectors, new_codes)[0]
        accepted = torch.rand_like(density).log() < new_density - density
        density = torch.where(accepted, new_density, density)
        vectors = torch.where(accepted.unsqueeze(-1), new_vectors, vectors)
        codes = torch.where(accepted.unsqueeze(-1), new_codes, codes)
    values = log_joint.many(vectors, codes)[1]
    return {gate: _active(values[gate]) - active for gate, active in before.items()}


def _active(gates: Tensor) -> Tensor:
    return (gates != 0).double().mean(0)


def _swaps(log_joint: LogJoint, slabs: Sequence[GatedSlab], active: Mapping[str, Tensor]) -> list[_Swap]:
    """Exchanges of gates in the order of how often they would change anything, with and without a change of sign."""
    # Entries of a slab that are not independent on the real line stay where they are.
    stay = {
        slab.gate for slab in slabs if log_joint.latent.real_shapes[slab.name] != log_joint.latent.shapes[slab.name]
    }
    ranked: list[tuple[float, str, int, int]] = []
    for gate, probability in active.items():
        if gate not in stay:
            p = probability.flatten()
            one_of_two = (p[:, None] * (1 - p)).triu(1) + (p * (1 - p[:, None])).triu(1)
            pairs = torch.triu_indices(len(p), len(p), 1).T.tolist()
            ranked += [(float(one_of_two[i, j]), gate, i, j) for i, j in pairs]
    ranked.sort(reverse=True)
    swaps = []
    for _, gate, i, j in ranked[:_MOST_PAIRS]:
        own = [slab for slab in slabs if slab.gate == gate]
        swaps += [_swap(log_joint, gate, own, i, j, sign) for sign in (1.0, -1.0)]
    return [swap for swap in swaps if swap is not None]


def _swap(log_joint: LogJoint, gate: str, slabs: Sequence[GatedSlab], i: int, j: int, sign: float) -> _Swap | None:
    """Exchange gates i and j of a site, and the entries of its slabs; None if they have not as many."""
    latent, switches = log_joint.latent.positions(), log_joint.switches.positions()
    vector, code = torch.arange(log_joint.latent.size), torch.arange(log_joint.switches.size)
    signs = torch.ones_like(log_joint.start)
    row, gates = (code, switches[gate]) if gate in switches else (vector, latent[f"{gate}_base"])
    _exchange(row, gates[[i]], gates[[j]])
    numbered = torch.arange(len(gates)).reshape(log_joint.sites[gate]["value"].shape)
    for slab in slabs:
        gate_of_entry = slab.alignment.of(numbered).expand(log_joint.latent.shapes[slab.name]).flatten()
        first, second = (latent[slab.name][gate_of_entry == k] for k in (i, j))
        if len(first) != len(second):
            return None
        _exchange(vector, first, second)
        signs[torch.cat((first, second))] = sign
    return _Swap(vector, code, signs)


def _exchange(row: Tensor, first: Tensor, second: Tensor) -> None:
    row[first], row[second] = second, first
