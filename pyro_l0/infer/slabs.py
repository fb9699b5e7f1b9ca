"""Which gate switches which of a slab's weights, and what a site has of joint samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from pyro.distributions import TorchDistribution, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Transform

from pyro_l0.expect import expect
from pyro_l0.infer.record import Site

Shape = tuple[int, ...]

#: The gate site of a slab: its name alone, or with the index by which the model reads it, as in ``z[..., index] * w``.
GateSite: TypeAlias = str | tuple[str, Tensor]


class Alignment(NamedTuple):
    """How the gates of a site align with the dimensions of a slab."""

    shape: Shape  # one dimension for each of the slab's, of size 1 where gates are shared
    group: Tensor | None  # index into the last dimension of the gates

    def of(self, gates: Tensor, lead: int = 0) -> Tensor:
        """Values of the gates along the slab's dimensions, after ``lead`` dimensions of draws."""
        if self.group is not None:
            gates = gates[..., self.group.to(gates.device)]
        return gates.reshape(gates.shape[:lead] + self.shape)


def slab_to_gate(slab: Mapping[str, GateSite] | None) -> dict[str, GateSite]:
    """The gate site of each slab site, with indices as tensors; refuses all but a name or one with integers."""
    expect(Mapping | None, "a dict such as {'w': 'z'}", slab=slab)
    return {name: gate if isinstance(gate, str) else _indexed(name, gate) for name, gate in (slab or {}).items()}


def _indexed(name: str, gate: object) -> GateSite:
    if isinstance(gate, tuple) and len(gate) == 2 and isinstance(gate[0], str):
        index = torch.as_tensor(gate[1]).detach()
        if index.dim() and not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
            return gate[0], index.long().cpu()
    raise TypeError(
        f"Expected slab[{name!r}] to be the name of its gate site, or a pair of that name and an index of integers for "
        f"z[..., index] * w, but got {gate!r}."
    )


def gate_site(gate: GateSite) -> str:
    """The name of a slab's gate site, which may be given with the index by which the model reads it."""
    return gate if isinstance(gate, str) else gate[0]


def with_latent_gates(slab: Mapping[str, GateSite], sites: Mapping[str, Site]) -> dict[str, GateSite]:
    """The slabs whose gates are not observed in a run of a model."""
    observed = {name for name, site in sites.items() if site["is_observed"]}
    return {name: gate for name, gate in slab.items() if gate_site(gate) not in observed}


def check_used(slab: Mapping[str, GateSite], sizes: Mapping[str, Shape]) -> None:
    """Refuse gates that no index of their slabs names, given the shapes of the gate sites."""
    indices: dict[str, list[Tensor]] = {}
    for site in slab.values():
        if not isinstance(site, str):
            indices.setdefault(site[0], []).append(site[1].flatten())
    for gate, found in indices.items():
        unused = set(range(sizes[gate][-1])).difference(torch.cat(found).tolist()) if gate not in slab.values() else ()
        if unused:
            raise ValueError(
                f"Expected an index that names each of the {sizes[gate][-1]} gates of site {gate!r}, but "
                f"{sorted(unused)[:5]} switch no element of a slab; leave these gates out of the model."
            )


def product_name(gate: str, slab: str) -> str:
    """The name under which draws of the products of a slab with its gates are kept, such as ``"z * w"``."""
    return f"{gate} * {slab}"


