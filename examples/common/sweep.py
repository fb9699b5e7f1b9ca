"""Many runs, each with its result in a JSON file, so that a stopped sweep goes on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common import command
from pyro_l0.compaction.storage import replace_file

__all__ = ["read_result", "results", "spread", "write_json"]

Task = TypeVar("Task")
Result = dict[str, Any]


def results(
    function: Callable[[Task], object],
    tasks: Sequence[Task],
    path_of: Callable[[Task], Path],
    options_of: Callable[[Task], Result],
    entries: Sequence[str],
) -> list[Result]:
    """The results of tasks, of which those that are missing are computed first.

    ``function`` does a task and writes its result to ``path_of(task)``, with ``options_of(task)`` under ``"options"``
    and all ``entries``.
    """
    command.advise("the runs that are finished stay, and the same command goes on with the others")
    for task in tasks:
        if not path_of(task).exists():
            function(task)
    return [read_result(path_of(task), options_of(task), entries) for task in tasks]


def write_json(path: Path, value: Any) -> None:
    """Write a result as a whole; numbers must be finite."""
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
    pairs = [(key, options.get(key), found.get(key)) for key in options | found]
    differences = [f"{key}: expected {mine!r}, got {its!r}" for key, mine, its in pairs if mine != its]
    if differences:
        raise ValueError(f"{path} is of another run: {'; '.join(differences)}")
    return result


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds, for a table."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"
