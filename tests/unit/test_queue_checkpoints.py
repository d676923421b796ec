"""From topic to queue: the checkpoint of a consumer in the transaction of a queue."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    Closed,
    InvalidGroup,
    InvalidItem,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
    TransactionEnded,
)
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Message
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import SharedStore, store_of
from pxrs.testing.waiting import aside
from tests.unit.numbered import send_numbers
from tests.unit.queue_faults import (
    PATIENCE_S,
    be_away,
    eventually,
    lose_the_reply,
    names_slots,
    once,
    puts,
    raise_once,
    values,
    with_topic,
)

# One transaction.


@pytest.fixture
def topic(hub: Hub) -> Hub:
    hub.create_topic("t", partitions=1)
    hub.create_queue("jobs")
    send_numbers(hub, "t", 5)
    return hub


def checkpoint_of(hub: Hub) -> int:
    return hub.group("g").describe().partitions[0].checkpoint


def test_z1_a_checkpoint_and_a_put_are_one(topic: Hub) -> None:
    with topic.consumer("t", "g", until="end", commit_interval=3_600) as inbox:
        for message in inbox:
            with topic.transaction() as tx:
                tx.put("jobs", message.value)
                tx.checkpoint(inbox)
            assert topic.queue("jobs").depth().ready == message.offset + 1 == checkpoint_of(topic)
            if message.offset == 2:
                break
    with topic.consumer("t", "g", until="end") as inbox:
        assert [message.offset for message in inbox] == [3, 4]


def test_z1_a_rolled_back_transaction_leaves_the_message_undone(topic: Hub) -> None:
    def read(inbox: Consumer) -> None:
        for message in inbox:
            with topic.transaction() as tx:
                tx.put("jobs", message.value)
                tx.checkpoint(inbox)
                if message.offset == 2:
                    raise ZeroDivisionError

    with topic.consumer("t", "g", until="end", commit_interval=0.001) as inbox, pytest.raises(ZeroDivisionError):
        read(inbox)
    assert (topic.queue("jobs").depth().ready, checkpoint_of(topic)) == (2, 2)


def test_z1_a_commit_that_fails_takes_the_checkpoint_back(topic: Hub) -> None:
    with topic.consumer("t", "g", until="end", commit_interval=0.001) as inbox:
        messages = inbox.poll(2, timeout=PATIENCE_S)
        tx = topic.transaction()
        tx.put("jobs", messages[0].value)
        tx.checkpoint(inbox)
        registry = topic.registry
        original = registry.commit

        def refuse(*arguments: Any, **named: Any) -> Any:
            if len(arguments) > 1 and any(key.startswith("items/") for key in arguments[1]):
                raise RegistryUnavailable("away")
            return original(*arguments, **named)

        registry.commit = refuse  # type: ignore[method-assign]
        with pytest.raises(RegistryUnavailable):
            tx.commit()
        registry.commit = original  # type: ignore[method-assign]
        inbox._member.commit()  # what the member's thread does by itself
        assert checkpoint_of(topic) == 0
        tx.commit()
        assert checkpoint_of(topic) == 2


def test_z1_a_lost_partition_refuses_the_transaction(topic: Hub) -> None:
    with topic.consumer("t", "g", until="end", commit_interval=3_600) as inbox:
        message = inbox.poll(1, timeout=PATIENCE_S)[0]
        topic.group("g").reset("earliest", force=True)
        tx = topic.transaction()
        tx.put("jobs", message.value)
        tx.checkpoint(inbox)
        with pytest.raises(PartitionLost):
            tx.commit()
        tx.rollback()
    assert topic.queue("jobs").depth().ready == 0


def test_z1_a_checkpoint_needs_the_same_hub_and_automatic_acknowledgement(place: SharedStore, topic: Hub) -> None:
    with topic.consumer("t", "g", ack="manual") as inbox:
        with pytest.raises(InvalidItem, match="another hub"):
            place.open().transaction().checkpoint(inbox)
        with pytest.raises(InvalidGroup, match="ack='auto'"), topic.transaction() as tx:
            tx.checkpoint(inbox)


# Polls and checkpoints.


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


@pytest.mark.parametrize("fault", ["none", "lost reply"])
def test_z1_what_is_handed_out_after_a_checkpoint_is_not_of_that_transaction(place: SharedStore, fault: str) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 6)
    with hub.consumer("t", "g") as inbox:
        first = inbox.poll(3, timeout=PATIENCE_S)
        tx = hub.transaction()
        tx.put("jobs", "of the first")
        tx.checkpoint(inbox)
        second = inbox.poll(3, timeout=PATIENCE_S)
        if fault == "lost reply":
            registry.after = raise_once(names_slots, OutcomeUnknown("?"))
            with pytest.raises(OutcomeUnknown):
                tx.commit()
            assert tx.outcome() == "committed"
        else:
            tx.commit()
        assert (offsets(first), offsets(second)) == ([0, 1, 2], [3, 4, 5])
        inbox._member.commit()  # what the member's thread does by itself
        assert hub.group("g").describe().partitions[0].checkpoint == 3
        if fault == "lost reply":
            assert offsets(inbox.poll(3, timeout=0.2)) == []  # the second is done by asking for more
            return
        tx = hub.transaction()
        tx.checkpoint(inbox)
        tx.rollback()
        assert offsets(inbox.poll(3, timeout=PATIENCE_S)) == [3, 4, 5]


def test_z1_a_transaction_over_several_polls_is_done_up_to_its_last_checkpoint(place: SharedStore) -> None:
    hub = with_topic(place.open(), 6)
    with hub.consumer("t", "g") as inbox:
        tx = hub.transaction()
        for _ in range(2):
            assert inbox.poll(2, timeout=PATIENCE_S)
            tx.checkpoint(inbox)
        assert offsets(inbox.poll(2, timeout=PATIENCE_S)) == [4, 5]
        tx.commit()
    assert hub.group("g").describe().partitions[0].checkpoint == 4


@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_what_was_read_beside_an_open_transaction_is_neither_lost_nor_doubled(place: SharedStore, how: str) -> None:
    hub = with_topic(place.open(), 12, partitions=3)
    seen: list[bytes | None] = []
    tx = hub.transaction()

    def read(inbox: Consumer, messages: list[Message]) -> None:
        seen.extend(message.value for message in messages)
        if len(seen) == 1:
            tx.put("jobs", "of the first")
            tx.checkpoint(inbox)
        elif len(seen) == 7:
            tx.commit()

    with hub.consumer("t", "g", until="end") as inbox:
        if how == "poll":
            while messages := inbox.poll(1, timeout=PATIENCE_S):
                read(inbox, messages)
        else:
            for message in inbox:
                read(inbox, [message])
    assert sorted(seen, key=lambda value: int(value or b"")) == [b"%d" % number for number in range(12)]
    assert [each.checkpoint for each in hub.group("g").describe().partitions] == [4, 4, 4]


def test_z1_a_checkpoint_that_its_commit_would_refuse_is_refused_at_once(place: SharedStore) -> None:
    hub = with_topic(place.open(), 2)
    tx = hub.transaction()
    with hub.consumer("t", "g", ack="manual") as inbox:
        inbox.poll(1, timeout=PATIENCE_S)
        with pytest.raises(InvalidGroup, match="ack='auto'"):
            tx.checkpoint(inbox)
    errors: list[BaseException | None] = []

    def handle(message: Message) -> None:
        errors.append(aside(lambda: tx.checkpoint(running)).exception(PATIENCE_S))

    with hub.consumer("t", "h", until="end") as running:
        running.run(handle)
    assert [type(error) for error in errors] == [InvalidGroup] * 2
    with pytest.raises(Closed):
        tx.checkpoint(running)


def lose_partition(inbox: Consumer) -> None:
    lane = inbox._lanes[0]
    inbox._member.lease.expire()  # type: ignore[union-attr]
    inbox._member.wake()
    eventually(lambda: inbox._lanes.get(0) not in (None, lane))


@pytest.mark.parametrize("before", ["rollback", "reading"])
def test_z1_a_partition_that_was_lost_before_does_not_refuse_a_later_transaction(
    place: SharedStore, before: str
) -> None:
    hub = with_topic(place.open(), 4)
    with hub.consumer("t", "g") as inbox:
        assert inbox.poll(2, timeout=PATIENCE_S)
        tx = hub.transaction()
        if before == "rollback":
            tx.checkpoint(inbox)
        lose_partition(inbox)
        tx.rollback()
        messages = inbox.poll(2, timeout=PATIENCE_S)
        with hub.transaction() as tx:
            tx.put("jobs", "x")
            tx.checkpoint(inbox)
        assert hub.group("g").describe().partitions[0].checkpoint == messages[-1].offset + 1


def test_z1_a_partition_lost_between_the_poll_and_the_checkpoint_refuses_the_transaction(place: SharedStore) -> None:
    hub = with_topic(place.open(), 4)
    with hub.consumer("t", "g") as inbox:
        assert inbox.poll(2, timeout=PATIENCE_S)
        lose_partition(inbox)
        tx = hub.transaction()
        tx.put("jobs", "x")
        tx.checkpoint(inbox)
        with pytest.raises(PartitionLost):
            tx.commit()
    assert values(hub, "jobs") == []


# Lost replies and lost partitions.


def value_of(message: Message) -> bytes:
    assert message.value is not None
    return message.value


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_z1_r5_a_loop_begun_anew_after_an_unknown_outcome_doubles_nothing(place: SharedStore) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 3)
    registry.after = once(puts, lose_the_reply)
    outcomes = []

    def read(inbox: Consumer) -> None:
        for message in inbox:
            tx = hub.transaction()
            try:
                with tx:
                    tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except OutcomeUnknown:
                outcomes.append(tx.outcome())
                raise

    with hub.consumer("t", "g", until="end") as inbox:
        with pytest.raises(OutcomeUnknown):
            read(inbox)
        read(inbox)
    assert outcomes == ["committed"]
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(3), 3)


@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_messages_whose_transaction_failed_come_again_if_the_reader_goes_on(place: SharedStore, how: str) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 4)
    registry.before = once(puts, be_away)
    failures = []
    with hub.consumer("t", "g", until="end") as inbox:

        def handle(messages: list[Message]) -> None:
            try:
                with hub.transaction() as tx:
                    for message in messages:
                        tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except RegistryUnavailable as error:
                failures.append(error)

        if how == "poll":
            while messages := inbox.poll(2):
                handle(messages)
        else:
            for message in inbox:
                handle([message])
    assert len(failures) == 1
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(4), 4)


def test_z1_a_commit_refused_for_a_lost_partition_cannot_be_tried_again(place: SharedStore) -> None:
    hub = with_topic(place.open(), 2)
    with hub.consumer("t", "g") as inbox:
        tx = hub.transaction()
        for message in inbox.poll(10, timeout=PATIENCE_S):
            tx.put("jobs", value_of(message))
        tx.checkpoint(inbox)
        lane = inbox._lanes[0]
        inbox._member.lease.expire()  # type: ignore[union-attr]
        inbox._member.wake()
        eventually(lambda: inbox._lanes.get(0) not in (None, lane))
        with pytest.raises(PartitionLost):
            tx.commit()
        assert tx.outcome() == "rolled back"
        with pytest.raises(TransactionEnded):
            tx.commit()
        with hub.transaction() as tx:
            for message in inbox.poll(10, timeout=PATIENCE_S):
                tx.put("jobs", value_of(message))
            tx.checkpoint(inbox)
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(2), 2)


def test_z1_r5_trying_again_inside_the_loop_after_an_unknown_outcome_is_refused(place: SharedStore) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 3)
    registry.after = once(puts, lose_the_reply)
    refusals = []
    with hub.consumer("t", "g", until="end") as inbox:
        for message in inbox:
            while True:
                try:
                    with hub.transaction() as tx:
                        tx.put("jobs", value_of(message))
                        tx.checkpoint(inbox)
                    break
                except OutcomeUnknown:
                    continue
                except InvalidGroup as error:
                    refusals.append(str(error))
                    break
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(3), 3)
    assert len(refusals) == 1
    assert "the messages that were handed out are done" in refusals[0]


@pytest.mark.parametrize("fault", ["lost reply", "lost request"])
@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_r5_a_reader_that_settles_an_unknown_outcome_and_reads_on_loses_and_doubles_nothing(
    place: SharedStore, how: str, fault: str
) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 4)
    if fault == "lost reply":
        registry.after = once(puts, lose_the_reply)
    else:
        registry.before = once(puts, lose_the_reply)
    outcomes = []
    with hub.consumer("t", "g", until="end") as inbox:

        def handle(messages: list[Message]) -> None:
            tx = hub.transaction()
            try:
                with tx:
                    for message in messages:
                        tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except OutcomeUnknown:
                outcomes.append(tx.outcome())

        if how == "poll":
            while messages := inbox.poll(2):
                handle(messages)
        else:
            for message in inbox:
                handle([message])
    assert outcomes == ["committed" if fault == "lost reply" else "rolled back"]
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(4), 4)


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_z1_the_checkpoint_is_never_beyond_the_commits_of_a_transaction_over_several_messages(
    place: SharedStore, ending: str
) -> None:
    place = place.on(MemoryStore())  # the system's clock: the member is to commit by itself, all the time
    log = MemoryLog()
    hub = with_topic(place.open(log=log), 10)
    committed = 0
    tx = None
    inbox = hub.consumer("t", "g", until="end", commit_interval=0.001)
    for message in inbox:
        tx = tx or hub.transaction()
        tx.put("jobs", value_of(message))
        tx.checkpoint(inbox)
        inbox._member.commit()
        assert checkpoint_of(hub) == committed
        if message.offset % 3 == 2:
            tx.commit()
            tx, committed = None, message.offset + 1
            assert checkpoint_of(hub) == committed
        if message.offset == 7:
            break
    assert tx is not None
    unfinished = tx
    if ending == "crash":
        assert inbox._member.lease is not None
        place.store.end_lease(inbox._member.lease.id)
        place.store.end_lease(store_of(hub)._taker.lease.id)
    with contextlib.suppress(PxrsError):
        inbox.close()
    later = place.open(log=log)
    assert (values(later, "jobs"), checkpoint_of(later)) == (numbers(6), 6)
    with later.consumer("t", "g", until="end") as inbox:
        for message in inbox:
            with later.transaction() as tx:
                tx.put("jobs", value_of(message))
                tx.checkpoint(inbox)
    with pytest.raises(PxrsError):
        unfinished.commit()
    assert (values(later, "jobs"), checkpoint_of(later)) == (numbers(10), 10)


def test_z1_a_checkpoint_in_a_callback_is_refused_and_what_is_in_hand_stays_undone(place: SharedStore) -> None:
    hub = place.open()
    hub.create_topic("t", partitions=4)
    hub.create_queue("jobs")
    with hub.producer("t") as out:
        for number in range(40):
            out.send(b"x", key=b"%d" % number)
    calls: list[PxrsError | None] = []

    def revoked(partitions: Any) -> None:
        try:
            with hub.transaction() as tx:
                tx.put("jobs", "audit")
                tx.checkpoint(inbox)
            calls.append(None)
        except PxrsError as error:
            calls.append(error)

    inbox = hub.consumer("t", "g", on_revoked=revoked)
    eventually(lambda: len(inbox.assignment) == 4)
    assert inbox.poll(100, timeout=PATIENCE_S)
    with hub.consumer("t", "g"):
        eventually(lambda: calls)
        assert {each.checkpoint for each in hub.group("g").describe().partitions} <= {None, 0}
        assert all(isinstance(error, InvalidGroup) and "callback" in str(error) for error in calls)
    assert values(hub, "jobs") == []


def test_z1_two_transactions_with_checkpoints_of_two_consumers_in_opposite_order_do_not_lock_up(
    place: SharedStore,
) -> None:
    hub = with_topic(place.open(), 1)
    with hub.consumer("t", "g") as one, hub.consumer("t", "h") as two:
        for inbox in (one, two):
            assert inbox.poll(1, timeout=PATIENCE_S)
        first, second = hub.transaction(), hub.transaction()
        first.checkpoint(one)
        second.checkpoint(two)
        for tx, inbox in ((first, two), (second, one)):
            with pytest.raises(InvalidGroup, match="another open transaction"):
                tx.checkpoint(inbox)
        for committing in [aside(first.commit), aside(second.commit)]:
            committing.result(PATIENCE_S)
    assert checkpoint_of(hub) == 1
