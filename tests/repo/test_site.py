"""The site: it is built, and opened from disk in a real browser, on a desktop and a phone, light and dark."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.once import once

ROOT = Path(__file__).parents[2]
browser_test = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
BROKEN = "[...document.images].filter(each => !each.naturalWidth).map(each => each.src)"
CUT = """[...document.querySelectorAll('.md-typeset table, .md-typeset pre, .md-typeset img')].filter(each => {
    for (let box = each; box.matches('.md-typeset *'); box = box.parentElement)
        if (getComputedStyle(box).overflowX === 'auto') return false
    return each.getBoundingClientRect().right > innerWidth + 1
}).map(each => each.outerHTML.slice(0, 200))"""
"""What goes beyond the edge of the screen and cannot be scrolled to."""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
STILL = """const style = document.createElement('style')
style.textContent = '* { transition: none !important }'
document.head.append(style)"""
"""From a phone to a desktop the search slides in from beyond the edge."""
LINKS = "[...document.querySelectorAll('a[href]')].map(each => each.href.split('#')[0])"
BACKGROUND = "Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0])"
"""How red it is, of 255."""
SCREENS = {
    "desktop": {"width": 1280, "height": 800},
    "phone": {"width": 390, "height": 844, "phone": True},
}


@pytest.fixture(scope="session")
def site(shared: Path) -> Path:
    """Built once for all workers."""
    place = shared / "site"
    with once(place / "sitemap.xml") as missing:
        if missing:
            words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
            built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
            assert built.returncode == 0, built.stdout + built.stderr
    return place


@pytest.fixture
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


def pages(site: Path) -> list[Path]:
    """All but the one that only a server shows."""
    return sorted(set(site.glob("*.html")) - {site / "404.html"})


def visit(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")


def test_the_site_has_all_pages_and_asks_no_other_host(site: Path) -> None:
    assert {path.stem for path in pages(site)} >= {"index", *(path.stem for path in (ROOT / "docs").glob("*.md"))}
    start = (site / "index.html").read_text()
    for path in pages(site):
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?(?:stylesheet|icon|preconnect|preload)\"?[^>]*", text)
        assert len(loaded) > 3 and not [each for each in loaded if "//" in each], path.name
        assert path.stem == "index" or f'href="{path.name}" class="md-nav__link"' in start, path.name


def test_the_target_builds_the_site() -> None:
    plan = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "mkdocs build --strict" in plan


@browser_test
def test_every_page_fits_every_screen_without_a_word_in_the_console(site: Path, browser: Browser) -> None:
    """A page is opened once: it follows the screen and the colours of the system while it is open. The next page begins
    with the look that the last one had, and looks that follow each other differ in one thing: each change draws a page
    again."""
    desktop, phone = SCREENS.values()
    looks = [(desktop, False), (desktop, True), (phone, True), (phone, False)]
    for page in pages(site):
        visit(browser, page)
        browser.get(STILL)
        here = {each for each in browser.get(LINKS) if each.startswith("file:")}
        assert {each for each in here if not Path(unquote(urlsplit(each).path)).is_file()} == set(), page.name
        for screen, dark in looks:
            browser.look_like(**screen, dark=dark)
            browser.wait(f"innerWidth === {screen['width']} && {BACKGROUND} < 64 === {str(dark).lower()}")
            browser.get(DRAWN)
            width = browser.get("document.documentElement.scrollWidth")
            assert width <= screen["width"], f"{page.name} is {width} pixels wide on {screen}"
            assert (browser.get(BROKEN), browser.get(CUT)) == ([], []), page.name
        looks.reverse()
    assert browser.said == []
    assert [address for address in browser.asked if not address.startswith((site.as_uri(), "data:"))] == []


@browser_test
def test_a_search_from_disk_finds_the_page_of_a_word(site: Path, browser: Browser) -> None:
    browser.look_like(**SCREENS["desktop"])
    visit(browser, site / "index.html")
    browser.get("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="PeerLost")
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 1")
    found = browser.get("[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)")
    assert any(f"{site.as_uri()}/troubleshooting.html" in each for each in found), found
    browser.get("document.querySelector('.md-search-result__link').click()")
    browser.wait("!location.href.includes('index.html') && document.readyState === 'complete'")
    assert browser.said == [] and "PeerLost" in browser.get("document.querySelector('article').textContent")


@browser_test
def test_colours_follow_the_system_until_a_reader_chooses_and_the_next_page_keeps_them(
    site: Path, browser: Browser
) -> None:
    scheme = "document.body.dataset.mdColorScheme"
    for page, dark in (("index", False), ("tutorial", True), ("index", False)):
        browser.look_like(**SCREENS["desktop"], dark=dark)
        visit(browser, site / f"{page}.html")
        browser.wait(f"{scheme} === '{'slate' if dark else 'default'}'")
    browser.get("document.querySelector('label[for=__palette_2]').click()")
    browser.wait(f"{scheme} === 'slate'")
    visit(browser, site / "tutorial.html")
    browser.wait(f"{scheme} === 'slate'")
    assert browser.said == []
