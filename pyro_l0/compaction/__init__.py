"""Turns a network and the values of its gates into the same network with fewer units and equal outputs."""

from pyro_l0.compaction.compact import compact, plan  # noqa: F401  the submodule of this name would hide it
from pyro_l0.compaction.shrinker import Shrinker
from pyro_l0.compaction.storage import load_compacted
from pyro_l0.retired import retired_names

__all__ = [
    "Shrinker",
    "compact",
    "load_compacted",
]

__getattr__ = retired_names(
    __name__,
    {
        "Certificate": "pyro_l0.compaction.certificate.Certificate",
        "CompactionError": "pyro_l0.compaction.compact.CompactionError",
        "rewrite": "pyro_l0.compaction.apply.apply_plan",
        "Plan": "pyro_l0.compaction.plan.Plan",
        "SelectedInputs": "pyro_l0.compaction.inputs.SelectedInputs",
        "Replica": "pyro_l0.compaction.shrinker.Replica",
        "Compacted": "pyro_l0.compaction.storage.Compacted",
    },
)
