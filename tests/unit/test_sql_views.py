"""The views for database administrators, on real groups in SQLite and PostgreSQL; Oracle's as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

import pxrs
from pxrs.registry.sql.views import VIEW_NAMES, view_statements
from pxrs.testing.servers import PostgresServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.db"
    server: PostgresServer = request.getfixturevalue("server")
    return server.url


@pytest.fixture
def engine(address: str) -> Iterator[Engine]:
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def make_views(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in view_statements(engine.dialect.name):
            connection.exec_driver_sql(statement)


def rows(engine: Engine, statement: str) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(text(statement)).mappings()]


def test_x17_a_group_is_seen_as_columns(address: str, engine: Engine, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(pxrs.open(tmp_path / "data", registry=f"{address}?namespace=seen"))
        hub.create_topic("orders", partitions=3)
        out = hub.producer("orders")
        for i in range(30):
            out.send(b"%d" % i, b"key-%d" % i)
        out.flush()
        inbox = stack.enter_context(hub.consumer("orders", "billing", name='a "quoted" näme', until="end"))
        for _ in inbox:
            pass
        inbox.commit()
        make_views(engine)
        make_views(engine)  # once more does no harm
        # Keys of other kinds and other namespaces, some of which are no JSON, are not in the way.
        hub.registry.commit(put={"owners/x": b"\xff", "groups/g/owners": b"\xff", "groups/g/other/owners/1": b"\xff"})
        topic = hub.topic("orders")
        mine = "WHERE namespace = 'seen' AND group_name = 'billing'"

        (member,) = rows(engine, f"SELECT * FROM pxrs_groups_members {mine}")
        assert (member["name"], member["topic_id"], member["topic_name"], member["partitions"]) == (
            'a "quoted" näme',
            topic.id,
            "orders",
            3,
        )
        assert member["pid"] > 0
        assert member["since_seconds"] > 1e9

        owners = rows(engine, f"SELECT * FROM pxrs_groups_owners {mine} ORDER BY partition_number")
        assert [owner["partition_number"] for owner in owners] == [0, 1, 2]
        assert {(owner["topic_id"], owner["incarnation"], owner["owner"], owner["epoch"]) for owner in owners} == {
            (topic.id, member["incarnation"], 'a "quoted" näme', 1)
        }

        checkpoints = rows(engine, f"SELECT * FROM pxrs_groups_checkpoints {mine} ORDER BY partition_number")
        assert [each["next_offset"] for each in checkpoints] == [topic.end(partition) for partition in range(3)]
        assert sum(each["next_offset"] for each in checkpoints) == 30
        assert all(each["written_seconds"] > 1e9 and each["epoch"] == 1 for each in checkpoints)
        inbox.close()

        assert not rows(engine, f"SELECT * FROM pxrs_groups_members {mine}")
        free = rows(engine, f"SELECT incarnation, epoch FROM pxrs_groups_owners {mine}")
        assert free == [{"incarnation": None, "epoch": 2}] * 3
        assert not rows(engine, "SELECT * FROM pxrs_groups_owners WHERE namespace = 'other'")


def test_views_need_no_more_than_the_table(address: str, engine: Engine) -> None:
    with pxrs.registry.open(f"{address}?namespace=empty"):
        make_views(engine)
        for name in VIEW_NAMES:
            assert not rows(engine, f"SELECT * FROM {name} WHERE namespace = 'empty'")


def test_oracle_reads_json_out_of_the_bytes() -> None:
    statements = view_statements("oracle")
    assert [statement.split()[4] for statement in statements] == list(VIEW_NAMES)
    owners = next(statement for statement in statements if "pxrs_groups_owners" in statement)
    assert "JSON_VALUE(e.value FORMAT JSON, '$.epoch' RETURNING NUMBER) AS epoch" in owners
    assert "TO_NUMBER(REGEXP_SUBSTR(e.key, '[^/]+', 1, 5)) AS partition_number" in owners


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from oracle, postgresql, sqlite"):
        view_statements("mysql")
