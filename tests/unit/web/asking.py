"""Requests to a page that listens on loopback, sent as a browser or as an attacker would."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pxrs
from pxrs.web.access import ActionToken
from pxrs.web.serving import WebServer

TOKEN = "correct-horse-battery-staple"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def server(hub: pxrs.Hub, folder: Path | None = None) -> WebServer:
    """folder: where the file with the token is made; without it the page only shows."""
    if folder is None:
        return WebServer(hub, "127.0.0.1:0")
    file = folder / "token"
    file.write_text(f"{TOKEN}\n")
    return WebServer(hub, "127.0.0.1:0", ActionToken(file))


def ask(server: WebServer, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    """headers: names with underscores in place of hyphens."""
    connection = http.client.HTTPConnection(server.address, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None and "Content_Length" not in headers:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


def get(server: WebServer, path: str) -> Any:
    answer = ask(server, "GET", path)
    assert answer.status == 200, answer
    return answer.json


def post(server: WebServer, path: str, given: object, token: str | None = TOKEN, **headers: str) -> Answer:
    """As the page itself sends it."""
    own = {"Origin": f"http://{server.address}", "Content_Type": "application/json"}
    if token is not None:
        own["X_Pxrs_Token"] = token
    return ask(server, "POST", path, json.dumps(given).encode(), **{**own, **headers})


def act(server: WebServer, action: str, given: Mapping[str, object], token: str | None = TOKEN) -> Answer:
    """Have an action shown, then confirm it, as the page does; the first answer that is no success."""
    shown = post(server, f"/api/actions/{action}/preview", given, token)
    return shown if shown.status != 200 else confirm(server, action, shown, token)


def confirm(server: WebServer, action: str, shown: Answer, token: str | None = TOKEN) -> Answer:
    return post(server, f"/api/actions/{action}", {"plan": shown.json["plan"], "confirmed": True}, token)
