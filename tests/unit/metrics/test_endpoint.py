"""V2, V4: /metrics, /healthz and /readyz, and clients that are slow or many."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import pxrs.metrics
from pxrs.errors import CannotListen, InvalidArgument
from pxrs.metrics import endpoint as endpoints
from pxrs.metrics.endpoint import CONNECTIONS_MAX, REQUEST_BYTES_MAX, Endpoint, parse_listen
from pxrs.metrics.health import Beat, Readiness, Verdict
from pxrs.metrics.instruments import PRODUCER_MESSAGES, Series
from pxrs.metrics.prometheus import Exposition, Part
from pxrs.testing.waiting import eventually


class Health:
    live = Verdict(True)
    ready = Verdict(False, "not yet", {"workers": {"1": "starting"}})


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def endpoint(health: Health) -> Iterator[Endpoint]:
    with Endpoint(
        "127.0.0.1:0", lambda accept: (b"a 1\n", "text/plain"), live=lambda: health.live, ready=lambda: health.ready
    ) as endpoint:
        yield endpoint


def ask(endpoint: Endpoint, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{endpoint.address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def connected(endpoint: Endpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_v4_probes_answer_by_status_and_say_why(endpoint: Endpoint, health: Health) -> None:
    assert ask(endpoint, "/healthz") == (200, '{"ok": true}\n')
    status, body = ask(endpoint, "/readyz?verbose")
    assert (status, json.loads(body)) == (503, {"ok": False, "reason": "not yet", "workers": {"1": "starting"}})
    health.ready, health.live = Verdict(True), Verdict(False, "hangs")
    assert ask(endpoint, "/readyz")[0] == 200
    assert ask(endpoint, "/healthz") == (503, '{"ok": false, "reason": "hangs"}\n')
    assert ask(endpoint, "/metrics") == (200, "a 1\n")
    assert ask(endpoint, "/")[0] == 404


def test_v2_the_counts_of_the_process_are_in_the_format_of_prometheus() -> None:
    hostile = 'a"b\\c\n{}'
    PRODUCER_MESSAGES.of(hostile).add(3)
    with pxrs.metrics.serve("0") as endpoint:
        status, body = ask(endpoint, "/metrics")
    assert status == 200
    assert "# TYPE pxrs_producer_messages_total counter\n" in body
    assert 'pxrs_producer_messages_total{topic="a\\"b\\\\c\\n{}"} 3.0\n' in body
    assert "process_resident_memory_bytes " in body


def test_an_error_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(accept: str) -> tuple[bytes, str]:
        raise ValueError("secret detail")

    with Endpoint("0", fail) as endpoint:
        status, body = ask(endpoint, "/metrics")
    assert (status, "secret" in body) == (500, False)
    assert "secret detail" in caplog.text


def test_a_slow_collection_does_not_hold_up_the_probes() -> None:
    begun, release = threading.Event(), threading.Event()

    def render(accept: str) -> tuple[bytes, str]:
        begun.set()
        release.wait(20)
        return b"", "text/plain"

    with Endpoint("0", render) as endpoint:
        slow = threading.Thread(target=ask, args=(endpoint, "/metrics"))
        slow.start()
        assert begun.wait(20)
        assert ask(endpoint, "/healthz")[0] == 200
        release.set()
        slow.join()


def test_slow_clients_are_bounded_in_number_and_ended(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints._Request, "timeout", 60.0)  # which a client escapes that sends a byte now and then
    clients = [connected(endpoint) for _ in range(CONNECTIONS_MAX)]
    for client in clients:
        client.sendall(b"GET /met")  # and never the rest
    with connected(endpoint) as refused:
        assert eventually(lambda: refused.recv(100)).startswith(b"HTTP/1.0 503")
    monkeypatch.setattr(endpoints, "CONNECTION_S", 0.0)  # as if they had been connected for long
    for client in clients:
        assert client.recv(100) == b"", "the server has ended it"
        client.close()
    monkeypatch.undo()
    assert eventually(lambda: ask(endpoint, "/healthz")[0] == 200)


def test_a_request_that_is_too_long_ends_there(endpoint: Endpoint) -> None:
    with connected(endpoint) as client:
        try:
            client.sendall(b"GET /healthz HTTP/1.0\r\nx: " + b"x" * 4 * REQUEST_BYTES_MAX)
            answer = client.recv(100)
        except ConnectionError:  # closed before all of it was read
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.0 ")
    assert ask(endpoint, "/healthz")[0] == 200


def test_other_methods_are_refused(endpoint: Endpoint) -> None:
    request = urllib.request.Request(f"http://{endpoint.address}/metrics", b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 501


def test_a_port_in_use_is_an_error_that_may_pass(endpoint: Endpoint) -> None:
    with pytest.raises(CannotListen, match="cannot listen for metrics on"):
        Endpoint(endpoint.address, lambda accept: (b"", ""))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:0", ("::1", 0)),
        ("host.example:80", ("host.example", 80)),
    ],
)
def test_a_port_alone_is_on_loopback(given: str, found: tuple[str, int]) -> None:
    assert parse_listen(given) == found


@pytest.mark.parametrize("given", ["", "host", "host:", "::1:80", "host:65536", "host:-1", "[::1:80"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="--metrics-listen is"):
        parse_listen(given)


def test_a_host_that_can_be_no_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is not a host name"):
        Endpoint(f"{'a' * 70}.example:0", lambda accept: (b"", ""))


def test_v2_hostile_names_are_exported_as_labels_and_hide_no_other_value() -> None:
    """Names of topics in records of the registry may be any text."""
    names = ['x"} 7\n# EOF\n', "\ud800", "back\\slash", "\x00\x1b[2J"]
    series: list[Series] = [(("g", name), number) for number, name in enumerate(names)]
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        body, _ = Exposition(lambda: [Part({}, {"pxrs.group.lag": series})]).render(accept)
        parse = parse_openmetrics if accept else parse_text
        (family,) = [each for each in parse(body.decode()) if each.name == "pxrs_group_lag"]
        found = {sample.labels["topic"]: sample.value for sample in family.samples}
        assert found == {name.replace("\ud800", "\\ud800"): number for number, name in enumerate(names)}


def test_a_loop_that_stands_still_is_not_alive() -> None:
    now = 0.0
    beat = Beat("the loop", 60.0, lambda: now)
    now = 59.0
    assert beat.verdict().is_ok
    now = 61.0
    assert beat.verdict() == Verdict(False, "the loop has made no progress for 61 s")
    beat.beat()
    assert beat.verdict().is_ok
    ready = Readiness("starting")
    assert ready.verdict() == Verdict(False, "starting")
