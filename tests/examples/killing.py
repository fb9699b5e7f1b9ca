"""Runs of examples that are stopped and resumed."""

from dataclasses import replace

import pytest

SECONDS = ("seconds", "epochs_seconds", "training_seconds")


def stopped_and_resumed(main, options, kind, is_time, monkeypatch):
    """The metrics of a run that was interrupted at the start of an epoch, and then resumed."""
    train_epoch = kind.train_epoch

    def stopping(run):
        if is_time(run):
            raise KeyboardInterrupt
        return train_epoch(run)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "train_epoch", stopping)
        with pytest.raises(KeyboardInterrupt):
            main(options)
    return main(replace(options, resume=True))


def without_seconds(metrics):
    """What two runs that do the same must agree in."""
    for entry in metrics["history"]:
        del entry["seconds"]
    return {name: value for name, value in metrics.items() if name not in (*SECONDS, "options")}
