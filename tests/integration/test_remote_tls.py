"""TLS, mutual TLS and tokens between the client and the server of `pxrs serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs import grpc_fork  # noqa: F401 - first: it imports gRPC in its own way
from pxrs.errors import InvalidUrl, NotPermitted, ReadFailed, RegistryUnavailable, Unauthenticated
from pxrs.log.contract import Append
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing.log_fixtures import records
from pxrs.testing.servers.certificates import Certificates, certificates

import grpc  # isort: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", 1)
        yield hub


def credentials(files: Certificates, *, mutual: bool) -> object:
    pair = files.server_key.read_bytes(), files.server_cert.read_bytes()
    return grpc.ssl_server_credentials([pair], files.ca.read_bytes() if mutual else None, require_client_auth=mutual)


def can_use(url: str) -> bool:
    try:
        with pxrs.open(url) as remote:
            with remote.producer("orders") as producer:
                producer.send(b"x")
            return remote.topic("orders").read(0, 0) != [] and remote.registry.get("a") is None
    except (RegistryUnavailable, ReadFailed, InvalidUrl, Unauthenticated):
        return False


def test_tls_is_needed_and_the_authority_must_be_known(hub: pxrs.Hub, files: Certificates, tmp_path: Path) -> None:
    with serving(hub, ServerSettings(credentials=credentials(files, mutual=False))) as url:
        assert can_use(f"{url}?ca_file={files.ca}")
        for options in ("?timeout=0.5", "?timeout=0.5&tls=true"):
            assert not can_use(url + options)
        (tmp_path / "other").mkdir()
        stranger = certificates(tmp_path / "other")
        assert not can_use(f"{url}?timeout=0.5&ca_file={stranger.ca}")


def test_mutual_tls_needs_the_certificate_of_the_client(hub: pxrs.Hub, files: Certificates) -> None:
    with serving(hub, ServerSettings(credentials=credentials(files, mutual=True))) as url:
        assert can_use(f"{url}?ca_file={files.ca}&cert_file={files.client_cert}&key_file={files.client_key}")
        assert not can_use(f"{url}?timeout=0.5&ca_file={files.ca}")


def test_a_token_permits_what_it_grants(hub: pxrs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PXRS_TOKEN", raising=False)
    auth = str(tmp_path / "auth")
    _, secret = tokens.create(auth, "reader", ["topic:orders=read"], now=0.0)
    (good := tmp_path / "good").write_text(f"{secret}\n")
    (wrong := tmp_path / "wrong").write_text("wrong")
    with serving(hub, ServerSettings(auth=auth)) as url:
        for bad in (url, f"{url}?token_file={wrong}"):
            with pxrs.open(bad) as remote, pytest.raises(Unauthenticated):
                remote.topics()
        with pxrs.open(f"{url}?token_file={good}") as remote:
            assert [topic.name for topic in remote.topics()] == ["orders"]
            assert remote.topic("orders").read(0, 0) == []
            with pytest.raises(NotPermitted):
                remote.create_topic("other")
            with pytest.raises(NotPermitted):
                remote.producer("orders")
            appending = Append.encoded(0, records([b"x"]))
            with pytest.raises(NotPermitted):
                remote.topic("orders").log.append([appending])
        wrong.write_text(good.read_text())
        with pxrs.open(f"{url}?token_file={wrong}") as remote:
            assert remote.topic("orders").end(0) == 0, "a token that was put right is read again"
