"""A cluster in which every connection is encrypted and shows a token: of clients, of brokers, to storage nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("grpc")
pytest.importorskip("trustme")

import pxrs
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.errors import NodeUnreachable, NotPermitted, Unauthenticated
from pxrs.remote.client.settings import Certificates as Trusted
from pxrs.server.auth import tokens
from pxrs.testing.servers import BrokerServer, StorageServer
from pxrs.testing.servers.certificates import certificates
from pxrs.testing.waiting import eventually


class Secured(NamedTuple):
    address: str
    """Of both brokers."""
    ca: Path
    folder: Path
    node: StorageServer

    def url(self, token: str) -> str:
        return f"pxrs://{self.address}?ca_file={self.ca}&token_file={self.folder / token}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = Path(tmp_path_factory.mktemp("secured"))
    tls = certificates(folder)
    auth, registry = folder / "tokens.json", f"file:{folder / 'registry'}"
    for name, grants in {
        "broker": ["cluster=member", "hub=admin"],
        "admin": ["hub=admin"],
        "orders": ["topic:orders=read", "topic:orders=write"],
    }.items():
        (folder / name).write_text(tokens.create(str(auth), name, grants, now=0.0)[1])
    nodes = [StorageServer(registry, flags=["--auth", str(auth)], tls=tls, forked=True) for _ in range(3)]
    flags = ["--auth", str(auth), "--token-file", str(folder / "broker"), "--ca-file", str(tls.ca)]
    brokers = [
        BrokerServer(registry, f"b{number}", flags=[*flags, "--placement", "round robin"], tls=tls, forked=True)
        for number in range(2)
    ]
    with ExitStack() as stack:
        for server in (*nodes, *brokers):
            stack.enter_context(server)
        address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        yield Secured(address, tls.ca, folder, nodes[0])


def test_messages_go_through_brokers_and_nodes_that_want_tokens_over_tls(secured: Secured) -> None:
    with pxrs.open(secured.url("admin")) as admin:
        admin.create_topic("orders", partitions=4)
        admin.create_topic("other", partitions=1)
        eventually(
            lambda: len(set(admin.log.topic("orders").owners().values())) == 2, what="both brokers own partitions"
        )
        with pxrs.open(secured.url("orders")) as hub:
            with hub.producer("orders") as out:
                for number in range(100):
                    out.send(b"%d" % number, key=b"%d" % number)
            with pytest.raises(NotPermitted):
                hub.topic("other").log.read(0, 0)
            found = [message.value for number in range(4) for message in hub.topic("orders").messages(number)]
        assert sorted(found) == sorted(b"%d" % number for number in range(100))


@pytest.mark.parametrize("token", ["unknown", "empty"])
def test_w4_a_client_without_a_valid_token_learns_nothing(secured: Secured, token: str) -> None:
    (secured.folder / "unknown").write_text("pxrs_" + "0" * 43)
    url = secured.url("unknown") if token == "unknown" else f"pxrs://{secured.address}?ca_file={secured.ca}"
    with pxrs.open(url) as hub, pytest.raises(Unauthenticated):
        hub.topics()


@pytest.mark.parametrize("token", [None, "orders", "admin"])
def test_c6_a_storage_node_serves_members_of_the_cluster_alone(secured: Secured, token: str | None) -> None:
    trusted = Trusted(secured.ca.read_bytes(), None, None)
    shown = None if token is None else secured.folder / token
    link = NodeLink(secured.node.node, secured.node.address, LinkSettings(token_file=shown, certificates=trusted))
    try:
        if token == "admin":  # who may do everything to a hub may look
            assert link.hello().node == secured.node.node
            return
        with pytest.raises(NodeUnreachable):
            link.ledgers()
    finally:
        link.close()
