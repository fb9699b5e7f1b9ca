"""The doctor: checks a training with gates and names what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_l0.diagnostics.check_gates import check_gates, check_movement
from pyro_l0.diagnostics.check_network import Error, check_network
from pyro_l0.diagnostics.check_prices import check_prices
from pyro_l0.diagnostics.findings import Diagnosis, Finding, Unchecked
from pyro_l0.diagnostics.pulls import Loss, first_batches, measure_pulls, objective_of, untouched
from pyro_l0.diagnostics.sites import AnyOptimiser, Training, gate_sites
from pyro_l0.expect import expect
from pyro_l0.infer.guides.protocol import GateGuide, check_guide
from pyro_l0.infer.target.sparsity_target import SparsityTarget

__all__ = ["diagnose"]

_BATCHES = 8
_DRAWS = 8


def diagnose(
    guide: GateGuide,
    optimiser: AnyOptimiser | Sequence[AnyOptimiser] | None = None,
    *,
    loss: Loss | None = None,
    batches: Iterable[object] | None = None,
    network: nn.Module | None = None,
    error: Error | None = None,
    target: SparsityTarget | None = None,
    steps_left: int | None = None,
) -> Diagnosis:
    """Check a training with gates and name what is wrong with it; at any time, and as often as you like.

    Only the guide is required; what cannot be checked without the rest is listed in
    :attr:`Diagnosis.unchecked <pyro_l0.diagnostics.findings.Diagnosis>`. Nothing is changed: random states, gradients,
    optimisers, modes, BatchNorm's statistics and the objective's step are as before.

    ===================================  ====================================================
    ``code`` of a finding                what was seen
    ===================================  ====================================================
    ``"gates-not-trained"``              no optimiser holds them, or ``requires_grad`` is off
    ``"rate-too-small"``                 no gate can reach the point where it closes
    ``"weight-decay-on-gates"``          a weight decay pulls gates to half open
    ``"step-below-rounding"``            half precision rounds every step away
    ``"no-price"``                       open gates cost nothing
    ``"price-too-small"``                the price closes nothing
    ``"price-too-large"``                the price closes everything
    ``"multiplier-at-limit"``            a target's multiplier is at its limit
    ``"site-collapsed"``                 all gates of a site are closed
    ``"gates-drift-together"``           the data do not tell a site's gates apart
    ``"undecided-gates"``                at the end, over 5 % are between 0 and 1
    ``"sampled-gap"``                    sampled and deterministic errors differ
    ``"batch-norm-of-another-network"``  running statistics belong to other gates
    ===================================  ====================================================

    It takes about as long as ten steps on a batch, and with ``error`` on eight batches another nine evaluations.

    Args:
        guide: the gates' guide, after its first call; an AutoGate, NetworkGates or another
            :class:`~pyro_l0.infer.guides.protocol.GateGuide`.
        optimiser: the gates' optimiser, of torch or of Pyro, or a list of all optimisers.
        loss: the loss that is trained, a function of a batch. ``L0_ELBO(...)(model, guide)`` is split into data and
            price; the price of other losses cannot be checked. Give it without a wrapper for data parallelism.
        batches: batches for the loss, such as a loader; the first eight are used. A tuple or list holds the arguments.
        network: the network with the gates, to check its BatchNorm and its error. It is called with a batch's first
            entry, or with the entries of that if it is a tuple or list.
        error: takes a network whose gates are fixed and the entries of a batch, and returns an error rate.
        target: the gates' SparsityTarget, if there is one in place of a price.
        steps_left: the optimiser's steps until the end of the training, 0 at the end; a target knows them.

    Returns:
        The findings with remedies, and what could not be checked.

    Raises:
        TypeError: an argument has the wrong type, or ``batches`` is a single batch.
        ValueError: the guide has not been called, ``steps_left`` is negative, or the loss raises, as it does if it is
            not finite.

    Example:
        >>> import pyro, torch
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import AutoGate
        >>> def model():
        ...     pyro.sample("z", HardConcrete(torch.zeros(10)).to_event(1))
        >>> guide = AutoGate(model)
        >>> _ = guide()
        >>> optimiser = torch.optim.Adam(guide.parameters(), lr=1e-3)
        >>> diagnosis = diagnose(guide, optimiser, steps_left=500)
        >>> diagnosis.codes
        ('rate-too-small',)
        >>> diagnosis.findings[0].seen
        'no gate can close in this training: 500 steps of at most 0.001 for a distance of 3.'
    """
    check_guide(guide, "a diagnosis", "posterior", "test_gates", "locations")
    if target is not None and not hasattr(target, "steps"):
        raise TypeError(f"Expected target to be a SparsityTarget, but got a value of type {type(target).__name__}.")
    if isinstance(batches, Tensor) or (isinstance(batches, tuple) and any(isinstance(x, Tensor) for x in batches)):
        raise TypeError("Expected batches to be an iterable of batches, but got a single one; put it in a list.")
    expect(Real | None, "a number", steps_left=steps_left)
    if steps_left is not None and steps_left < 0:
        raise ValueError(f"Expected steps_left of at least 0, but got {steps_left}.")
    optimisers = list(optimiser) if isinstance(optimiser, Sequence) else [] if optimiser is None else [optimiser]
    for each in optimisers:
        if not isinstance(each, Optimizer | PyroOptim):
            raise TypeError(f"Expected an optimiser of torch's or of Pyro's, but got a {type(each).__name__}.")
    if steps_left is None and target is not None:
        steps_left = max(0, target.steps - target.step)
    sites = gate_sites(guide, optimisers, target is not None)
    devices = {site.location.device for site in sites}
    some, pulls = None, None
    with untouched(guide, devices):
        if batches is not None:
            some = first_batches(batches, _BATCHES)
        if loss is not None and some:
            pulls = measure_pulls(loss, some, {site.name: site.parameter for site in sites}, _DRAWS)
    training = Training(sites, len(optimisers), objective_of(loss), target, pulls, steps_left)
    found = [*check_movement(training), *check_prices(training), *check_gates(training)]
    with untouched(guide, devices):
        found += check_network(training, guide, network, error, some)
    return Diagnosis(
        tuple(x for x in found if isinstance(x, Finding)), tuple(x for x in found if isinstance(x, Unchecked))
    )
