"""Programs in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path


def python(code, *arguments, quiet=True):
    """What a program prints that ends well; warnings and errors among it, unless it is to be quiet."""
    run = subprocess.run(
        [sys.executable, *(("-W", "ignore") if quiet else ()), "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr or run.stdout
    return run.stdout
