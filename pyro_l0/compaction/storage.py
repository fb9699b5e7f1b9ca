"""A compacted network and the files that it is saved in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from pyro_l0.compaction.plan import Plan

__all__ = ["Compacted"]


@dataclass(frozen=True)
class Compacted:
    """A small plain network and where it comes from.

    Attributes:
        network: plain torch, without gates; it computes what the network with fixed gates computes.
        plan: which units stayed.
        certificate: largest difference between the two on random inputs and on the example, relative to the largest
            output if that is above 1.
        before: the plans by which the network had shrunk before, if it did.
    """

    network: nn.Module
    plan: Plan
    certificate: float
    before: tuple[Plan, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write ``path.safetensors`` (the tensors) and ``path.json`` (the plan); no pickle is involved.

        Raises:
            ImportError: safetensors is not installed (``pip install pyro-l0[export]``).
        """
        from safetensors.torch import save_file

        state = {name: value.contiguous() for name, value in self.network.state_dict().items()}
        save_file(state, str(path) + ".safetensors")
        plans = [json.loads(found.to_json()) for found in (*self.before, self.plan)]
        text = json.dumps({"certificate": self.certificate, "plans": plans})
        Path(str(path) + ".json").write_text(text)
