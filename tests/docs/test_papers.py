"""docs/papers.md: no item of the papers lacks a row, what it names exists, and each of its commands runs."""

import importlib.util
import pydoc
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tyro

from common.data import MNIST_SHA256
from pyro_l0.distributions.gate import GateDistribution
from tests.examples.test_cifar import write_small_cifar
from tests.examples.test_data import idx

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
L0, MIXTURES = PAGE.split("\n## ")[1:]


def commands(page):
    """Those that stand on a page whole, and those of tables whose header says how their commands begin.

    Those of finished comparisons are of an older commit, which stands behind them.
    """
    yield from re.findall(r"`python ([^`]+)`(?! with \||, at commit)", page)
    for begin, rows in re.findall(r"^\|[^\n]*`python ([^`]+)` with \|[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE):
        yield from (f"{begin} {options}" for options in re.findall(r"`(--[^`]+)` \|", rows))


COMMANDS = sorted(set(commands(PAGE)))
# What makes a command's run short; an option that is given twice has its last value.
SMALL = {
    "mnist.py": "--epochs 1 --batch-size 30 --out {out}",
    "cifar_wrn.py": "--epochs 1 --batch-size 26 --data-dir {cifar} --out {out}",
    "compare_families.py": "--epochs 1 --lams 0.1 --families power_law --out {out}",
    "compare_objectives.py": "--epochs 1 --rates-only --out {out}",
}


def numbered(paper, kind):
    """How often a table of a paper has each number of a kind in its first column."""
    cells = re.findall(rf"^\| {re.escape(kind)} ([\d, ]+) \|", paper, re.MULTILINE)
    return Counter(int(number) for cell in cells for number in cell.split(","))


@pytest.mark.parametrize(
    ("paper", "kind", "last"),
    [
        (L0, "Eq.", 29),
        (L0, "Table", 2),
        (L0, "Figure", 4),
        (MIXTURES, "Eq.", 13),
        (MIXTURES, "Table", 2),
        (MIXTURES, "Figure", 2),
        (MIXTURES, "Algorithm", 2),
    ],
)
def test_every_item_has_one_row(paper, kind, last):
    assert numbered(paper, kind) == Counter(range(1, last + 1))
    assert re.findall(r"^\| Appendix (\S+) \|", MIXTURES, re.MULTILINE) == ["A.1", "A.2", "B", "C"]


def test_every_name_exists():
    """Files, pages, pictures, and what inline code names: of the package, of a gate, or an argument."""
    files = re.findall(r"(?:examples|tests)/[\w/]+\.py", re.sub("`[^`]+`, at commit", "", PAGE))
    assert len(files) > 10
    missing = [name for name in files if not (ROOT / name).is_file()]
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", PAGE)
    missing += [name for name in linked if not (ROOT / "docs" / name).is_file()]
    names = {*re.findall(r"`([A-Za-z]\w*(?:\.(?!py|png)\w+)?)[`(]", PAGE)}
    doors = [f"pyro_l0.{door}" for door in ("distributions", "infer", "nn")]
    public = {name for name in names if any(pydoc.locate(f"{door}.{name}") for door in doors)}
    assert len(public) >= 20
    assert missing == []
    assert {name for name in names - public if not hasattr(GateDistribution, name)} == {"group_size", "weight_decay"}


def test_pictures_are_small():
    for name in re.findall(r"\]\((images/\S+)\)", PAGE):
        assert (ROOT / "docs" / name).stat().st_size < 60_000


def module(script):
    """A script as a module."""
    name = Path(script).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / script)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_understood(line):
    """By the script's own parser; nothing runs."""
    script, *arguments = shlex.split(line)
    options = module(script).Options
    assert isinstance(tyro.cli(options, args=arguments), options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Small images of both kinds."""
    found = {"cifar": tmp_path_factory.mktemp("cifar"), "mnist": tmp_path_factory.mktemp("mnist")}
    write_small_cifar(found["cifar"])
    generator = np.random.default_rng(0)
    shapes = (60, 28, 28), (60,), (20, 28, 28), (20,)
    for name, shape in zip(MNIST_SHA256, shapes, strict=True):
        array = generator.integers(0, 10, shape, dtype=np.uint8)
        (found["mnist"] / name.removesuffix(".gz")).write_bytes(idx(array))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_runs(line, folders, tmp_path):
    """At a small setting: few images, one epoch, and shallow networks."""
    script, *arguments = shlex.split(line)
    arguments += SMALL[Path(script).name].format(out=tmp_path, **folders).split()
    if "mnist" in arguments:
        arguments += ["--data-dir", str(folders["mnist"])]
    if script.endswith("cifar_wrn.py"):
        arguments += ["--depth", "14"] if "residual" in arguments else ["--depth", "10", "--width", "1"]
    if "--hold-out" in arguments:
        arguments += ["--hold-out", "20"]
    found = module(script)
    found.main(tyro.cli(found.Options, args=arguments))
    assert any(tmp_path.iterdir())
