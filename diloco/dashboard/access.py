"""Who may look: everybody on this machine, or whoever has the token. Nobody can change anything."""

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit


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


def cookie_name(port: int) -> str:
    """Browsers send a cookie to all ports of a host: two dashboards need two names."""
    return f"diloco-{port}"


def allowed(token: str | None, host: str, given: str, cookies: str, port: int) -> bool:
    """Whether a request may be answered, by its Host header, the token in its address, and its cookies.

    Without a token the name in the Host header must be one of this machine: another name that leads here is a page
    elsewhere that tries to read through the visitor's browser.
    """
    if token is None:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return any(hmac.compare_digest(text.encode(), token.encode()) for text in (given, _cookie(cookies, port)))


def _cookie(header: str, port: int) -> str:
    try:
        found = SimpleCookie(header).get(cookie_name(port))
    except CookieError:
        return ""
    return found.value if found else ""
