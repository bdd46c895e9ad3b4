"""Everything this package raises on purpose. One root, with subclasses only where a caller would catch them."""


class DiLoCoError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(DiLoCoError, ValueError):
    """An argument is not allowed; the message says what is."""


class Mismatch(DiLoCoError):
    """Replicas disagree on settings, on the shape of the model, or on which round comes next."""


class Diverged(DiLoCoError):
    """Replicas that hold the same round have different anchors or outer state."""


class NotFinite(DiLoCoError):
    """A replica's delta holds inf or nan. Raised on every replica; nothing was applied on any."""


class PeerLost(DiLoCoError):
    """Another replica died, left, or did not answer in time. This replica's state can still be saved."""


def install_command(extra: str) -> str:
    """The pip command that adds an extra, from wherever this package was installed: an index, a folder or a URL."""
    import importlib.metadata  # here, because everything imports this module
    import json
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    try:
        text = importlib.metadata.distribution("diloco").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    url = origin.get("url", "")
    if "dir_info" in origin and Path(folder := unquote(urlsplit(url).path)).is_dir():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    if "vcs_info" in origin:
        return f"pip install 'diloco[{extra}] @ {origin['vcs_info']['vcs']}+{url}'"
    if "archive_info" in origin:
        return f"pip install 'diloco[{extra}] @ {url}'"
    return f"pip install 'diloco[{extra}]'"
