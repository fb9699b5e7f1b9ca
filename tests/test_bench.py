"""The benchmarks, tried out with few steps and without a GPU, so that they work on the day that they are needed."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyro_l0.nn import NetworkGates, fix_gates
from tests.bench.pruning import bench_pruning, zoo
from tests.engine.zoo.libraries import LIBRARIES

BENCH = Path(__file__).parent / "bench"
pytestmark = pytest.mark.slow


def run(script, *arguments):
    """What a script prints, whether or not its limits are kept."""
    found = subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    assert "Traceback" not in found.stderr, found.stderr
    return found.stdout


@pytest.mark.parametrize(("line", "design"), [("1", "exact pair"), ("3", "near-duplicates"), ("6", "exact pair")])
def test_fits_are_compared(line, design):
    printed = run("posteriors/bench_posteriors.py", "--line", line, "--quick", "--design", design)
    assert f"| {design}" in printed


def test_enumeration_is_calibrated():
    """Twenty replicates of the exact posterior; the ranks of both quantities."""
    printed = run("posteriors/simulation_based_calibration.py", "--quick", "--exact-only", "--setting", "known")
    assert "AR(.8), unknown: 20 replicates" in printed
    assert printed.count("ranks p = ") == 14


def test_families_are_timed():
    """A row for each of the nine estimators."""
    printed = run("posteriors/bench_families.py", "--n", "80", "--features", "4")
    assert len(printed.splitlines()) == 2 + 9


def test_the_whole_command_is_timed():
    """And what its epochs cost beside their training."""
    printed = run("steps/bench_epochs.py", "--epochs", "2", "3")
    assert [line.split()[1] for line in printed.splitlines()[2:]] == ["2", "3"]


def test_masks_are_timed():
    """A ratio for each model, and the largest."""
    pytest.importorskip("transformers")
    printed = run("steps/bench_masks.py", "--rounds", "1")
    assert [line.split()[0] for line in printed.splitlines()[1:]] == ["GPT-2:", "Llama:", "ViT:", "largest"]


def test_every_part_for_a_gpu_runs_and_continues_where_it_stopped(tmp_path):
    """A short run and a long one; the report has every table."""
    script, options = "steps/bench_gpu.py", ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    stopped = run(script, "equality", "--minutes", "0.001", *options)
    assert "equality stopped before" in stopped
    printed = run(script, "equality", "speed", "report", "--minutes", "9", *options)
    assert not set(stopped.splitlines()[:-1]) & set(printed.splitlines())  # those were found before
    assert "Equality in float64" in printed
    for row in ("| MLP, float32, eager |", "| WRN-28-10, bfloat16, compile |"):
        assert row in printed


@pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, random images
def test_pruning_is_measured_once(tmp_path, monkeypatch, capsys):
    """A row for each budget, the same when what is in the folder is read again."""
    torch.manual_seed(0)
    x, y = torch.randn(500, 1, 28, 28), torch.randint(10, (500,))
    data = bench_pruning.Problem("mlp", bench_pruning.Shuffled(x, y, 10, bench_pruning.PASS), x[:50], y[:50])
    monkeypatch.setattr(bench_pruning, "problem", lambda *_: data)
    monkeypatch.setattr(bench_pruning, "STEPS", 100)
    monkeypatch.setitem(bench_pruning.DENSE_STEPS, "mlp", 30)
    tables = []
    for more in ([], ["--table"]):
        options = ["--out", str(tmp_path), "--network", "mlp", "--budget", "0.5", "0.3", "--seeds", "0", *more]
        monkeypatch.setattr(sys, "argv", ["bench_pruning.py", *options])
        bench_pruning.main()
        tables.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")])
    assert tables[0] == tables[1]
    assert [line.split()[3] for line in tables[0][2:]] == ["0.5", "0.3"]
    assert all(0.9 < float(line.split("|")[-3]) <= 1 for line in tables[0][2:])


@pytest.mark.parametrize(("tool", "cuts"), [("ours", ["equal", "unequal"]), ("zeros", [])])
def test_a_network_of_a_library_is_cut(tool, cuts):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    network, inputs = LIBRARIES["transformers"]()["BertForSequenceClassification"]()
    *_, line = zoo.TOOLS[tool](network.eval(), inputs)
    assert line["at"] == "end"
    assert all(found["difference"] < zoo.EXACT < found["spread"] for found in [line[cut] for cut in cuts] or [line])


def test_compiled_circuits_are_sought():
    """A row for each of two compiled transformers."""
    rows = run("edges/bench_edges.py", "compiled", "--seeds", "0", "--steps", "12").splitlines()
    assert [row.split()[0] for row in rows if "seed 0:" in row] == ["Reversal", "Share"]


def test_needed_heads_are_sought():
    """Of all sets of three heads the planted one is the best, by far; a row for each run, of its seeds."""
    pytest.importorskip("transformers")
    from tests.bench.pruning import bench_heads

    network, tokens = bench_heads.planted(), torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    masked = bench_heads.with_gates(network, tokens)
    sites, heads = list(NetworkGates(masked).sites), itertools.product(range(2), range(4))
    distances = {}
    for chosen in itertools.combinations(heads, 3):
        gates = {site: torch.zeros(4) for site in sites}
        for layer, head in chosen:
            gates[sites[layer]][head] = 1.0
        with torch.no_grad():
            distances[chosen] = float(bench_heads.apart(network, fix_gates(masked, gates), tokens))
    best, second, *_ = sorted(distances, key=distances.__getitem__)
    assert set(best) == bench_heads.NEEDED
    assert 10 * distances[best] < distances[second]
    rows = run("pruning/bench_heads.py", "--seeds", "2", "--runs", "12x1", "10x2").splitlines()
    assert [row.split("|")[1:3] for row in rows[2:]] == [[" 12 ", " 1 "], [" 10 ", " 2 "]]
