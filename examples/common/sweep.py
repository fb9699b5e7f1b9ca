"""Many runs: side by side in processes, each with its result in a JSON file, so that a stopped sweep goes on."""

from __future__ import annotations

import json
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import active_children, connection, get_context
from pathlib import Path
from typing import Any, TypeVar

from common import command

__all__ = ["read_result", "results", "side_by_side", "write_json"]

Task = TypeVar("Task")
Result = dict[str, Any]


def results(
    function: Callable[[Task], object],
    tasks: Sequence[Task],
    jobs: int,
    path_of: Callable[[Task], Path],
    options_of: Callable[[Task], Result],
    entries: Sequence[str],
) -> list[Result]:
    """The results of tasks; those that are missing are computed in ``jobs`` processes.

    ``function`` does a task and writes its result to ``path_of(task)``, with ``options_of(task)`` under ``"options"``
    and all ``entries``.
    """
    command.advise("the runs that are finished stay, and the same command goes on with the others")
    side_by_side(function, [task for task in tasks if not path_of(task).exists()], jobs)
    return [read_result(path_of(task), options_of(task), entries) for task in tasks]


def write_json(path: Path, value: Any) -> None:
    """Write a result as a whole; numbers must be finite."""
    from pyro_l0.compaction.files import replace_file  # what imports torch, which a process may do without

    replace_file(path, json.dumps(value, indent=1, allow_nan=False).encode())


def read_result(path: Path, options: Result, entries: Sequence[str]) -> Result:
    """Read what a finished run wrote; refuse what is damaged, lacks an entry, or is of another run."""
    try:
        result: Result = json.loads(path.read_bytes())
        found = {name: result[name] for name in ("options", *entries)}["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the result of a run with the entries options, {', '.join(entries)}, but it is damaged "
            f"or of another program ({type(error).__name__}: {error}); remove it to run anew"
        ) from error
    differences = [
        f"{key}: expected {options.get(key)!r}, got {found.get(key)!r}"
        for key in options | found
        if options.get(key) != found.get(key)
    ]
    if differences:
        raise ValueError(f"{path} is of another run: {'; '.join(differences)}")
    return result


def side_by_side(function: Callable[[Task], object], tasks: Sequence[Task], jobs: int) -> None:
    """Call a function for every task, each in a process of its own, ``jobs`` at a time.

    What the first call raises that fails is raised here, and the other processes are ended.
    """
    waiting = list(reversed(tasks))
    busy: dict[Any, Any] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                line, process = _start(function, waiting.pop())
                busy[line] = process
            for line in connection.wait(list(busy)):
                process = busy.pop(line)
                try:
                    error = line.recv()
                except EOFError:
                    process.join()
                    error = ChildProcessError(f"A process ended before its run did; its status: {process.exitcode}.")
                if error is not None:
                    raise error
                process.join()
    except BaseException:
        for process in active_children():
            process.terminate()
            process.join()
        raise


def _start(function: Callable[[Task], object], task: Task) -> tuple[connection.Connection, Any]:
    """A process that does a task, and the line by which it answers."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, task, theirs))
    # A new process starts with our mask: a terminal's interrupt is for us to answer, and we end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def _work(function: Callable[[Task], object], task: Task, line: connection.Connection) -> None:
    """Do a task, and answer with None or an exception."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is ended leaves behind
    try:
        function(task)
    except Exception as error:
        error.add_note(traceback.format_exc())  # which is not sent otherwise
        line.send(error)
    else:
        line.send(None)
