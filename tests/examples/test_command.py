"""What every example does as a command: one line and a status for bad values and interrupts, a folder for one run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mnist
from common import command
from mnist import Options
from tests.examples.killing import without_seconds
from tests.processes import HANGS

EXAMPLES = Path(mnist.__file__).parent
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "command.run(" in path.read_text())


def start(code, *arguments):
    """A process that imports what the examples share, and its pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


def refused(capfd, monkeypatch, *arguments):
    """The status and the one line with which the main example refuses its command line."""
    monkeypatch.setattr(sys, "argv", ["examples/mnist.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.run(mnist.main, Options, "Train.")
    out, err = capfd.readouterr()
    assert all(line.startswith("epoch ") for line in out.splitlines())  # of a run that began
    assert err.count("\n") == 1
    assert err.startswith("mnist.py: ")
    return end.value.code, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gate-learning-rate -1", "gate_learning_rate to be finite and positive, at most 1e+06, but got -1.0"),
        ("--device meta", "device to be one of this machine, but got 'meta'"),
        ("--device cuda:99", "device to be one of this machine, but got 'cuda:99'"),
        ("--resume", "checkpoint.pt: expected a checkpoint to resume from, found no file"),
        ("--data mnist --data-dir nowhere", "nowhere: expected the data's folder"),
        ("--data-dir somewhere", "data_dir with data='mnist' only"),
        ("--network lenet5", "data='mnist' for network='lenet5'"),
        ("--objective spike_slab --shrink", "no shrink for objective='spike_slab'"),
        ("--objective spike_slab --lam 0.1", "no lam and no weight_decay for"),
        ("--family bernoulli --beta 2", "beta with the hard concrete or a mixture, but got family='bernoulli'"),
        ("--lam 0.1 0.2", "lam with 1 or 3 entries, one per gate site, but got 2"),
        ("--lam 0.05 --target-of weights", "target_of with target only, but got 'weights'"),
        ("--lam 0.05 --retrain-noise 0.1", "retrain_noise of 0 without retrain, but got 0.1"),
        ("--epochs 1 --target 0.1 --batch-size 1000", "steps of at least 10, but got 2"),
        ("--hold-out 1437", "hold out between 1 and 1436 images, but got 1437"),
        ("--epochs ten", "invalid literal for int"),
        ("--epoch 10", "Unrecognized options"),
    ],
)
def test_bad_values_end_with_one_line_and_status_2(arguments, message, capfd, monkeypatch, tmp_path):
    """Nothing is trained or written, and there is no traceback."""
    status, line = refused(capfd, monkeypatch, *arguments.split(), "--out", tmp_path)
    assert status == 2
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} <= {".run.lock"}


def test_out_that_is_a_file(capfd, monkeypatch, tmp_path):
    """It, and a folder in it."""
    (tmp_path / "file").touch()
    for out in ("file", "file/folder/"):
        status, line = refused(capfd, monkeypatch, "--out", tmp_path / out)
        assert status == 2
        assert "Expected out to be a folder that can be written to" in line


def test_mistakes_in_the_program_keep_their_traceback(monkeypatch):
    """They are not the user's."""
    monkeypatch.setattr(sys, "argv", ["mnist.py"])

    def wrong(options):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        command.run(wrong, Options, None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupt_while_torch_loads(script):
    """One line, at the first library that takes its time."""
    code = """
import os, runpy, signal
class Slow:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "matplotlib"):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Slow)
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
    process = start(code, EXAMPLES / script)
    out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out, err) == (130, "", f"{script}: ended by SIGINT; nothing was trained yet\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice(number):
    """One line all the same."""
    code = "from common import command; import time; command.answer_signals(); print(flush=True); time.sleep(3600)"
    process = start(code)
    process.stdout.readline()
    process.send_signal(number)
    process.send_signal(number)
    err = process.communicate(timeout=HANGS)[1]
    assert process.returncode == 128 + number
    assert err == f"-c: ended by {number.name}; nothing was trained yet\n"


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint_that_resumes(tmp_path):
    """In the midst of training: one line, which off a terminal is all, and the same metrics to the last bit."""
    out = tmp_path / "ended"
    path = out / "checkpoint.pt"
    script = str(EXAMPLES / "mnist.py")
    code = "import runpy; sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
    process = start(code, script, "--lam", "0.05", "--epochs", 5000, "--shrink", "--out", out)
    while not path.with_name("checkpoint.pt.previous").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    done = len(torch.load(path, weights_only=True)["state"]["history"])
    assert process.returncode == 130
    said = "holds all but the last moments, and the same command with --resume goes on from there"
    assert err == f"mnist.py: ended by SIGINT; {path} {said}\n"
    resumed = mnist.main(Options(epochs=done + 2, lam=(0.05,), shrink=True, out=out, resume=True))
    straight = mnist.main(Options(epochs=done + 2, lam=(0.05,), shrink=True, out=tmp_path / "straight"))
    assert without_seconds(resumed) == without_seconds(straight)


def test_a_training_that_diverges(capfd, monkeypatch, tmp_path):
    """One line; the checkpoint before it stays, and no network is saved."""
    status, line = refused(capfd, monkeypatch, "--lam", "0.05", "--learning-rate", "1e6", "--out", tmp_path)
    assert status == 1
    assert "finite" in line
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(value.isfinite().all() for value in state["state"]["model"].values())
    monkeypatch.setattr("common.averages.LEARNING_RATE", 1e30)
    out = tmp_path / "retrained"
    with pytest.raises(FloatingPointError, match="smaller learning rate"):
        mnist.main(Options(epochs=1, retrain=1, out=out))
    assert not list(out.glob("pruned*"))
    assert not (out / "metrics.json").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_range(script, monkeypatch, tmp_path):
    """None is taken that nobody asked about, and none that is swept over is given twice or not at all."""
    monkeypatch.chdir(tmp_path)
    module = __import__(Path(script).stem)
    for name, kind in ((name, str(kind)) for name, kind in module.Options.__annotations__.items()):
        bad = [()] if name in command.SWEPT else []
        if "int" in kind or "float" in kind:
            assert name in command.RULES, (script, name)
            bad += [(value,) if kind.startswith("tuple") else value for value in (float("nan"), -1)]
        for value in bad:
            with pytest.raises(ValueError, match=f"Expected {name} "):
                module.main(module.Options(**{name: value}))


def test_a_run_says_what_it_does_and_how_far_it_is(monkeypatch, capfd):
    monkeypatch.setattr(command, "_bar", None)
    monkeypatch.setattr(command, "_about", command._summary("Counts.\n\n``python examples/x.py`` takes\na second. No."))
    command.plan(20, "run")
    for _ in range(20):
        command.advance()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("Counts. python examples/x.py takes a second.")
    assert [line.split(": ", 1)[1].split(",")[0] for line in lines[1:]] == [f"{2 * k} of 20 runs" for k in range(1, 11)]
