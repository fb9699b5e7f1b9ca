"""Where the gates of a slab's weights lie along its dimensions."""

from __future__ import annotations

from pyro_l0.fast.record import Site

Shape = tuple[int, ...]


def product_name(gate: str, slab: str) -> str:
    """The name under which draws of the products of a slab with its gates are kept, such as ``"z * w"``."""
    return f"{gate} * {slab}"


def places_of(name: str, gate_name: str, slab: Site, gates: Site, plates_of_gates: Site) -> Shape:
    """The gates' shape with a dimension of size 1 wherever they are shared, one for each dimension of the slab.

    The slab is the model's, the gates are the guide's; their plates in the model tell which dimensions belong together.
    Gates that fit the slab in no way or in several are refused.
    """
    batch, event = tuple(gates["fn"].batch_shape), tuple(gates["fn"].event_shape)
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
    return found[0]


def _padded(shape: Shape, dims: int) -> tuple[Shape, Shape]:
    """A shape among the last and among the first of some dimensions."""
    ones = (1,) * (dims - len(shape))
    return ones + shape, shape + ones


def fits(shape: Shape, to: Shape) -> bool:
    """Whether a shape broadcasts to another."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, larger) for size, larger in aligned)


def _other_plates(gates: Site, slab: Site, batch: Shape) -> bool:
    """Whether gates vary over a plate where the slab has another one."""
    plates = {frame.dim: frame.name for frame in slab["cond_indep_stack"] if frame.vectorized}
    own = {frame.dim: frame.name for frame in gates["cond_indep_stack"] if frame.vectorized}
    from_the_right = ((-i, size) for i, size in enumerate(reversed(batch), 1))
    return any(size > 1 and d in own and d in plates and own[d] != plates[d] for d, size in from_the_right)
