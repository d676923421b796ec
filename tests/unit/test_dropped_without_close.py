"""What is dropped without `close()` warns, and ends: partitions go to others, messages are sent, files are closed.

On registries in memory and in files. Objects are dropped inside functions, so that no test's own frame keeps them.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
import pxrs.registry
from pxrs.consumer.consumer import Consumer
from pxrs.hub import Hub
from pxrs.producer.sending import SendingThread
from pxrs.queue.listener import QueueListener
from pxrs.registry import renewal
from pxrs.scheduler import ScheduledState
from pxrs.testing.waiting import eventually
from tests.unit.numbered import send_numbers

BOUND_S = 30.0
LONG_S = 3_600.0
"""A lease that does not end by itself within a test."""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def _forget_older_objects() -> None:
    """Have the collections that these tests ask for look only at what these tests make: that of a process that has run
    a thousand tests before takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["memory", "file"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open("memory:" if request.param == "memory" else tmp_path / "data") as hub:
        yield hub


def fill(hub: Hub, count: int, partitions: int = 1) -> None:
    hub.create_topic("t", partitions=partitions)
    send_numbers(hub, "t", count, partitions)


def drop(make: Callable[[], object], match: str) -> None:
    """Run it, and collect what it left until that has warned; a thread may have a reference for a moment more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()

        def has_warned() -> bool:
            gc.collect()
            told = [str(each.message) for each in caught if each.category is ResourceWarning]
            return any(re.search(match, text) for text in told)

        soon(has_warned)


def checkpoint(hub: Hub) -> int | None:
    return hub.group("g").describe().partitions[0].checkpoint


def soon(check: Callable[[], Any]) -> Any:
    return eventually(check, BOUND_S)


def threads_named(part: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if part in thread.name]


# Consumers.


def test_a_consumer_that_is_dropped_gives_its_partitions_to_others(hub: Hub) -> None:
    fill(hub, 8, partitions=2)

    def lose_one() -> None:
        inbox = hub.consumer("t", "g", lease_ttl=LONG_S)
        soon(lambda: len(inbox.assignment) == 2)

    drop(lose_one, "Consumer of t in group g.*dropped without close.*leaves the group")
    with hub.consumer("t", "g") as other:
        soon(lambda: other.assignment == [0, 1])
        soon(lambda: len(hub.group("g").describe().members) == 1)


def test_what_a_dropped_consumer_had_done_is_committed_and_what_it_had_in_hand_is_not(hub: Hub) -> None:
    fill(hub, 6)

    def lose_one() -> None:
        inbox = hub.consumer("t", "g", lease_ttl=LONG_S, commit_interval=LONG_S)
        assert [message.offset for message in inbox.poll(2, timeout=BOUND_S)] == [0, 1]
        assert [message.offset for message in inbox.poll(2, timeout=BOUND_S)] == [2, 3]

    drop(lose_one, "not done")
    with hub.consumer("t", "g") as other:
        assert [message.offset for message in other.poll(2, timeout=BOUND_S)] == [2, 3]


def test_a_consumer_in_a_cycle_is_collected_too(hub: Hub) -> None:
    """Such as one whose callback names it."""
    fill(hub, 2)

    def lose_one() -> None:
        box: list[Consumer] = []
        inbox = hub.consumer("t", "g", lease_ttl=LONG_S, on_assigned=lambda partitions: len(box))
        box.append(inbox)
        soon(lambda: inbox.assignment == [0])

    drop(lose_one, "Consumer of t")
    with hub.consumer("t", "g") as other:
        soon(lambda: other.assignment == [0])


def test_an_iterator_keeps_its_consumer_until_it_is_dropped_too(hub: Hub) -> None:
    fill(hub, 4)

    def lose_one() -> None:
        loop = iter(hub.consumer("t", "g", lease_ttl=LONG_S))
        assert [next(loop).offset, next(loop).offset] == [0, 1]
        gc.collect()
        assert next(loop).offset == 2, "the consumer lives as long as its loop"

    drop(lose_one, "Consumer of t")
    with hub.consumer("t", "g") as other:
        assert [message.offset for message in other.poll(timeout=BOUND_S)] == [2, 3]


def test_an_iterator_that_is_dropped_in_the_middle_leaves_its_message_undone(hub: Hub) -> None:
    fill(hub, 4)
    with hub.consumer("t", "g") as inbox:

        def lose_loop() -> None:
            loop = iter(inbox)
            assert [next(loop).offset, next(loop).offset] == [0, 1]

        lose_loop()
        gc.collect()
        assert [message.offset for message in inbox.poll(timeout=BOUND_S)] == [1, 2, 3]


def test_a_dropped_consumer_whose_member_has_failed_leaves_no_thread(hub: Hub) -> None:
    fill(hub, 1)

    def lose_one() -> None:
        inbox = hub.consumer("t", "g", lease_ttl=LONG_S, on_assigned=lambda partitions: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inbox.poll(timeout=BOUND_S)
        soon(lambda: inbox._member.session.scheduled.state is ScheduledState.ENDED)

    drop(lose_one, "Consumer of t")
    soon(lambda: not threads_named("pxrs-member-g"))
    soon(lambda: not hub.registry._watches)


def test_a_closed_consumer_does_not_warn(hub: Hub, recwarn: pytest.WarningsRecorder) -> None:
    fill(hub, 1)

    def use_one() -> None:
        with hub.consumer("t", "g") as inbox:
            inbox.poll(timeout=BOUND_S)

    use_one()
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "Consumer" in str(each.message)]


def test_a_consumer_that_could_not_be_made_does_not_warn(hub: Hub, recwarn: pytest.WarningsRecorder) -> None:
    fill(hub, 1)
    hub.registry.close()
    with pytest.raises(pxrs.errors.Closed):
        hub.consumer("t", "g")
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "Consumer" in str(each.message)]


def test_a_consumer_that_is_collected_on_a_thread_that_holds_its_locks_blocks_nobody(hub: Hub) -> None:
    """The garbage collector runs anywhere: also on the member's own thread, and under any lock."""
    fill(hub, 1)

    def lose_one() -> None:
        inbox = [hub.consumer("t", "g", lease_ttl=LONG_S)]
        soon(lambda: inbox[0].assignment == [0])
        watch = inbox[0]._member.session._watch
        assert watch is not None
        locks: list[Any] = [
            inbox[0]._lanes.lock,
            inbox[0]._member.session.mutex,
            hub._clients._lock,
            hub.registry._handles_lock,
        ]
        locks.append(hub.registry.scheduler._lock)
        locks.append(watch._raised._cond)  # type: ignore[attr-defined]
        for lock in locks:
            assert lock.acquire(timeout=BOUND_S)
        try:
            inbox.clear()
            gc.collect()
        finally:
            for lock in locks:
                lock.release()

    dropping = threading.Thread(target=lose_one, daemon=True)
    dropping.start()
    dropping.join(BOUND_S)
    assert not dropping.is_alive()
    with hub.consumer("t", "g") as other:
        soon(lambda: other.assignment == [0])


def test_a_closed_consumer_and_its_member_are_freed_without_the_garbage_collector(hub: Hub) -> None:
    """What refers to a hub, as a member does, keeps it open: a cycle would do so until the collector runs."""
    fill(hub, 1)
    gc.disable()
    try:
        with hub.consumer("t", "g") as inbox:
            assert inbox.poll(timeout=BOUND_S)
        seen = weakref.ref(inbox), weakref.ref(inbox._member)
        del inbox
        soon(lambda: [each() for each in seen] == [None, None])
    finally:
        gc.enable()


# Producers.


def test_what_waits_in_a_dropped_producer_is_stored(hub: Hub) -> None:
    fill(hub, 0)
    receipts = []

    def lose_one() -> None:
        out = hub.producer("t", linger_s=60)
        receipts.extend(out.send(b"%d" % number, key=b"k") for number in range(3))

    drop(lose_one, "Producer of t.*dropped without close.*sent now")
    assert [receipt.result(BOUND_S)[1] for receipt in receipts] == [0, 1, 2]
    soon(lambda: not threads_named("pxrs-producer-t"))


def test_a_dropped_producer_in_a_cycle_stores_what_waits_too(hub: Hub) -> None:
    fill(hub, 0)
    receipts = []

    def lose_one() -> None:
        cycle: list[Any] = [hub.producer("t", linger_s=60)]
        cycle.append(cycle)
        receipts.append(cycle[0].send(b"x"))

    drop(lose_one, "Producer of t")
    assert receipts[0].result(BOUND_S) == (0, 0)
    soon(lambda: not threads_named("pxrs-producer-t"))


def test_a_dropped_producer_with_nothing_to_send_ends(hub: Hub) -> None:
    fill(hub, 0)
    drop(lambda: hub.producer("t") and None, "Producer of t")
    soon(lambda: not threads_named("pxrs-producer-t"))


def test_closing_the_hub_waits_for_what_a_dropped_producer_still_stores(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, 0)
    log = hub.topic("t").log
    append, may_append = log.append, threading.Event()
    monkeypatch.setattr(log, "append", lambda given: may_append.wait(BOUND_S) and append(given))
    receipts = []

    def lose_one() -> None:
        out = hub.producer("t", linger_s=60)
        receipts.append(out.send(b"x"))

    drop(lose_one, "Producer of t")
    closing = threading.Thread(target=hub.close)
    closing.start()
    may_append.set()
    closing.join(BOUND_S)
    assert receipts[0].result(0) == (0, 0)


def test_an_error_of_a_dropped_producer_is_logged_and_raised_by_the_receipts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(hub, 0)

    def refuse(given: object, tell: object) -> None:
        raise pxrs.errors.LogError("the disk is gone")

    monkeypatch.setattr(hub.topic("t").log, "append_each", refuse)
    receipts = []

    def lose_one() -> None:
        out = hub.producer("t", linger_s=60)
        receipts.append(out.send(b"x"))

    with caplog.at_level(logging.ERROR, "pxrs.producer.sending"):
        drop(lose_one, "Producer of t")
        with pytest.raises(pxrs.errors.LogError, match="the disk is gone"):
            receipts[0].result(BOUND_S)
        soon(lambda: "dropped without close" in caplog.text)


def test_a_dropped_producer_whose_thread_has_failed_warns_of_the_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, 0)

    def fail(sending: SendingThread, batches: object) -> None:
        raise MemoryError("no room for the batch")

    def lose_one() -> None:
        out = hub.producer("t", linger_s=0)
        monkeypatch.setattr(SendingThread, "_store", fail)
        with pytest.raises(MemoryError):
            out.send(b"x").result(BOUND_S)
        soon(lambda: not out.sending.thread.is_alive())

    drop(lose_one, "Producer of t.*not all of its messages were stored: no room for the batch")


