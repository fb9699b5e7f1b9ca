"""What the gates themselves show: sites that have closed, gates that are neither open nor closed, sites that drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyro_l0.diagnostics.findings import Finding
from pyro_l0.diagnostics.gate_sites import GateSite

__all__ = ["check_closed", "check_drift", "check_undecided"]

_UNDECIDED = 0.05  # share of the gates
_MOVED = 1.0  # on the scale of log alpha
_TOGETHER = 0.05  # spread of a site's gates over how far they have moved
_FEWEST = 4  # gates of which can be said that they move together


def check_closed(sites: Sequence[GateSite]) -> Iterator[Finding]:
    """Find sites of several gates of which none is open.

    A closed gate that is alone at its site takes a whole branch, whose other gates may then close as well.
    """
    if any(len(site.test_gate) == 1 and not bool(site.is_open.any()) for site in sites):
        return
    closed = [site for site in sites if len(site.test_gate) > 1 and not bool(site.is_open.any())]
    if closed:
        most = max(float(site.gate.active_prob.detach().max()) for site in closed)
        yield Finding(
            "site-collapsed",
            tuple(site.name for site in closed),
            f"all {' and '.join(str(len(site.test_gate)) for site in closed)} gates are closed in the deterministic "
            f"network; P(z != 0) is at most {most:.2g}.",
            "Go back to a checkpoint before it closed, and lower its price (lam, group_size) or the gates' learning "
            "rate, or train the network first; unless the whole site is meant to go.",
        )


def check_undecided(sites: Sequence[GateSite]) -> Iterator[Finding]:
    """At the end, find many gates between 0 and 1."""
    between = {site.name: int(((site.test_gate > 0) & (site.test_gate < 1)).sum()) for site in sites}
    total = sum(len(site.test_gate) for site in sites)
    share = sum(between.values()) / max(total, 1)
    if share > _UNDECIDED:
        yield Finding(
            "undecided-gates",
            tuple(name for name, number in between.items() if number),
            f"{sum(between.values())} of {total} test gates ({100 * share:.0f} %) are between 0 and 1 at the end.",
            "Train the gates longer or at a larger learning rate, or give a target, which decides them; what is "
            "between is folded into the weights and costs as much as an open gate.",
        )


def check_drift(sites: Sequence[GateSite]) -> Iterator[Finding]:
    """Find sites whose gates have moved towards closing all by the same distance."""
    for site in sites:
        if site.start is None or len(site.location) < _FEWEST or not bool(site.is_open.any()):
            continue
        moved = site.location - site.start
        mean, spread = float(moved.mean()), float(moved.std())
        if mean < -_MOVED and spread < -_TOGETHER * mean:
            yield Finding(
                "gates-drift-together",
                (site.name,),
                f"all {len(moved)} gates have moved by {mean:.2g} (spread {spread:.2g}): the data tell none apart.",
                "See that the network's output depends on these gates and that the likelihood is the sum over the "
                "data; if they do, lower the price or the gates' learning rate.",
            )
