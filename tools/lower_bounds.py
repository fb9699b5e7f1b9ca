"""The oldest versions that the package allows, as requirements of pip: python tools/lower_bounds.py

Those of the dependencies, and of the extras for selection and for saved networks, with which the tests run; and what
such versions need besides, as the newest of their own dependencies warn.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
TESTS = ("pytest", "pytest-xdist", "hypothesis", "mpmath")
BESIDES = ("pyparsing<3.2",)  # of matplotlib, which calls names that it has deprecated since
BOUND = re.compile(r"([\w-]+)>=([\d.]+)")


def lower_bounds() -> list[str]:
    """Requirements such as ``torch==2.9``, each name once."""
    extras = PROJECT["optional-dependencies"]
    tests = [x for x in extras["test"] if x.split(">")[0] in TESTS]
    wanted = [*PROJECT["dependencies"], *extras["selection"], *extras["examples"], *tests]
    return sorted({BOUND.sub(r"\1==\2", x).split(",")[0] for x in wanted} | {*BESIDES})


if __name__ == "__main__":
    print("\n".join(lower_bounds()))
