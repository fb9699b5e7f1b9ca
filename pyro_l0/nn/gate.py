"""The Gate layer, a random multiplier per unit, and what every gate in a network is."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral
from types import FrameType, MappingProxyType

import pyro
import torch
from pyro.infer.elbo import ELBOModule
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.expect import expect, expect_count
from pyro_l0.fast.products import gated_product, may_be_gated, may_be_in_block, multiply_along
from pyro_l0.infer.record import sample


class GateLayer(nn.Module):
    """Base class of :class:`~pyro_l0.nn.Gate` and :class:`~pyro_l0.nn.L0Gate`: a gate per unit in a network.

    Attributes:
        size: number of units; a single gate multiplies an input of any size.
        dim: dimension of the input that holds the units.
        site_name: the gates' name in guides, costs and plans; None until they are named.
    """

    size: int
    dim: int
    site_name: str | None
    is_reported: bool = False  # whether a draw that nothing trains was warned of

    def narrow(self, index: Tensor) -> None:
        """Keep the gates at some indices, shape ``(n,)``, in place."""
        raise NotImplementedError(f"Expected {type(self).__name__} to write narrow, which keeps some of its gates.")

    def multiply(self, x: Tensor, z: Tensor, dim: int, in_block: bool) -> Tensor:
        """Multiply units by their gates ``z``; where that is cheaper, the layer behind does it with its weights.

        Args:
            x: what the units returned.
            z: their gates, in a shape that broadcasts along ``dim``.
            dim: dimension of ``x`` that holds the units.
            in_block: whether a block of ``torch.utils.checkpoint`` may be around; then only the layer multiplies.
        """
        is_last = dim in (-1, x.dim() - 1)
        if self.size > 1 and not in_block and x.dim() > 1 and (is_last or dim == 1) and may_be_gated(x, z):
            return gated_product(x, z, -1 if is_last else 1)
        return multiply_along(x, z, dim)


class GateHolder(nn.Module):
    """Registers gates that act by hooks; when it is called, it does nothing.

    ``levels`` is how many modules below the network it is, as a container can't hold it.
    """

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: object) -> object:
        """The input."""
        return x


def name_gates(network: nn.Module, prefix: str = "") -> dict[str, GateLayer]:
    """Name the gates of a network after their module paths, and return them by name.

    An unnamed gate takes its name at its first forward pass, from the outermost running module that contains it
    (wrappers for losses and data parallelism do not count). Name gates beforehand, and it does not matter who calls the
    network first.

    Args:
        network: the module whose paths are used.
        prefix: text in front of every path.

    Raises:
        TypeError: ``network`` is not a module, or ``prefix`` not a string.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> list(name_gates(nn.Sequential(Gate(4), nn.Linear(4, 2), Gate(2)), prefix="net."))
        ['net.0', 'net.2']
    """
    check_given(network)
    expect(str, "a string", prefix=prefix)
    paths = {path: gate for path, gate in network.named_modules() if isinstance(gate, GateLayer)}
    gates = {prefix + (site_path(network, path) or "gate"): gate for path, gate in paths.items()}
    for name, gate in gates.items():
        gate.site_name = name
    return gates


def gate_names(network: nn.Module) -> dict[str, GateLayer]:
    """The gates of a network by site name, or by their path in it if they have none; see :class:`~pyro_l0.nn.Gate`.

    Raises:
        ValueError: two gates have one name.
        TypeError: ``network`` is not a module.
    """
    check_given(network)
    gates: dict[str, GateLayer] = {}
    for path, module in network.named_modules():
        if isinstance(module, GateLayer):
            name = module.site_name or site_path(network, path) or "gate"
            if name in gates:
                raise ValueError(
                    f"Expected gates of different names, but two are called {name!r}; name them by name_gates, which "
                    "takes their paths in the whole network."
                )
            gates[name] = module
    return gates


def check_given(network: object, entries: object = MappingProxyType({}), what: str = "") -> None:
    """Refuse all but a network and a mapping from strings, which a message describes by ``what``."""
    expect(nn.Module, "an nn.Module", network=network)
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
        raise TypeError(f"Expected {what}, but got a {type(entries).__name__}.")


def check_units(x: object, size: int, dim: int, name: object) -> None:
    """Refuse an input unless dimension ``dim`` holds ``size`` units, any number if that is 1."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"Expected a tensor at gate {name}, but got a {type(x).__name__}; of what a module such as nn.LSTM or "
            "nn.MultiheadAttention returns, pass on the entry to be gated."
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"Expected units of a floating type at gate {name}, but got {x.dtype}, which would round gates to 0; "
            "convert them, by images.float() / 255 for example."
        )
    if type(x) is Tensor and x.is_nested:
        for example in x.unbind():
            check_units(example, size, dim - 1 if dim > 0 else dim, name)
    elif x.dim() <= (dim if dim >= 0 else -dim - 1) or (size != 1 and size != x.shape[dim]):
        raise ValueError(
            f"Expected {size} units in dimension {dim} at gate {name}, but got an input of shape {tuple(x.shape)}."
        )


