"""Clients that are slow on purpose, and many: they do not keep others from the page."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

import pxrs
from pxrs.testing.waiting import eventually
from pxrs.web import connections
from pxrs.web.serving import WebServer
from tests.unit.web.asking import TOKEN, get, server

HEAD = b"GET /api/session HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with pxrs.open("memory:") as hub, server(hub, tmp_path_factory.mktemp("token")) as made:
        yield made


def connect(page: WebServer, sent: bytes = b"") -> socket.socket:
    host, _, port = page.address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.sendall(sent)
    return made


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other side has closed it, up to the timeout of the socket."""
    try:
        return connection.recv(65_536) == b""
    except ConnectionResetError:
        return True


def test_a_request_whose_head_comes_too_slowly_is_ended(page: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with connect(page) as silent, connect(page, HEAD) as slow:
        assert is_closed(silent)
        assert is_closed(slow)


def test_a_byte_now_and_then_gives_no_further_time(page: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with connect(page, HEAD + b"\r\n") as slow:
        assert slow.recv(65_536).startswith(b"HTTP/1.1 200"), "a connection that was used is no exception"
        slow.settimeout(0.02)
        began = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012
            while time.monotonic() < began + 10:
                slow.sendall(b"G")
                try:
                    if not slow.recv(1):
                        raise ConnectionError
                except TimeoutError:
                    continue


def test_a_body_that_does_not_come_is_not_waited_for(page: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    fields = ("POST /api/actions/purge HTTP/1.1", f"Host: {page.address}", f"Origin: http://{page.address}")
    more = ("Content-Type: application/json", "Content-Length: 9", f"X-Pxrs-Token: {TOKEN}")
    with connect(page, "\r\n".join((*fields, *more, "", "{")).encode()) as slow:
        assert is_closed(slow)


def test_an_answer_that_nobody_reads_is_given_up(page: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    with connect(page) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.settimeout(1.0)
        eventually(lambda: page.connection_count == 1)  # else its end below could be taken for an end by the page
        # Answers of 20 MB, more than the system keeps for a socket: the page does not read the last requests.
        with suppress(TimeoutError, ConnectionError):
            deaf.sendall((HEAD.replace(b"/api/session", b"/assets/style.css") + b"\r\n") * 2_000)
        eventually(lambda: not page.connection_count)


def test_more_connections_than_the_limit_do_not_keep_others_out(page: WebServer) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connect(page, HEAD)) for _ in range(connections.CONNECTIONS_MAX + 20)]
        eventually(
            lambda: page.connection_count == connections.CONNECTIONS_MAX,
            what=lambda: f"{page.connection_count} connections",
        )
        assert get(page, "/api/session")["is_open"]
        assert all(is_closed(each) for each in held[:20]), "those that have waited longest"
        assert page.connection_count <= connections.CONNECTIONS_MAX
    eventually(lambda: not page.connection_count)


def test_a_client_that_leaves_in_the_middle_of_a_request_leaves_no_traceback(
    page: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    head = (
        f"POST /api/actions/skip HTTP/1.1\r\nHost: {page.address}\r\nOrigin: http://{page.address}\r\n"
        f"Content-Type: application/json\r\nContent-Length: 100\r\nX-Pxrs-Token: {TOKEN}\r\n\r\n"
    )
    connect(page, head.encode() + b'{"group"').close()
    left = "a client of the page has left before its request was complete"
    eventually(lambda: [record for record in caplog.records if record.getMessage() == left], what=lambda: caplog.text)
    eventually(lambda: not page.connection_count)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert "Traceback" not in caplog.text
    assert get(page, "/api/session")["has_actions"]
