"""The gate layer, and the gates of a network as targets, shrinking and diagnostics ask for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Self

import pyro
import torch
from pyro.poutine import runtime
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor, distributed, nn
from torch._compile import _disable_dynamo
from torch.distributions import constraints, kl_divergence

from pyro_l0.distributions import (
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)
from pyro_l0.distributions.gate import GateDistribution, check_rate, concatenate, sum_open
from pyro_l0.expect import expect, expect_count
from pyro_l0.fast.products import has_top_hooks, may_be_in_block
from pyro_l0.fast.switch import is_on
from pyro_l0.infer.record import free_name, sample
from pyro_l0.nn.gate import GateLayer, check_units, gate_names, keep_being_called

__all__ = ["FAMILIES", "Gate", "L0Gate", "NetworkGates", "penalty"]


#: Gate families by name, which are ``"hard_concrete"``, ``"rectified_normal"``, ``"hard_kumaraswamy"``,
#: ``"exponential"``, ``"exponential_uniform"`` and ``"power_law"``. Binary gates are missing because they have no
#: pathwise draws, which a plain loss needs.
FAMILIES: dict[str, type[GateDistribution]] = {
    "hard_concrete": HardConcrete,
    "rectified_normal": RectifiedNormal,
    "hard_kumaraswamy": HardKumaraswamy,
    "exponential": ExponentialGate,
    "exponential_uniform": ExponentialUniformGate,
    "power_law": PowerLawGate,
}
Family = str | type[GateDistribution]

# What to do where a model's gate is called without the model.
_IN_A_LOOP = (
    "Evaluate fix_gates(network, guide.test_gates()), or the network of compact; NetworkGates(network) returns to the "
    "gates' own parameters."
)
_IN_A_BLOCK = "Give torch.utils.checkpoint use_reentrant=False, whose blocks run again with the gates of the first run."


class L0Gate(GateLayer):
    r"""A random gate for each unit, in any torch training loop and in models of Pyro.

    ``gate()`` is a value of each gate, ``gate(x)`` multiplies ``x`` by it. Put it behind the nonlinearity, where a
    closed gate makes its unit a true zero.

    In a torch loop the layer's own parameters are the gates' posterior: values are random in training mode, and
    deterministic (the test gate, Eq. 13) in evaluation mode. The L0 objective (Eq. 22) is the task's loss plus a price
    on open gates, :func:`penalty`; the free energy (Eq. 21) is the task's loss plus :meth:`kl`. For budgets, costs and
    compaction see :class:`NetworkGates`.

    In a model of Pyro the gates are a sample site of their ``prior``, with a posterior in a guide such as
    :class:`~pyro_l0.infer.AutoGate`. From then on a call without the guide is refused, and the layer's own parameters
    are buffers, until :class:`NetworkGates` is made of the network.

    Args:
        *shape: shape of the gates, such as ``L0Gate(300)`` for 300 units.
        dim: dimension of the input that holds the units; -1 for features, 1 for feature maps.
        prior: in a model of Pyro, the prior of one gate, or of each; by default one of the family that is open with
            probability 1/2. Only objectives with a gate KL use it.
        family: a name of :data:`~pyro_l0.nn.l0_gate.FAMILIES`, or a class of gates with pathwise draws and learned
            parameters.
        init_active_prob: P(z != 0) at the start.
        init_jitter: standard deviation of the normal noise on the location at the start (0.01 in the L0 paper).
        family_options: keywords of ``family.from_active_prob``, such as ``{"temperature": 0.5}``.
        sync_draws: whether all processes of a distributed training take the draws of the first; if not, each draws
            from its own generator.

    Shape:
        ``gate()`` has the gates' shape, ``gate(x)`` that of ``x``. The gates' last dimension is aligned with dimension
        ``dim`` of ``x``, and those before it with the ones before. A single gate, ``L0Gate(1)``, takes an input of any
        size.

    Note:
        Values are computed in float32 at least, under autocast and in half precision too; products have the type of
        ``x``. Every call draws anew, but in a run of a model, and in a call of a network that :class:`NetworkGates`
        knows, which draws all of its gates once. A block of ``torch.utils.checkpoint`` that runs again has the gates
        of its network's last call, and refuses if these are others than at first. The layer behind may apply gates to
        its weights instead: ask for a gradient of the output itself (``retain_grad``, ``register_hook``) before it is
        read. Under FSDP pass the gates, which are few, as ``ignored_params`` and average their gradients.

    Raises:
        ValueError: a size or rate is out of range, ``dim`` of a row of gates is 0, the batch, the family is unknown, or
            the input has another number of units.
        TypeError: an argument has the wrong type, or the input is not a tensor of a floating or complex type.
        RuntimeError: a model of Pyro has had the gate as a site, and it is called without; or a checkpointed block runs
            again and gets other gates.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> gate = L0Gate(3, init_active_prob=0.5)
        >>> gate().shape, gate(torch.ones(2, 3)).shape
        (torch.Size([3]), torch.Size([2, 3]))
        >>> round(float(gate.expected_l0().detach()), 2)
        1.5

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; Eq. 10-13, 21, 22.
    """

    is_reached = False  # by a call, since NetworkGates knows it
    # Which of its parameters were trained, if they are buffers, as a model has had it as a site, for a guide.
    waiting: tuple[str, ...] | None = None
    prior: GateDistribution | None = None  # None if a network computes the gates, which are no site then

    def __init__(
        self,
        *shape: int,
        dim: int = -1,
        prior: GateDistribution | None = None,
        family: Family = "hard_concrete",
        init_active_prob: float = 0.9,
        init_jitter: float = 0.01,
        family_options: Mapping[str, Any] | None = None,
        sync_draws: bool = True,
    ) -> None:
        if not shape:
            raise ValueError("Expected a shape, such as L0Gate(300), but got none.")
        for size in shape:
            expect_count(1, size=size)
        expect(Real, "a number", init_active_prob=init_active_prob, init_jitter=init_jitter)
        kind, options = _family(family, family_options)
        check_rate("init_active_prob", init_active_prob, kind.__name__)
        template = kind.from_active_prob(torch.tensor(float(init_active_prob)), **options)
        self._set_up(template, torch.Size(map(int, shape)), dim, sync_draws)
        if len(shape) == 1 and dim == 0:
            raise ValueError("Expected dim to be a dimension of units, but got 0, the batch.")
        prior = kind.from_active_prob(0.5, **options) if prior is None else prior
        expect(GateDistribution, "a gate distribution", prior=prior)
        self._expand(prior)
        for i, (name, value) in enumerate(template.on_real_line().items()):
            start = value.expand(shape).clone()
            if i == 0 and init_jitter:
                start += init_jitter * torch.randn(shape)
            self.register_parameter(name, nn.Parameter(start))

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        dim: int = -1,
        family: Family = "hard_concrete",
        *,
        family_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Gates that a network computes, such as one for each input of each example (DiffMask, arXiv:2004.14992).

        They have no parameters, and each process draws its own. Make new ones at every step, in the mode of the module
        that computes them: ``L0Gate.from_logits(logits).train(self.training)``.

        Args:
            logits: logits of P(z != 0), the gates' shape; those beyond ±15 count as ±15, except for hard concretes.
            dim: as for the class.
            family: as for the class.
            family_options: as for the class.

        Example:
            >>> gate = L0Gate.from_logits(torch.tensor([[0.0, 2.0]]))
            >>> gate.active_prob
            tensor([[0.5000, 0.8808]])
        """
        expect(Tensor, "a tensor", logits=logits)
        gate = cls.__new__(cls)
        kind, options = _family(family, family_options)
        made = kind.from_logits(logits, **options)
        gate._set_up(made, logits.shape, dim, sync_draws=False)
        return gate

    def _set_up(self, template: GateDistribution, shape: torch.Size, dim: int, sync_draws: bool) -> None:
        expect(Integral, "a whole number", dim=dim)
        expect(bool, "True or False", sync_draws=sync_draws)
        nn.Module.__init__(self)
        self.shape, self.dim, self.sync_draws = shape, int(dim), sync_draws
        self.size = shape[-1] if shape else 1
        self.site_name = None
        self.drawn: Drawn | None = None
        self._template = template
        self.register_forward_pre_hook(keep_being_called)

    def _expand(self, prior: GateDistribution) -> None:
        self.prior = prior.expand(self.shape)
        self._site = self.prior.to_event(len(self.shape))  # type: ignore[no-untyped-call]

    @property
    def distribution(self) -> GateDistribution:
        """The gates' distribution, shape ``self.shape``, differentiable in their parameters; at least in float32."""
        held = (self._parameters or self._buffers).items()
        values = {name: _at_least_float32(x) for name, x in held if x is not None}
        return self._template.from_real_line(values) if values else self._template

    @property
    def active_prob(self) -> Tensor:
        """P(z != 0) of each gate (Eq. 12), the gates' shape."""
        return self.distribution.active_prob

    @property
    def test_gate(self) -> Tensor:
        """The deterministic gates that prune (Eq. 13), the gates' shape."""
        return self.distribution.test_gate

    @property
    def location(self) -> nn.Parameter:
        """The parameter that moves P(z != 0) most, the gates' shape."""
        location: nn.Parameter = getattr(self, next(iter(self._template.learned)))
        if location.shape != self.shape or hasattr(location, "to_local"):
            raise ValueError(
                f"Expected {self.site_name or self!r} to be whole in every process, but FSDP sharded its parameters; "
                "give it list(NetworkGates(network).parameters()) as ignored parameters."
            )
        return location

    def expected_l0(self) -> Tensor:
        """The sum of P(z != 0) over the gates, shape ``()``, differentiable in their parameters."""
        return self.active_prob.sum()

    def kl(self, prior: GateDistribution) -> Tensor:
        """KL of the gates to a prior with the same atoms, summed over the gates, in nats (Eq. 21); shape ``()``.

        Divide it by the number of training examples beside a loss that is their mean.

        Args:
            prior: prior of one gate or of each, such as ``HardConcrete.from_active_prob(0.1)``.

        Raises:
            TypeError: ``prior`` is not a gate distribution, or its atoms differ.
        """
        expect(GateDistribution, "a gate distribution", prior=prior)
        return kl_divergence(self.distribution, prior.expand(self.shape)).sum()

    def forward(self, x: Tensor | None = None, dim: int | None = None) -> Tensor:
        """The gates' values, or ``x`` multiplied by them; ``dim`` overrides that of the constructor."""
        self.is_reached = True
        dim = self.dim if dim is None else dim
        if x is not None:
            check_units(x, self.size, dim, self.site_name or self)
        in_block = may_be_in_block()
        z = self._value(in_block)
        if x is None:
            return z.clone()  # not the value that the other calls of the gate have, which it may be changed in
        out = self.multiply(x, z, dim, in_block)
        if len(self.shape) > 1 and out.shape != x.shape:
            raise ValueError(
                f"Expected an input that gates of shape {tuple(self.shape)} at {self.site_name or self} multiply "
                f"without enlarging it, but got one of shape {tuple(x.shape)}."
            )
        return out

    def _value(self, in_block: bool) -> Tensor:
        """A draw, or the one that holds; in evaluation mode the test gate, unless a model has the gate as a site."""
        drawn, task = self.drawn, torch._C._current_graph_task_id() if in_block else -1
        is_held = drawn is not None and not drawn.is_over and drawn.with_grad == torch.is_grad_enabled()
        if task == -1 and self.prior is not None and _in_model():
            value = self._site_value()
            if in_block:
                self.drawn = Drawn(value, torch.is_grad_enabled(), self, is_over=True, in_block=True)
        elif not self.training and self.waiting is None:
            return self.test_gate
        elif drawn is not None and drawn.in_block and task != -1 and has_top_hooks():
            value = drawn.value  # a checkpointed block runs again
        elif self.waiting is not None:
            raise RuntimeError(
                f"Expected gate {self.site_name!r} in a run of the model of which it is a site, but it is called "
                f"without, so that nothing gives its value. {_IN_A_LOOP if task == -1 else _IN_A_BLOCK}"
            )
        elif drawn is not None and is_held and (not in_block or drawn.task == task):
            value, drawn.in_block = drawn.value, in_block or drawn.in_block
        else:
            value = draw([self])[0][0]
        if in_block and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            value = value if value.requires_grad else value.detach().requires_grad_(value.is_floating_point())
            value = _SameAgain.apply(value, self.site_name or self)  # type: ignore[no-untyped-call]
        return value

    def _site_value(self) -> Tensor:
        """The value of the gate's site in a run of Pyro, drawn from the prior where no handler sets it."""
        if self.waiting is None or self.site_name is None:
            self._leave_to_guide()
        assert self.site_name is not None
        value = sample(self.site_name, self._site)
        if value.dim() > len(self.shape):
            _warn_inside_data(self.site_name)
        return value

    @_disable_dynamo  # torch.compiler.disable imports the compiler at once
    def _leave_to_guide(self) -> None:
        """Take a name, and let the own parameters wait as buffers, for which no optimiser and no process waits."""
        self.site_name = self.site_name or free_name("gate")
        if self.waiting is None and not torch._C._are_functorch_transforms_active():
            self.waiting = tuple(name for name, p in self.named_parameters() if p.requires_grad)
            for name, parameter in list(self.named_parameters()):
                del self._parameters[name]
                self.register_buffer(name, parameter.requires_grad_(False))

    def take_back(self) -> None:
        """Let the gates' own parameters be their posterior, instead of a guide's."""
        for name, x in list(self._buffers.items()):
            assert x is not None
            del self._buffers[name]
            self.register_parameter(name, x if isinstance(x, nn.Parameter) else nn.Parameter(x))
            self.get_parameter(name).requires_grad_(name in (self.waiting or ()))
        self.waiting = None

    def narrow(self, index: Tensor) -> None:
        """Keep the gates at some indices, shape ``(n,)``, in place, with new parameters."""
        size = self.shape
        self._template = self._template.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == size else x)
        for name, old in [*self.named_parameters(), *self.named_buffers()]:
            new = nn.Parameter(old.detach()[index.to(old.device)].clone(), old.requires_grad)
            (self._parameters if self.waiting is None else self._buffers)[name] = new
        self.size, self.shape, self.drawn = len(index), torch.Size([len(index)]), None
        if self.prior is not None:
            self._expand(self.prior.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == size else x))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._parameters or self._buffers:  # options that are tensors move with the parameters
            self._template = self._template.apply_to_tensors(fn)
        if self.prior is not None:
            self._expand(self.prior.apply_to_tensors(fn))
        return self

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "drawn": None}  # which has a graph

    def extra_repr(self) -> str:
        """Shape, dimension and class of the family, for ``print``."""
        return f"{', '.join(map(str, self.shape))}, dim={self.dim}, {type(self._template).__name__}"


