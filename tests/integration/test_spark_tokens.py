"""The tokens that Spark's tasks get on a server with a tokens file: what they permit, when they end, where they are.

The tasks run in this process, which has no token of its own: the driver's is in a file that its address names, and
tasks are not given that address.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("grpc")

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructType

import pxrs
from pxrs.errors import InvalidArgument, NotPermitted, PxrsError, Unauthenticated
from pxrs.hub import Hub
from pxrs.log.contract import Append
from pxrs.publishing.planning import Range
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.spark import place as places
from pxrs.spark import reader, writer
from pxrs.spark.options import read_options, stream_options, write_options
from pxrs.spark.place import HubPlace
from pxrs.spark.publishers import Publishers
from pxrs.spark.reader import BatchReader, StreamReader
from pxrs.spark.tasks import Slice, read_slice
from pxrs.spark.writer import BatchWriter, StagedFile, StagedMessage, StreamWriter
from pxrs.testing.log_fixtures import records
from pxrs.testing.waiting import eventually

VALUE = StructType().add("value", BinaryType())
DRIVER = ("topic:orders=read", "topic:returns=write", "group:g=member")


@dataclass
class Place:
    hub: Hub
    url: str
    """The driver's address of the server."""
    secret: str
    """The driver's token."""
    path: str
    """The tokens file."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("PXRS_TOKEN", raising=False)
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # this is not a process of Spark's
    publishers = Publishers()
    monkeypatch.setattr(writer, "_publishers", publishers)
    path = str(tmp_path / "tokens.json")
    _, secret = tokens.create(path, "driver", DRIVER, now=0.0)
    assert secret is not None
    (tmp_path / "token").write_text(secret)
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        for topic in ("orders", "returns", "secret"):
            hub.create_topic(topic, partitions=1)
            with hub.producer(topic) as out:
                out.send_batch(pa.table({"value": [topic.encode()] * 3}))
        with serving(hub, ServerSettings(auth=path)) as address:
            yield Place(hub, f"{address}?token_file={tmp_path / 'token'}", secret, path)
            publishers.close()
            places.let_go()


def slices(place: Place) -> list[Slice]:
    found = BatchReader(read_options({"url": place.url, "topic": "orders"})).partitions()
    return [part for part in found if isinstance(part, Slice)]


def read(parts: list[Slice]) -> list[bytes]:
    return [value for part in parts for batch in read_slice(part) for value in batch.column("value").to_pylist()]


def table(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(NotPermitted):
        call()


def has_ended(call: Callable[[], object]) -> bool:
    """Whether a token is not accepted any more."""
    try:
        call()
    except Unauthenticated:
        return True
    return False


def check_hidden(place: Place, given: Any) -> None:
    """The driver's token is not sent to tasks, and the tasks' own is not shown."""
    sent = pickle.dumps(given)
    assert place.secret.encode() not in sent
    assert b"pxrsc_" in sent
    assert b"token_file" not in sent
    assert "pxrsc_" not in repr(given)
    assert "pxrsc_" not in str(given)


def test_tasks_that_read_have_a_token_for_their_topics_alone(place: Place) -> None:
    parts = slices(place)
    check_hidden(place, parts)
    assert read(parts) == [b"orders"] * 3
    (part,) = parts
    there = part.place
    secret, returns = place.hub.topic("secret"), place.hub.topic("returns")
    refused(lambda: read([replace(part, topic="secret", topic_id=secret.id)]))
    refused(lambda: read([replace(part, topic="secret")]))
    refused(lambda: there.staging().stage(returns.topic, "q", 0, 0, [table(b"v")]))
    refused(lambda: there.staging().clear(returns.id, "q", 0))
    with there.connected() as connection:
        for call, arguments in (
            ("registry.get", {"key": "groups/g/leader"}),
            ("registry.scan", {"prefix": "server/", "after": None, "limit": None}),
            ("registry.lease", {"ttl": 5.0}),
            ("log.delete_topic", {"topic": "orders"}),
            ("capability.create", {"read": [part.topic_id], "stage": [], "seconds": 60.0}),
        ):
            refused(lambda call=call, arguments=arguments: connection.call(call, arguments, 10.0))  # type: ignore[misc]
    with pxrs.open(place.url) as hub:
        refused(lambda: hub.topic("orders").log.append([Append.encoded(0, records([b"v"]))]))


def test_the_token_of_a_stream_ends_with_the_query(place: Place) -> None:
    options = stream_options({"url": place.url, "topic": "orders", "group": "g", "leaseTtl": "5"})
    stream = StreamReader(options)
    try:
        start = stream.initialOffset()
        parts = stream.partitions(start, stream.latestOffset(start, ReadAllAvailable()))
        check_hidden(place, parts)
        assert read(parts) == [b"orders"] * 3  # type: ignore[arg-type]
    finally:
        stream.stop()
    eventually(lambda: has_ended(lambda: read(parts)), what="the token is valid after the query's end")  # type: ignore[arg-type]


def test_the_token_of_a_batch_that_writes_stages_and_ends_with_its_commit(place: Place) -> None:
    returns = place.hub.topic("returns").topic
    options = write_options({"url": place.url, "topic": "returns"})
    for kind in ("stream", "batch"):
        made = StreamWriter(options, VALUE) if kind == "stream" else BatchWriter(options, VALUE, False)
        task = pickle.loads(pickle.dumps(made))  # as tasks get it
        check_hidden(place, task.stager)
        there = task.stager.place
        query = "5a3c1f9e" if kind == "stream" else task.job
        staged = there.staging().stage(returns, query, 0, 0, [table(kind.encode())])
        topic = place.hub.topic("returns").log
        refused(lambda there=there: there.staging().stage(place.hub.topic("secret").topic, "q", 0, 0, [table(b"v")]))
        refused(lambda there=there, topic=topic: there.staging().publish(topic, "q", 0, [], []))
        refused(lambda there=there: there.staging().clear(returns.id, "q", 5))
        part = Slice(there, "returns", returns.id, (Range(0, 0, 3),), ("value",), True)
        refused(lambda part=part: read([part]))
        file = StagedFile("returns", returns.id, staged.name)
        message = StagedMessage(query, (file,), "run", capability=there.capability)
        assert "pxrsc_" not in repr(message)
        made.commit([message], 0) if isinstance(made, StreamWriter) else made.commit([message])

        def stage(there: HubPlace = there) -> object:
            return there.staging().stage(returns, "late", 0, 0, [table(b"v")])

        eventually(lambda stage=stage: has_ended(stage), what="the token is valid after the batch")
    assert place.hub.topic("returns").to_arrow()["value"].to_pylist() == [b"returns"] * 3 + [b"stream", b"batch"]


def test_rows_that_name_their_topics_are_staged_for_those_that_the_driver_may_write_to(place: Place) -> None:
    there = HubPlace.of(place.url).to_stage(place.url, None)
    with there.log() as log:
        topic = log.topic("returns")
        topic.check_writable()
        assert there.staging().stage(topic.topic, "routed-q", 0, 0, [table(b"v")]).name
        refused(lambda: log.topic("secret"))
        refused(lambda: log.topic("orders"))


def test_a_token_permits_no_more_than_the_drivers_and_ends_with_it(place: Place) -> None:
    secret = place.hub.topic("secret").id
    refused(lambda: HubPlace.to_read(place.url, [secret]))
    refused(lambda: HubPlace.of(place.url).to_stage(place.url, [place.hub.topic("orders").id]))
    assert place.hub.registry.scan("server/capabilities/") == [], "nothing was made for what was refused"
    parts = slices(place)
    assert read(parts) == [b"orders"] * 3
    tokens.revoke(place.path, "driver")
    eventually(lambda: has_ended(lambda: read(parts)), what="the driver's token was revoked")


def test_a_token_that_was_changed_or_whose_time_is_over_is_not_accepted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part,) = slices(place)
    token = part.place.token
    assert token is not None
    for other in (token[:-4] + "AAAA", "pxrsc_", f"{token}x", token.replace(".", "")):
        with pytest.raises((Unauthenticated, InvalidArgument)):
            read([replace(part, place=replace(part.place, token=other))])
    monkeypatch.setattr(places, "TOKEN_S", 1.0)

    def accepted() -> list[Slice] | None:
        """Slices whose token was accepted; None if its time was over before that."""
        made = slices(place)
        try:
            assert read(made) == [b"orders"] * 3
        except Unauthenticated:
            return None
        return made

    short = eventually(accepted)
    eventually(lambda: has_ended(lambda: read(short)), what="its time is over")
    assert len(place.hub.registry.scan("server/capabilities/")) == 1, "jobs that only read share a secret"
    returns = [place.hub.topic("returns").id]
    short_stage = HubPlace.of(place.url).to_stage(place.url, returns)
    assert len(place.hub.registry.scan("server/capabilities/")) == 2
    stage = functools.partial(short_stage.staging().stage, place.hub.topic("returns").topic, "q", 0, 0, [table(b"v")])
    eventually(lambda: has_ended(stage), what="its time is over")
    HubPlace.of(place.url).to_stage(place.url, returns)
    assert len(place.hub.registry.scan("server/capabilities/")) == 2, "the one whose time is over was removed"


def test_a_server_without_a_tokens_file_needs_no_tokens(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub") as hub, serving(hub) as url:
        topic = hub.create_topic("orders", partitions=1)
        there = HubPlace.to_read(url, [topic.id])
        assert (there.token, there.capability) == (None, None)
        assert hub.registry.scan("server/") == []
        with pytest.raises(PxrsError):
            HubPlace.of(url).to_stage("pxrs://127.0.0.1:1?timeout=0.2", [topic.id])
