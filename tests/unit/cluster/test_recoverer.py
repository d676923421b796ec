"""A broker recovers a ledger on nodes that hang, are gone, or come late. The nodes are `NodeCore`s in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs.cluster.answers import EntryRead, Fenced, IndexPage
from pxrs.cluster.broker import recovering
from pxrs.cluster.broker.context import Broker, BrokerSettings
from pxrs.cluster.broker.membership import Membership
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.broker.recent import Recent
from pxrs.cluster.broker.recovering import Recoverer
from pxrs.cluster.broker.room import Room
from pxrs.cluster.broker.view import Seen, View
from pxrs.cluster.ledgers import EntryHead, Fragment, LedgerRecord, Quorum
from pxrs.cluster.records import AliveNode, TopicRecord
from pxrs.cluster.storage.core import NodeCore
from pxrs.errors import ClusterError, NodeUnreachable, PartitionUnavailable
from pxrs.model import Topic
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.waiting import aside, eventually

BODY = b"x"


def head(entry: int) -> EntryHead:
    return EntryHead(entry, 1, len(BODY), 0, 0, entry)


class Node:
    """A storage node, and the link to it."""

    def __init__(self, name: str, *entries: int) -> None:
        self.name, self.core = name, NodeCore(name)
        self.is_away = False
        self.hangs_until: threading.Event | None = None
        self.unreadable: set[int] = set()
        """Entries that the node has and cannot read."""
        self.calls = 0
        self.has_shown_index = False
        for entry in entries:
            self.core.add("t/0/0", entry, head(entry), -1, None)

    def ask(self, outcome: Any) -> Any:
        self.calls += 1
        if self.hangs_until is not None:
            assert self.hangs_until.wait(30)
        if self.is_away:
            raise NodeUnreachable(self.name, "it is away")
        reply = outcome().reply
        if isinstance(reply, ClusterError):
            raise reply
        return reply

    def fence(self, ledger: str, recovery: int, timeout_s: float) -> Fenced:
        reply = self.ask(lambda: self.core.fence(ledger, recovery))
        return Fenced(reply.lac, reply.last)

    def read(self, ledger: str, first: int, last: int, *, recovery: int, timeout_s: float) -> list[EntryRead]:
        reply = self.ask(lambda: self.core.read(ledger, first, last, recovery))

        def answer(entry: int) -> EntryRead:
            if entry not in reply.present:
                return EntryRead(entry, None, is_unknown=reply.is_in_doubt)
            if entry in self.unreadable:
                return EntryRead(entry, None, error=NodeUnreachable(self.name, "the entry is damaged"))
            return EntryRead(entry, head(entry), memoryview(BODY))

        return [answer(entry) for entry in range(first, last + 1)]

    def index(self, ledger: str, after: int, limit: int, timeout_s: float | None) -> IndexPage:
        self.has_shown_index = True
        reply = self.ask(lambda: self.core.index(ledger, after, limit))
        return IndexPage([(entry, head(entry)) for entry in reply.entries], reply.lac, None, False)

    def add(self, ledger: str, entry: int, head: EntryHead, body: Any, lac: int, recovery: int, done: Any) -> None:
        if self.hangs_until is not None:
            return
        try:
            self.ask(lambda: self.core.add(ledger, entry, head, lac, recovery))
        except ClusterError as error:
            done(error)
        else:
            done(None)


class Scene:
    """A broker, and its nodes."""

    def __init__(self, crew: ThreadPoolExecutor, nodes: Collection[Node], quorum: Quorum) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.events: list[dict[str, Any]] = []
        """The events that the broker has recorded, each with its name as the field `name`."""
        registry = MemoryRegistry(MemoryStore())
        links: Any = self.nodes.__getitem__
        self.broker = Broker(
            registry,
            View(registry),
            Membership(registry, "", "b", 5.0),
            links,
            LedgerReader(links),
            Recent(1),
            crew,
            crew,
            Room(1),
            BrokerSettings(recovery_s=20.0),
        )
        self.broker.news.recorder = self
        self.topic = TopicRecord(Topic("orders", "t", 1), quorum)
        self.show()

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Any) -> None:
        """The scene is the broker's recorder of events."""
        self.events.append({"name": name, **fields})

    def audit(self, action: str, /, **fields: Any) -> None:
        raise AssertionError("a recovery is no action of an administrator")

    def show(self) -> None:
        """The registry lists the nodes that are not away."""
        alive = {name: AliveNode("h:1", 1) for name, node in self.nodes.items() if not node.is_away}
        self.broker.view.seen = Seen(alive=alive)

    def recoverer(self, *fragments: Fragment, is_crowded: bool = False) -> Recoverer:
        record = LedgerRecord("t", 0, 0, 1, self.topic.quorum, 0, fragments)
        version = self.broker.registry.commit(put={record.key: record.dump()})[record.key]
        return Recoverer(self.broker, self.topic, record, version, 1, is_crowded=lambda: is_crowded)


