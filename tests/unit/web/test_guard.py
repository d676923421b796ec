"""Which requests the page answers: not those of other sites, whatever a browser sends along."""

from __future__ import annotations

import pytest

from pxrs.web.guard import BODY_BYTES_MAX, Refusal, check, is_own_host

HOST = (b"host", b"127.0.0.1:8080")
POST = [
    HOST,
    (b"origin", b"http://127.0.0.1:8080"),
    (b"content-type", b"application/json"),
    (b"content-length", b"2"),
]


def refused(method: str, *headers: tuple[bytes, bytes], size: int = 10, hosts: tuple[str, ...] = ()) -> int | None:
    """The status of the refusal; None if the request is answered."""
    try:
        check(method, size, headers, frozenset(hosts))
    except Refusal as refusal:
        return refusal.status
    return None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8080", "localhost:8080", "[::1]:8080", "10.1.2.3", "LOCALHOST"]
)
def test_an_address_and_localhost_are_the_pages_own_host(host: str) -> None:
    assert is_own_host(host, frozenset())


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "local host"),
        *("[::1", "[::1]x", "[::1]x:80", "127.0.0.1@evil.example", "localhost:8080/evil", "127.0.0.1:80:80x"),
    ],
)
def test_a_name_that_may_be_rebound_is_not_the_pages_own_host(host: str) -> None:
    assert not is_own_host(host, frozenset())


def test_a_request_under_another_name_is_refused_unless_the_name_is_allowed() -> None:
    assert refused("GET", (b"host", b"pxrs.example")) == 421
    assert refused("GET") == 421
    assert refused("GET", HOST, HOST) == 421
    assert refused("GET", (b"host", b"pxrs.example"), hosts=("pxrs.example",)) is None
    assert refused("GET", HOST) is None


def test_a_post_must_come_from_the_page_itself() -> None:
    assert refused("POST", *POST) is None
    without = [each for each in POST if each[0] != b"origin"]
    assert refused("POST", *without) == 403
    for origin in (b"null", b"http://evil.example", b"https://127.0.0.1:8080", b"http://127.0.0.1:8081"):
        assert refused("POST", *without, (b"origin", origin)) == 403, origin
    for site in (b"cross-site", b"same-site", b"none"):
        assert refused("POST", *POST, (b"sec-fetch-site", site)) == 403
    assert refused("POST", *POST, (b"sec-fetch-site", b"same-origin")) is None


def test_a_post_may_come_through_a_proxy_with_tls_whose_name_is_allowed() -> None:
    rest = [each for each in POST if each[0] not in (b"host", b"origin")]
    host = (b"host", b"pxrs.example")
    for origin, status in ((b"https://pxrs.example", None), (b"https://pxrs.example:8443", 403), (b"https://x", 403)):
        assert refused("POST", *rest, host, (b"origin", origin), hosts=("pxrs.example",)) == status
    assert refused("POST", *rest, HOST, (b"origin", b"https://127.0.0.1:8080"), hosts=("pxrs.example",)) == 403


def test_a_post_that_a_form_could_send_is_refused() -> None:
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b""):
        headers = [each for each in POST if each[0] != b"content-type"]
        assert refused("POST", *headers, (b"content-type", kind)) == 415


def test_another_site_cannot_read_by_a_script_but_may_link_to_the_page() -> None:
    assert refused("GET", HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")) == 403
    assert refused("GET", HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"cors")) == 403
    assert refused("GET", HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")) is None


def test_requests_are_bounded() -> None:
    body = [each for each in POST if each[0] != b"content-length"]
    assert refused("POST", *body) == 411
    for length, status in ((b"-1", 411), (b"x", 411), (b"9" * 40, 413), (str(BODY_BYTES_MAX + 1).encode(), 413)):
        assert refused("POST", *body, (b"content-length", length)) == status
    assert refused("GET", HOST, size=5_000) == 414
    assert refused("GET", HOST, (b"content-length", b"5")) == 400
    assert refused("GET", HOST, (b"transfer-encoding", b"chunked")) == 400
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"):
        assert refused(method, HOST) == 405
