"""The pictures of README.md and docs/dashboard.md, of a demo that is run for them. Run: make picture"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.browser import Browser, browsing

ROOT = Path(__file__).parents[1]
DOCS, RUNS = ROOT / "docs", ROOT / "build" / "picture"
FROM = 400
"""The step from which on the page of the run that goes on is taken."""
STEP = "+(document.getElementById('head').textContent.match(/step (\\d+) of/) ?? [])[1]"
SETTLED = "new Promise(done => setTimeout(done, 500))"


def main() -> None:
    shutil.rmtree(RUNS, ignore_errors=True)
    program = [sys.executable, "-m", "diloco"]
    run = subprocess.Popen([*program, "train", "demo", "--name", "demo", "--out", str(RUNS)], cwd=ROOT)
    while not (RUNS / "demo/replica-0").exists():
        time.sleep(0.1)
    server = subprocess.Popen([*program, "dashboard", str(RUNS / "demo")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
    with browsing() as browser:
        browser.look_like(1280, 1000)
        browser.open(address)
        while not (browser.get(STEP) or 0) >= FROM:
            assert run.poll() is None, "the run ended before the picture was taken"
            browser.get(SETTLED)
        for dark in (False, True):
            tone = "dark" if dark else "light"
            take(browser, DOCS / f"dashboard-{tone}.png", 1280, 1000, dark=dark)
            take(browser, DOCS / f"dashboard-phone-{tone}.png", 390, 844, dark=dark, phone=True)
        assert run.wait() == 0
        server.terminate()
        browser.look_like(1280, 1000)
        browser.open((RUNS / "demo/report.html").as_uri())
        take(browser, DOCS / "report.png", 1280, 1230)


def take(browser: Browser, path: Path, width: int, height: int, **how: bool) -> None:
    browser.look_like(width, height, **how)
    browser.get(SETTLED)
    browser.picture(path)
    print(path.relative_to(ROOT))  # noqa: T201


if __name__ == "__main__":
    main()
