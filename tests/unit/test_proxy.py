"""Each fault of the proxy, seen from both sides: what the client gets, and what has reached the server."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pxrs.testing.proxy import Proxy
from pxrs.testing.relay import BUFFER_BYTES_MAX

WAIT_S = 30.0


class EchoServer:
    """Answers every byte with itself and remembers what it got."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.received = bytearray()
        self.open_connections = 0
        self.open_at: dict[bytes, int] = {}
        """How many connections were open when this data was received."""
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_S), (bytes(self.received[:100]), self.open_connections)

    def push(self, data: bytes) -> None:
        """Send unasked on the connection that came first, as a watch does."""
        self._connections[0].sendall(data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._echo, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _count(self, change: int, data: bytes = b"") -> None:
        with self._changed:
            self.open_connections += change
            self.received += data
            self.open_at[data] = self.open_connections
            self._changed.notify_all()

    def _echo(self, connection: socket.socket) -> None:
        self._count(+1)
        with connection:
            try:
                while data := connection.recv(65536):
                    self._count(0, data)
                    connection.sendall(data)
            except OSError:
                pass
            finally:
                self._count(-1)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    echo = EchoServer()
    yield echo
    echo.close()


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        assert ask(connection, b"hello") == b"hello"
        yield connection


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=WAIT_S)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def is_silent(connection: socket.socket, wait_s: float = 0.1) -> bool:
    """Say whether nothing at all arrives, not even an end; the time is what "nothing" is measured by."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return not selector.select(wait_s)


def test_everything_passes_at_first_also_more_than_the_buffers_hold(client: socket.socket) -> None:
    data = bytes(range(256)) * (BUFFER_BYTES_MAX * 3 // 256)
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(client, len(data)) == data
    sender.join(WAIT_S)


def test_an_end_passes_in_both_directions(client: socket.socket, server: EchoServer) -> None:
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == b"last"
    server.wait_until(lambda: server.open_connections == 0)


def test_a_client_that_closes_is_gone_for_the_server_too(client: socket.socket, server: EchoServer) -> None:
    client.close()
    server.wait_until(lambda: server.open_connections == 0)


def test_a_target_that_is_down_resets_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Proxy("127.0.0.1", port) as proxy, pytest.raises(ConnectionResetError), connect(proxy) as client:
        client.recv(1)


def test_cut_resets_and_refuses_until_restored(proxy: Proxy, client: socket.socket, server: EchoServer) -> None:
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    server.wait_until(lambda: server.open_connections == 0)
    proxy.restore()
    with connect(proxy) as again:
        assert ask(again, b"back") == b"back"


def test_stall_keeps_old_and_new_connections_silent_until_restored(
    proxy: Proxy, client: socket.socket, server: EchoServer
) -> None:
    proxy.stall()
    client.sendall(b"old")
    proxy.wait_for_request(WAIT_S)
    with connect(proxy) as second:
        second.sendall(b"new")
        assert is_silent(client)
        assert is_silent(second, 0)
        assert server.received == b"hello"
        proxy.restore()
        assert receive(client, 3) == b"old"
        assert receive(second, 3) == b"new"


def test_stall_keeps_back_what_the_server_sends_unasked(
    proxy: Proxy, client: socket.socket, server: EchoServer
) -> None:
    proxy.stall()
    server.push(b"event")
    assert is_silent(client)
    proxy.restore()
    assert receive(client, 5) == b"event"


def test_stall_pushes_back_instead_of_growing(proxy: Proxy, client: socket.socket) -> None:
    proxy.stall()
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.sendall(bytes(64 << 20))
    (link,) = proxy._relay._links
    assert len(link.requests.buffer) < 2 * BUFFER_BYTES_MAX


def test_dropped_replies_are_lost_while_requests_arrive(
    proxy: Proxy, client: socket.socket, server: EchoServer
) -> None:
    proxy.drop_replies()
    client.sendall(b"write")
    proxy.wait_for_request(WAIT_S)
    server.wait_until(lambda: server.received == b"hellowrite")
    assert is_silent(client)


def test_a_connection_that_lost_a_reply_is_reset_by_restore(
    proxy: Proxy, client: socket.socket, server: EchoServer
) -> None:
    proxy.drop_replies()
    with connect(proxy) as idle:
        client.sendall(b"write")
        server.wait_until(lambda: server.received == b"hellowrite")
        (loser,) = [link for link in proxy._relay._links if link.client.getpeername() == client.getsockname()]
        deadline = time.monotonic() + WAIT_S
        while not loser.has_lost_replies:
            assert time.monotonic() < deadline
        proxy.restore()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert ask(idle, b"fine") == b"fine"


def test_drop_replies_can_close_as_soon_as_the_server_answered(
    proxy: Proxy, client: socket.socket, server: EchoServer
) -> None:
    proxy.drop_replies(close_after=0)
    client.sendall(b"write")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert server.received == b"hellowrite"


def test_held_requests_land_when_released(proxy: Proxy, client: socket.socket, server: EchoServer) -> None:
    proxy.hold_requests()
    client.sendall(b"late")
    proxy.wait_for_request(WAIT_S)
    assert is_silent(client)
    assert server.received == b"hello"
    proxy.release_requests()
    assert receive(client, 4) == b"late"


@pytest.mark.parametrize("how", ["end", "reset", "reset by the proxy"])
def test_held_requests_land_even_after_their_client_is_gone(
    proxy: Proxy, client: socket.socket, server: EchoServer, how: str
) -> None:
    proxy.hold_requests()
    client.sendall(b"late")
    proxy.wait_for_request(WAIT_S)
    if how == "reset by the proxy":
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    elif how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    with connect(proxy) as other:
        other.sendall(b"!")
        assert is_silent(other)
        assert server.received == b"hello"
        proxy.release_requests()
        assert receive(other, 1) == b"!"
        server.wait_until(lambda: sorted(server.received) == sorted(b"hello!late"))
        # The server has time to act on the request before it sees that the client has gone.
        assert server.open_at[b"late"] == 2
        server.wait_until(lambda: server.open_connections == 1)


def test_reset_connections_spares_new_ones(proxy: Proxy, client: socket.socket) -> None:
    proxy.reset_connections()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with connect(proxy) as again:
        assert ask(again, b"new") == b"new"


def test_wait_for_request_counts_only_what_comes_after_the_mode_was_set(proxy: Proxy, client: socket.socket) -> None:
    proxy.wait_for_request(WAIT_S)
    proxy.stall()
    with pytest.raises(TimeoutError):
        proxy.wait_for_request(0.05)
    client.sendall(b"now")
    proxy.wait_for_request(WAIT_S)


def test_close_resets_connections_and_ends_the_thread(proxy: Proxy, client: socket.socket) -> None:
    proxy.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert not any(thread.name == f"proxy-{proxy.port}" for thread in threading.enumerate())
    proxy.close()
