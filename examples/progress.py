"""The epochs of a run, from its start or from a checkpoint, with a checkpoint after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

import checkpoint
import command

__all__ = ["Progress"]


class Resumable(Protocol):
    """What a checkpoint holds the state of."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass
class Progress:
    """What a run has found so far, as its checkpoints keep it.

    Args:
        run: what is trained.
        path: the checkpoint.
        fingerprint: what a checkpoint and the run that resumes it must agree in.
        first: whether this process writes and shows; of several it is one.
        totals: numbers that grow over the epochs.
        history: what was measured after each epoch.
    """

    run: Resumable
    path: Path
    fingerprint: dict[str, Any]
    first: bool
    totals: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    def epochs(
        self, number: int, entries: Sequence[str], show: Callable[[dict[str, Any]], str], resume: Path | None
    ) -> Iterator[dict[str, Any]]:
        """The entries of the history for the epochs that are left, to be filled.

        Args:
            number: epochs in all.
            entries: what every epoch's entry has.
            show: an entry as the text behind the bar.
            resume: the checkpoint to go on from, if any.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged or of another run.
        """
        if resume is None:
            self._save()
        else:
            self._load(resume, number, entries)
        done = len(self.history)
        # None: shown on a terminal alone.
        bar = tqdm(range(done, number), initial=done, total=number, unit="epoch", disable=None if self.first else True)
        for epoch in bar:
            entry: dict[str, Any] = {"epoch": epoch + 1}
            yield entry
            self.history.append(entry)
            bar.set_postfix_str(show(entry))
            self._save()

    def _save(self) -> None:
        state = {"fingerprint": self.fingerprint, "run": self.run.state(), "history": self.history, **self.totals}
        if self.first:
            checkpoint.save(self.path, state)
            done = f"{self.path} holds {len(self.history)} epochs"
            command.advise(f"{done}, and the same command with --resume goes on from there")

    def _load(self, path: Path, number: int, entries: Sequence[str]) -> None:
        state = checkpoint.load(path, self.fingerprint)
        with checkpoint.fitting(path):
            checkpoint.check_history(path, state["history"], number, entries)
            self.run.load_state(state["run"])
            self.history = state["history"]
            self.totals = {name: float(state[name]) for name in self.totals}
