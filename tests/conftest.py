"""What every test starts from: one thread, a fixed seed, an empty parameter store, float32."""

import os
from collections.abc import Iterator

# For scripts that a test starts, and read once by the libraries: so before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pyro
import pytest
import torch

# Several processes that each take every core slow one another down.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Seed every generator and empty Pyro's parameter store; give float32 back afterwards."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    # The first torch.compile of a process switches validation off for good.
    torch.distributions.Distribution.set_default_validate_args(True)