@dataclass
class Drawn:
    """A gate's value in a call of its network, and what it stands for afterwards."""

    value: Tensor
    with_grad: bool  # whether it was drawn with a graph
    by: nn.Module  # the network; the gate itself if a model has it as a site
    task: int = -1  # the backward pass in which it was drawn
    is_over: bool = False  # whether the call has ended
    in_block: bool = False  # whether a checkpointed block may have taken it, which takes it again


class _SameAgain(torch.autograd.Function):
    """Its input; the backward pass refuses if the checkpointed block around it had another one when it ran again."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, name: object) -> Tensor:
        ctx.first, ctx.name = z.detach(), name
        ctx.save_for_backward(z)  # of which a block makes a new one
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (again,) = ctx.saved_tensors
        if not again.is_meta and not torch.allclose(again, ctx.first, rtol=0.0, atol=0.0, equal_nan=True):
            raise RuntimeError(
                f"Expected a checkpointed block that runs again to have the value of gate {ctx.name} that it had at "
                "first, but its network has been called since, or its random state is another. Go backward after each "
                "call of the network, and keep preserve_rng_state=True."
            )
        return grad, None


def _in_model() -> bool:
    """Whether a handler is active that may give sites a value; plates don't."""
    stack = runtime._PYRO_STACK
    return bool(stack) and not all(isinstance(handler, IndepMessenger) for handler in stack)


