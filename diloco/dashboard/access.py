"""Who may look: everybody on this machine, or whoever has the token. Nobody can change anything."""

import hmac
import ipaddress
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from diloco.errors import ConfigError

COOKIE = "diloco-token"
LEAST = 16
"""Characters of a token, at least."""
AUTO = "auto"
_TOKEN = re.compile(f"[A-Za-z0-9_-]{{{LEAST},}}")


def chosen_token(host: str, token: str | None) -> str | None:
    """The token to ask for; None if none is needed. Raises ConfigError if others could reach a server without one."""
    if token == AUTO:
        return secrets.token_urlsafe(24)
    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigError(f"--token of {len(token)} characters: give at least {LEAST} letters, digits, - or _; auto "
                          "makes one")  # fmt: skip
    if token is None and not is_loopback(host):
        raise ConfigError(f"--host {host} without --token: others could read your runs; add --token auto, or leave "
                          "--host out and let ssh forward the port")  # fmt: skip
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed(token: str | None, host: str, query: str, cookies: str) -> bool:
    """Whether a request may be answered, by its Host header, the token in its address, and its cookies.

    Without a token the name in the Host header must be one of this machine: another name that leads here is a page
    elsewhere that tries to read through the visitor's browser.
    """
    if token is None:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return any(hmac.compare_digest(given.encode(), token.encode()) for given in (query, _cookie(cookies)))


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