def test_an_idle_producer_is_not_kept_by_its_thread_nor_by_the_end_of_the_process(hub: Hub) -> None:
    fill(hub, 0)
    out = hub.producer("t")
    out.send(b"x").result(BOUND_S)
    seen = weakref.ref(out)
    out.close()
    del out
    gc.collect()
    soon(lambda: seen() is None)


def test_a_closed_producer_does_not_warn(hub: Hub, recwarn: pytest.WarningsRecorder) -> None:
    fill(hub, 3)
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "Producer" in str(each.message)]


# Hubs.


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def files_below(folder: Path) -> set[str]:
    gc.collect()  # the registry's own files go with objects that refer to each other
    return {name for name in open_files() if name.startswith(str(folder))}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks the kernel which files are open")
def test_a_hub_that_is_dropped_closes_its_files_threads_and_registry(tmp_path: Path) -> None:
    place = tmp_path / "data"

    def lose_one() -> None:
        hub = pxrs.open(place)
        fill(hub, 3)
        with hub.consumer("t", "g") as inbox:
            assert inbox.poll(timeout=BOUND_S)
        hub.create_queue("q")
        with hub.transaction() as transaction:
            transaction.put("q", b"x")
        with hub.transaction() as transaction:
            assert transaction.take("q", timeout=BOUND_S)
        assert files_below(place)

    before = set(threading.enumerate())
    drop(lose_one, "Hub .*data.*dropped without close.*closed now")
    soon(lambda: not files_below(place))
    soon(lambda: set(threading.enumerate()) <= before)


