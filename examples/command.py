"""What makes a script a command: bad values and interrupts end with one line, and a folder belongs to one run.

It imports the standard library alone, so that a script can answer an interrupt while torch still loads.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from multiprocessing import active_children, connection, get_context
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = ["advise", "answer_signals", "folder", "run", "side_by_side"]

Options = TypeVar("Options")
Task = TypeVar("Task")

_advice = "nothing was trained yet"
_ending = False


def answer_signals() -> None:
    """From now on SIGINT and SIGTERM end the process with one line and the status 130 or 143."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def advise(advice: str) -> None:
    """Say what the line of an interrupt adds: where the checkpoint is and how to go on."""
    global _advice
    _advice = advice


def run(main: Callable[[Options], Any], options: type[Options], description: str | None) -> None:
    """Call a script's main function with the options of the command line; what it refuses is one line.

    The status is 2 for a bad value or a missing file, and 1 for what went wrong on the way: a full disk, too little
    memory, a training that diverged. Other exceptions are mistakes in the program and keep their traceback.

    Args:
        main: the function.
        options: dataclass of the options.
        description: the script's docstring.
    """
    try:
        main(_parse(options, description))
        for number in (signal.SIGINT, signal.SIGTERM):  # all is done and written; Python needs a moment to end
            signal.signal(number, signal.SIG_IGN)
    except (ValueError, FileNotFoundError) as error:
        _refuse(error, 2)
    except (OSError, ArithmeticError, MemoryError) as error:
        _refuse(error, 1)
    except RuntimeError as error:  # torch has no class of its own for a host without memory
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        _refuse(error, 1)


def _parse(options: type[Options], description: str | None) -> Options:
    """The command line as options; tyro's frame around what it refuses becomes a line."""
    import tyro

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(options, description=description)
    except SystemExit as end:
        if end.code:
            _say(re.sub("[\u2500-\u257f]+", " ", said.getvalue()))
        raise


@contextmanager
def folder(out: Path) -> Iterator[None]:
    """Make a run's folder, and keep other runs out of it for as long as this one lasts.

    The kernel holds the lock for the open file and lets go when the process ends, however it ends; so the file
    ``.lock`` may stay behind and stops nobody. Under ``torchrun`` the first process locks.

    Args:
        out: the folder.

    Raises:
        ValueError: it is no folder, can't be written to, or another run uses it.
    """
    if not _is_first():
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("a+")
    except OSError as error:
        raise ValueError(
            f"Expected out to be a folder that can be written to, but got {str(out)!r}: {error.strerror}."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"Expected out to be a folder that no other run uses, but got {str(out)!r}, where process "
                f"{file.read(20).strip()} is at work; choose another folder or wait."
            ) from None
        except OSError as error:
            text = f"{out}: its file system has no locks ({error.strerror}), so start no second run there."
            warnings.warn(text, stacklevel=3)
        else:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


def side_by_side(function: Callable[[Task], object], tasks: Sequence[Task], jobs: int) -> None:
    """Call a function for every task, in several processes.

    Args:
        function: of a module, so that a process can import it.
        tasks: its arguments.
        jobs: how many processes.

    Raises:
        Exception: what the first call raised that failed; the other processes are ended.
    """
    waiting = list(reversed(tasks))
    workers = [_start(function) for _ in range(min(jobs, len(tasks)))]
    try:
        busy = dict(workers)
        for line in busy:
            line.send(waiting.pop())
        while busy:
            for line in connection.wait(list(busy)):
                assert isinstance(line, connection.Connection)
                try:
                    error = line.recv()
                except EOFError:
                    error = ChildProcessError(f"A process ended before its run did; its status: {_status(busy[line])}.")
                if error is not None:
                    raise error
                if waiting:
                    line.send(waiting.pop())
                else:
                    del busy[line]
    except BaseException:
        for _, process in workers:
            process.terminate()
        raise
    finally:
        for line, process in workers:
            line.close()
            process.join()


def _start(function: Callable[[Task], object]) -> tuple[connection.Connection, Any]:
    """A process that waits for tasks, and the line to it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(function, theirs))
    # A new process starts with our mask: a terminal's interrupt is for us to answer, and we end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def _work(function: Callable[[Task], object], line: connection.Connection) -> None:
    """Do tasks and answer with None or an exception, until nobody sends any."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is ended leaves behind
    while True:
        try:
            task = line.recv()
        except EOFError:
            return
        try:
            function(task)
        except Exception as error:
            error.add_note(traceback.format_exc())  # which is not sent otherwise
            line.send(error)
        else:
            line.send(None)


def _status(process: Any) -> int | None:
    process.join()
    status: int | None = process.exitcode
    return status


def _end(number: int, frame: object) -> None:
    """Leave at once: every file is replaced whole, so there is nothing to tidy up, and nothing that could fail."""
    global _ending
    if _ending:
        return
    _ending = True
    for process in active_children():
        process.terminate()
    below_the_bar = "\n" if os.isatty(2) else ""
    _say(f"ended by {signal.Signals(number).name}; {_advice}", below_the_bar)
    os._exit(128 + number)


def _refuse(error: BaseException, status: int) -> NoReturn:
    _say(f"error: {error}")
    raise SystemExit(status) from None


def _say(text: str, start: str = "") -> None:
    """One line, past Python's buffers, which the code that was interrupted may hold."""
    if _is_first():
        line = textwrap.shorten(f"{Path(sys.argv[0]).name}: {text}", 1000)
        with suppress(OSError):  # nobody may listen any more
            os.write(2, f"{start}{line}\n".encode(errors="backslashreplace"))


def _is_first() -> bool:
    """Whether this is the first of the processes that ``torchrun`` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"