def _warn_inside_data(name: str) -> None:
    """Warn of a subsampled plate around the network, which gives every example its own gates."""
    for handler in runtime._PYRO_STACK:
        if isinstance(handler, pyro.plate) and handler.subsample_size < handler.size:
            warnings.warn(
                f"Gate {name!r} is sampled inside the subsampled plate {handler.name!r}, so that every example has "
                "its own gates, and none can be pruned; call the network before the plate.",
                stacklevel=3,
            )


def _versions(gates: Iterable[L0Gate]) -> list[tuple[int, int]]:
    """Parameters, and how often each was changed in place."""
    return [(id(x), x._version) for gate in gates for x in gate._parameters.values() if x is not None]


def draw(gates: Sequence[L0Gate]) -> tuple[Sequence[Tensor], Tensor | None]:
    """A draw of each gate, the same in all processes if ``sync_draws``; P(z != 0) of all, if they are drawn jointly."""
    each = [gate.distribution for gate in gates]
    if not (gates[0].sync_draws and _processes() > 1):
        return _sample(each)
    # The first process says from where all draw; its own number comes from the generator that a checkpointed block
    # restores.
    device = each[0]._like.device
    seed = torch.randint(2**62, (1,), device=device)
    distributed.broadcast(seed, 0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        return _sample(each)


def _sample(each: Sequence[GateDistribution]) -> tuple[Sequence[Tensor], Tensor | None]:
    if len(each) > 1 and is_on("joint_draws") and concatenate(each) is not None:
        joint = each[0].draw_jointly(each)
        return joint.draws, joint.active_prob
    return [gates.rsample() for gates in each], None


class _CallHook:
    """Draws the gates of a network once for each of its calls, unless it is compiled; has handles as GateHook has."""

    def __init__(self, network: nn.Module) -> None:
        self.has_trained = False  # since the gates are watched
        # P(z != 0) of the last draw, which costs less beside it, and of which parameters; for one price.
        self.priced: tuple[list[tuple[int, int]], Tensor] | None = None
        self.handles = [
            network.register_forward_pre_hook(self),
            network.register_forward_hook(self.forget, always_call=True),
        ]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "priced": None}

    def __call__(self, network: nn.Module, args: object) -> None:
        """Draw all gates in training mode once, for this call of the network and the blocks that it runs again."""
        if torch.compiler.is_compiling():
            return
        gates = [x for x in network.modules() if isinstance(x, L0Gate) and x.training and x._parameters]
        # A network around this one has drawn already; own values may be left from a call that was interrupted.
        gates = [x for x in gates if x.drawn is None or x.drawn.is_over or x.drawn.by is network]
        gates = [x for x in gates if x.waiting is None]
        for are_same in (True, False):
            own = [gate for gate in gates if gate.sync_draws == are_same]
            values, active_prob = draw(own) if own else ([], None)
            for gate, value in zip(own, values, strict=True):
                task = torch._C._current_graph_task_id()
                gate.drawn = Drawn(value, torch.is_grad_enabled(), network, task, in_block=may_be_in_block())
            # A backward pass of the loss alone would free the nodes that transforms of parameters share with a price.
            is_apart = own and all(x is constraints.real for x in own[0]._template.learned.values())
            if is_apart and active_prob is not None and active_prob.requires_grad:
                self.priced = _versions(own), active_prob

    def forget(self, network: nn.Module, args: object, output: object) -> None:
        """Let gates draw by themselves again; after the first training call refuse those that no call reached."""
        gates = [x for x in network.modules() if isinstance(x, L0Gate)]
        for gate in gates:
            if gate.drawn is not None and gate.drawn.by is network:
                gate.drawn.is_over = True
                if not gate.drawn.in_block:
                    gate.drawn = None
        is_training = output is not None and any(x.training for x in gates) and torch.is_grad_enabled()
        if self.has_trained or not is_training or torch.compiler.is_compiling():
            return
        self.has_trained = True
        idle = [site for site, gate in _l0_gates(network).items() if not gate.is_reached]
        if idle:
            raise ValueError(
                f"Expected a network that uses its gates, but its first training call did not reach {idle[0]!r}; take "
                "the gate out, or before that call the network in evaluation mode on inputs that reach it."
            )


