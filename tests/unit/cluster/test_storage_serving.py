"""A storage node behind its port, and the link of a broker to it."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs import disk
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.cluster.messages import Add
from pxrs.cluster.records import AliveNode, alive_key
from pxrs.cluster.storage import running, service
from pxrs.cluster.storage.collecting import Collected, Collector
from pxrs.cluster.storage.journal import Journal
from pxrs.cluster.storage.running import StorageServer, StorageSettings, storing
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import LedgerFenced, NodeFull, NodeUnreachable, PxrsError, WrongNode
from pxrs.log.batch import SCHEMA, encode, header_bytes, padding, read_header
from pxrs.registry.contract import Registry
from pxrs.server.auth import tokens
from pxrs.server.budget import Budget
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers.process import wait_until
from pxrs.testing.waiting import aside, eventually
from tests.unit.cluster.stored import ANSWER_S_MAX, LEDGER, body_of, entry, head_of

Answers = queue.SimpleQueue[tuple[int, Exception | None]]


@contextmanager
def served(registry: Registry, folder: Path, **settings: object) -> Iterator[StorageServer]:
    limits = StorageLimits(free_bytes_min=1, **settings.pop("limits", {}))  # type: ignore[arg-type]
    with storing(registry, StorageSettings(folder / "node", limits=limits, **settings)) as found:  # type: ignore[arg-type]
        yield found


@contextmanager
def linked(server: StorageServer, node: str | None = None, settings: LinkSettings | None = None) -> Iterator[NodeLink]:
    link = NodeLink(node or server.node.id, server.address, settings)
    try:
        yield link
    finally:
        link.close()


def send(link: NodeLink, answers: Answers, add: Add) -> None:
    def done(error: Exception | None) -> None:
        answers.put((add.entry, error))

    link.add(add.ledger, add.entry, add.head, add.body, add.lac, add.recovery, done)


def sent(link: NodeLink, *adds: Add) -> list[Exception | None]:
    """Add entries; what the link says of each, in their order."""
    answers: Answers = queue.SimpleQueue()
    for add in adds:
        send(link, answers, add)
    found = dict(answers.get(timeout=ANSWER_S_MAX) for _ in adds)
    return [found[add.entry] for add in adds]


def test_adds_fences_reads_and_the_index_go_through_a_link(registry: Registry, folder: Path) -> None:
    with served(registry, folder) as server, linked(server) as link:
        assert link.hello().node == server.node.id
        assert sent(link, *(entry(number, size=number * 100) for number in range(40))) == [None] * 40
        found = link.read(LEDGER, 5, 9)
        assert [each.entry for each in found] == [5, 6, 7, 8, 9]
        assert all(bytes(each.body) == body_of(each.entry, each.entry * 100) for each in found)
        assert [each.head for each in found] == [head_of(n, body_of(n, n * 100)) for n in range(5, 10)]
        assert [each.entry for each in link.read(LEDGER, 10, 39, max_bytes=3_500)] == [10, 11, 12]
        missing = link.read(LEDGER, 39, 41)
        assert [each.is_missing for each in missing] == [False, True, True]
        page = link.index(LEDGER, after=20, limit=5)
        assert [number for number, _ in page.entries] == [21, 22, 23, 24, 25]
        assert (page.lac, page.fenced, page.has_more) == (38, None, True)
        assert link.fence(LEDGER, 2) == (38, 39)
        with pytest.raises(LedgerFenced):
            link.fence(LEDGER, 1)
        with pytest.raises(LedgerFenced):
            link.read(LEDGER, 0, 1, recovery=1)
        assert link.index(LEDGER).fenced == 2
        refused, done, again = sent(link, entry(40), entry(41, recovery=2), entry(3, size=300, recovery=2))
        assert isinstance(refused, LedgerFenced)
        assert (done, again) == (None, None)
        assert link.ledgers() == ([LEDGER], False)
        assert link.unanswered_bytes == 0


def test_refusals_among_adds_of_one_message_meet_the_right_ones(registry: Registry, folder: Path) -> None:
    other = LEDGER.replace("/0/0", "/1/0")
    with served(registry, folder) as server, linked(server) as link:
        link.fence(other, 1)
        adds = [entry(number, other if number % 3 == 1 else LEDGER) for number in range(300)]
        answers = sent(link, *adds)
        assert [isinstance(answer, LedgerFenced) for answer in answers] == [add.ledger == other for add in adds]
        assert [answer is None for answer in answers] == [add.ledger == LEDGER for add in adds]
        assert [each.entry for each in link.read(LEDGER, 0, 299) if each.head] == [n for n in range(300) if n % 3 != 1]


def test_a_fencing_read_fences(registry: Registry, folder: Path) -> None:
    with served(registry, folder) as server, linked(server) as link:
        assert sent(link, entry(0)) == [None]
        assert [each.is_missing for each in link.read(LEDGER, 0, 1, recovery=4)] == [False, True]
        assert isinstance(sent(link, entry(1))[0], LedgerFenced)


def test_heads_are_the_headers_of_an_entrys_frames(registry: Registry, folder: Path) -> None:
    frames, headers = b"", b""
    for offset, value in ((0, b"a"), (1, b"b" * 3_000)):
        columns = [pa.nulls(1, pa.binary()), pa.array([value]), pa.array([7], SCHEMA.field(2).type)]
        payload = encode(pa.record_batch([*columns, pa.nulls(1, SCHEMA.field(3).type)], schema=SCHEMA))
        header = header_bytes(payload, offset, place=1, stored_at=5)
        frames += header + payload.data.to_pybytes() + padding(payload)
        headers += header
    snapshot = b'{"producers": []}'
    zero, one = head_of(0, snapshot)._replace(rows=0), head_of(1, frames)._replace(rows=2)
    with served(registry, folder) as server, linked(server) as link:
        assert sent(link, Add(LEDGER, 0, -1, None, zero, (snapshot,)), Add(LEDGER, 1, -1, None, one, (frames,)))
        found = link.read(LEDGER, 0, 1, heads=True)
        assert [bytes(each.body) for each in found] == [snapshot, headers]
        assert read_header(found[1].body, "", 0).base_offset == 0


def test_another_node_at_the_address_answers_wrong_node(registry: Registry, folder: Path) -> None:
    with served(registry, folder) as server, linked(server, "the-one-before") as link:
        for call in (lambda: link.fence(LEDGER, 1), lambda: link.read(LEDGER, 0, 1), lambda: link.index(LEDGER)):
            with pytest.raises(WrongNode) as raised:
                call()
            assert raised.value.found == server.node.id
        assert isinstance(sent(link, entry(0))[0], WrongNode)
        assert server.node.ledgers() == []


def test_a_damaged_message_is_refused(registry: Registry, folder: Path) -> None:
    with served(registry, folder) as server, linked(server) as link:
        good = entry(0)
        bad = good._replace(body=(b"x" * len(good.body[0]),))
        (answer,) = sent(link, bad)
        assert isinstance(answer, NodeUnreachable)
        assert "was damaged in transit" in str(answer)
        assert server.node.ledgers() == []


def test_a_link_is_used_again_after_the_node_was_away(registry: Registry, folder: Path) -> None:
    with served(registry, folder) as server:
        node, address = server.node.id, server.address
        link = NodeLink(node, address)
        assert sent(link, entry(0)) == [None]
    try:
        assert isinstance(sent(link, entry(1))[0], NodeUnreachable)
        with served(registry, folder, listen=address) as server:
            assert server.node.id == node
            # gRPC waits for a moment before it connects again.
            assert wait_until(lambda: sent(link, entry(1)) == [None], ANSWER_S_MAX)
            assert link.hello().starts == 2
            assert [each.head is not None for each in link.read(LEDGER, 0, 2)] == [True, True, False]
    finally:
        link.close()
    assert isinstance(sent(link, entry(2))[0], NodeUnreachable)
    with pytest.raises(NodeUnreachable):
        link.fence(LEDGER, 1)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The journal is not written until this event is set."""
    released, write = threading.Event(), Journal._write
    monkeypatch.setattr(Journal, "_write", lambda *arguments: released.wait() and write(*arguments))
    return released


