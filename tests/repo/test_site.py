"""The site is built without a warning, asks no other host, and can be searched from disk."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.once import once

pytestmark = pytest.mark.slow  # processes

ROOT = Path(__file__).parents[2]
browser_test = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


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
def test_a_search_from_disk_finds_the_page_of_a_word(site: Path, browser: Browser) -> None:
    browser.look_like(width=1280, height=800)
    visit(browser, site / "index.html")
    browser.get("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="PeerLost")
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 1")
    found = browser.get("[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)")
    assert any(f"{site.as_uri()}/troubleshooting.html" in each for each in found), found
    browser.get("document.querySelector('.md-search-result__link').click()")
    browser.wait("!location.href.includes('index.html') && document.readyState === 'complete'")
    assert browser.said == [] and "PeerLost" in browser.get("document.querySelector('article').textContent")
