"""The site stays short enough to be read: what its pages and README have in all."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 140_000  # characters of Markdown
# Folders and pages that are files of the repository, and no pages of the site.
NOT_PAGES = ("lab", "_build", "generated", "architecture.md")


def pages():
    docs = ROOT / "docs"
    found = (page for page in docs.rglob("*.md") if not {*NOT_PAGES} & {*page.relative_to(docs).parts})
    return [ROOT / "README.md", *found]


def test_the_site_is_short():
    sizes = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8")) for page in pages()}
    assert len(sizes) > 50
    longest = sorted(sizes, key=sizes.__getitem__)[-8:]
    assert sum(sizes.values()) <= LIMIT, f"longest: {longest}"
