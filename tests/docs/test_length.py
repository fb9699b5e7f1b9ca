"""The site stays short enough to be read: what its pages and README have in all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import run_code

LIMIT = 150_000  # characters of Markdown


def test_the_site_is_short():
    pages = [page for page in run_code.pages() if page.name != "architecture.md"]  # a file beside the site
    sizes = {str(page): len(page.read_text(encoding="utf-8")) for page in pages}
    assert len(sizes) > 50
    assert sum(sizes.values()) <= LIMIT, f"longest: {sorted(sizes, key=sizes.__getitem__)[-8:]}"