def test_the_room_for_unanswered_adds_is_bounded(registry: Registry, folder: Path, hanging: threading.Event) -> None:
    settings = LinkSettings(timeout_s=60.0, unanswered_bytes_max=10_000)
    with served(registry, folder) as server, linked(server, settings=settings) as link, releasing(hanging):
        answers: Answers = queue.SimpleQueue()
        for number in range(12):
            send(link, answers, entry(number, size=1_000))
        refused = dict(answers.get(timeout=ANSWER_S_MAX) for _ in range(2))
        assert sorted(refused) == [10, 11]
        assert all(isinstance(each, NodeUnreachable) for each in refused.values())
        assert link.unanswered_bytes == 10_000
        hanging.set()
        assert dict(answers.get(timeout=ANSWER_S_MAX) for _ in range(10)) == dict.fromkeys(range(10))


def test_a_node_that_does_not_answer_costs_the_timeout(
    registry: Registry, folder: Path, hanging: threading.Event
) -> None:
    settings = LinkSettings(timeout_s=0.3)
    with served(registry, folder) as server, linked(server, settings=settings) as link, releasing(hanging):
        answers = sent(link, entry(0), entry(1))
        assert all(isinstance(each, NodeUnreachable) and "no answer for" in str(each) for each in answers)
        with pytest.raises(NodeUnreachable):
            link.fence(LEDGER, 1)


