"""Whether a worker that ended with an error may do better when it is started again. Decided here alone, by the error's
class.

What pxrs raises on purpose is either an outage, or a refusal that says what to correct: an option, a name, the state of
a group, damaged data. A refusal would be repeated for ever. So every error of pxrs is final unless MAY_PASS names it or
a base of it. Any other exception is the handler's, Python's or the machine's, and may pass.
"""

from __future__ import annotations

from typing import Final

from pxrs.errors import (
    AppendFailed,
    Closed,
    Conflict,
    HandlerFailed,
    LeaseExpired,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    ReadFailed,
    RegistryUnavailable,
    TransactionLost,
)

MAY_PASS: Final = (
    RegistryUnavailable,
    OutcomeUnknown,
    LeaseExpired,
    Conflict,
    AppendFailed,
    ReadFailed,
    PartitionLost,
    TransactionLost,
    HandlerFailed,
    Closed,
)


def is_final(error: BaseException) -> bool:
    """Whether a new process would fail in the same way."""
    if isinstance(error, PxrsError):
        return not isinstance(error, MAY_PASS)
    return isinstance(error, ImportError)  # of the handler