def alignment_of(
    name: str, gate: GateSite, model: Mapping[str, Site], guide: Mapping[str, Site] | None = None
) -> Alignment:
    """How the gates of a slab align with it.

    The slab is the model's, the gates are the guide's; their plates in the model tell which dimensions belong together.
    """
    gate_name, index = (gate, None) if isinstance(gate, str) else gate
    slab, plates_of_gates = model[name], model[gate_name]
    gates = plates_of_gates if guide is None else guide[gate_name]
    batch, event = tuple(gates["fn"].batch_shape), tuple(gates["fn"].event_shape)
    if index is not None:
        _check_index(name, gate_name, index, batch + event, plates_of_gates)
        batch, event = (batch, event[:-1] + tuple(index.shape)) if event else (batch[:-1] + tuple(index.shape), event)
    slab_batch, slab_event = tuple(slab["fn"].batch_shape), tuple(slab["fn"].event_shape)
    whole, slab_whole = batch + event, slab_batch + slab_event
    last, first = _padded(whole, len(slab_whole))
    along_last, along_first = _padded(event, len(slab_event))
    found: list[Shape] = []
    if fits(along_last, slab_event) and fits(batch, slab_batch):
        found = [(1,) * (len(slab_batch) - len(batch)) + batch + along_last]
        if len(event) < len(slab_event) and _other_plates(plates_of_gates, slab, batch):
            found += [last] if fits(last, slab_whole) else []
    # An event never lies along the first dimensions: what is right for 2 x 3 weights would be another thing for 3 x 3.
    whole_fits = [shape for shape in ([last] if event else [last, first]) if fits(shape, slab_whole)]
    found = list(dict.fromkeys(found or whole_fits))
    shapes = f"batch {batch} and event {event} against batch {slab_batch} and event {slab_event}"
    if not found:
        such = f", such as .expand({list(along_first)}).to_event({len(slab_event)})"
        raise ValueError(
            f"Expected gates at site {gate_name!r} that broadcast against slab site {name!r} of shape {slab_whole}, "
            f"but got {whole} ({shapes}). Draw one gate per event in the slab's plates, or give the gates as many "
            "event dimensions as the slab has, of size 1 where a gate is "
            f"shared{such if event and fits(along_first, slab_event) else ''}."
        )
    if len(found) > 1:
        raise ValueError(
            f"Expected gates at site {gate_name!r} that fit slab site {name!r} in one way, but got {shapes}, which may "
            f"mean {found[0]} or {found[1]}. Draw both in the same plates, or give the gates as many event dimensions "
            f"as the slab has, of size 1 where a gate is shared, such as .expand({list(found[1])}).to_event("
            f"{len(slab_event)})."
        )
    return Alignment(found[0], index)


def _check_index(name: str, gate: str, index: Tensor, shape: Shape, plates: Site) -> None:
    """Refuse an index that does not fit the last dimension of gates of some shape."""
    if not shape or not index.numel() or not 0 <= int(index.min()) <= int(index.max()) < shape[-1]:
        got = f"numbers from {int(index.min())} to {int(index.max())}" if index.numel() else "none"
        raise ValueError(
            f"Expected the index of slab site {name!r} to index the last dimension of gate site {gate!r}, "
            f"of shape {shape}, but got {got}."
        )
    check_whole(f"gate site {gate!r}, which an index of slab site {name!r} reads,", plates)


def check_whole(what: str, site: Site, advice: str = "") -> None:
    """Refuse a site in a minibatch, which a message calls ``what``."""
    small = [frame.name for frame in site["cond_indep_stack"] if frame.vectorized and frame.full_size != frame.size]
    if small:
        named = ", ".join(map(repr, small))
        raise ValueError(f"Expected {what} in plates of their full size, but {named} is subsampled{advice}.")


def _padded(shape: Shape, dims: int) -> tuple[Shape, Shape]:
    """A shape among the last and among the first of some dimensions."""
    ones = (1,) * (dims - len(shape))
    return ones + shape, shape + ones