def test_a_node_that_is_slow_to_answer_a_connection_has_the_timeout_for_it(registry: Registry, folder: Path) -> None:
    """As one that was just resumed: the kernel accepts the connection, and the process answers later."""
    with served(registry, folder) as server:
        host, _, port = server.address.rpartition(":")
        with Proxy(host, int(port)) as proxy:
            proxy.stall()
            link = NodeLink(server.node.id, f"{proxy.host}:{proxy.port}", LinkSettings(timeout_s=ANSWER_S_MAX))
            with closing(link):
                found = aside(link.hello)
                proxy.wait_for_request(ANSWER_S_MAX)
                with pytest.raises(TimeoutError):
                    found.result(0.5)  # a link that gives up sooner raises NodeUnreachable
                proxy.restore()
                assert found.result(ANSWER_S_MAX).node == server.node.id


@contextmanager
def releasing(event: threading.Event) -> Iterator[None]:
    """Set the event at the end, also after a failure: a node whose disk hangs cannot be stopped."""
    try:
        yield
    finally:
        event.set()


def test_a_full_node_says_so_to_brokers_and_in_the_registry(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = os.pwritev, threading.Event()

    def pwritev(*arguments: Any) -> int:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    with served(registry, folder, limits={"alive_s": 0.01}) as server, linked(server) as link:
        monkeypatch.setattr(os, "pwritev", pwritev)
        key = alive_key(server.node.id)

        def wait_for(*, is_refusing: bool) -> None:
            with registry.watch(key) as watch:
                while (found := registry.get(key)) is None or is_refusing == (
                    AliveNode.parse(key, found.value).refuses is None
                ):
                    assert watch.wait(ANSWER_S_MAX)

        is_full.set()
        assert isinstance(sent(link, entry(0))[0], NodeFull)
        wait_for(is_refusing=True)
        assert isinstance(sent(link, entry(0))[0], NodeFull)
        is_full.clear()
        wait_for(is_refusing=False)
        assert sent(link, entry(0)) == [None]


def test_c7_brokers_are_told_of_each_record_that_a_node_has_cleared(registry: Registry, folder: Path) -> None:
    with served(registry, folder, limits={"alive_s": 0.01}) as server:
        key = alive_key(server.node.id)

        def told() -> int | None:
            found = registry.get(key)
            return None if found is None else AliveNode.parse(key, found.value).cleared

        for _ in range(2):
            server.node.cleared += 1  # and nothing else of the load changes
            eventually(lambda: told() == server.node.cleared, 10.0, what="brokers do not read the records again")


@contextmanager
def without_inodes(patch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Cookies cannot be written, although as many bytes are free as ever. Gives a semaphore that each try releases."""
    tries = threading.Semaphore(0)

    def full(*arguments: object, **named: object) -> None:
        tries.release()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.context() as inner:
        inner.setattr(running, "REFRESH_S", 0.01)
        inner.setattr(disk, "replace_file", full)
        yield tries


def test_a_read_only_node_starts_anew_although_the_number_of_free_bytes_is_what_it_was(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(registry, folder) as server, linked(server) as link:
        assert sent(link, entry(0)) == [None]
        node = server.node.id
    found = os.statvfs_result([4096, 4096, 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 1 << 19, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with contextlib.ExitStack() as stack:
        with without_inodes(monkeypatch) as tries:
            server = stack.enter_context(served(registry, folder))
            assert server.node.read_only is not None
            for _ in range(2):  # the start, and the one that was made because enough bytes are free
                assert tries.acquire(timeout=ANSWER_S_MAX)
        assert wait_until(lambda: server.is_serving and server.node.refuses is None, ANSWER_S_MAX)
        assert server.node.id == node
        with linked(server) as link:
            assert sent(link, entry(1)) == [None]
    assert sorted(each.name for each in (folder / "node").iterdir()) == ["journal", "lock", "node.json", "scrub.json"]


def test_a_read_only_node_that_cannot_be_started_again_ends_its_process_whatever_the_reason(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(registry, folder):
        pass
    with without_inodes(monkeypatch) as tries, served(registry, folder) as server:
        assert tries.acquire(timeout=ANSWER_S_MAX)

        def no_thread(*arguments: object, **named: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(running, "start", no_thread)
        assert wait_until(server.replaced.done, ANSWER_S_MAX)
        assert "can't start new thread" in str(server.replaced.result())
        assert not server.is_serving


def test_w5_an_entry_takes_its_whole_length_of_the_room_for_reads(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    exchange = Budget.exchange

    def noted(budget: Budget, taken: int, size: int) -> int:
        found = exchange(budget, taken, size)
        held.append(budget.held)
        return found

    monkeypatch.setattr(service, "PIECE_BYTES", 1_000)
    with served(registry, folder) as server, linked(server) as link:
        assert sent(link, entry(0, size=50_000)) == [None]
        monkeypatch.setattr(Budget, "exchange", noted)
        assert len(link.read(LEDGER, 0, 0)[0].body) == 50_000
    assert max(held) > 50_000


def test_w5_one_call_at_a_time_looks_for_garbage(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not take the threads of reads and fences."""
    is_collecting, may_end = threading.Event(), threading.Event()
    collect = Collector.collect

    def slow(collector: Collector) -> Collected:
        is_collecting.set()
        assert may_end.wait(ANSWER_S_MAX)
        return collect(collector)

    monkeypatch.setattr(Collector, "collect", slow)
    with (
        served(registry, folder, limits={"threads": 2}) as server,
        linked(server) as link,
        ThreadPoolExecutor(1) as pool,
        releasing(may_end),
    ):
        first = pool.submit(link.collect, ANSWER_S_MAX)
        assert is_collecting.wait(ANSWER_S_MAX)
        for _ in range(3):
            with pytest.raises(PxrsError, match="already"):
                link.collect()
        assert link.fence(LEDGER, 1).last == -1
        may_end.set()
        assert first.result(ANSWER_S_MAX)["skipped"] is None


def test_w4_a_node_with_tokens_wants_the_right_to_use_the_cluster(registry: Registry, folder: Path) -> None:
    file = folder / "tokens.json"
    secrets = {}
    for name, grant in (("broker", "cluster=member"), ("client", "topic:*=write")):
        secrets[name] = tokens.create(str(file), name, [grant], now=0.0)[1]
        (folder / name).write_text(f"{secrets[name]}\n")
    broker = LinkSettings(token_file=folder / "broker")
    with served(registry, folder, auth=str(file)) as server, linked(server, settings=broker) as link:
        assert sent(link, entry(0)) == [None]
        for who in (None, folder / "client"):
            with linked(server, settings=LinkSettings(token_file=who)) as other:
                with pytest.raises(NodeUnreachable, match="token"):
                    other.read(LEDGER, 0, 0)
                assert isinstance(sent(other, entry(1))[0], NodeUnreachable)
        tokens.revoke(str(file), "broker")
        errors: list[Exception | None] = []
        # W5: the open stream ends.
        assert wait_until(lambda: errors.extend(sent(link, entry(2))) or errors[-1] is not None, ANSWER_S_MAX)
        assert "token" in str(errors[-1])
        assert str(secrets["broker"]) not in str(errors[-1])
