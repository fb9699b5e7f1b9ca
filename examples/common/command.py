"""What makes a script a command: its options are checked, interrupts end with one line, a folder belongs to one run.

It imports the standard library alone at first, so that a script can answer an interrupt while torch still loads.
"""

from __future__ import annotations

import gc
import io
import math
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = [
    "RULES",
    "advance",
    "advise",
    "answer_signals",
    "began",
    "check",
    "folder",
    "plan",
    "require_checkpoint",
    "run",
]

Options = TypeVar("Options")

_advice = ""
_ending = False
_start: float | None = None  # of a script, on the clock of time.perf_counter
_about = ""  # what a script does, and how long that takes
_bar: Any = None  # how far the run is

Rule = tuple[str, Callable[[Any], bool]]  # the end of "Expected epochs ...", and whether a value is as expected
LARGEST = 1e6  # of a factor; more than anybody means, and far from what overflows float32


def whole(least: int, most: int = 2**31 - 1) -> Rule:
    """Whole numbers from one to another."""
    return f"of at least {least} and at most {most}", lambda x: least <= x <= most


POSITIVE: Rule = (f"to be finite and positive, at most {LARGEST:g}", lambda x: 0 < x <= LARGEST)
NOT_NEGATIVE: Rule = (f"to be finite and not negative, at most {LARGEST:g}", lambda x: 0 <= x <= LARGEST)
RATE: Rule = ("strictly between 0 and 1", lambda x: 0 < x < 1)

# An option means the same in every example. Each value of several is checked; one that is not given (None) is not.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("batch", "batch_size", "epochs", "hidden", "max_steps", "steps"), whole(1)),
    **dict.fromkeys(("hold_out", "retrain"), whole(0)),
    **dict.fromkeys(("seed", "seeds"), whole(0, 2**32 - 1)),
    **dict.fromkeys(("budgets", "prior_active_prob", "target"), RATE),
    **dict.fromkeys(("beta", "gate_learning_rate", "learning_rate", "nats", "strength"), POSITIVE),
    **dict.fromkeys(("evenness", "lam", "lams", "retrain_noise", "weight_decay"), NOT_NEGATIVE),
    "depth": whole(10, 1000),
    "draws": whole(2),
    **dict.fromkeys(("edges", "records"), whole(1)),
    "nodes": whole(3, 100),
    "width": whole(1, 100),
}
# Each value is a run:
SWEPT = ("budgets", "edges", "families", "kinds", "lams", "methods", "nodes", "seeds", "strength")


def answer_signals() -> None:
    """A script begins: from now on SIGINT and SIGTERM end the process with one line and the status 130 or 143."""
    global _start
    _start = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def began() -> float:
    """When the script began, before its imports; now if its main function was called from elsewhere."""
    return time.perf_counter() if _start is None else _start


def advise(advice: str) -> None:
    """Say what the line of an interrupt adds: where the checkpoint is and how to go on. The first advice stays."""
    global _advice
    _advice = _advice or advice


def plan(number: int, unit: str = "step") -> None:
    """Say what the run does, and show from now on how much is done: by a bar on a terminal, else by ten lines.

    A script calls it once, and :func:`advance` whenever some of the number is done.
    """
    global _bar
    if not _is_first():
        return
    if _about:
        _say(_about)
    if os.isatty(2):
        from tqdm import tqdm

        _bar = tqdm(total=number, unit=unit, leave=False)
    else:
        _bar = _Lines(number, unit)


def advance(number: int = 1) -> None:
    """So much of what was planned is done."""
    if _bar is not None:
        _bar.update(number)


class _Lines:
    """What tqdm is on a terminal, as lines."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done, self.start = total, unit, 0, time.perf_counter()

    def update(self, number: int) -> None:
        """Count, and print at each tenth."""
        tenths = 10 * self.done // self.total
        self.done = min(self.done + number, self.total)
        if 10 * self.done // self.total > tenths:
            left = (time.perf_counter() - self.start) * (self.total / self.done - 1)
            _say(f"{self.done} of {self.total} {self.unit}s, {left:.0f} s left")


def _summary(description: str) -> str:
    """The first sentence of a script's description, and the one that says what its command takes."""
    first, *others = re.split(r"(?<=[.?;]) ", " ".join(description.replace("``", "").split()))
    return " ".join([first, *(x for x in others if x.startswith("python examples/") and " take" in x)][:2])


def run(main: Callable[[Options], Any], options: type[Options], description: str | None) -> None:
    """Call a script's main function with the options of the command line; what it refuses is one line.

    The status is 2 for a bad value or a missing file, and 1 for a full disk, too little memory or a training that
    diverged. Other exceptions are mistakes in the program and keep their traceback.
    """
    global _about
    _about = _summary(description or "")
    try:
        main(_parse(options, description))
        for number in (signal.SIGINT, signal.SIGTERM):  # all is done and written; Python needs a moment to end
            signal.signal(number, signal.SIG_IGN)
        if _start is not None:
            gc.freeze()  # else Python takes a quarter of the time of all imports to look for cycles once more
    except (ValueError, FileNotFoundError) as error:
        _refuse(error, 2)
    except (OSError, ArithmeticError, MemoryError) as error:
        _refuse(error, 1)
    except RuntimeError as error:  # torch has no class of its own for a CPU without memory
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


def check(options: Any) -> None:
    """Refuse values that no run should start with, by the option's name, before anything is loaded or trained."""
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        expected, holds = RULES.get(name, ("", lambda x: True))
        for entry in value if isinstance(value, tuple) else () if value is None else (value,):
            if not holds(entry) or (isinstance(entry, float) and math.isnan(entry)):
                raise ValueError(f"Expected {name} {expected}, but got {entry}.")
        if name in SWEPT and len(set(value)) != max(len(value), 1):
            raise ValueError(f"Expected {name} with at least one value and none of them twice, but got {value}.")
    if getattr(options, "device", "cpu") != "cpu":
        _check_device(options.device)
    data_dir = getattr(options, "data_dir", None)
    if data_dir is not None and getattr(options, "data", None) == "digits":
        raise ValueError("Expected data_dir with data='mnist' only; the digits are embedded.")
    if data_dir is not None and not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: expected the data's folder, found no such folder.")


def require_checkpoint(path: Path) -> None:
    """Refuse to resume without a checkpoint."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint to resume from, found no file; start without --resume.")
    advise(f"{path} is whole, and the same command goes on from there")


@contextmanager
def folder(out: Path) -> Iterator[None]:
    """Make a run's folder and keep other runs out of it; under ``torchrun`` the first process does."""
    from pyro_l0.compaction.storage import hold

    with ExitStack() as stack:
        if _is_first():
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold(out / ".run"))
            except OSError as error:
                found = f"{str(out)!r}: {error.strerror}"
                raise ValueError(f"Expected out to be a folder that can be written to, but got {found}.") from error
        yield


def _end(number: int, frame: object) -> None:
    """Leave at once: every file is replaced whole, so there is nothing to tidy up, and nothing that could fail."""
    global _ending
    if _ending:
        return
    _ending = True
    below_the_bar = "\n" if os.isatty(2) else ""
    _say(f"ended by {signal.Signals(number).name}; {_advice or 'nothing was trained yet'}", below_the_bar)
    os._exit(128 + number)


def _check_device(device: str) -> None:
    import torch

    # What a device lacks shows when it is used: a build without it, a driver, a second GPU, "meta" without values.
    try:
        torch.ones((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Expected device to be one of this machine, but got {device!r}: {reason}") from error


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