def _call_hook(network: nn.Module) -> _CallHook | None:
    return next((hook for hook in network._forward_pre_hooks.values() if isinstance(hook, _CallHook)), None)


def forget_calls(network: nn.Module) -> None:
    """Remove the hooks that draw a network's gates from modules where there are none, in place."""
    for module in network.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, _CallHook) and not any(isinstance(x, L0Gate) for x in module.modules()):
                for handle in hook.handles:
                    handle.remove()


def _family(
    family: Family, family_options: Mapping[str, Any] | None
) -> tuple[type[GateDistribution], Mapping[str, Any]]:
    """The class of a family, given or by name, and its options; a ValueError refuses what has no pathwise draws."""
    expect(Mapping | None, "a dict of arguments of the family", family_options=family_options)
    kind = FAMILIES.get(family) if isinstance(family, str) else family
    if not (isinstance(kind, type) and issubclass(kind, GateDistribution) and kind.has_rsample and kind.learned):
        raise ValueError(
            f"Expected family to be one of {sorted(FAMILIES)}, or a class of gates with pathwise draws and learned "
            f"parameters, but got {family!r}."
        )
    return kind, family_options or {}


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _processes() -> int:
    is_one = torch.compiler.is_compiling() or not (distributed.is_available() and distributed.is_initialized())
    return 1 if is_one else distributed.get_world_size()


