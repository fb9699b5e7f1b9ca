"""Programs in a fresh process, and functions in two processes of a group."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed

HANGS = 3600  # seconds after which a process does; no test depends on how long one takes


def python(code, *arguments, quiet=True):
    """What a program prints that ends well; warnings and errors among it, unless it is to be quiet."""
    run = subprocess.run(
        [sys.executable, *(("-W", "ignore") if quiet else ()), "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else subprocess.STDOUT,
        text=True,
        timeout=HANGS,
    )
    assert run.returncode == 0, run.stderr or run.stdout
    return run.stdout


def in_two(work, folder):
    """What a function of the rank and a folder found, a dict, in each of two processes of a group."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    both = [context.Process(target=_work, args=(work, rank, port, folder)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(HANGS)
        if process.is_alive():
            process.kill()
            pytest.fail("a process hangs")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for each in found:
        assert "error" not in each, each["error"]
    return found


def _work(work, rank, port, folder):
    """What each process does; what it found goes into a file of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        found = work(rank, folder)
    except Exception:  # the other process is told by a file as well
        found = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group that failed would wait for the other process
