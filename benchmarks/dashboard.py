"""The dashboard with a run of 10,000 steps and 8 replicas that goes on: first paint, delay of an update, memory.

Run: python -m benchmarks.dashboard [MINUTES]. In place of a training this process writes ten steps a second; the server
and the browser are real. Times depend on what else the machine does, so CPU times stand beside them.
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from diloco.runs.schema import Step, to_line
from tests.support.browser import browsing
from tests.support.run_directory import make_run
from tests.support.s3 import free_port

STEPS, REPLICAS, A_SECOND = 10_000, 8, 10


def prepare(folder: Path) -> Path:
    """A run of so many steps that has not ended: replicas are copies of two."""
    run = make_run(folder / "run", steps=STEPS, replicas=REPLICAS)
    (run / "summary.json").unlink()
    for number in range(2, REPLICAS):
        shutil.copytree(run / f"replica-{number % 2}", run / f"replica-{number}")
    config = run / "config.toml"
    config.write_text(config.read_text().replace(f"steps = {STEPS}", f"steps = {2 * STEPS}"))
    return run


def go_on(run: Path, ended: threading.Event, written: dict[int, float]) -> None:
    """Write further steps of all replicas, and when each was written."""
    files = [(run / f"replica-{number}/metrics.jsonl").open("a") for number in range(REPLICAS)]
    number = STEPS
    while not ended.wait(1 / A_SECOND):
        number += 1
        record = Step(number, number / 5, 2048 * number, 1.4, 0.003, 0.8, 0.2, 1e4, 300 * number, 300 * number, 0, 0, 0)
        for file in files:
            file.write(json.dumps(to_line(record)) + "\n")
            file.flush()
        written[number] = time.time()


def follow(port: int, ended: threading.Event, seen: dict[int, float]) -> None:
    """Be a second browser, and note when each step has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    while not ended.is_set():
        line = answer.readline()
        if line.startswith(b"data:"):
            now = time.time()
            for step in json.loads(line[6:]).get("charts", {}).get("loss", {}).get("steps", []):
                seen.setdefault(step, now)


def cpu(pid: int) -> float:
    """CPU seconds of a process and all that it has started."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for each in Path("/proc").glob("[0-9]*"):
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(each.name) == pid or int(fields[2]) == pid or int(fields[1]) == pid:
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def resident(pid: int) -> float:
    """MB of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as folder:
        run, port = prepare(Path(folder)), free_port()
        words = [sys.executable, "-m", "diloco", "dashboard", str(run), "--port", str(port)]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            print(server.stdout.readline().strip())
            print(json.dumps(measure(run, port, server.pid, minutes), indent=1))
        finally:
            server.terminate()
            server.wait()


def measure(run: Path, port: int, server: int, minutes: float) -> dict[str, Any]:
    written: dict[int, float] = {}
    seen: dict[int, float] = {}
    ended = threading.Event()
    with browsing() as browser:
        browser.look_like(1280, 1000)
        found = {}
        for which in ("first", "second"):  # the first one may find the server still reading
            before = cpu(server)
            browser.open(f"http://127.0.0.1:{port}/")
            painted = browser.get("performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000")
            drawn = browser.get("performance.getEntriesByName('drawn')[0].startTime / 1000")
            found |= {
                f"{which} page": {"first paint": painted, "all drawn": drawn, "server's cpu": cpu(server) - before}
            }
        threads = [
            threading.Thread(target=go_on, args=(run, ended, written)),
            threading.Thread(target=follow, args=(port, ended, seen)),
        ]
        for thread in threads:
            thread.start()
        memory, began = [], cpu(server)
        for _ in range(max(int(minutes * 6), 1)):
            time.sleep(10)
            memory.append(round(resident(server), 1))
        ended.set()
        for thread in threads:
            thread.join()
        load = (cpu(server) - began) / (minutes * 60)
        last = browser.get("document.querySelector('#loss .u-value').textContent")
        assert browser.said == [], browser.said
    delays = sorted(seen[step] - at for step, at in written.items() if step in seen)
    return found | {
        "steps written": len(written), "the browser shows step": last,
        "delay of an update, median": delays[len(delays) // 2],
        "delay, 99 of 100": delays[len(delays) * 99 // 100], "server's MB, every 10 s": memory, "server's cores": load,
        "machine's load": os.getloadavg(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