class Gate(L0Gate):
    """An :class:`L0Gate` for a row of units whose gates start alike, with the arguments that a model of Pyro needs.

    Args:
        size: number of units.
        dim: dimension of the input that holds the units.
        prior: as of :class:`L0Gate`.

    Raises:
        ValueError: ``size`` is out of range, or ``dim`` is 0, the batch.
        TypeError: an argument has the wrong type.

    Example:
        >>> Gate(20, 1)
        Gate(20, dim=1, HardConcrete)
    """

    def __init__(self, size: int, dim: int = -1, prior: GateDistribution | None = None) -> None:
        super().__init__(size, dim=dim, prior=prior, init_jitter=0.0)


class NetworkGates:
    """The gates of a network and their own parameters, by site, with the methods of a guide over gates.

    :class:`~pyro_l0.infer.SparsityTarget`, :class:`~pyro_l0.compaction.Shrinker` and
    :func:`~pyro_l0.diagnostics.diagnose` take it in place of a guide. A site is named after the gate's module path.

    A hook on the network draws all gates once for each of its calls. So a gate that is called several times has one
    value, also in checkpointed blocks, and a step takes less time. Modules called on their own draw by themselves.

    Args:
        network: a network with L0Gates.

    Attributes:
        sites: the network's own L0Gates by site.

    Raises:
        ValueError: the network has no L0Gate. The network's first training call raises one for gates that neither it
            nor a call before reaches.
        TypeError: ``network`` is not a module.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> gate = L0Gate(3, init_jitter=0.0)
        >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), gate, nn.Linear(3, 2))
        >>> gates = NetworkGates(network)
        >>> gates.test_gates()
        {'2': tensor([0.6744, 0.6744, 0.6744])}
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        _some_l0_gates(network)
        self._follow()
        is_new = _call_hook(network) is None
        if is_new:
            _CallHook(network)
        for gate in self.sites.values():
            gate.take_back()
            gate.is_reached = gate.is_reached and not is_new

    def _follow(self) -> None:
        self.sites = _l0_gates(self._network)
        self._held = {site: dict(gate.named_parameters()) for site, gate in self.sites.items()}

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """A value of each gate, by site and in its shape; random in training mode. Arguments are ignored."""
        return {site: gate() for site, gate in self.sites.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates' parameters, for their own parameter group of an optimiser."""
        for gate in self.sites.values():
            yield from gate.parameters()

    def train(self, mode: bool = True) -> Self:
        """Put the gates alone in training mode, where they are drawn, or in evaluation mode.

        After ``network.eval()`` it makes a network of frozen weights that is as in evaluation but for its gates.
        """
        for gate in self.sites.values():
            gate.train(mode)
        return self

    def eval(self) -> Self:
        """Put the gates alone in evaluation mode, where they are as :meth:`test_gates` says."""
        return self.train(False)

    def posterior(self) -> dict[str, GateDistribution]:
        """The gates' distributions by site, differentiable in their parameters."""
        return {site: gate.distribution for site, gate in self.sites.items()}

    def locations(self) -> list[nn.Parameter]:
        """The location parameter of each site's gates, in the order of :meth:`posterior`."""
        return [gate.location for gate in self.sites.values()]

    @torch.no_grad()
    def test_gates(self) -> dict[str, Tensor]:
        """The deterministic gates that prune, by site and in its shape."""
        return {site: gate.test_gate for site, gate in self.sites.items()}

    @torch.no_grad()
    def active_probs(self) -> dict[str, Tensor]:
        """P(z != 0) of each gate, by site and in its shape."""
        return {site: gate.active_prob for site, gate in self.sites.items()}

    def keep(self, units: Mapping[str, Tensor]) -> dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]]:
        """Follow the network after units were removed; as ``keep`` of :class:`~pyro_l0.infer.AutoGate`."""
        before = self._held
        self._follow()
        replaced: dict[nn.Parameter, tuple[nn.Parameter | None, Tensor]] = {}
        for site, index in units.items():
            now = self._held.get(site, {})
            replaced.update({old: (now.get(name), index) for name, old in before[site].items()})
        return replaced


