"""The states of an item and of a transaction, and which event changes them: the tables that the other modules follow.

`moves` asks `item_after` for the folder of every key that it writes, and `Transaction` asks `transaction_after` for
every change of its state. An event that a table does not have for a state is a mistake of this package: it raises
ImpossibleEvent, and nothing is written.

An item (docs/queues.md draws the table). Each event is one commit, which deletes the item's key in the folder of the
first state and writes its key in the folder of the second:

    event          from        to          who
    PUT            -           READY       a transaction's commit, or `QueueHandle.put`
    PUT_DELAYED    -           DELAYED     the same, with a delay
    TAKE           READY       IN_FLIGHT   a transaction; the delivery is counted in the same commit
    FINISH         IN_FLIGHT   -           the commit of the transaction that took the item
    RETURN         IN_FLIGHT   READY       the transaction that took it, rolled back; or a sweeper, if its taker is gone
    BACK_OFF       IN_FLIGHT   DELAYED     the same, if the queue has a backoff and is not FIFO
    GIVE_UP        IN_FLIGHT   DEAD        the same, if that was the last delivery that the queue's policy allows
    COME_DUE       DELAYED     READY       a sweeper, when the item's time has come
    RETRY          DEAD        READY       a person, by `DeadLetters.retry`
    PURGE          DEAD        -           a person, by `DeadLetters.purge`

A transaction:

    event             from      to            when
    COMMITTED         OPEN      COMMITTED     the registry has acknowledged the commit
    REPLY_LOST        OPEN      UNKNOWN       the commit was sent, and no reply came
    ROLLED_BACK       OPEN      ROLLED_BACK   `rollback`, a refused commit, or the end of the hub
    FOUND_COMMITTED   UNKNOWN   COMMITTED     the outcome was resolved: the commit was applied
    FOUND_ABORTED     UNKNOWN   ROLLED_BACK   the outcome was resolved: the commit is refused if it still arrives
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class ImpossibleEvent(AssertionError):
    """The table has no such event for this state."""


class ItemState(enum.Enum):
    """Where an item is. The value is the folder of its key: see `records`."""

    READY = "ready"
    """It can be taken."""
    IN_FLIGHT = "inflight"
    """A transaction has taken it; the key names the transaction and the taker."""
    DELAYED = "delayed"
    """It cannot be taken before the time that its key names."""
    DEAD = "dead"
    """It is a dead letter: nobody takes it until a person decides."""

    __hash__ = object.__hash__  # of C, and not Enum's: the table is looked up for every move


class ItemEvent(enum.Enum):
    PUT = "put"
    PUT_DELAYED = "put with a delay"
    TAKE = "take"
    FINISH = "finish"
    RETURN = "return"
    BACK_OFF = "back off"
    GIVE_UP = "give up"
    COME_DUE = "come due"
    RETRY = "retry"
    PURGE = "purge"

    __hash__ = object.__hash__


ITEM_TRANSITIONS: Final[Mapping[tuple[ItemState | None, ItemEvent], ItemState | None]] = MappingProxyType(
    {
        (None, ItemEvent.PUT): ItemState.READY,
        (None, ItemEvent.PUT_DELAYED): ItemState.DELAYED,
        (ItemState.READY, ItemEvent.TAKE): ItemState.IN_FLIGHT,
        (ItemState.IN_FLIGHT, ItemEvent.FINISH): None,
        (ItemState.IN_FLIGHT, ItemEvent.RETURN): ItemState.READY,
        (ItemState.IN_FLIGHT, ItemEvent.BACK_OFF): ItemState.DELAYED,
        (ItemState.IN_FLIGHT, ItemEvent.GIVE_UP): ItemState.DEAD,
        (ItemState.DELAYED, ItemEvent.COME_DUE): ItemState.READY,
        (ItemState.DEAD, ItemEvent.RETRY): ItemState.READY,
        (ItemState.DEAD, ItemEvent.PURGE): None,
    }
)
"""None: the item is not in the queue."""


class TransactionState(enum.StrEnum):
    OPEN = "open"
    UNKNOWN = "unknown"
    """Its commit was sent, and the reply was lost."""
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class TransactionEvent(enum.Enum):
    COMMITTED = "committed"
    REPLY_LOST = "the reply was lost"
    ROLLED_BACK = "rolled back"
    FOUND_COMMITTED = "found committed"
    FOUND_ABORTED = "found aborted"


TRANSACTION_TRANSITIONS: Final[Mapping[tuple[TransactionState, TransactionEvent], TransactionState]] = MappingProxyType(
    {
        (TransactionState.OPEN, TransactionEvent.COMMITTED): TransactionState.COMMITTED,
        (TransactionState.OPEN, TransactionEvent.REPLY_LOST): TransactionState.UNKNOWN,
        (TransactionState.OPEN, TransactionEvent.ROLLED_BACK): TransactionState.ROLLED_BACK,
        (TransactionState.UNKNOWN, TransactionEvent.FOUND_COMMITTED): TransactionState.COMMITTED,
        (TransactionState.UNKNOWN, TransactionEvent.FOUND_ABORTED): TransactionState.ROLLED_BACK,
    }
)

_STATES: Final = {state.value: state for state in ItemState}


def state_in(key: str) -> ItemState:
    """The state that an item's key names: `items/<queue's id>/<state>/...`."""
    return _STATES[key.split("/", 3)[2]]


def item_after(state: ItemState | None, event: ItemEvent) -> ItemState | None:
    """The state of an item after an event. Raises ImpossibleEvent."""
    try:
        return ITEM_TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleEvent(f"an item that is {state} cannot {event.value}") from None


def folder_after(state: ItemState | None, event: ItemEvent) -> str:
    """The folder of an item's key after an event that leaves the item in its queue. Raises ImpossibleEvent."""
    after = item_after(state, event)
    assert after is not None
    return after.value


def transaction_after(state: TransactionState, event: TransactionEvent) -> TransactionState:
    """The state of a transaction after an event. Raises ImpossibleEvent."""
    try:
        return TRANSACTION_TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleEvent(f"a transaction that is {state} cannot be {event.value}") from None
