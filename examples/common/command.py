"""What makes a script a command: bad values and interrupts end with one line, and a folder belongs to one run.

It imports the standard library alone at first, so that a script can answer an interrupt while torch still loads.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = ["advise", "answer_signals", "folder", "require_checkpoint", "run"]

Options = TypeVar("Options")

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


def require_checkpoint(path: Path) -> None:
    """Refuse to resume without a checkpoint.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint to resume from, found no file; start without --resume.")
    advise(f"{path} is as it was, and the same command goes on from there")


@contextmanager
def folder(out: Path) -> Iterator[None]:
    """Make a run's folder, and keep other runs out of it for as long as this one lasts.

    Under ``torchrun`` the first process does.

    Raises:
        ValueError: it is no folder, can't be written to, or another run uses it.
    """
    from pyro_l0.compaction.files import hold

    with ExitStack() as stack:
        if _is_first():
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold(out / ".run"))
            except OSError as error:
                raise ValueError(
                    f"Expected out to be a folder that can be written to, but got {str(out)!r}: {error.strerror}."
                ) from error
        yield


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
