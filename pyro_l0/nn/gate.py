"""The Gate layer: a random multiplier per unit, as a Pyro site inside any network."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType

import numpy as np
import pyro
import torch
from pyro.infer.elbo import ELBOModule
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.fast.products import may_be_in_block
from pyro_l0.fast.record import sample
from pyro_l0.nn.gate_layer import GateLayer, check_units, keep_being_called, site_path
from pyro_l0.nn.recompute import draw_in_block, keep_with, refuse_reentrant

__all__ = ["Gate"]


class Gate(GateLayer):
    r"""Multiply every unit by a gate that is sampled once per minibatch.

    Put it behind the nonlinearity, where a closed gate makes its unit a true zero. The sample site is named after the
    layer's module path, such as ``"net.3"``; see :func:`~pyro_l0.nn.gate_layer.name_gates`.

    Args:
        size: number of units. A single gate multiplies an input of any size, such as the output of a whole branch.
        dim: dimension of the input that holds the units; -1 for features, 1 for feature maps, never 0, the batch.
        prior: prior of one gate, or of each (shape ``(size,)``); by default a hard concrete that is open with
            probability 1/2. Only objectives with a gate KL use it.

    Shape:
        Input and output have the same shape; dimension ``dim`` has ``size`` entries, or any number if that is 1.

    Note:
        The layer behind may apply the gates to its weights instead. So ask for a gradient of the output itself
        (``retain_grad``, ``register_hook``) before anything uses the output, a flattening or another gate included. If
        maps are used as well as their flattened features, change neither in place.

        Without a guide, loss or other Pyro handler that gives the gates a value, they are drawn from the prior. In eval
        mode, and when gradients pass repeatedly, this warns once per network: use :func:`~pyro_l0.nn.fix_gates`. Such
        draws cannot be exported. Blocks of ``torch.utils.checkpoint`` need ``use_reentrant=False``.

    Raises:
        ValueError: ``size`` is not positive, ``dim`` is 0, the prior's shape does not fit, or the input has
            another number of units.
        TypeError: ``dim`` is not an integer, ``prior`` is not a gate distribution, or the input is not a tensor of a
            floating or complex type.
        RuntimeError: the layer is exported, or called in a reentrant checkpoint.

    Example:
        >>> import torch
        >>> from pyro_l0.nn.gate_layer import gate_names
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Gate(3))
        >>> net(torch.ones(2, 4)).shape
        torch.Size([2, 3])
        >>> gate_names(net)
        {'2': Gate(3, dim=-1)}

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; section 2.4.
    """

    def __init__(self, size: int, dim: int = -1, prior: GateDistribution | None = None) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"Expected size to be a positive number of units, but got {size!r}.")
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise TypeError(f"Expected dim to be an integer, but got {dim!r}.")
        if dim == 0:
            raise ValueError("Expected dim to be a dimension of units, but got 0, the batch.")
        if prior is None:
            prior = HardConcrete.from_active_prob(0.5)
        if not isinstance(prior, GateDistribution):
            raise TypeError(f"Expected prior to be a gate distribution, but got {prior!r}.")
        if prior.batch_shape not in ((), (1,), (size,)):
            raise ValueError(f"Expected a prior of shape () or ({size},), but got {tuple(prior.batch_shape)}.")
        self.size = int(size)
        self.dim = int(dim)
        self.prior = prior.expand((self.size,))
        self.site_name = None
        self.place = "gate"  # its name where it is called outside of every module
        self.prior_gradients = 0  # gradients through such draws
        self.register_forward_pre_hook(keep_being_called)
        self._site = self.prior.to_event(1)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply dimension ``dim`` of ``x`` by one sample of the gates."""
        check_units(x, self.size, self.dim, self.site_name or self)
        # Every handler but a plate may give values.
        is_alone = all(isinstance(handler, IndepMessenger) for handler in runtime._PYRO_STACK)
        if is_alone and _is_exporting():
            raise _no_export(self)
        name = self.site_name
        if name is None:
            name = self.site_name = _path_on_stack(self)
        in_block, kept = may_be_in_block(), None
        if in_block:
            z, kept = draw_in_block(self, name, x.device, lambda: sample(name, self._site))
        else:
            z = sample(name, self._site)
        if z.requires_grad and not torch.is_grad_enabled():
            refuse_reentrant(name)
        if z.dim() > 1:
            _warn_inside_data(name)
        out = self.multiply(x, z, self.dim, in_block)
        if kept is not None:
            keep_with(out, kept)
        if is_alone and in_block == (kept is not None) and not self.is_reported:
            _tell_without_posterior(self, name, out)
        return out

    def narrow(self, index: Tensor) -> None:
        """Keep the gates at some indices, in place; the site's name stays."""
        size = self.size
        prior = self.prior.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == (size,) else x)
        self.size = len(index)
        self.prior = prior.expand((self.size,))
        self._site = self.prior.to_event(1)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> Gate:  # what torch.jit.script asks for
        raise _no_export(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        # The prior moves with the network, though it is no parameter of it.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.prior = self.prior.apply_to_tensors(fn)
        self._site = self.prior.to_event(1)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Size and dimension."""
        return f"{self.size}, dim={self.dim}"


def _warn_inside_data(name: str) -> None:
    """Warn of a subsampled plate around the network, which gives every example its own gates."""
    for handler in runtime._PYRO_STACK:
        if isinstance(handler, pyro.plate) and handler.subsample_size < handler.size:
            warnings.warn(
                f"Gate {name!r} is sampled inside the subsampled plate {handler.name!r}, so that every example has "
                "its own gates, and none can be pruned; call the network before the plate.",
                stacklevel=3,
            )


def _tell_without_posterior(gate: Gate, name: str, out: Tensor) -> None:
    """Warn of a draw from the prior where a value of the posterior was probably meant."""
    is_compiling = torch.compiler.is_compiling()  # where there is no stack and no hook
    if gate.training and (is_compiling or not out.requires_grad):
        return
    network = gate if is_compiling else _root_on_stack(gate)
    if not gate.training:
        _warn_once(
            network,
            f"Gate {name!r} is called in eval mode without a guide or a loss, so that its values are random draws of "
            "the prior; evaluate fix_gates(network, guide.test_gates()), or the network of compact.",
        )
    else:

        def count(gradient: Tensor) -> None:
            gate.prior_gradients += 1
            if gate.prior_gradients > 1:  # a single one trains nothing yet
                _warn_once(
                    network,
                    f"Gradients pass gate {name!r}, whose values are random draws of the prior and which nothing "
                    "trains; train the network by L0_ELBO with the guide AutoGate, or fix its gates by fix_gates.",
                )

        out.register_hook(count)


def _warn_once(network: nn.Module, message: str) -> None:
    """Warn, unless one of the network's gates has warned already."""
    gates = [module for module in network.modules() if isinstance(module, Gate)]
    if not any(gate.is_reported for gate in gates):
        warnings.warn(message, stacklevel=2)
    for gate in gates:
        gate.is_reported = True


def _is_exporting() -> bool:
    compiler = torch.compiler
    is_exporting = getattr(compiler, "is_exporting", lambda: False)  # new in torch 2.7
    if torch._C._get_tracing_state() is not None or is_exporting():
        return True
    return compiler.is_compiling() and not compiler.is_dynamo_compiling()


def _no_export(gate: Gate) -> RuntimeError:
    name = gate.site_name
    if name is None and not torch.compiler.is_dynamo_compiling():
        name = _path_on_stack(gate)
    return RuntimeError(
        f"Expected a network without random gates, but gate {name!r}, Gate({gate.extra_repr()}), would be "
        "exported as a draw of its prior; export fix_gates(network, guide.test_gates()), or the network of compact."
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _path_on_stack(gate: Gate) -> str:
    """Path of a gate in the outermost module that is being called and contains it."""
    root = _root_on_stack(gate)
    path = next(path for path, module in root.named_modules() if module is gate)
    return site_path(root, path, with_wrappers=False) or gate.place


def _root_on_stack(gate: Gate) -> nn.Module:
    """The outermost module that is being called and contains a gate; a module does not know its parents."""
    root: nn.Module = gate
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, ELBOModule):
            break
        if isinstance(owner, nn.Module) and owner is not root and any(m is gate for m in owner.modules()):
            root = owner
        frame = frame.f_back
    return root
