"""The first connection to a server: an address at which nothing listens is reported soon, and a server that is just
being started is waited for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

pytest.importorskip("grpc")

from pxrs import registry as registries
from pxrs.address import open_log
from pxrs.errors import PxrsError, ReadFailed, RegistryUnavailable
from pxrs.launching import free_ports
from pxrs.log.contract import Log
from pxrs.registry import address
from pxrs.registry.address import REFUSALS_MIN, parse
from pxrs.remote import wire
from pxrs.remote.client import link as link_module
from pxrs.remote.client import settings, transfers
from pxrs.remote.client.log import RemoteLog
from pxrs.remote.client.ping import ping
from pxrs.remote.client.settings import TIMEOUT_S, Settings
from pxrs.testing.log_fixtures import new_topic
from pxrs.testing.waiting import aside, eventually
from tests.unit.remote_peer import Peer, Stream

NOWHERE = "pxrs://127.0.0.1:1,127.0.0.1:2"
TOPIC = new_topic("orders", 4)


def attempts(error: BaseException) -> int:
    found = re.search(r"at each of (\d+) attempts; is `pxrs serve` running there\?", str(error))
    assert found is not None, error
    return int(found[1])


def in_log(call: Callable[[Log], object]) -> Callable[[str], object]:
    def use(url: str) -> None:
        with closing(open_log(url)) as log:
            call(log)

    return use


USES: dict[str, tuple[Callable[[str], object], type[PxrsError]]] = {
    "topics": (in_log(lambda log: log.topics()), ReadFailed),
    "topic": (in_log(lambda log: log.topic("orders")), ReadFailed),
    "create": (in_log(lambda log: log.create_topic(TOPIC)), ReadFailed),
    "delete": (in_log(lambda log: log.delete_topic("orders")), ReadFailed),
    "registry": (registries.open, RegistryUnavailable),
    "ping": (lambda url: ping(Settings.of(parse(url)), 1), RegistryUnavailable),
}


@pytest.mark.parametrize(("use", "kind"), USES.values(), ids=USES)
def test_an_address_at_which_nothing_listens_is_reported_long_before_the_timeout(
    use: Callable[[str], object], kind: type[PxrsError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "REFUSED_S", 0.3)
    began = time.monotonic()
    with pytest.raises(kind, match="Connection refused") as caught:
        use(NOWHERE)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert attempts(caught.value) >= REFUSALS_MIN


def test_by_default_that_takes_two_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(ReadFailed):
        in_log(lambda log: log.topics())(NOWHERE)
    assert 2 <= time.monotonic() - began < TIMEOUT_S / 2


def test_the_next_call_of_a_program_that_goes_on_is_not_delayed_again() -> None:
    with closing(open_log(NOWHERE)) as log:
        with pytest.raises(ReadFailed) as first:
            log.topics()
        began = time.monotonic()
        with pytest.raises(ReadFailed) as second:
            log.topics()
        assert time.monotonic() - began < address.REFUSED_S / 2
    assert attempts(second.value) > attempts(first.value), "it was tried once more"


def test_what_was_refused_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gap of 0, each refusal is the first one."""
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    monkeypatch.setattr(settings, "TIMEOUT_S", 0.8)
    monkeypatch.setattr(link_module, "REFUSED_GAP_S", 0.0)
    with pytest.raises(ReadFailed, match=r"gave up after 0.8 s"):
        in_log(lambda log: log.topics())(NOWHERE)


def test_one_refusal_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is started again refuses for a moment."""
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    with pytest.raises(ReadFailed) as caught:
        in_log(lambda log: log.topics())(NOWHERE)
    assert attempts(caught.value) >= REFUSALS_MIN


def test_an_address_with_a_timeout_has_its_program_wait_for_that_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    with pytest.raises(ReadFailed, match=r"gave up after 0.8 s \(`timeout` in the address\)"):
        in_log(lambda log: log.topics())(f"{NOWHERE}?timeout=0.8")


@pytest.fixture
def port() -> int:
    """A port at which nothing listens yet."""
    return free_ports(1)[0]


@pytest.fixture
def log(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteLog]:
    monkeypatch.setattr(address, "REFUSED_S", TIMEOUT_S)
    with closing(open_log(f"pxrs://127.0.0.1:{port}")) as log:
        assert isinstance(log, RemoteLog)
        yield log


def answer_topics(control: Stream) -> None:
    request = control.next()
    assert request["call"] == "log.topics"
    control.answer(request, topics=[wire.topic_to_dict(TOPIC)])


def test_a_server_that_begins_to_listen_meanwhile_is_found(log: RemoteLog, port: int) -> None:
    asking = aside(log.topics)
    link = log._session.connection()._link
    eventually(lambda: link._refused > REFUSALS_MIN)
    with Peer(port) as peer:
        answer_topics(peer.control())
        assert [topic.name for topic in asking.result()] == ["orders"]


def test_a_server_that_has_answered_before_is_waited_for_with_patience(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    with closing(open_log(f"pxrs://127.0.0.1:{port}")) as log:
        assert isinstance(log, RemoteLog)
        link = log._session.connection()._link
        with Peer(port) as peer:
            asking = aside(log.topics)
            answer_topics(peer.control())
            assert len(asking.result()) == 1
        asking = aside(log.topics)
        eventually(lambda: link._refused > REFUSALS_MIN)
        with Peer(port) as peer:
            answer_topics(peer.control())
            assert len(asking.result()) == 1


def test_a_task_of_spark_waits_for_its_first_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may begin in a new process while the server is started again: docs/spark.md promises that it waits."""
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    with transfers.connected(f"pxrs://127.0.0.1:{port}", None) as connection:
        asking = aside(lambda: transfers.ask(connection, "log.topics", {}))
        link = connection._link
        eventually(lambda: link._refused > REFUSALS_MIN)
        with Peer(port) as peer:
            answer_topics(peer.control())
            assert len(asking.result()["topics"]) == 1


def test_a_transfer_of_spark_waits_for_its_first_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "REFUSED_S", 0.0)
    with transfers.connected(f"pxrs://127.0.0.1:{port}", None) as connection:

        def begin() -> str:
            with transfers.Patience(connection).channel() as channel:
                return channel.target

        beginning = aside(begin)
        eventually(lambda: connection._link._refused > REFUSALS_MIN)
        with Peer(port) as peer:
            peer.control()
            assert beginning.result() == f"127.0.0.1:{port}"


def test_an_etcd_at_which_nothing_listens_is_reported_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pxrs.registry.etcd")
    monkeypatch.setattr(address, "REFUSED_S", 0.3)
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=r"Connection refused.* at each of \d+ attempts; is etcd running"):
        registries.open("etcd://127.0.0.1:1,127.0.0.1:2")
    assert time.monotonic() - began < TIMEOUT_S / 2
    with pytest.raises(RegistryUnavailable) as patient:
        registries.open("etcd://127.0.0.1:1,127.0.0.1:2?timeout=0.6")
    assert "attempts" not in str(patient.value)
