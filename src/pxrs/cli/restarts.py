"""Whether a process that ended with an error is started again. This is decided here alone, by the class of the error:
`pxrs worker` restarts its workers by it, and the exit codes of all long-running commands (`exits.py`) follow it.

An error of pxrs is either an outage, or a refusal that says what to correct: an option, a name, the state of a group,
damaged data. A refusal would be repeated for ever. So every error of pxrs is final unless MAY_PASS contains its class
or a base class of it. A plain LogError that an error of the operating system has caused, such as a full disk or too
many open files, may pass too: what can never work has a class of its own, such as LogNotWritable. Any other exception
comes from the handler, Python or the machine, and may not occur again.
"""

from __future__ import annotations

from typing import Final

from pxrs.errors import (
    AppendFailed,
    CannotListen,
    Closed,
    Conflict,
    HandlerFailed,
    InvalidArgument,
    InvalidItem,
    InvalidPlacement,
    InvalidRecord,
    LeaseExpired,
    LogError,
    NodeFormatUnsupported,
    NodeUnreachable,
    OutcomeUnknown,
    PartitionLost,
    PipelineFailed,
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
    CannotListen,
    PipelineFailed,
    NodeUnreachable,
)


NOT_ON_THE_COMMAND_LINE: Final = (CannotListen, InvalidItem, InvalidPlacement, InvalidRecord, NodeFormatUnsupported)
"""The errors of the base class InvalidArgument that are no fault of the command line: a port that is taken, a line of
standard input, a placement function that fails in a broker, a directory that another version has written."""


def is_wrong_argument(error: BaseException) -> bool:
    """Whether the command line is wrong: an option or argument has a value that is refused."""
    return isinstance(error, InvalidArgument) and not isinstance(error, NOT_ON_THE_COMMAND_LINE)


def is_final(error: BaseException) -> bool:
    """Whether a new process would fail in the same way."""
    if isinstance(error, PxrsError):
        is_of_system = type(error) is LogError and isinstance(error.__cause__, OSError)
        return not (is_of_system or isinstance(error, MAY_PASS))
    return isinstance(error, ImportError)  # the handler cannot be imported
