"""Gates on the heads of attention, in front of the output projections."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from pyro_l0.nn.attention import PlainAttention
from pyro_l0.nn.engine.record import copied
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.gate_layer import check_given
from pyro_l0.nn.hooks import GateHook, arrange, has_hook, module_at

__all__ = ["gate_heads", "is_dense"]


def gate_heads(network: nn.Module, heads: Mapping[str, int]) -> nn.Module:
    """Copy a network and put a gate on each attention head.

    The input of an output projection holds the heads side by side. The gates multiply its slices, so compaction removes
    a closed head's columns of the projection and its rows of queries, keys and values.

    A hook on the projection at ``path`` gates its input; the site is named ``path.gate``, and every module and
    parameter of the network keeps its path. An exception is :class:`torch.nn.MultiheadAttention`, which never calls its
    output projection ``path.out_proj``: it is replaced by a module with the same arguments and results that calls its
    layers, among them ``path.q_proj``, ``path.k_proj`` and ``path.v_proj``.

    Args:
        network: the network; it is not changed, and weights are not shared.
        heads: by path of the output projection, the number of heads whose values it reads.

    Raises:
        ValueError: a path is not a module of the network, or the module has two names or head gates already; the number
            of heads is not that of the ``nn.MultiheadAttention``, or does not divide the projection's inputs; or an
            ``nn.MultiheadAttention`` is the whole network, or adds a bias or zeros to its keys and values.
        TypeError: a module is not a dense layer, or a number of heads is not an integer.

    Example:
        >>> import torch
        >>> from pyro_l0.nn import fix_gates
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
        >>> net = gate_heads(layer, {"self_attn.out_proj": 2})
        >>> fixed = fix_gates(net, {"self_attn.out_proj.gate": torch.tensor([1.0, 0.0])})
        >>> fixed(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    References:
        Voita, Talbot, Moiseev, Sennrich, Titov (2019), arXiv:1905.09418; section 5.1, with the gates in the same place.
    """
    check_given(network, heads, "numbers of heads by module path")
    new = copied(network)
    for path, number in heads.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"Expected the number of heads at {path!r} to be an integer, but got {number!r}.")
        module_at(new, path, "dense layers", is_dense)
        parent = new.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            _swap(new, path, parent, number)
        projection = new.get_submodule(path)
        _check_projection(new, path, projection, number)
        _HeadsHook(projection, number)
    arrange(new)
    for module in new.modules():
        # It would pass packed sequences to layers that take plain ones.
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, PlainAttention) for m in module.modules()):
            module.use_nested_tensor = False
    return new


class _HeadsHook(GateHook):
    """A gate per head in front of a projection."""

    suffix = "gate"

    def __init__(self, projection: nn.Module, heads: int) -> None:
        super().__init__(Gate(heads, dim=-2))
        self.heads = heads
        self.handles.append(projection.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The projection's input, shape ``(..., heads * head_size)``, with its slices multiplied by the gates."""
        x, *others = args
        return self.gate(x.unflatten(-1, (self.heads, -1))).flatten(-2), *others

    def resize(self, size: int) -> None:
        """Adapt to another number of heads."""
        self.heads = size


def _swap(network: nn.Module, path: str, attention: nn.MultiheadAttention, heads: int) -> None:
    """Replace torch's attention by a module whose layers are called."""
    inner = path.rpartition(".")[0]
    if heads != attention.num_heads:
        raise ValueError(
            f"Expected {attention.num_heads} heads at {path!r}, as many as its nn.MultiheadAttention has, but got "
            f"{heads}."
        )
    if not inner:
        raise ValueError(
            f"Expected a network that holds its nn.MultiheadAttention, which is replaced, but {path!r} is a part of "
            "one that is the whole network; put it into nn.Sequential, and give the path as '0.out_proj'."
        )
    _refuse_shared(network, inner, attention)
    try:
        plain = PlainAttention(attention)
    except ValueError as error:
        raise ValueError(f"{error} At {inner!r} there is one; write that attention out to gate its heads.") from error
    network.set_submodule(inner, plain)


def _check_projection(network: nn.Module, path: str, projection: nn.Module, heads: int) -> None:
    """Refuse all but a dense layer of one name that reads heads side by side."""
    if has_hook(projection, _HeadsHook):
        raise ValueError(f"Expected an output projection without head gates, but {path!r} has them already.")
    if not is_dense(projection):
        raise TypeError(
            f"Expected a dense layer at {path!r}, which reads the heads side by side, but got "
            f"{type(projection).__name__}; write a Gate(heads, dim=...) into the network's forward."
        )
    _refuse_shared(network, path, projection)
    weight = projection.weight
    assert isinstance(weight, Tensor)
    inputs = weight.shape[0 if type(projection).__name__ == "Conv1D" else 1]  # transformers' holds it transposed
    if heads < 1 or inputs % heads:
        raise ValueError(f"Expected a number of heads at {path!r} that divides its {inputs} inputs, but got {heads}.")


def _refuse_shared(network: nn.Module, path: str, module: nn.Module) -> None:
    names = [name for name, other in network.named_modules(remove_duplicate=False) if other is module]
    if len(names) > 1:
        raise ValueError(
            f"Expected {path!r} to be a module of one name, but it is at {' and at '.join(map(repr, names))}; "
            "write a Gate(heads, dim=...) into the network's forward."
        )


def is_dense(module: nn.Module) -> bool:
    """Whether a module is a dense layer: torch's, or one of a matrix alone, such as the Conv1D of transformers."""
    weight = getattr(module, "weight", None)
    is_other = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not is_other
