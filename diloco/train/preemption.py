"""The notice that a cloud gives before it takes a machine away, read from the machine's metadata service."""

import contextlib
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

SERVICES = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}
INTERVAL = 2.0
"""Seconds between two looks. The shortest notice, of gcp and azure, is 30 s."""
TIMEOUT = 2.0
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""gcp and azure answer only requests with their header; the other services ignore it."""
log = logging.getLogger("diloco")


@contextlib.contextmanager
def watched(service: str | None, tell: Callable[[], None]) -> Iterator[None]:
    """While inside, look for a notice in the background, and call `tell` once it has come. `service`: a key of SERVICES
    or the URL of a service that answers in the form of one of them; None: look for nothing."""
    ended = threading.Event()

    def watch(service: str) -> None:
        silent = False
        while not ended.is_set():
            try:
                if has_notice(SERVICES.get(service, service)):
                    log.warning("the cloud will take this machine away: syncing, saving a checkpoint and stopping")
                    tell()
                    return
            except OSError as error:
                if not silent:
                    log.warning("the metadata service %s does not answer (%s); asking again", service, error)
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
    """Whether the service announces the end of this machine. Raises OSError if it does not answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask its own machine's service

    def answer(url: str, method: str = "GET", **headers: str) -> str:
        request = urllib.request.Request(url, headers=headers, method=method)
        with opener.open(request, timeout=TIMEOUT) as response:
            return response.read(1 << 16).decode(errors="replace")

    headers = dict(HEADERS)
    with contextlib.suppress(OSError):  # aws wants a token; the others have none
        address = urlsplit(url)
        token = answer(f"{address.scheme}://{address.netloc}/latest/api/token", "PUT",
                       **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})  # fmt: skip
        headers["X-aws-ec2-metadata-token"] = token
    try:
        return _announces(answer(url, **headers))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # aws, as long as nothing is planned
            return False
        raise


def _announces(text: str) -> bool:
    """
    >>> _announces("FALSE"), _announces("TRUE"), _announces('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')
    (False, True, True)
    >>> _announces('{"Events": []}'), _announces('{"Events": [{"EventType": "Preempt"}]}')
    (False, True)
    """
    if text.strip() == "TRUE":
        return True
    try:
        value = json.loads(text)
        events = [event["EventType"] for event in value.get("Events", ())]
        return value.get("action") in ("terminate", "stop", "hibernate") or bool({"Preempt", "Terminate"} & {*events})
    except (ValueError, AttributeError, TypeError, KeyError):
        return False