def test_what_a_hub_made_keeps_it_open(hub: Hub, tmp_path: Path) -> None:
    url = tmp_path / "other"

    def make() -> list[Any]:
        other = pxrs.open(url)
        fill(other, 3)
        other.create_queue("q")
        return [
            other.topic("t"),
            other.producer("t"),
            other.consumer("t", "g"),
            other.group("g"),
            other.queue("q"),
            other.transaction(),
        ]

    topic, out, inbox, group, queue, transaction = make()
    gc.collect()
    assert topic.end(0) == 3
    assert out.send(b"x").result(BOUND_S) == (0, 3)
    assert len(inbox.poll(timeout=BOUND_S)) == 3
    inbox.commit()
    assert group.describe().partitions[0].checkpoint == 3
    queue.put(b"y")
    with transaction:
        assert transaction.take(queue, timeout=BOUND_S).value == b"y"
    seen = weakref.ref(topic.hub)
    out.close()
    inbox.close()
    last: dict[str, Any] = {"topic": topic}
    del topic, out, inbox, group, queue, transaction
    gc.collect()
    assert last["topic"].end(0) == 4
    drop(last.clear, "Hub")
    soon(lambda: seen() is None or seen().parts.is_closed)


def test_a_consumer_and_its_hub_that_are_dropped_together_commit_first(tmp_path: Path) -> None:
    def lose_both() -> None:
        hub = pxrs.open(tmp_path / "data")
        fill(hub, 6)
        inbox = hub.consumer("t", "g", lease_ttl=LONG_S, commit_interval=LONG_S)
        assert len(inbox.poll(2, timeout=BOUND_S)) == 2
        assert len(inbox.poll(2, timeout=BOUND_S)) == 2

    drop(lose_both, "Consumer of t")
    with pxrs.open(tmp_path / "data") as hub, hub.consumer("t", "g") as inbox:
        assert inbox.poll(1, timeout=BOUND_S)[0].offset == 2