@contextmanager
def scene(nodes: Collection[Node], quorum: Quorum) -> Iterator[Scene]:
    with ThreadPoolExecutor(8) as crew:
        yield Scene(crew, nodes, quorum)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "RETRY_S", 0.01)


def away(name: str, *entries: int) -> Node:
    node = Node(name, *entries)
    node.is_away = True
    return node


def in_doubt(name: str, *entries: int) -> Node:
    """A node that has restarted in doubt (C7)."""
    node = Node(name, *entries)
    node.core.begin_doubt(["t/0/0"], [])
    return node


def test_p5_a_spare_that_comes_while_a_recovery_waits_for_one_is_used() -> None:
    late = away("c")
    gone = away("b")
    with scene([Node("a", 0), gone, late], Quorum(2, 2, 2)) as found:
        recoverer = found.recoverer(Fragment(0, ("a", "b")))
        running = aside(recoverer.run)
        eventually(lambda: gone.calls > 5, what="it does not wait")
        late.is_away = False
        found.show()
        closed = running.result()
        assert (closed.record.last, closed.record.fragments) == (0, (Fragment(0, ("a", "c")),))


def test_p5_a_node_that_keeps_other_entries_of_the_ledger_can_take_a_recovered_one() -> None:
    nodes = [Node("a", 0), away("b"), away("c"), Node("d"), Node("e")]
    with scene(nodes, Quorum(3, 3, 3)) as found:
        closed = found.recoverer(Fragment(0, ("a", "b", "c")), Fragment(1, ("a", "b", "d"))).run()
        assert closed.record.last == 0
        assert {*closed.record.fragments[0].nodes} == {"a", "d", "e"}


def test_p9_a_placement_function_that_fails_does_not_stop_a_recovery_that_needs_no_spare() -> None:
    with scene([Node("a", 0), Node("b", 0), Node("c")], Quorum()) as found:
        found.topic = replace(found.topic, placement="not installed")
        assert found.recoverer(Fragment(0, ("a", "b", "c"))).run().record.last == 0
        (failed,) = found.broker.placements.failed
        assert (failed.topic_id, "not installed" in failed.why) == ("t", True)


def test_a_node_that_hangs_holds_one_thread_for_each_question() -> None:
    hung, gone, answers = Node("b"), away("c"), Node("a", 0)
    hung.hangs_until = threading.Event()
    with scene([answers, hung, gone], Quorum()) as found:
        running = aside(found.recoverer(Fragment(0, ("a", "b", "c"))).run)
        try:
            eventually(lambda: gone.calls > 20, what="nothing is asked again")
            assert hung.calls == 1, "the fence"
            gone.is_away = False
            assert running.result().record.last == 0
        finally:
            hung.hangs_until.set()


@pytest.mark.parametrize("is_refused", [False, True])
def test_p5_a_recovery_that_hears_nothing_makes_room_for_others_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """Else the partitions that wait for one node would keep all others from being opened."""
    monkeypatch.setattr(recovering, "SILENT_S", 0.05)
    if not is_refused:
        monkeypatch.setattr(Node, "fence", lambda *given: threading.Event().wait(0.2))  # no answer in time
    with scene([away("a"), away("b"), away("c")], Quorum(3, 3, 2)) as found:
        object.__setattr__(found.broker.settings, "recovery_s", 600.0)
        with pytest.raises(PartitionUnavailable, match="do not answer"):
            found.recoverer(Fragment(0, ("a", "b", "c")), is_crowded=True).run()


