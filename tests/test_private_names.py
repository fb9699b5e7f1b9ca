"""Private names of other libraries: those that the package uses are listed here, and are in what is installed.

None has a public twin that does the same. A version that lacks one fails here, by name.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
from pyro.distributions import MaskedDistribution
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.poutine.messenger import Messenger
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from torch import nn
from torch.nn.utils import prune

import pyro_l0

SEEN = "torch 2.13.0, Pyro 1.9.2, scikit-learn 1.9.1"  # where all of these were seen
PATHS = {
    "pyro.poutine.runtime": "_PYRO_STACK",  # which handlers are active
    # scikit-learn's own checks of arguments, with its messages
    "sklearn.utils._missing": "is_pandas_na is_scalar_nan",
    "sklearn.utils._param_validation": "Interval StrOptions",
    "sklearn.utils.validation": "_check_feature_names_in _check_sample_weight _check_y",
    "torch": "_standard_gamma",  # gamma draws from a generator
    # whether torch.func, a mode or a backward pass calls; and a subclass's operation on plain tensors
    "torch._C": "DisableTorchFunctionSubclass _are_functorch_transforms_active _current_graph_task_id "
    "_len_torch_dispatch_stack",
    "torch._C._autograd": "_top_saved_tensors_default_hooks",  # whether a block is checkpointed
    "torch._C._functorch": "get_unwrapped is_batchedtensor is_functorch_wrapped_tensor",  # inside of torch.func
    "torch._VF": "_pad_packed_sequence",  # as torch calls it, which the engine records
    "torch._compile": "_disable_dynamo",  # torch.compiler.disable imports the compiler, which takes a second
    "torch._functorch.pyfunctorch": "temporarily_pop_interpreter_stack",  # a draw outside of torch.func
    "torch._guards": "active_fake_mode",  # whether the compiler traces
    "torch._ops": "OpOverload",  # an operation of a graph
    "torch.nn.modules.batchnorm": "_BatchNorm _NormBase",  # bases, so that a user's subclass of one counts
    "torch.nn.modules.conv": "_ConvNd",
    "torch.types": "_size",  # the type of shapes in torch's signatures
    "torch.utils._python_dispatch": "TorchDispatchMode",  # records operations
    # tensors in nested arguments
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
}
# Attributes, and methods that a subclass overrides; the last test says what has them.
MEMBERS = {
    "what a module holds, doubles and None too": "_buffers _modules _parameters",
    "its hooks in their order": "_forward_hooks _forward_hooks_always_called _forward_pre_hooks",
    "what moves a module's tensors, and what loads them": "_apply _load_from_state_dict",
    "weights that a recurrent layer's call reads": "_flat_weights _flat_weights_names _update_flat_weights",
    "the padding and the call of a convolution": "_conv_forward _reversed_padding_repeated_twice",
    "what was done to a tensor": "_backward_hooks _version",
    "an operation's arguments, and which tensor is pruned": "_schema _tensor_name",
    "what a transform computes": "_call",
    "a distribution without its checks, and its mask": "_batch_shape _mask _validate_args _validate_sample",
    "what torch.compile keeps as it is, and what is inside of it": "_dynamo_marked_constant _orig_mod",
    "an optimiser that unscales gradients itself": "_step_supports_amp_scaling",
    "what a handler does with a site": "_postprocess_message _process_message",
    "steps of a loss": "_get_trace _get_traces",
    "steps of a guide": "_check_module_local_param_usage _create_plates _prototype_hide_fn _pyro_context "
    "_pyro_get_fullname _setup_prototype",
    "what an estimator checks and selects": "_get_support_mask _validate_params",
}
LISTED_PATHS = {f"{module}.{name}" for module, names in PATHS.items() for name in names.split()}
LISTED_MEMBERS = {name for names in MEMBERS.values() for name in names.split()}
FILES = [[*ast.walk(ast.parse(path.read_text()))] for path in Path(pyro_l0.__file__).parent.rglob("*.py")]
NAMES = [x.name for x in pkgutil.walk_packages(pyro_l0.__path__, "pyro_l0.") if ".callbacks." not in x.name]
MODULES = [importlib.import_module(name) for name in NAMES]


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def is_foreign(module):
    return module.split(".")[0] not in {*sys.stdlib_module_names, "pyro_l0"}


def path_of(node):
    """An expression such as ``nn.Module``; of others the attributes at its end, as in ``.weight.data``."""
    return f"{path_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def members_of_the_package():
    """Names of methods and attributes that a class of the package defines."""
    yield from ("_replace", "_asdict", "_fields")  # of named tuples, where they are public
    for node in (node for nodes in FILES for node in nodes):
        if isinstance(node, ast.ClassDef):
            yield from (x.name for x in node.body if isinstance(x, ast.FunctionDef))
            targets = [x.targets[0] if isinstance(x, ast.Assign) else getattr(x, "target", x) for x in node.body]
            yield from map(path_of, targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and path_of(node.value) == "self":
            yield node.attr


def uses(nodes):
    """Paths below what a file imports, and names of other attributes, also where they are texts."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update((x.asname, x.name) if x.asname else [x.name.split(".")[0]] * 2 for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update((x.asname or x.name, f"{node.module}.{x.name}") for x in node.names)
    yield from names.values()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, path = path_of(node).partition(".")
            yield f"{names[root]}.{path}" if root in names else node.attr
        elif isinstance(node, ast.Call) and path_of(node.func) in ("getattr", "hasattr"):
            yield from [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []


def overridden():
    """Private methods of other libraries' classes that one of the package's overrides."""
    for cls in {x for module in MODULES for x in vars(module).values() if inspect.isclass(x)}:
        bases = [x for x in cls.__mro__ if is_foreign(x.__module__)] if not is_foreign(cls.__module__) else []
        methods = [name for name, x in vars(cls).items() if is_private(name) and inspect.isfunction(x)]
        yield from (name for name in methods if any(name in vars(base) for base in bases))


def test_all_that_is_used_is_listed():
    used = {name for nodes in FILES for name in uses(nodes) if any(is_private(x) for x in name.split("."))}
    paths = {name for name in used if "." in name and is_foreign(name)}
    paths = {name for name in paths if not any(other.startswith(f"{name}.") for other in paths)}
    assert paths == LISTED_PATHS
    own = {*members_of_the_package()} - LISTED_MEMBERS  # both may have a name, such as _parameters
    assert {name for name in used if "." not in name} - own | {*overridden()} == LISTED_MEMBERS


def test_what_is_listed_is_installed():
    normal, pruning = torch.distributions.Normal(0.0, 1.0), prune.identity(nn.Linear(1, 1), "weight")
    owners = [nn.Conv1d(1, 1, 1), nn.RNN(1, 1), torch.zeros(1), torch.ops.aten.add.Tensor, torch._C._autograd]
    owners += [normal, MaskedDistribution(normal, True), torch.distributions.SigmoidTransform, Messenger, Trace_ELBO]
    owners += [AutoNormal(lambda: None), BaseEstimator, SelectorMixin, *pruning._forward_pre_hooks.values()]
    files = ("_dynamo/eval_frame.py", "_dynamo/decorators.py", "optim/sgd.py")  # read, as the compiler's import is slow
    text = "".join((Path(torch.__file__).parent / name).read_text() for name in files)
    installed = {name for name in LISTED_MEMBERS if any(hasattr(owner, name) for owner in owners) or name in text}
    for module, _, name in (path.rpartition(".") for path in LISTED_PATHS):
        with suppress(ImportError):  # then it is missing
            installed.update([f"{module}.{name}"] if hasattr(importlib.import_module(module), name) else [])
    missing = sorted((LISTED_PATHS | LISTED_MEMBERS) - installed)
    assert not missing, f"{missing} were seen in {SEEN}, and are gone"
