"""Reparameterise a gate so that samplers and guides of continuous variables can handle it."""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.infer import Predictive
from pyro.infer.reparam.reparam import Reparam, ReparamMessage, ReparamResult
from torch import Tensor

from pyro_l0.distributions.gate import find_gate, rewrap
from pyro_l0.expect import expect
from pyro_l0.infer.record import Site, is_deterministic
from pyro_l0.infer.runs import Program, sample_sites


class RectifyReparam(Reparam):
    """Sample a gate's variable before rectification at the site ``{name}_base`` and clip it deterministically.

    NUTS, AutoNormal and Trace_ELBO then see a continuous latent variable on the real line. The loss of the
    reparameterised model is an upper bound on the gate's free energy, because it also charges for the tails inside
    the atoms. Samplers return draws of ``{name}_base``; :func:`complete_samples` adds the gates.

    Raises:
        TypeError: the site is not a gate.
        ValueError: the site is observed.

    Example:
        >>> from pyro import poutine
        >>> from pyro_l0 import HardConcrete
        >>> gate = HardConcrete(0.0)
        >>> model = poutine.reparam(lambda: pyro.sample("z", gate), {"z": RectifyReparam()})
        >>> sorted(poutine.trace(model).get_trace().nodes)
        ['_INPUT', '_RETURN', 'z', 'z_base']
    """

    def apply(self, msg: ReparamMessage) -> ReparamResult:
        """Replace the gate by a deterministic function of a new continuous site."""
        name = msg["name"]
        gate = find_gate(msg["fn"])
        if gate is None:
            raise TypeError(f"RectifyReparam expected a gate at site {name!r}, but got {msg['fn']}.")
        if msg["is_observed"]:
            raise ValueError(f"RectifyReparam expected a latent gate at site {name!r}, but it is observed.")
        base = rewrap(msg["fn"], gate.base_distribution())
        value = gate.rectify(pyro.sample(f"{name}_base", base))
        delta = Delta(value, event_dim=base.event_dim, validate_args=False).mask(False)
        return {"fn": delta, "value": value, "is_observed": True}


@torch.no_grad()
def complete_samples(
    model: Program, samples: Mapping[str, Tensor], *args: object, **kwargs: object
) -> dict[str, Tensor]:
    """Complete samples of a model's latent variables with their gates and ``pyro.deterministic`` sites.

    Runs the model once per draw, at the draw's values.

    Args:
        model: the model that was sampled, with its reparameterisation.
        samples: draws by site, shape ``(*draws, *shape of the site)``, such as ``mcmc.get_samples()`` with or without
            ``group_by_chain=True``.
        *args: the model's arguments.
        **kwargs: the model's keyword arguments.

    Returns:
        The samples and, in the model's order, the values of every deterministic site, of the same ``draws`` dimensions.

    Raises:
        TypeError: ``samples`` is not a dict.
        ValueError: the samples lack a latent site of the model, have an unknown one, or differ in their dimensions.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro import poutine
        >>> from pyro.infer import MCMC, NUTS
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer.reparam import RectifyReparam
        >>> def regression():
        ...     z = pyro.sample("z", HardConcrete(0.0))
        ...     effect = pyro.deterministic("effect", 2.0 * z)
        ...     pyro.sample("y", dist.Normal(effect, 1.0), obs=torch.tensor(1.5))
        >>> model = poutine.reparam(regression, {"z": RectifyReparam()})
        >>> mcmc = MCMC(NUTS(model), num_samples=20, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run()
        >>> samples = complete_samples(model, mcmc.get_samples())
        >>> {name: tuple(x.shape) for name, x in samples.items()}
        {'z_base': (20,), 'z': (20,), 'effect': (20,)}
    """
    expect(Mapping, "a dict of tensors by site", samples=samples)
    sites = sample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    lead = _dimensions_in_front(sites, samples)
    free = [name for name in samples if not is_deterministic(sites[name])]
    latent = {name: samples[name].flatten(0, len(lead) - 1) for name in free}
    fixed = {name: site["value"].shape for name, site in sites.items() if is_deterministic(site)}
    found = Predictive(model, latent, num_samples=lead.numel(), return_sites=list(fixed))(*args, **kwargs)
    return {**samples, **{name: found[name].reshape(lead + shape) for name, shape in fixed.items()}}


def _dimensions_in_front(sites: Mapping[str, Site], samples: Mapping[str, Tensor]) -> torch.Size:
    missing = [name for name, site in sites.items() if not site["is_observed"] and name not in samples]
    unknown = [name for name in samples if name not in sites]
    if missing or unknown:
        raise ValueError(
            f"Expected samples of every latent site of the model that was sampled, but got {sorted(samples)}: "
            f"{missing} are missing and {unknown} are not in the model. Pass the model with its reparameterisation; "
            "sites that a sampler sums out are drawn by pyro.infer.infer_discrete, and by sample_posterior."
        )
    splits = {name: x.dim() - sites[name]["value"].dim() for name, x in samples.items()}
    leads = {x.shape[: splits[name]] for name, x in samples.items()}
    are_right = all(x.shape[splits[name] :] == sites[name]["value"].shape for name, x in samples.items())
    if len(leads) != 1 or min(splits.values()) < 1 or not are_right:
        shapes = {name: (tuple(x.shape), tuple(sites[name]["value"].shape)) for name, x in samples.items()}
        raise ValueError(
            "Expected samples of the shape of their sites behind the same dimensions of draws, but got by site, beside "
            f"the site's own shape: {shapes}."
        )
    return leads.pop()
