"""What the registry costs over the bare client: single-key commits, alternating with the same work done by hand.

The reference sends the same transaction or the same statements, in the same process, to the same server, through the
client that the backend itself uses, and waits for the same durability.
"""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figure, Work, compare
from pxrs import registry
from pxrs.registry import Registry
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

VALUE = b"x" * 100
KEY = "groups/billing/checkpoints/7"


def commits(store: Registry) -> Work:
    """A checkpoint: one key that exists, at the version that it has."""
    version = store.commit(put={KEY: VALUE})[KEY]

    def work() -> None:
        nonlocal version
        version = store.commit(expect={KEY: version}, put={KEY: VALUE}, quiet=True)[KEY]

    return work


@contextmanager
def memory() -> Iterator[list[tuple[str, Figure]]]:
    lock, table = threading.Lock(), {KEY: (VALUE, 0)}

    def by_hand() -> None:
        with lock:
            _, version = table[KEY]
            table[KEY] = (VALUE, version + 1)

    with registry.open("memory:") as store:
        yield [("a dict and a lock", compare(commits(store), by_hand, times=5000))]


@contextmanager
def file() -> Iterator[list[tuple[str, Figure]]]:
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        scratch, journal = Path(theirs, "scratch"), Path(theirs, "journal")
        scratch.mkdir()
        journal.mkdir()
        folder = os.open(journal, os.O_RDONLY)
        number = 0
        data = VALUE + KEY.encode() + bytes(40)

        def by_hand() -> None:
            nonlocal number
            number += 1
            path = f"{scratch}/{uuid.uuid4().hex}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            os.close(descriptor)
            os.link(path, f"{journal}/{number:020d}")
            os.unlink(path)
            os.fsync(folder)

        with registry.open(ours) as store:
            yield [("write, fdatasync, link, unlink, fsync of the folder", compare(commits(store), by_hand))]
        os.close(folder)


@contextmanager
def sqlite() -> Iterator[list[tuple[str, Figure]]]:
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        bare = sqlite3.connect(f"{folder}/bare.db", isolation_level=None)
        bare.execute("PRAGMA journal_mode=WAL")
        bare.execute("PRAGMA synchronous=FULL")
        bare.execute("CREATE TABLE entry (key TEXT PRIMARY KEY, value BLOB, version INTEGER)")
        bare.execute("INSERT INTO entry VALUES (?, ?, 0)", (KEY, VALUE))

        def update() -> None:
            bare.execute("UPDATE entry SET value = ?, version = version + 1 WHERE key = ?", (VALUE, KEY))

        with registry.open(f"sqlite:///{folder}/ours.db") as store:
            yield [("a bare UPDATE, WAL, synchronous=FULL", compare(commits(store), update))]
        bare.close()


@contextmanager
def postgresql() -> Iterator[list[tuple[str, Figure]]]:
    import psycopg

    from pxrs.registry.sql.statements import statements_for

    with PostgresServer() as server, registry.open(server.url) as store:
        work = commits(store)
        statements = statements_for("postgresql")
        names = {
            "the_namespace": "pxrs",
            "the_key": "by/hand",
            "the_value": VALUE,
            "the_version": 0,
            "the_lease": None,
        }

        def run(cursor: psycopg.Cursor[tuple[int, ...]], name: str) -> None:
            statement = getattr(statements, name)
            text = statement.text
            for position in range(len(statement.parameters), 0, -1):
                text = text.replace(f"${position}", "%s")
            cursor.execute(text, [names[parameter] for parameter in statement.parameters], prepare=True)

        store.commit(put={"by/hand": VALUE})
        with psycopg.connect(server.url, autocommit=True) as connection:

            def same_statements() -> None:
                with connection.transaction(), connection.cursor() as cursor:
                    run(cursor, "lock_entry")
                    cursor.fetchall()
                    run(cursor, "next_version")
                    names["the_version"] = cursor.fetchall()[0][0]
                    run(cursor, "write_entry")

            def update() -> None:
                connection.execute(
                    "UPDATE pxrs_entry SET value = %s, version = version + 1 WHERE namespace = 'pxrs' AND key = %s",
                    (VALUE, "by/hand"),
                    prepare=True,
                )

            yield [
                ("the same statements through psycopg", compare(work, same_statements)),
                ("a bare UPDATE through psycopg", compare(work, update)),
            ]


@contextmanager
def etcd() -> Iterator[list[tuple[str, Figure]]]:
    import grpc
    from pyetcd import etcdrpc as rpc

    with EtcdServer() as server, registry.open(server.url) as store, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}"))
        stub = rpc.KVStub(channel)
        name = b"/bare/" + KEY.encode()
        revision = stub.Put(rpc.PutRequest(key=name, value=VALUE)).header.revision

        def same_transaction() -> None:
            nonlocal revision
            request = rpc.TxnRequest(
                compare=[rpc.Compare(key=name, target=rpc.Compare.MOD, mod_revision=revision)],
                success=[rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=VALUE))],
                failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name, keys_only=True))],
            )
            response = stub.Txn(request, timeout=10)
            assert response.succeeded
            revision = response.header.revision

        yield [("the same Txn through the gRPC stub", compare(commits(store), same_transaction))]


@contextmanager
def zookeeper() -> Iterator[list[tuple[str, Figure]]]:
    from kazoo.client import KazooClient

    with ZooKeeperServer() as server, registry.open(server.url) as store:
        client = KazooClient(f"127.0.0.1:{server.port}")
        client.start()
        client.ensure_path("/bare")
        version = 0
        client.create("/bare/key", VALUE)

        def same_transaction() -> None:
            nonlocal version
            transaction = client.transaction()
            transaction.set_data("/bare/key", VALUE, version)
            (stat,) = transaction.commit()
            version = stat.version

        yield [("the same multi through kazoo", compare(commits(store), same_transaction))]
        client.stop()
        client.close()


BACKENDS: list[tuple[str, Callable[..., object], float | None]] = [
    ("memory", memory, None),
    ("file", file, 0.5),
    ("sqlite", sqlite, None),
    ("postgresql", postgresql, 0.8),
    ("etcd", etcd, 0.8),
    ("zookeeper", zookeeper, 0.8),
]


def main() -> None:
    console = Console()
    table = Table("registry", "reference", title="single-key commit against the bare client", header_style="bold")
    for column in ("ours/s", "reference/s", "ratio", "wanted"):
        table.add_column(column, justify="right")
    for name, backend, wanted in BACKENDS:
        with console.status(f"measuring {name}"), backend() as figures:  # type: ignore[attr-defined]
            for index, (reference, figure) in enumerate(figures):
                table.add_row(
                    name,
                    reference,
                    f"{figure.ours_per_s:,.0f}",
                    f"{figure.reference_per_s:,.0f}",
                    f"{figure.ratio:.2f}x",
                    f"{wanted}x" if wanted and index == 0 else "",
                )
    console.print(table)


if __name__ == "__main__":
    main()
