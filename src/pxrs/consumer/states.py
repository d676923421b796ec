"""The states of what a consumer has in hand, and which call changes them: the table that `settling` follows.

The problem: between hand-out and checkpoint, a message may be counted as done by six different calls, on several
threads, and the wrong one loses it. Which call counts depends on how the consumer is read. So that is a state (`Mode`),
and what each call (`Event`) does in each state is a table (`TRANSITIONS`). A call that is not in the table is refused
with InvalidGroup, and changes nothing.

    mode      more     ack      commit   loop     run        transactions  checkpoint  committed   rolled back
    AUTO      done     refused  done     again    again:RUN  again:SQL     stays:HELD
    MANUAL    stays    done     stays    stays    refused    refused       refused
    RUN       busy     refused  stays    busy     busy       busy          refused
    SQL       stays    refused  stays    stays    refused    refused       refused
    HELD      stays    refused  refused  stays    refused    refused       stays       done:AUTO   again:AUTO

    stays, done, again   what becomes of the messages in hand (`InHand`); after the colon: the new mode
    refused              InvalidGroup
    busy                 another thread reads, so that `Readings` has raised ConsumerBusy before

RUN and SQL become AUTO again when `run` or the loop over `transactions` ends. In these two modes the messages in hand
are counted as done one handler call, or one COMMIT, at a time: `runner` and `transactions` do that by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Mode(enum.Enum):
    """How messages are counted as done."""

    __hash__ = object.__hash__  # the hash of Enum is a Python function, and every message looks up its event

    AUTO = "auto"
    """ack="auto": when the thread that has them asks for more."""
    MANUAL = "manual"
    """ack="manual": when `ack` was called for them."""
    RUN = "run"
    """`run` is under way: when the handler returns."""
    SQL = "sql"
    """A loop over `transactions` is under way: when the COMMIT was answered."""
    HELD = "held"
    """ack="auto", and an open queue transaction has the checkpoint: when that transaction is committed."""


class Event(enum.Enum):
    """What can happen to the messages in hand."""

    __hash__ = object.__hash__  # the hash of Enum is a Python function, and every message looks up its event

    MORE = "more"
    """The thread that has them asks for more."""
    ACK = "ack"
    COMMIT = "commit"
    LOOP = "loop"
    """A loop begins. What an earlier loop was left with was not handled."""
    RUN = "run"
    RUN_ENDS = "run ends"
    SQL = "transactions"
    """A loop over `transactions` begins."""
    SQL_ENDS = "transactions end"
    CHECKPOINT = "checkpoint"
    """A queue transaction takes the checkpoint over."""
    COMMITTED = "committed"
    """That transaction is known to be committed."""
    ROLLED_BACK = "rolled back"
    """That transaction is known to be rolled back."""


class InHand(enum.Enum):
    """What becomes of the messages in hand."""

    __hash__ = object.__hash__  # the hash of Enum is a Python function, and every message looks up its event

    STAYS = "stays"
    DONE = "done"
    AGAIN = "again"
    """They count as not handed out, and are handed out again."""


class Transition(NamedTuple):
    in_hand: InHand
    mode: Mode


_STAYS, _DONE, _AGAIN = InHand
TRANSITIONS: Final[Mapping[Mode, Mapping[Event, Transition]]] = MappingProxyType(
    {
        Mode.AUTO: {
            Event.MORE: Transition(_DONE, Mode.AUTO),
            Event.COMMIT: Transition(_DONE, Mode.AUTO),
            Event.LOOP: Transition(_AGAIN, Mode.AUTO),
            Event.RUN: Transition(_AGAIN, Mode.RUN),
            Event.SQL: Transition(_AGAIN, Mode.SQL),
            Event.CHECKPOINT: Transition(_STAYS, Mode.HELD),
        },
        Mode.MANUAL: {
            Event.MORE: Transition(_STAYS, Mode.MANUAL),
            Event.ACK: Transition(_DONE, Mode.MANUAL),
            Event.COMMIT: Transition(_STAYS, Mode.MANUAL),
            Event.LOOP: Transition(_STAYS, Mode.MANUAL),
        },
        Mode.RUN: {
            Event.COMMIT: Transition(_STAYS, Mode.RUN),
            Event.RUN_ENDS: Transition(_STAYS, Mode.AUTO),
        },
        Mode.SQL: {
            Event.MORE: Transition(_STAYS, Mode.SQL),
            Event.COMMIT: Transition(_STAYS, Mode.SQL),
            Event.LOOP: Transition(_STAYS, Mode.SQL),
            Event.SQL_ENDS: Transition(_STAYS, Mode.AUTO),
        },
        Mode.HELD: {
            Event.MORE: Transition(_STAYS, Mode.HELD),
            Event.LOOP: Transition(_STAYS, Mode.HELD),
            Event.CHECKPOINT: Transition(_STAYS, Mode.HELD),
            Event.COMMITTED: Transition(_DONE, Mode.AUTO),
            Event.ROLLED_BACK: Transition(_AGAIN, Mode.AUTO),
        },
    }
)
HELD_REFUSAL: Final = (
    "an open transaction has the checkpoint of the messages that were handed out: commit it or roll it back first"
)
REFUSALS: Final[Mapping[Event, str]] = MappingProxyType(
    {
        Event.ACK: "ack needs a consumer with ack='manual'; in a transaction, its COMMIT acknowledges",
        Event.RUN: "run counts a message as done when its handler returns, so it does not work with ack='manual'",
        Event.SQL: 'in a transaction, its COMMIT acknowledges: use ack="auto", and one loop at a time',
        Event.CHECKPOINT: (
            "a checkpoint in a transaction covers what was handed out: read with a loop or `poll`, and ack='auto'"
        ),
    }
)
"""Why an event that `TRANSITIONS` does not have for a mode is refused; in the mode HELD, `HELD_REFUSAL` says why."""
