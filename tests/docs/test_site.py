"""The built site in a browser: DOCS_HTML=build/docs pytest -m slow tests/docs/test_site.py

Each page is opened in a wide window, a narrow one, and a wide dark one. SITE_PICTURES names a folder for pictures.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.browser import Browser

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("DOCS_HTML", ROOT / "build" / "docs"))
PAGES = sorted(SITE.rglob("*.html"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WINDOWS = ((1400, "light"), (400, "light"), (1400, "dark"))
# What a reader may look for, and the page that should come first.
SEARCHES = {
    "install": "index",
    "GPU": "howto/gpu",
    "cite": "index",
    "resnet": "howto/latency",
    "latency": "howto/latency",
    "groups": "howto/groups",
    "lightning": "howto/lightning",
    "offset": "howto/selection",
}

# Elements of which a reader can't see the right end: neither in the window, nor by scrolling in a box around them.
CUT_OFF = """
(() => {
  const found = [];
  for (const part of document.querySelectorAll("article *")) {
    const right = part.getBoundingClientRect().right;
    if (part.closest("math") !== part && part.closest("math")) continue;
    for (let box = part.parentElement; box; box = box.parentElement) {
      const style = getComputedStyle(box), end = box.getBoundingClientRect().right;
      if (style.position === "absolute") break;  // shown to nobody, or on top
      if (["auto", "scroll"].includes(style.overflowX)) break;
      const window = box === document.documentElement;
      if ((window || style.overflowX !== "visible") && right > (window ? innerWidth : end) + 1) {
        found.push(part.outerHTML.slice(0, 120));
        break;
      }
    }
  }
  return found;
})()
"""
# Pictures of plots whose ground would be the page's.
WITHOUT_GROUND = """
[...document.querySelectorAll("article img[src$='.png']")].filter(
  part => getComputedStyle(part).backgroundColor !== "rgb(255, 255, 255)").map(part => part.src)
"""
FIRST_FOUND = """
new Promise(found => {
  const look = () => {
    const first = document.querySelector("#search-results ul.search li a");
    first ? found(first.href) : setTimeout(look, 50);
  };
  setTimeout(() => found(""), 20000);
  setTimeout(look, 1000);
})
"""
OTHER_FILES = "[...document.querySelectorAll('script, link, img')].map(part => part.src || part.href).filter(Boolean)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(not PAGES, reason=f"no site in {SITE}; DOCS_HTML names the folder of a built one"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def complaints(events):
    """What the page wrote to the console as an error, and what it asked another host for."""
    for event in events:
        about = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            yield about["exceptionDetails"]["text"]
        elif event["method"] == "Runtime.consoleAPICalled" and about["type"] == "error":
            yield str(about["args"])
        elif event["method"] == "Log.entryAdded" and about["entry"]["level"] == "error":
            yield about["entry"]["text"]
        elif event["method"] == "Network.requestWillBeSent":
            yield from other_hosts([about["request"]["url"]])


def other_hosts(addresses):
    return [address for address in addresses if urlsplit(address).scheme not in ("file", "data", "blob")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE).with_suffix("")))
def test_page(page, browser):
    """Nothing is cut off, no error is written, nothing is asked of another host, and plots have their own ground."""
    for width, scheme in WINDOWS:
        browser.open(page, width, scheme)
        assert browser.ask(CUT_OFF) == [], f"cut off at a width of {width}"
        assert browser.ask(WITHOUT_GROUND) == []
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert other_hosts(browser.ask(OTHER_FILES)) == []
        assert list(complaints(browser.events)) == []
        if "SITE_PICTURES" in os.environ:
            name = "-".join(page.relative_to(SITE).with_suffix("").parts)
            browser.save_picture(Path(os.environ["SITE_PICTURES"]) / f"{name}-{width}-{scheme}.png")


def test_attributes_and_types_have_their_names():
    page = (SITE / "api/generated/pyro_l0.selection.SpikeSlabRegressor.html").read_text(encoding="utf-8")
    assert "<strong>pip_</strong>" in page
    assert "ArrayLike" in page
    assert "_SupportsArray" not in page


def test_the_landing_page_is_short(browser):
    browser.open(SITE / "index.html", 1400)
    assert browser.ask("document.documentElement.scrollHeight") <= 2400


@pytest.mark.parametrize("word", SEARCHES)
def test_a_search_finds_the_right_page_first(word, browser):
    browser.open(SITE / "search.html", 1400, query=f"?q={word}")
    first = urlsplit(browser.ask(FIRST_FOUND)).path
    assert first.endswith(f"/{SEARCHES[word]}.html")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE).with_suffix("")))
def test_no_path_of_the_builder(page):
    text = page.read_text()
    for folder in (ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir())):
        assert f"{folder}/" not in text


TUTORIALS = [page for page in PAGES if page.parent == SITE / "tutorials" and page.stem != "index"]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_show_a_picture(page):
    """Drawn by a cell: it is not there if cells draw into files, as with MPLBACKEND=Agg."""
    assert "<img" in page.read_text().split("cell_output", 1)[1]


def test_the_list_of_tutorials_shows_their_pictures(browser):
    browser.open(SITE / "tutorials" / "index.html", 1400)
    pictures = browser.ask(
        "[...document.querySelectorAll('.sd-card img')].filter(part => part.naturalWidth).map(part => part.src)"
    )
    assert len({*pictures}) == len(TUTORIALS)
    for page in TUTORIALS:
        assert any(Path(picture).name in page.read_text() for picture in pictures), page


def test_pictures_have_captions_and_commands_fold_away(browser):
    browser.open(SITE / "results.html", 1400)
    code = (
        "[...document.querySelectorAll('article code, article pre')]"
        ".filter(part => part.textContent.startsWith('python tests/'))"
    )
    assert browser.ask(f"{code}.length") > 5
    assert browser.ask(f"{code}.filter(part => !part.closest('details')).length") == 0
    assert "published points" in browser.ask("document.querySelector('figure:has(img) figcaption').innerText")


def test_a_page_that_is_cut_off_is_found(browser, tmp_path):
    """What the tests of the pages look for, on a page that has it."""
    (tmp_path / "page.html").write_text("""<body><article>
        <div style="overflow: hidden"><p id="a" style="width: 600px">cut off</p></div>
        <div style="overflow: auto"><p id="b" style="width: 600px">in a box</p></div>
        <p id="c" style="width: 600px">too wide</p></article>
        <script src="https://example.org/x.js"></script><script>console.error("an error")</script></body>""")
    browser.open(tmp_path / "page.html", 400)
    assert [part.split('"')[1] for part in browser.ask(CUT_OFF)] == ["a", "c"]
    assert other_hosts(browser.ask(OTHER_FILES)) == ["https://example.org/x.js"]
    assert {"https://example.org/x.js"} < {*complaints(browser.events)}
