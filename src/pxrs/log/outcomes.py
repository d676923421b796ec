"""What became of each batch that was given to `TopicLog.append`.

`append` returns one outcome for each batch, in the order of the batches, so that the failure of one partition hides
nothing about the others. What the sender may do next depends on the outcome alone:

| outcome       | is the batch in the log?         | what the sender may do                                        |
|---------------|----------------------------------|---------------------------------------------------------------|
| `StoredAt`    | yes, durable, from `offset` on   | acknowledge it; `is_duplicate`: an earlier try had stored it  |
| `NotStored`   | no, as far as this try goes      | resend it if `error` may pass, also under another producer id |
| `MaybeStored` | not known: the sync failed, or   | resend it under the same origin only; a batch without an      |
|               | the reply was lost               | origin must not be resent                                     |

A batch whose earlier try was MaybeStored stays so: a later NotStored says nothing about that try.
The log never resends by itself. A sender that does not know of the first try could give the batch another producer id
after the log has forgotten the first one, and the batch would be stored twice (W1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StoredAt(NamedTuple):
    """The batch is in the log, durable."""

    offset: int
    """The offset of the batch's first record."""
    is_duplicate: bool = False
    """The log had a batch with this origin already, at this offset; this call has stored nothing of it."""


class NotStored(NamedTuple):
    """The log has refused the batch, or could not write it. This call has stored nothing of it, and nothing of it will
    appear later."""

    error: Exception


class MaybeStored(NamedTuple):
    """Whether the batch is in the log is not known, and it may still appear there."""

    error: Exception
    """Mostly an AppendUnknown."""


Outcome = StoredAt | NotStored | MaybeStored


def offsets_of(outcomes: Iterable[Outcome]) -> list[int]:
    """The offset of each batch, if all are stored; otherwise raises the error of the first one that is not. For a
    caller that resends nothing: after the error, it does not know which of the other batches are stored."""
    offsets = []
    for outcome in outcomes:
        if not isinstance(outcome, StoredAt):
            raise outcome.error
        offsets.append(outcome.offset)
    return offsets
