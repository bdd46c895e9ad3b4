"""A dashboard that serves while a test looks at it."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from diloco.report.dashboard import Dashboard, open_dashboard


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Dashboard]:
    dashboard = open_dashboard(folder, port)
    threading.Thread(target=dashboard.serve_forever, daemon=True).start()
    try:
        yield dashboard
    finally:
        dashboard.shutdown()
        dashboard.server_close()
