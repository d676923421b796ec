"""The staging contract through a server, and what only a server can do wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.errors import InvalidArgument, InvalidRecord, TopicDeleted
from pxrs.hub import Hub
from pxrs.log.batch import encode
from pxrs.model import Topic
from pxrs.publishing.records import Manifest, manifests_of
from pxrs.publishing.staging import served
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.frames import Piece
from pxrs.publishing.staging.served import ServedStaging
from pxrs.remote.client import limits, transfers
from pxrs.remote.client.transfers import connected
from pxrs.server.serving import serving
from pxrs.testing.log_fixtures import records
from pxrs.testing.proxy import Proxy
from pxrs.testing.staging_contract import DAY_S, OTHER, TOPIC, StagingContract, feed, rows, staged
from pxrs.testing.waiting import aside, eventually


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub in a directory, with the topics of the contract."""
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        for topic in (TOPIC, replace(TOPIC, name="returns", id=OTHER)):
            hub.log.create_topic(topic)
        yield hub


@pytest.fixture
def place(hub: Hub) -> Iterator[ServedStaging]:
    """The staging place of that hub, as a client sees it. The connection stays open for the whole test."""
    with serving(hub) as url, connected(url, None):
        yield ServedStaging(url)


def make_older(hub: Hub, seconds: float) -> None:
    folder = Path(hub.url, "staging")
    for path in [folder, *folder.rglob("*")]:
        found = path.stat()
        os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


class TestServed(StagingContract):
    @pytest.fixture
    def staging(self, hub: Hub, place: ServedStaging) -> Staging:
        self.hub = hub
        return place

    def make_older(self, staging: Staging, seconds: float) -> None:
        make_older(self.hub, seconds)


def ask(place: ServedStaging, call: str, **arguments: Any) -> dict[str, Any]:
    with place.connected() as connection:
        return dict(connection.call(f"staging.{call}", arguments, 10.0))


def files_in(hub: Hub) -> list[str]:
    return sorted(str(path.relative_to(hub.url)) for path in Path(hub.url, "staging").rglob("*") if path.is_file())


def test_k1_staged_rows_are_published_where_they_are_and_once(hub: Hub, place: ServedStaging) -> None:
    name = place.stage(TOPIC, "q", 3, 0, [rows(b"a", b"b", partition=2), rows(b"c", partition=1)]).name
    assert name is not None
    with pxrs.open(place.url) as remote:
        topic = remote.topic(TOPIC.name).log
        for _ in range(2):  # as by another driver, or after a lost reply
            place.publish(topic, "q", 3, [name], [0, 0, 0])
        with pytest.raises(FileNotFoundError):
            place.publish(topic, "q", 3, ["missing"], [])
        with pytest.raises(InvalidArgument, match="2 ends"):
            place.publish(topic, "q", 3, [name], [0, 0])
    stored = {number: hub.topic(TOPIC.name).log.read(number, 0) for number in range(3)}
    assert {number: [b.records.column("value").to_pylist() for b in found] for number, found in stored.items()} == {
        0: [],
        1: [[b"c"]],
        2: [[b"a", b"b"]],
    }
    place.clear(TOPIC.id, "q", 3)
    assert files_in(hub) == []


def test_what_is_staged_on_either_side_of_the_server_is_the_same(hub: Hub, place: ServedStaging) -> None:
    """A query may go on with a driver on the other side."""
    local = DirectoryStaging(hub.url)
    far, near = (each.stage(TOPIC, "q", 0, 0, [rows(b"a")]).name for each in (place, local))
    assert far is not None
    assert near is not None
    for each in (place, local):
        assert each.make_durable(TOPIC.id, "q", 0, [far, near])
        assert staged(each, "q", 0, far, near) == [(0, [b"a"]), (0, [b"a"])]
    local.announce("q", 0, "run", feed())
    assert place.feeds("q", 0, "run") == [feed()]


