"""Watch a cloud's metadata service for the notice that precedes a preemption."""

import contextlib
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from urllib.parse import urlsplit

SERVICES = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
"""Where Azure gives the name of this machine: its events list all machines of a scale set or availability set."""
INTERVAL = 2.0
"""Seconds between requests. The shortest notice is 30 s, on gcp and azure."""
TIMEOUT = 2.0
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""gcp and azure each require one of these headers; the other services ignore them."""
log = logging.getLogger("diloco")


@contextlib.contextmanager
def watched(service: str | None, tell: Callable[[], None]) -> Iterator[None]:
    """Poll for a notice in the background inside this context, and call `tell` when it comes. `service`: a key of
    SERVICES, or the URL of a compatible service; None disables polling."""
    ended = threading.Event()

    def watch(service: str) -> None:
        silent = False
        while not ended.is_set():
            try:
                if has_notice(SERVICES.get(service, service)):
                    log.warning("the cloud will preempt this machine: syncing, saving a checkpoint and stopping")
                    tell()
                    return
            except (OSError, HTTPException, ValueError) as error:
                if not silent:
                    log.warning("the metadata service %s does not answer (%s); retrying", service, error)
                silent = True
            ended.wait(INTERVAL)

    thread = threading.Thread(target=watch, args=(service,), name="preemption", daemon=True)
    if service is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def has_notice(url: str) -> bool:
    """Whether the service announces the preemption of this machine. Raises OSError, HTTPException or ValueError if it
    gives no valid HTTP response."""
    # A proxy would ask about its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(url: str, method: str = "GET", **headers: str) -> str:
        request = urllib.request.Request(url, headers=headers, method=method)
        with opener.open(request, timeout=TIMEOUT) as response:
            return response.read(1 << 16).decode(errors="replace")

    headers, address = dict(HEADERS), urlsplit(url)
    service = f"{address.scheme}://{address.netloc}"
    with contextlib.suppress(OSError, HTTPException):  # aws requires a token; the others have none
        token = answer(f"{service}/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        if token.isascii() and token.isprintable():
            headers["X-aws-ec2-metadata-token"] = token
    try:
        text = answer(url, **headers)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # aws, while nothing is planned
            return False
        raise
    machines = _machines(text)
    return _announces(text) or (bool(machines) and answer(service + NAME, **headers).strip().casefold() in machines)


def _announces(text: str) -> bool:
    """Whether this is the notice of aws or gcp, which is about the machine that asks.

    >>> _announces("FALSE"), _announces("TRUE"), _announces('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')
    (False, True, True)
    """
    try:
        return text.strip() == "TRUE" or json.loads(text)["action"] in ("terminate", "stop", "hibernate")
    except (ValueError, TypeError, KeyError):
        return False


def _machines(text: str) -> set[str]:
    """The machines that azure is about to preempt or delete, in lower case.

    >>> _machines('{"Events": [{"EventType": "Preempt", "Resources": ["A_0"]}]}')
    {'a_0'}
    >>> _machines('{"Events": [{"EventType": "Freeze", "Resources": ["A_1"]}]}')
    set()
    """
    try:
        ends = [event for event in json.loads(text)["Events"] if event["EventType"] in ("Preempt", "Terminate")]
        return {name.casefold() for event in ends for name in event["Resources"]}
    except (ValueError, AttributeError, TypeError, KeyError):
        return set()
