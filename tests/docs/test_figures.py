"""The figures of README, results, their tables and recipes agree wherever they stand."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text()
RESULTS = (DOCS / "results.md").read_text()
TABLES = (DOCS / "lab" / "results_tables.md").read_text()
RECIPES = "".join(page.read_text() for page in sorted(DOCS.glob("lab/recipes*.md")))
PAGES = RESULTS + TABLES + RECIPES + "".join(page.read_text() for page in DOCS.glob("gallery.md"))
# What a measurement looks like: a spread, a percentage, or weights and multiply-adds by their thousands.
SPREAD = r"\d[\d.,]* ± \d[\d.,]*\d"
FIGURE = re.compile(rf"{SPREAD}|\d[\d.]* ?%|\d{{1,3}}(?:,\d{{3}})+")


def figures(text: str) -> set[str]:
    """What is measured, in prose and tables: not in programs, and without the spaces before a percent sign."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {figure.replace(" %", "%") for figure in FIGURE.findall(text)}


def rows(network: str) -> str:
    """The rows of results.md on a network, against published points."""
    section = RESULTS.split("## Against published points")[1].split("\n## ")[0]
    block = re.search(rf"^\| {re.escape(network)}.*\n(?:\| \|.*\n)*", section, re.MULTILINE)
    assert block is not None
    return "".join(row.split("|")[2] for row in block[0].splitlines())


def recipes(network: str) -> str:
    """The section on a network, of the file that has the recipes' tables."""
    return next(part for part in re.split(r"^## ", RECIPES, flags=re.MULTILINE) if part.startswith(network))


def test_readme_states_no_other_figures():
    assert figures(README) <= figures(PAGES)
    assert figures("1.51 ± 0.05 % of 7,001") == {"1.51 ± 0.05", "7,001"}


def test_results_and_recipes_agree():
    """Every error with its spread, and every number of weights, is a recipe's."""
    for network in ("MLP 784-300-100", "LeNet-5"):
        stated = re.findall(rf"{SPREAD}|\d{{1,3}}(?:,\d{{3}})+", rows(network))
        assert stated
        assert [figure for figure in stated if figure not in recipes(network)] == []


def test_every_bench_that_a_page_names_is_there():
    """But for those of finished comparisons, behind which the commit stands that has them."""
    text = "\n".join(page.read_text() for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")))
    named = re.findall(r"(tests/bench/[\w/]+\.py)(?![^`\n]*(?:`,\s+at commit|# at commit|` of commit))", text)
    assert len(named) > 20
    assert [name for name in named if not (DOCS.parent / name).is_file()] == []