def test_a_closed_hub_does_not_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def use_one() -> None:
        with pxrs.open(tmp_path / "data") as hub:
            fill(hub, 1)

    use_one()
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "Hub" in str(each.message)]


# Transactions of queues.


def test_what_a_dropped_transaction_had_taken_is_soon_there_for_others(hub: Hub) -> None:
    hub.create_queue("q")
    hub.queue("q").put(b"x")

    def lose_one() -> None:
        transaction = hub.transaction()
        assert transaction.take("q", timeout=BOUND_S) is not None

    drop(lose_one, "neither committed nor rolled back")
    began = time.monotonic()
    with hub.transaction() as transaction:
        assert transaction.take("q", timeout=BOUND_S) is not None
    assert time.monotonic() - began < BOUND_S / 2


def test_a_dropped_transaction_that_has_only_put_warns_that_nothing_of_it_happens(hub: Hub) -> None:
    hub.create_queue("q")

    def lose_one() -> None:
        hub.transaction().put("q", b"x")

    drop(lose_one, "neither committed nor rolled back")
    assert hub.queue("q").depth().ready == 0


def test_a_listener_that_was_started_works_on_and_keeps_its_hub_until_it_is_stopped(tmp_path: Path) -> None:
    """As a thread does: who starts one and keeps no reference wants it to go on."""
    seen: list[bytes] = []
    stopped = threading.Event()

    def start_one() -> None:
        hub = pxrs.open(tmp_path / "data")
        hub.create_queue("q")

        def handle(transaction: Any, item: Any) -> None:
            seen.append(item.value)
            if item.value == b"stop":
                transaction._listener.stop()
                stopped.set()

        QueueListener(hub.queue("q"), handle).start()

    def use_it() -> None:
        with pxrs.open(tmp_path / "data") as hub:
            hub.queue("q").put(b"x")
            soon(lambda: seen == [b"x"])
            gc.collect()
            hub.queue("q").put(b"stop")
            assert stopped.wait(BOUND_S)

    start_one()
    gc.collect()
    use_it()
    soon(lambda: not threads_named("pxrs-queue-q"))
    soon(lambda: not files_below(tmp_path / "data"))


def test_a_transaction_that_was_not_used_does_not_warn(hub: Hub, recwarn: pytest.WarningsRecorder) -> None:
    hub.transaction()
    gc.collect()
    assert not [each for each in recwarn if "Transaction" in str(each.message)]


# Registries.


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{tmp_path / 'registry'}"


def test_a_registry_that_is_dropped_ends_its_leases_watches_and_threads(address: str) -> None:
    before = set(threading.enumerate())

    def lose_one() -> None:
        registry = pxrs.registry.open(address)
        lease = registry.lease(LONG_S)
        registry.commit(ephemeral={"a": b""}, lease=lease)
        registry.watch("a").wait(0)

    drop(lose_one, "Registry .*dropped without close.*leases and watches end")
    soon(lambda: set(threading.enumerate()) <= before)
    if address != "memory:":
        with pxrs.registry.open(address) as other:
            soon(lambda: other.get("a") is None)


def test_a_lease_keeps_its_registry_and_is_kept_by_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "RENEWALS_PER_TTL", 20)  # soon, although the lease is long
    lease = pxrs.registry.open(address).lease(20)
    gc.collect()
    deadline = lease.deadline
    soon(lambda: lease.deadline > deadline)  # it is renewed
    lease.close()


def test_a_registry_with_nothing_open_is_dropped_without_a_warning(
    address: str, recwarn: pytest.WarningsRecorder
) -> None:
    pxrs.registry.open(address).commit(put={"a": b""})
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "Registry" in str(each.message)]


def test_a_registry_closed_while_the_interpreter_exits_ends_all_its_leases(tmp_path: Path) -> None:
    """An atexit function runs when no pool takes work any more."""
    code = f"""
import atexit
from pxrs import registry

handle = registry.open({str(tmp_path)!r})
for number in range(3):
    handle.commit(ephemeral={{f"m/{{number}}": b""}}, lease=handle.lease({LONG_S}))

def end():
    handle.close()
    with registry.open({str(tmp_path)!r}) as other:  # this process is alive, and so are leases that were not ended
        print(len(other.scan("m/")))

atexit.register(end)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S)
    assert (result.stdout, result.stderr) == ("0\n", "")
