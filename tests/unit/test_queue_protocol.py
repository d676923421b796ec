"""The queue's procedures by hand, one operation at a time, where a schedule is too rare for the simulator; and the
tables of states."""

from __future__ import annotations

import pytest

import pxrs
from pxrs.clock import ManualClock
from pxrs.errors import OutcomeUnknown
from pxrs.failures import Failure
from pxrs.hub import Hub
from pxrs.queue.items import Taken
from pxrs.queue.outcomes import Slot
from pxrs.queue.protocol import PendingTake, Reason, TransactionProtocol, read_head, read_turn, return_pending
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
from pxrs.registry.steps import Steps, Write, drive, perform
from pxrs.testing.fixtures import memory_hub

REASON = Reason(Failure("lost"), lambda: 0.0, lambda: 0.5)


def take(hub: Hub, protocol: TransactionProtocol, queue: Queue) -> Steps[list[Taken]]:
    turn = None
    if queue.is_fifo and queue.id not in protocol.turns:
        turn = drive(read_turn(queue), hub.registry)
    planned, _ = protocol.plan(queue, drive(read_head(queue, 1), hub.registry), "taker")
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
