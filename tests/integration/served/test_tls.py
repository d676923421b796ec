"""TLS and mutual TLS between a server and its clients: what works, and the error of each mistake. An address that can
never work fails long before the timeout of its calls, which is set to a minute here."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("trustme")

import grpc
import trustme

import pxrs
from pxrs.errors import InvalidUrl, PxrsError, ReadFailed, Unauthenticated
from pxrs.hub import Hub
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing.servers.certificates import Certificates, certificates

TIMEOUT = "timeout=60"
SOON_S = 20.0
"""Far less than the timeout, far more than a busy machine needs."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of another authority."""
    return certificates(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1)
        yield hub


def settings(cert: Path, key: Path, client_ca: Path | None = None) -> ServerSettings:
    root = None if client_ca is None else client_ca.read_bytes()
    pair = key.read_bytes(), cert.read_bytes()
    credentials: Any = grpc.ssl_server_credentials([pair], root, require_client_auth=client_ca is not None)
    return ServerSettings(credentials=credentials)


@pytest.fixture(scope="module")
def plain(hub: Hub) -> Iterator[str]:
    with serving(hub) as url:
        yield url


@pytest.fixture(scope="module")
def encrypted(hub: Hub, ours: Certificates) -> Iterator[str]:
    with serving(hub, settings(ours.server_cert, ours.server_key)) as url:
        yield url


@pytest.fixture(scope="module")
def mutual(hub: Hub, ours: Certificates) -> Iterator[str]:
    with serving(hub, settings(ours.server_cert, ours.server_key, ours.ca)) as url:
        yield url


def shown(url: str) -> list[str]:
    """The topics, by the log and by the registry's connection."""
    with pxrs.open(url) as hub:
        assert hub.queues() == []
        return [topic.name for topic in hub.topics()]


def refused(url: str, kind: type[PxrsError]) -> str:
    """What both the log and the registry raise, soon."""
    began_at = time.monotonic()
    with pxrs.open(url) as hub:
        with pytest.raises(kind) as by_log:
            hub.topics()
        with pytest.raises(kind) as by_registry:
            _ = hub.registry
    assert time.monotonic() - began_at < SOON_S
    assert url.partition("?")[0] in str(by_log.value)
    assert url.partition("?")[0] in str(by_registry.value)
    return str(by_log.value)


def test_a_client_that_trusts_the_authority_reads_and_writes_over_tls(encrypted: str, ours: Certificates) -> None:
    url = f"{encrypted}?ca_file={ours.ca}&{TIMEOUT}"
    assert shown(url) == ["orders"]
    with pxrs.open(url) as hub:
        with hub.producer("orders") as out:
            out.send(b"secret")
        assert [message.value for message in hub.topic("orders").messages(0)] == [b"secret"]


def test_the_connection_is_encrypted(encrypted: str, ours: Certificates) -> None:
    host, port = encrypted.removeprefix("pxrs://").split(":")
    found = ssl.get_server_certificate((host, int(port)))
    assert found.strip() in ours.server_cert.read_text()


@pytest.mark.parametrize("how", ["another authority", "the system's"])
def test_a_certificate_of_an_authority_that_the_client_does_not_know_is_refused(
    encrypted: str, theirs: Certificates, how: str
) -> None:
    option = "tls=true" if how == "the system's" else f"ca_file={theirs.ca}"
    told = refused(f"{encrypted}?{option}&{TIMEOUT}", InvalidUrl)
    assert "is not trusted: unable to get local issuer certificate" in told
    assert "ca_file=FILE" in told


def test_a_certificate_for_another_host_is_refused(hub: Hub, tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("other.example")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    with serving(hub, settings(cert, key)) as url:
        told = refused(f"{url}?ca_file={ca}&{TIMEOUT}", InvalidUrl)
    assert "is not trusted" in told
    assert "must be issued for this host name" in told


def test_a_client_without_tls_is_told_that_the_server_has_it(encrypted: str, mutual: str) -> None:
    for url in (encrypted, mutual):
        told = refused(f"{url}?{TIMEOUT}", InvalidUrl)
        assert "uses TLS, but the address does not: add ?tls=true" in told


def test_a_client_with_tls_is_told_that_the_server_has_none(plain: str, ours: Certificates) -> None:
    told = refused(f"{plain}?ca_file={ours.ca}&{TIMEOUT}", InvalidUrl)
    assert "does not use TLS: start it with --tls-cert" in told


def test_a_client_with_a_certificate_of_the_authority_is_served_over_mutual_tls(
    mutual: str, ours: Certificates
) -> None:
    own = f"cert_file={ours.client_cert}&key_file={ours.client_key}"
    assert shown(f"{mutual}?ca_file={ours.ca}&{own}&{TIMEOUT}") == ["orders"]


def test_a_client_without_a_certificate_is_refused_over_mutual_tls(mutual: str, ours: Certificates) -> None:
    told = refused(f"{mutual}?ca_file={ours.ca}&{TIMEOUT}", Unauthenticated)
    assert "requires a client certificate" in told
    assert "cert_file=FILE" in told


def test_a_client_with_a_certificate_of_another_authority_is_refused_over_mutual_tls(
    mutual: str, ours: Certificates, theirs: Certificates
) -> None:
    own = f"cert_file={theirs.client_cert}&key_file={theirs.client_key}"
    told = refused(f"{mutual}?ca_file={ours.ca}&{own}&{TIMEOUT}", Unauthenticated)
    assert "rejected the certificate of this client" in told


def test_a_server_that_is_not_there_is_told_after_the_timeout() -> None:
    with pxrs.open("pxrs://127.0.0.1:1?timeout=0.5") as hub, pytest.raises(ReadFailed) as raised:
        hub.topics()
    assert str(raised.value) == (
        "pxrs://127.0.0.1:1: no server answers: 127.0.0.1:1: Connection refused (UNAVAILABLE); is `pxrs serve` running "
        "there?; gave up after 0.5 s (`timeout` in the address); check the server with `pxrs ping`"
    )
