"""Which requests are answered at all, and the headers of every answer. Nothing here knows the hub.

The page usually listens on loopback, without a password. So it must not be used by other sites through the visitor's
own browser:
- A site cannot read or act by a name of its own that leads to this address (DNS rebinding): `Host` must be an address,
  `localhost`, or a name that the operator has allowed.
- A site cannot act by sending a form or a script's request: what changes something is a POST with a body of JSON, whose
  `Origin` is that of the page itself, and with the token in a header of its own. The page uses no cookies, so no
  browser adds a credential by itself.
- A site cannot put the page into a frame, or have a browser take an answer for something else than it is.

Requests are bounded: method, length of the address, number of headers (by the HTTP server) and size of the body.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

BODY_BYTES_MAX: Final = 64 << 10
TARGET_BYTES_MAX: Final = 4_096
HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refusal(Exception):
    """The request is not passed on."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def check(
    method: str, target_bytes: int, headers: Iterable[tuple[bytes, bytes]], hosts: frozenset[str], scheme: str = "http"
) -> None:
    """Raise Refusal if the request must not be answered. hosts: the names that are allowed beside addresses."""
    if method not in ("GET", "HEAD", "POST"):
        raise Refusal(405, "method not allowed: use GET to read and POST to change")
    if target_bytes > TARGET_BYTES_MAX:
        raise Refusal(414, f"the URL is longer than {TARGET_BYTES_MAX:,} bytes")
    given: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        given.setdefault(name.lower(), []).append(value)
    named = given.get(b"host", [])
    if len(named) != 1 or not is_own_host(host := named[0].decode("latin-1"), hosts):
        raise Refusal(421, "the Host header is not that of this page: use its address, or start it with --allow-host")
    site = given.get(b"sec-fetch-site", [b"none"])[0]
    mode = given.get(b"sec-fetch-mode", [b""])[0]
    if site in (b"cross-site", b"same-site") and mode != b"navigate":
        raise Refusal(403, "requests from other sites are refused")
    if method == "POST":
        own = {f"{scheme}://{host}".lower()}
        if _name_of(host) in hosts:  # a proxy before the page, which speaks TLS, is reached under this name
            own.add(f"https://{host}".lower())
        _check_post(given, own)
    elif given.get(b"transfer-encoding") or given.get(b"content-length", [b"0"]) != [b"0"]:
        raise Refusal(400, "a GET or HEAD request must not have a body")


def _name_of(host: str) -> str:
    return host.partition(":")[0].lower()


def _check_post(given: dict[bytes, list[bytes]], own: set[str]) -> None:
    """own: the origins of the page itself."""
    origins = [each.decode("latin-1") for each in given.get(b"origin", [])]
    if len(origins) != 1 or origins[0].lower() not in own:
        raise Refusal(403, "the request does not come from this page: its Origin header is missing or different")
    if given.get(b"sec-fetch-site", [b"same-origin"])[0] != b"same-origin":
        raise Refusal(403, "requests from other sites are refused")
    kind = given.get(b"content-type", [b""])[0].split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refusal(415, "the body must be application/json")
    length = given.get(b"content-length", [b""])
    if len(length) != 1 or not length[0].isdigit():
        raise Refusal(411, "the Content-Length header is missing or not a number")
    if len(length[0]) > 9 or int(length[0]) > BODY_BYTES_MAX:
        raise Refusal(413, f"the body is longer than {BODY_BYTES_MAX:,} bytes")


def is_own_host(host: str, hosts: frozenset[str]) -> bool:
    """Whether a `Host` header can be that of this page. An address always can: it is a name that could lead a browser
    here on behalf of another site."""
    name, bracket, rest = host.rpartition("]")
    if bracket:
        name, port = name.lstrip("["), rest.removeprefix(":")
        if rest and not rest.startswith(":"):
            return False
    else:
        name, _, port = host.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name.lower() in hosts or name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Stands before the routes: refuses what `check` refuses, and adds the headers to every answer."""

    def __init__(self, app: App, hosts: Iterable[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: nothing here speaks it
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in own]
                message["headers"] = [*kept, *HEADERS]
            await send(message)

        try:
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
            check(scope["method"], size, scope["headers"], self._hosts, scope.get("scheme", "http"))
        except Refusal as refusal:
            body = refusal.why.encode()
            kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
            closing = [(b"connection", b"close")]
            await send_guarded({"type": "http.response.start", "status": refusal.status, "headers": kind + closing})
            await send_guarded({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send_guarded)