def keep_being_called(module: nn.Module, inputs: object) -> None:
    """A hook that does nothing, without which torch's fused transformer layers bypass a module."""


def site_path(root: nn.Module, path: str, with_wrappers: bool = True) -> str:
    """A gate's module path without holders of gates, and without the wrappers of torch unless those are asked for."""
    names: list[str] = []
    module = root
    for name in path.split(".") if path else []:
        is_wrapper = isinstance(module, DistributedDataParallel) or name in ("_orig_mod", "_export_root")
        module = getattr(module, name)
        if isinstance(module, GateHolder):
            names = names[: len(names) - module.levels]
        elif with_wrappers or not is_wrapper:
            names.append(name)
    return ".".join(names)


class Gate(GateLayer):
    r"""Multiply every unit by a gate that is sampled once per minibatch.

    Put it behind the nonlinearity, where a closed gate makes its unit a true zero. The sample site is named after the
    layer's module path, such as ``"net.3"``; see :func:`~pyro_l0.nn.gate.name_gates`.

    Args:
        size: number of units. A single gate multiplies an input of any size, such as the output of a whole branch.
        dim: dimension of the input that holds the units; -1 for features, 1 for feature maps, never 0, the batch.
        prior: prior of one gate, or of each (shape ``(size,)``); by default a hard concrete that is open with
            probability 1/2. Only objectives with a gate KL use it.

    Shape:
        Input and output have the same shape; dimension ``dim`` has ``size`` entries, or any number if that is 1.

    Note:
        The layer behind may apply the gates to its weights instead. So ask for a gradient of the output itself
        (``retain_grad``, ``register_hook``) before a layer or another gate reads the output.

        Without a guide, loss or other Pyro handler that gives the gates a value, they are drawn from the prior. In eval
        mode, and when gradients pass repeatedly, this warns once per network: use :func:`~pyro_l0.nn.fix_gates`. Such
        draws cannot be exported. In blocks of ``torch.utils.checkpoint`` use :class:`~pyro_l0.nn.L0Gate`.

    Raises:
        ValueError: ``size`` is not positive, ``dim`` is 0, or the input has another number of units.
        TypeError: ``size`` or ``dim`` is not an integer, ``prior`` is not a gate distribution, or the input is not a
            tensor of a floating or complex type.
        RuntimeError: the layer is exported, or called in a backward pass, as a checkpointed block does.

    Example:
        >>> import torch
        >>> from pyro_l0.nn.gate import gate_names
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
        expect_count(1, size=size)
        expect(Integral, "a whole number", dim=dim)
        if dim == 0:
            raise ValueError("Expected dim to be a dimension of units, but got 0, the batch.")
        if prior is None:
            prior = HardConcrete.from_active_prob(0.5)
        expect(GateDistribution, "a gate distribution", prior=prior)
        self.size = int(size)
        self.dim = int(dim)
        self.prior = prior.expand((self.size,))
        self.site_name = None
        self.site_of_hook = "gate"  # its name where no module contains it that is called
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
        in_block = may_be_in_block()
        if in_block and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"Expected gate {name!r} outside of checkpointed blocks, which would draw it anew, but one runs again "
                "for its gradient. Use L0Gate, whose value such a block takes again."
            )
        z = sample(name, self._site)
        if z.dim() > 1:
            _warn_inside_data(name)
        out = self.multiply(x, z, self.dim, in_block)
        if is_alone and not self.is_reported:
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


@_disable_dynamo  # torch.compiler.disable imports the compiler at once
def _path_on_stack(gate: Gate) -> str:
    """Path of a gate in the outermost module that is being called and contains it."""
    root = _root_on_stack(gate)
    path = next(path for path, module in root.named_modules() if module is gate)
    return site_path(root, path, with_wrappers=False) or gate.site_of_hook


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