def fits(shape: Shape, to: Shape) -> bool:
    """Whether a tensor of a shape can be expanded to another."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, larger) for size, larger in aligned)


def _other_plates(gates: Site, slab: Site, batch: Shape) -> bool:
    """Whether gates vary over a plate where the slab has another one."""
    plates = {frame.dim: frame.name for frame in slab["cond_indep_stack"] if frame.vectorized}
    own = {frame.dim: frame.name for frame in gates["cond_indep_stack"] if frame.vectorized}
    from_the_right = ((-i, size) for i, size in enumerate(reversed(batch), 1))
    return any(size > 1 and d in own and d in plates and own[d] != plates[d] for d, size in from_the_right)


class Conditional(TorchDistribution):
    """The distribution of a site given the sites before it, whose value is that of a joint sample.

    The densities of the sites of a joint sample multiply to the joint density. As the parameters depend on the sample,
    it is the only value that has a density here.
    """

    arg_constraints = {}  # noqa: RUF012  # as torch declares it

    def __init__(self, base_dist: TorchDistribution, value: Tensor) -> None:
        self.base_dist, self.value, self.has_rsample = base_dist, value, base_dist.has_rsample
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def support(self) -> torch.distributions.constraints.Constraint | None:
        """The support of the distribution inside, or None where that has none."""
        return self.base_dist.support

    def expand(self, batch_shape: torch.types._size, _instance: object = None) -> Conditional:
        """The distribution in more plates, whose dimensions the value has already."""
        return Conditional(self.base_dist.expand(batch_shape), self.value)

    def rsample(self, sample_shape: torch.types._size = torch.Size()) -> Tensor:
        """The value that was drawn; refuses further draws."""
        if len(sample_shape):
            raise ValueError(
                f"Expected one draw of a site of a joint sample, but got sample_shape {tuple(sample_shape)}."
            )
        return self.value

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the value that was drawn, shape ``batch_shape``; refuses another."""
        if value is not self.value and not torch.equal(value, self.value):
            raise ValueError("Expected the value that was drawn, since the other sites' draws depend on it.")
        log_prob: Tensor = self.base_dist.log_prob(value)
        return log_prob


class JointSample(NamedTuple):
    """What a site has of n joint samples."""

    values: Tensor  # on the real line, (n, entries of the site), or without the dimension of draws
    make: Callable[..., TorchDistribution]  # the distribution given the sites before, from its parameters
    parameters: tuple[Tensor, ...]  # each of the values' shape
    shape: torch.Size  # of the site's value in one draw
    event_dim: int
    transform: Transform | None = None  # to the site's support
    depends: bool = True  # on other sites of the sample

    @classmethod
    def of(cls, fn: TorchDistributionMixin, n: int, event_dim: int) -> JointSample:
        """n draws of a distribution that depends on no other site, differentiable where it has ``rsample``."""
        draws = fn.rsample((n,)) if fn.has_rsample else fn.sample((n,))
        return cls(draws.reshape(n, draws.shape[1:].numel()), lambda: fn, (), draws.shape[1:], event_dim, depends=False)

    def at_site(self, particles: Mapping[int, int]) -> tuple[TorchDistribution, Tensor]:
        """The distribution of a site and its value, in plates of particles: their sizes by dimension from the right."""
        batch = self.shape[: len(self.shape) - self.event_dim]
        width = max(len(batch), *(-dim for dim in particles), 0)
        dims = [1] * (width - len(batch)) + list(batch)
        for dim, size in particles.items():
            dims[dim] = size
        shape = torch.Size(dims) + self.shape[len(batch) :]
        shape = shape if self.transform is None else self.transform.inverse_shape(shape)
        base = self.make(*(x.reshape(shape) for x in self.parameters))
        value = self.values.reshape(shape)
        if self.transform is not None:
            base, value = TransformedDistribution(base, [self.transform]), self.transform(value)
        base = base.to_event(self.event_dim - base.event_dim) if self.event_dim > base.event_dim else base
        return (Conditional(base, value) if self.depends else base), value

    def supported(self) -> Tensor:
        """The values in the site's support and shape, shape ``(n, *shape)``."""
        if self.transform is None:
            return self.values.reshape(-1, *self.shape)
        values: Tensor = self.transform(self.values.reshape(-1, *self.transform.inverse_shape(self.shape)))
        return values