def test_a_large_file_is_kept_on_disk_until_it_is_sent(
    hub: Hub, place: ServedStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    temporary = served.tempfile.TemporaryFile
    monkeypatch.setattr(served.tempfile, "TemporaryFile", lambda **given: made.append(temporary(**given)) or made[-1])
    values = [os.urandom(100_000) for _ in range(30)]
    small = place.stage(TOPIC, "q", 0, 0, [rows(b"a")]).name
    assert small is not None
    assert not made
    large = place.stage(TOPIC, "q", 0, 0, [rows(value) for value in values]).name
    assert large is not None
    assert len(made) == 1
    assert made[0].closed
    assert [value for _, found in staged(place, "q", 0, large) for value in found] == values


def test_a_file_is_sent_again_after_a_break_and_counts_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks while the file is on its way, and once more when only the answer is missing."""
    with serving(hub) as url, Proxy("127.0.0.1", int(url.rpartition(":")[2])) as proxy:
        place = ServedStaging(f"pxrs://{proxy.host}:{proxy.port}")
        with place.connected():
            data, breaks = served.Spool.data, [2, 0]

            def broken(spool: served.Spool, number: int) -> Any:
                if breaks and breaks[0] == number:
                    breaks.pop(0)
                    proxy.reset_connections()
                return data(spool, number)

            monkeypatch.setattr(served.Spool, "data", broken)
            values = [os.urandom(20_000) for _ in range(4)]
            name = place.stage(TOPIC, "q", 0, 0, [rows(value, partition=n % 3) for n, value in enumerate(values)]).name
            assert name is not None
            assert not breaks
            # What a broken stream has sent is removed once the server has noticed the break.
            eventually(lambda: files_in(hub) == [f"staging/{TOPIC.id}/q/0/{name}"])
            assert sorted(v for _, found in staged(place, "q", 0, name) for v in found) == sorted(values)

            proxy.drop_replies(close_after=0.0)
            lost = place.create(TOPIC, "q", 1, 0)
            lost.add(Piece(0, encode(records([b"v"]))))
            restore = threading.Timer(1.0, proxy.restore)
            restore.start()
            again = lost.finish().name
            restore.join()
            assert again is not None
            assert staged(place, "q", 1, again) == [(0, [b"v"])]


def test_a_file_is_sent_again_if_a_thread_of_the_server_hangs_and_counts_once(
    hub: Hub, place: ServedStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALLED_S", 0.4)
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    create, hangs, opened = DirectoryStaging.create, [True], threading.Event()

    def hanging(*given: Any) -> Any:
        if hangs and hangs.pop():
            opened.wait(30)
        return create(*given)

    monkeypatch.setattr(DirectoryStaging, "create", hanging)
    try:
        name = aside(lambda: place.stage(TOPIC, "q", 0, 0, [rows(b"a"), rows(b"b")]).name).result(20)
    finally:
        opened.set()
    assert name is not None
    assert staged(place, "q", 0, name) == [(0, [b"a", b"b"])]
    eventually(lambda: files_in(hub) == [f"staging/{TOPIC.id}/q/0/{name}"])


@pytest.mark.parametrize("name", ["", ".", "..", "../q", "q/../../x", "/etc", "a b", "q\0", ".hidden", "x" * 201, "ä"])
def test_w4_names_that_clients_send_stay_within_the_staging_folder(hub: Hub, place: ServedStaging, name: str) -> None:
    before = sorted(str(path) for path in Path(hub.url).rglob("*"))
    whole = {"topic_id": TOPIC.id, "query": "q", "batch": 0}
    odd = [
        ("announce", {"query": name, "batch": 0, "run": "r", "feed": feed().dump()}),
        ("announce", {"query": "q", "batch": 0, "run": "r", "feed": feed(incarnation=name).dump()}),
        ("announce", {"query": "q", "batch": 0, "run": "r", "feed": feed(topic=name).dump()}),
        ("feeds", {"query": name, "batch": 0, "run": "r"}),
        ("make_durable", {**whole, "files": [name]}),
        ("publish", {**whole, "topic": "orders", "files": [name], "ends": []}),
        ("remove", {**whole, "topic": "orders", "file": name}),
        ("clear", {**whole, "query": name}),
        ("clear", {**whole, "topic_id": name}),
        ("forget_query", {**whole, "query": name}),
        ("sweep", {"topic_id": name, "needed": {}}),
        ("keep_topic", {"topic_id": name}),
        ("forget_topic", {"topic_id": name}),
        ("changed_at", {"topic_id": name}),
    ]
    for call, arguments in odd:
        with pytest.raises(InvalidArgument):
            ask(place, call, **arguments)
    with pytest.raises(InvalidArgument):
        place.stage(TOPIC, name, 0, 0, [rows(b"v")])
    assert sorted(str(path) for path in Path(hub.url).rglob("*")) == before


def test_k1_a_sweep_of_a_client_removes_nothing_that_a_manifest_names(hub: Hub, place: ServedStaging) -> None:
    """The client says that nothing is needed: it has read the manifests before they were written, or not at all."""
    names = {query: place.stage(TOPIC, query, 4, 0, [rows(b"v")]).name for query in ("named", "other")}
    name = names["named"]
    assert name is not None
    key = f"{manifests_of(TOPIC.id)}named"
    hub.registry.commit(put={key: Manifest(4, [name], at=time.time()).dump()})
    make_older(hub, 2 * DAY_S)
    place.sweep(TOPIC.id, {})
    assert files_in(hub) == [f"staging/{TOPIC.id}/named/4/{name}"]
    place.sweep(TOPIC.id, {"named": 5})  # needs another batch: the one that the manifest names stays all the same
    assert place.make_durable(TOPIC.id, "named", 4, [name])
    hub.registry.commit(put={key: Manifest(4, [], is_published=True).dump()})
    place.sweep(TOPIC.id, {})
    assert files_in(hub) == []


def test_g7_nothing_is_staged_or_published_for_another_topic_of_the_same_name(hub: Hub, place: ServedStaging) -> None:
    other = Topic(TOPIC.name, "f" * 32, 3)
    with pytest.raises(TopicDeleted):
        place.stage(other, "q", 0, 0, [rows(b"v")])
    with pytest.raises(TopicDeleted):
        ask(place, "publish", topic=TOPIC.name, topic_id=other.id, query="q", batch=0, files=[], ends=[])
    assert files_in(hub) == []


def test_a_stream_that_does_not_say_its_rows_or_sends_bad_ones_leaves_nothing(
    hub: Hub, place: ServedStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Piece(0, encode(records([b"v"])))
    for piece, says in (
        (Piece(3, good.payload), "has no partition 3"),
        (Piece(0, good.payload._replace(data=pa.py_buffer(good.payload.data.to_pybytes()[:-60] + b"\xff" * 60))), ""),
    ):
        file = place.create(TOPIC, "q", 0, 0)
        file.add(piece)
        with pytest.raises(InvalidRecord, match=says or None):
            file.finish()
    file = place.create(TOPIC, "q", 0, 0)
    file.add(good)
    monkeypatch.setattr(file, "_rows", 2)
    with pytest.raises(InvalidRecord, match="received 1 rows of a staged file that has 2"):
        file.finish()
    assert files_in(hub) == []


def test_a_hub_in_memory_has_no_place_to_stage() -> None:
    with pxrs.open("memory:") as hub, serving(hub) as url, pytest.raises(InvalidArgument, match="only hubs in"):
        ServedStaging(url).check_writable()