def penalty(network: nn.Module, cost: float | Mapping[str, float] | Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
    r"""The price of a network's open L0Gates in nats, shape ``()``; add it to the task's loss.

    The sum is Eq. 22.

    .. math:: \sum_j c_j P(z_j \neq 0) \quad \text{for prices } c, \qquad c(P(z \neq 0)) \quad \text{for a function } c.

    With prices :math:`\lambda |g|` by site it is the penalty of ``L0_ELBO("l0", lam=lam, group_size=sizes)``.

    Args:
        network: a network with L0Gates.
        cost: the price of each open gate in nats, one for all or by site, such as ``{site: lam * size for site, size in
            cost.group_sizes.items()}``; or a function of P(z != 0) by site, such as ``NetworkCost.macs``.

    Raises:
        ValueError: the network has no L0Gate, or a site has no price.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> gate = L0Gate(4, init_active_prob=0.5, init_jitter=0.0)
        >>> network = nn.Sequential(gate, nn.Linear(4, 2))
        >>> round(float(penalty(network, 0.1).detach()), 4)
        0.2
    """
    gates = _some_l0_gates(network)
    if callable(cost):
        return cost({site: gate.active_prob for site, gate in gates.items()})
    coefficients = dict.fromkeys(gates, float(cost)) if isinstance(cost, Real) else cost
    if not isinstance(coefficients, Mapping) or coefficients.keys() != gates.keys():
        raise ValueError(
            f"Expected cost to be a price, a function, or a price for each of the gates {sorted(gates)}, but got "
            f"{cost!r}."
        )
    prices, sizes = list(coefficients.values()), [gate.shape.numel() for gate in gates.values()]
    # Taken once: a backward pass may free the graph, and a further price makes its own.
    hook = None if torch.compiler.is_compiling() else _call_hook(network)
    if hook is not None and hook.priced is not None:
        (versions, active_prob), hook.priced = hook.priced, None
        if torch.is_grad_enabled() and versions == _versions(gates.values()):
            return sum_open(active_prob, prices, sizes)
    each = [gate.distribution for gate in gates.values()]
    joint = concatenate(each)
    if joint is not None:
        return sum_open(joint.active_prob, prices, sizes)
    terms = [c * x.active_prob.sum() for c, x in zip(coefficients.values(), each, strict=True)]
    return torch.stack(terms).sum()


def _l0_gates(network: nn.Module) -> dict[str, L0Gate]:
    return {site: gate for site, gate in gate_names(network).items() if isinstance(gate, L0Gate)}


def _some_l0_gates(network: nn.Module) -> dict[str, L0Gate]:
    gates = _l0_gates(network)
    if not gates:
        raise ValueError("Expected a network with L0Gates, but it has none. Put some in, by insert_gates say.")
    return gates
