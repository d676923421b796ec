"""The queue's procedures by hand, one operation at a time, where a schedule is too rare for the simulator; and the
tables of states."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

import pxrs
from pxrs.clock import ManualClock
from pxrs.errors import Conflict, OutcomeLost, OutcomeUnknown
from pxrs.failures import Failure
from pxrs.hub import Hub
from pxrs.queue.items import Taken
from pxrs.queue.outcomes import Slot, resolve
from pxrs.queue.protocol import PendingTake, Reason, TransactionProtocol, read_head, return_pending
from pxrs.queue.puts import PutVersions
from pxrs.queue.records import OUTCOMES, Queue
from pxrs.queue.states import (
    ITEM_TRANSITIONS,
    ImpossibleEvent,
    ItemEvent,
    ItemState,
    TransactionEvent,
    TransactionState,
    item_after,
    transaction_after,
)
from pxrs.registry.steps import Get, Operation, Steps, Write, drive, perform
from pxrs.testing.fixtures import memory_hub

REASON = Reason(Failure("lost"), lambda: 0.0, lambda: 0.5)


def take(hub: Hub, protocol: TransactionProtocol, queue: Queue, count: int = 1) -> Steps[list[Taken]]:
    turn = drive(protocol.begin_fifo_take(queue, REASON), hub.registry) if queue.is_fifo else None
    planned, _ = protocol.plan(queue, drive(read_head(queue, count), hub.registry), "taker")
    return protocol.take(queue, "taker", planned, turn)


def lose(hub: Hub, steps: Steps[list[Taken]], protocol: TransactionProtocol, *, is_applied: bool) -> PendingTake | None:
    """Run a take whose reply is lost, and all replies to what should resolve it."""
    write = next(steps)
    assert isinstance(write, Write)
    if is_applied:
        perform(write._replace(is_leased=False), hub.registry)
    with pytest.raises(OutcomeUnknown, match="was lost"):
        _answer_nothing(steps)
    return protocol.put_aside()


def _answer_nothing(steps: Steps[list[Taken]]) -> None:
    while True:
        steps.throw(OutcomeUnknown("no answer"))


def _answer_reads_alone(steps: Steps[bool]) -> None:
    """Nothing is found, and the reply to every write is lost."""
    operation = next(steps)
    while True:
        is_read = isinstance(operation, Get)
        operation = steps.send(None) if is_read else steps.throw(OutcomeUnknown("no answer"))


def test_r5_an_item_that_is_taken_again_is_not_returned_with_the_take_that_was_lost() -> None:
    with memory_hub(ManualClock()) as hub:
        hub.create_queue("q").put("x")
        queue = hub.queue("q").settings
        protocol = TransactionProtocol("transaction1", PutVersions(), hub.registry.limits)
        pending = lose(hub, take(hub, protocol, queue), protocol, is_applied=False)
        assert pending is not None
        lease = hub.registry.lease(10)
        assert drive(take(hub, protocol, queue), hub.registry, lease)
        drive(return_pending(pending, REASON, hub.registry.limits), hub.registry)
        assert hub.queue("q").depth() == pxrs.Depth(ready=0, delayed=0, in_flight=1, dead=0)


def test_z7_a_lost_take_from_a_fifo_queue_is_resolved_before_the_commit_frees_the_turn() -> None:
    with memory_hub(ManualClock()) as hub:
        hub.create_queue("q", fifo=True).put_many(["1", "2", "3"])
        queue = hub.queue("q").settings
        protocol = TransactionProtocol("transaction1", PutVersions(), hub.registry.limits)
        lease = hub.registry.lease(10)
        assert drive(take(hub, protocol, queue), hub.registry, lease)
        assert lose(hub, take(hub, protocol, queue), protocol, is_applied=True) is None
        drive(protocol.return_unresolved(REASON), hub.registry)
        drive(protocol.commit(Slot(f"{OUTCOMES}taker-1"), now=0.0, sent_at=0.0), hub.registry, lease)
        with hub.transaction() as tx:
            assert [item.value for item in tx.take_many("q", 3, timeout=0)] == [b"2", b"3"]


def test_z7_a_take_from_a_fifo_queue_returns_an_earlier_lost_one_of_its_transaction_first() -> None:
    with memory_hub(ManualClock()) as hub:
        hub.create_queue("q", fifo=True).put_many(["1", "2", "3"])
        queue = hub.queue("q").settings
        protocol = TransactionProtocol("transaction1", PutVersions(), hub.registry.limits)
        lease = hub.registry.lease(10)
        assert drive(take(hub, protocol, queue), hub.registry, lease)
        lose(hub, take(hub, protocol, queue), protocol, is_applied=True)
        assert [each.record.value for each in drive(take(hub, protocol, queue), hub.registry, lease)] == [b"2"]


@pytest.mark.parametrize("after", range(5))
def test_z7_a_lost_take_does_not_free_the_turn_that_another_transaction_has_by_now(after: int) -> None:
    """The keeper resolves the take twice, because it did not get the reply to the first time. That is applied when the
    second time has made `after` operations, and another transaction takes the item at once."""
    with memory_hub(ManualClock()) as hub:
        hub.create_queue("q", fifo=True).put("x")
        queue, limits, lease = hub.queue("q").settings, hub.registry.limits, hub.registry.lease(10)
        first = TransactionProtocol("transaction1", PutVersions(), limits)
        pending = lose(hub, take(hub, first, queue), first, is_applied=True)
        assert pending is not None
        steps, operation = return_pending(pending, REASON, limits), None
        for _ in range(after):
            operation = answer(hub, steps, operation)
        drive(return_pending(pending, REASON, limits), hub.registry)
        second = TransactionProtocol("transaction2", PutVersions(), limits)
        assert drive(take(hub, second, queue), hub.registry, lease)
        with suppress(StopIteration):
            while True:
                operation = answer(hub, steps, operation)
        drive(second.commit(Slot(f"{OUTCOMES}taker-1"), now=0.0, sent_at=0.0), hub.registry, lease)
        assert hub.queue("q").depth() == pxrs.Depth(0, 0, 0, 0)


def answer(hub: Hub, steps: Steps[None], operation: Operation | None) -> Operation:
    """Perform an operation of a procedure, and return the next one."""
    if operation is None:
        return next(steps)
    try:
        result = perform(operation, hub.registry)
    except Conflict as conflict:
        return steps.throw(conflict)
    return steps.send(result)


def test_z2_a_lost_take_whose_items_were_returned_in_part_is_returned_as_a_whole() -> None:
    with memory_hub(ManualClock()) as hub:
        hub.create_queue("q").put_many(["1", "2"])
        queue = hub.queue("q").settings
        protocol = TransactionProtocol("transaction1", PutVersions(), hub.registry.limits)
        pending = lose(hub, take(hub, protocol, queue, 2), protocol, is_applied=True)
        assert pending is not None
        one_at_a_time = replace(hub.registry.limits, commit_keys_max=6)
        steps, operation, writes = return_pending(pending, REASON, one_at_a_time), None, 0
        while writes < 3:  # what resolves the take, and the return of one of the items; the next is never sent
            operation = answer(hub, steps, operation)
            writes += isinstance(operation, Write)
        assert hub.queue("q").depth() == pxrs.Depth(ready=1, delayed=0, in_flight=1, dead=0)
        drive(return_pending(pending, REASON, one_at_a_time), hub.registry)
        assert hub.queue("q").depth() == pxrs.Depth(ready=2, delayed=0, in_flight=0, dead=0)


@pytest.mark.parametrize("event", ItemEvent)
@pytest.mark.parametrize("state", [None, *ItemState])
def test_an_event_that_the_table_does_not_have_for_an_item_is_refused(
    state: ItemState | None, event: ItemEvent
) -> None:
    if (state, event) in ITEM_TRANSITIONS:
        assert item_after(state, event) is ITEM_TRANSITIONS[state, event]
    else:
        with pytest.raises(ImpossibleEvent):
            item_after(state, event)


def test_a_transaction_that_has_ended_cannot_change() -> None:
    for state in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK):
        for event in TransactionEvent:
            with pytest.raises(ImpossibleEvent):
                transaction_after(state, event)


def test_r5_an_outcome_of_which_no_reply_arrived_is_unknown_and_is_found_out_later() -> None:
    """It is not lost: whoever asks would take the transaction for rolled back, although it may be committed."""
    with memory_hub(ManualClock()) as hub:
        slot = Slot(f"{OUTCOMES}taker-1")
        steps = resolve(slot, "tx", hub.registry.clock.now, 0.0)
        with pytest.raises(OutcomeUnknown) as raised:
            _answer_reads_alone(steps)
        assert not isinstance(raised.value, OutcomeLost)
        assert drive(resolve(slot, "tx", hub.registry.clock.now, 0.0), hub.registry) is False
