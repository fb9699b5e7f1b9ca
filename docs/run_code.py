"""Run the programs of the docs, or of pages that are named: python docs/run_code.py [PAGE ...]

A program is a block of ``python`` on a page, with all cells above it that run while the docs are built. Each runs in a
process and a folder of its own, as many side by side as there are cores; so do the cells of a page that is named, if no
program comes after them. Those of README.md run with the package as built, in tests/test_readme.py. A comment right
above a block says what is special about it: ``<!-- after: PAGE -->`` puts the first cell of another page before it, and
``<!-- not run: WHY -->`` leaves it out. Pages of the laboratory, which quote scripts, are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?:not run: (?P<why>[^\n]*?)|after: (?P<after>\S+)) -->\n+ *)?"
    r"```(?P<kind>python|{code-cell}[^\n]*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
OPTIONS = re.compile(r"^(?::[^\n]*|---\n.*?---)\n", re.DOTALL | re.MULTILINE)  # of a cell
# For programs that are started as one of several processes.
GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LIMIT = 300  # seconds
# What stands in a program, and the library of an extra that it then needs.
OPTIONAL = {
    "lightning": "lightning",
    "matplotlib": "matplotlib",
    "peft": "peft",
    "pyro_l0.plots": "matplotlib",
    "pyro_l0.selection": "sklearn",
    "safetensors": "safetensors",
    "sklearn": "sklearn",
    "transformers": "transformers",
}
LATE = {"transformers": "Trainer"}  # what a library that imports its parts when they are used needs all of torch for


class Program(NamedTuple):
    """A block of a page, by the line on which it begins."""

    page: str
    line: int
    code: str
    left_out: str | None  # why


def pages() -> list[Path]:
    """README.md, and the docs' pages."""
    found = (ROOT / "docs").rglob("*.md")
    left_out = {"_build", "lab"}
    return [ROOT / "README.md", *sorted(page for page in found if not left_out & set(page.relative_to(ROOT).parts))]


def programs(page: Path, with_cells: bool = False) -> Iterator[Program]:
    """The programs of a page, in order, and at the end its cells, if they are wanted and no program has run them."""
    text, cells, left = page.read_text(), "", 0
    name = str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page)
    for block in BLOCK.finditer(text):
        code = re.sub(f"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        if block["kind"] != "python":
            cells += OPTIONS.sub("", code)
            left = text.count("\n", 0, block.start("code"))
            continue
        left = 0
        before = first_cell(page.parent / block["after"]) if block["after"] else cells
        yield Program(name, text.count("\n", 0, block.start("code")), f"{before}\n{code}", block["why"])
    if with_cells and left:
        yield Program(name, left, cells, None)


def first_cell(page: Path) -> str:
    """The first cell of a page, which makes what its others use."""
    return next(
        OPTIONS.sub("", block["code"]) for block in BLOCK.finditer(page.read_text()) if block["kind"] != "python"
    )


def missing(code: str) -> list[str]:
    """The optional libraries that a program or a page needs, and that can't be imported."""
    return sorted({name for text, name in OPTIONAL.items() if text in code and not can_import(name)})


@cache
def can_import(library: str) -> bool:
    """Whether an optional library is installed, and works: built for another torch, it raises anything on import.

    What such an import leaves behind is taken away, so that Sphinx can mock it.
    """
    if find_spec(library) is None:
        return False
    before = set(sys.modules)
    try:
        getattr(import_module(library), LATE.get(library, "__name__"))
    except Exception as error:
        print(f"{library} is installed, but can't be imported, and counts as missing: {error}", file=sys.stderr)
        for name in set(sys.modules) - before:
            if name.split(".")[0] == library:
                del sys.modules[name]
        return False
    return True


def run(program: Program, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder that is empty, and is gone afterwards; one that takes too long has failed.

    It imports this tree, or what is installed for another interpreter.
    """
    paths = [] if python else [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **GROUP,
        "PYTHONPATH": os.pathsep.join(paths),
        "MPLBACKEND": "Agg",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python or sys.executable), "-c", program.code]
        try:
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"Expected an end after at most {LIMIT} seconds.\n")


def main(names: list[str]) -> int:
    """Run all programs of the docs, or those of some pages; the number of those that failed."""
    found = [Path(name).resolve() for name in names] or pages()[1:]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return sum(threads.map(fails, [program for page in found for program in programs(page, bool(names))]))


def fails(program: Program) -> bool:
    """Run a program, say how it ended, and whether it failed."""
    where = f"{program.page}, line {program.line}"
    needed = " and ".join(missing(program.code))
    if program.left_out is not None or needed:
        print(f"{where}: not run, {program.left_out or f'it needs {needed}'}\n", end="", flush=True)
        return False
    start = time.perf_counter()
    finished = run(program)
    end, why = ("failed", f"{finished.stderr[-2000:]}\n") if finished.returncode else ("ok", "")
    print(f"{where}: {end}, {time.perf_counter() - start:.0f} s\n{why}", end="", flush=True)
    return finished.returncode != 0


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
