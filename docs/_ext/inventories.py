"""What the docs link to in other projects' docs, by the names that signatures have; the docs build without a network.

Sphinx reads such lists from files called inventories. Those of whole projects would have to be downloaded for every
build, so this writes small ones.
"""

from __future__ import annotations

import zlib
from pathlib import Path

TORCH, PYRO = "https://docs.pytorch.org/docs/stable/", "https://docs.pyro.ai/en/stable/"
NUMPY, PYTHON = "https://numpy.org/doc/stable/", "https://docs.python.org/3/"
# By project: where its docs are, and by name the page; the anchor is what stands behind #, or the name.
LINKS: dict[str, tuple[str, dict[str, str]]] = {
    "python": (
        PYTHON,
        {
            **{
                f"collections.abc.{name}": "library/collections.abc.html"
                for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence", "Set")
            },
            "collections.Counter": "library/collections.html",
            "pathlib.Path": "library/pathlib.html",
            "Path": "library/pathlib.html#pathlib.Path",
        },
    ),
    "torch": (
        TORCH,
        {
            "torch.Tensor": "tensors.html",
            "Tensor": "tensors.html#torch.Tensor",
            "torch.Size": "size.html",
            "torch.device": "tensor_attributes.html",
            "torch.dtype": "tensor_attributes.html",
            "torch.autocast": "amp.html",
            "torch.nn.modules.module.Module": "generated/torch.nn.Module.html#torch.nn.Module",
            "nn.Module": "generated/torch.nn.Module.html#torch.nn.Module",
            "torch.nn.parameter.Parameter": "generated/torch.nn.parameter.Parameter.html",
            "torch.nn.MultiheadAttention": "generated/torch.nn.MultiheadAttention.html",
            "torch.optim.Optimizer": "optim.html",
            "torch.optim.optimizer.Optimizer": "optim.html#torch.optim.Optimizer",
            "torch.optim.lr_scheduler.LRScheduler": "generated/torch.optim.lr_scheduler.LRScheduler.html",
            "torch.distributions.distribution.Distribution": "distributions.html",
            "Distribution": "distributions.html#torch.distributions.distribution.Distribution",
            "torch.distributions.normal.Normal": "distributions.html#normal",
            "torch.distributions.constraints.Constraint": "distributions.html#module-torch.distributions.constraints",
        },
    ),
    "pyro": (
        PYRO,
        {
            "pyro.optim.optim.PyroOptim": "optimization.html",
            "pyro.distributions.torch_distribution.TorchDistribution": "distributions.html",
            "pyro.distributions.torch.TransformedDistribution": "distributions.html",
            "pyro.distributions.torch.Normal": "distributions.html#normal",
            "pyro.distributions.torch.LogNormal": "distributions.html#lognormal",
            "pyro.infer.autoguide.AutoGuideList": "infer.autoguide.html#pyro.infer.autoguide.AutoGuideList",
            "pyro.infer.reparam.reparam.ReparamResult": "infer.reparam.html",
            "pyro.infer.reparam.reparam.ReparamMessage": "infer.reparam.html",
        },
    ),
    "numpy": (
        NUMPY,
        {
            "numpy.ndarray": "reference/generated/numpy.ndarray.html",
            "numpy.dtype": "reference/generated/numpy.dtype.html",
            "numpy.generic": "reference/arrays.scalars.html",
            **{
                f"numpy.{name}": "reference/arrays.scalars.html"
                for name in ("float64", "int64", "uint8", "bool", "object_")
            },
            "ArrayLike": "reference/typing.html#numpy.typing.ArrayLike",
            "numpy.random.mtrand.RandomState": "reference/random/legacy.html#numpy.random.RandomState",
            "np.random.RandomState": "reference/random/legacy.html#numpy.random.RandomState",
            "RandomState": "reference/random/legacy.html#numpy.random.RandomState",
        },
    ),
    "arviz": (
        "https://python.arviz.org/en/stable/",
        {
            "arviz.InferenceData": "api/inference_data.html",
            "InferenceData": "api/inference_data.html#arviz.InferenceData",
        },
    ),
    "pandas": (
        "https://pandas.pydata.org/docs/",
        dict.fromkeys(("pandas.DataFrame", "pd.DataFrame"), "reference/api/pandas.DataFrame.html"),
    ),
    "scipy": (
        "https://docs.scipy.org/doc/scipy/",
        {
            "scipy.sparse._csr.csr_array": "reference/generated/scipy.sparse.csr_array.html#scipy.sparse.csr_array",
        },
    ),
    "matplotlib": (
        "https://matplotlib.org/stable/",
        {
            "Axes": "api/_as_gen/matplotlib.axes.Axes.html#matplotlib.axes.Axes",
            "Figure": "api/_as_gen/matplotlib.figure.Figure.html#matplotlib.figure.Figure",
            "SubFigure": "api/_as_gen/matplotlib.figure.SubFigure.html#matplotlib.figure.SubFigure",
        },
    ),
}


def write_inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory a project into a folder; what ``intersphinx_mapping`` should be."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (url, pages) in LINKS.items():
        lines = [
            f"{name} py:class 1 {page if '#' in page else f'{page}#{name}'} -" for name, page in sorted(pages.items())
        ]
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress("\n".join(lines).encode() + b"\n"))
        mapping[project] = (url, str(path))
    return mapping