def test_p5_a_registry_that_is_slow_is_not_taken_for_nodes_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery that ended meanwhile would change the record again and again, and never get on."""
    monkeypatch.setattr(recovering, "SILENT_S", 0.05)
    commit, is_late = MemoryRegistry.commit, threading.Event()

    def slow(self: MemoryRegistry, *given: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            is_late.wait(0.3)
        return commit(self, *given, **named)

    monkeypatch.setattr(MemoryRegistry, "commit", slow)
    with scene([Node("a", 0), Node("b", 0), Node("c", 0)], Quorum(3, 3, 2)) as found:
        assert found.recoverer(Fragment(0, ("a", "b", "c")), is_crowded=True).run().record.last == 0


def test_p5_a_recovery_reads_the_index_from_nodes_that_have_answered_it() -> None:
    """The one that hangs would be asked first, and would cost the recovery its time."""
    hung = Node("a")
    hung.hangs_until = threading.Event()
    with scene([hung, Node("b", 0, 1), Node("c", 0, 1)], Quorum(3, 3, 2)) as found:
        running = aside(found.recoverer(Fragment(0, ("a", "b", "c"))).run)
        try:
            assert running.result().record.last == 1
            assert not hung.has_shown_index
        finally:
            hung.hangs_until.set()


def test_c7_a_node_in_doubt_does_not_help_to_end_a_ledger_before_an_entry_that_a_third_node_has() -> None:
    """`b` has lost the entry without knowing it was there, and `a` never got it. Two nodes that lack the entry would
    be enough to end the ledger."""
    late = away("c", 0)
    with scene([in_doubt("a"), Node("b"), late], Quorum()) as found:
        running = aside(found.recoverer(Fragment(0, ("a", "b", "c"))).run)
        eventually(lambda: late.calls > 20 or running.done(), what="nothing is asked again")
        assert not running.done(), "it has ended the ledger without the answer of c"
        late.is_away = False
        assert running.result().record.last == 0
        assert found.events == []


def test_c8_a_node_that_cannot_read_the_entry_does_not_help_to_end_a_ledger_before_it() -> None:
    """Neither as one without the entry, of which two are enough, nor as one in doubt, since all have answered."""
    damaged = Node("a", 0)
    damaged.unreadable.add(0)
    with scene([damaged, Node("b"), in_doubt("c")], Quorum()) as found:
        running = aside(found.recoverer(Fragment(0, ("a", "b", "c"))).run)
        eventually(lambda: damaged.calls > 20 or running.done(), what="nothing is asked again")
        assert not running.done(), "it has ended the ledger before an entry that a node has"
        damaged.unreadable.clear()
        assert running.result().record.last == 0


def test_c8_that_answers_of_nodes_in_doubt_have_ended_a_ledger_is_recorded_as_an_event() -> None:
    with scene([in_doubt("a", 0), Node("b", 0), in_doubt("c")], Quorum()) as found:
        closed = found.recoverer(Fragment(0, ("a", "b", "c"))).run().record
        assert (closed.last, closed.end, {*closed.doubted}) == (0, 1, {"a", "c"})
        (told,) = found.events
        assert told == {
            "name": "ledger.ended_in_doubt",
            "topic": "orders",
            "topic_id": "t",
            "partition": 0,
            "ledger": "t/0/0",
            "end": 1,
            "nodes": [*closed.doubted],
        }


def test_the_end_of_a_ledger_that_enough_nodes_are_certain_of_is_no_event() -> None:
    with scene([in_doubt("a", 0), Node("b", 0), Node("c")], Quorum()) as found:
        closed = found.recoverer(Fragment(0, ("a", "b", "c"))).run().record
        assert (closed.last, closed.doubted) == (0, ())
        assert found.events == []
