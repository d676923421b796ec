"""Rows and checkpoint in one transaction of the user's database (X20), with topics behind a server whose registry is in
that database; and the puts that are part of the user's transaction, which need the registry itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

import pxrs
from pxrs.errors import InvalidGroup, InvalidItem
from pxrs.hub import Hub
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing.servers import PostgresServer
from tests.integration.transactions.bookings import Place, book


class ServedPlace(Place):
    """Its hub is that of a client; the tables of the registry, and the user's, are in one database."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.hub
        self.hub = self.exits.enter_context(pxrs.open(self.exits.enter_context(serving(self.kept))))


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedPlace]:
    with ExitStack() as exits:
        if request.param == "sqlite":
            url = engine_url = f"sqlite:///{tmp_path}/registry.db"
        else:
            url = request.getfixturevalue("server").create_database(f"d{uuid.uuid4().hex[:12]}")
            engine_url = url.replace("postgresql:", "postgresql+psycopg:")
        yield ServedPlace(tmp_path, f"{url}?namespace=prod", engine_url, exits)


def test_x20_rows_and_checkpoint_are_one_transaction_over_a_server(place: ServedPlace) -> None:
    total = place.send(200, partitions=4)
    for messages, db in place.consumer().transactions(place.engine, 20):
        book(messages, db)
    assert place.sum == total
    assert sum(checkpoint.offset for checkpoint in place.checkpoints()) == 200
    assert len(place.rows()) == len(set(place.rows())) == 200


def test_x20_what_the_body_raises_undoes_rows_and_checkpoint(place: ServedPlace) -> None:
    total = place.send(10)
    inbox = place.consumer()

    def fail_once() -> None:
        for messages, db in inbox.transactions(place.engine):
            book(messages, db)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_once()
    assert (place.sum, place.rows()) == (0, [])
    for messages, db in inbox.transactions(place.engine):
        book(messages, db)
    assert place.sum == total


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)  # on SQLite the body has the one write lock
def test_x20_a_partition_that_was_lost_in_the_body_writes_nothing(place: ServedPlace) -> None:
    total = place.send(10)
    loop = place.consumer(lease_ttl=5.0).transactions(place.engine, 100)
    messages, db = next(loop)
    book(messages, db, "late")
    place.take_away(messages[0].partition)
    for again, connection in iter(lambda: next(loop, (None, None)), (None, None)):
        book(again, connection, "new")
    assert place.sum == total
    assert {name for _, _, name in place.rows()} == {"new"}


def test_an_engine_of_another_database_is_refused(place: ServedPlace, tmp_path: Path) -> None:
    place.send(1)
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(InvalidGroup, match=r"does not access the tables|cannot span both"):
        next(place.consumer().transactions(other))
    other.dispose()


def test_a_registry_that_is_in_no_database_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.create_topic("t", partitions=1)
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with (
        hub.consumer("t", "g", until="end") as inbox,
        pytest.raises(InvalidGroup, match="is not a PostgreSQL or SQLite"),
    ):
        next(inbox.transactions(engine))
    engine.dispose()


def test_a_put_inside_the_users_transaction_says_how_to_open_the_queue(place: ServedPlace) -> None:
    mail = place.hub.create_queue("mail")
    with place.engine.begin() as db, pytest.raises(InvalidItem, match=r"open the hub with pxrs.open\(registry=...\)"):
        mail.put("hello", connection=db)
    with pxrs.open(registry=place.registry) as direct, place.engine.begin() as db:
        direct.queue("mail").put("hello", connection=db)
    assert place.hub.queue("mail").depth().ready == 1


def test_a_token_of_a_group_is_enough_for_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    auth = str(tmp_path / "tokens.json")
    _, secret = tokens.create(auth, "billing", ["topic:t=read", "group:g=member"], now=1.0)
    monkeypatch.setenv("PXRS_TOKEN", str(secret))
    engine = create_engine(url)
    with pxrs.open(tmp_path / "data", url) as kept, serving(kept, ServerSettings(auth=auth)) as at:
        kept.create_topic("t", partitions=1)
        with kept.producer("t") as out:
            out.send(b"1")
        with engine.begin() as db:
            db.execute(text("CREATE TABLE done (value TEXT)"))
        with pxrs.open(at) as hub, hub.consumer("t", "g", until="end") as inbox:
            for messages, db in inbox.transactions(engine):
                db.execute(text("INSERT INTO done VALUES (:value)"), {"value": messages[0].value})
        with engine.connect() as db:
            assert db.execute(text("SELECT count(*) FROM done")).scalar_one() == 1
    engine.dispose()
