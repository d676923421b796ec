"""Which errors end `pxrs worker`, and which have a worker started again."""

from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path

import pytest

from pxrs import disk, errors
from pxrs.cli.restarts import is_final
from pxrs.errors import LogError, PxrsError

MAY_PASS = {
    *("RegistryUnavailable", "StorageFull", "OutcomeUnknown", "OutcomeLost", "LeaseExpired", "Conflict"),
    *("AppendFailed", "AppendUnknown", "BufferFull", "LogBusy", "PartitionMoved", "ReadFailed"),
    *("PartitionLost", "PartitionNotAssigned", "CommitUnknown", "GroupUnavailable"),
    *("TransactionLost", "HandlerFailed", "Closed", "ServerBusy", "CannotListen", "PipelineFailed"),
    *("NodeUnreachable", "NodeFull", "WrongNode", "LedgerRemoved", "LedgerDamaged", "PartitionUnavailable"),
}


def made(kind: type[PxrsError]) -> PxrsError:
    return kind.__new__(kind)


@pytest.mark.parametrize(
    "kind", [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PxrsError)]
)
def test_every_error_of_pxrs_is_an_outage_or_a_refusal(kind: type[PxrsError]) -> None:
    assert is_final(made(kind)) == (kind.__name__ not in MAY_PASS)


@pytest.mark.parametrize(
    "error", [OSError("no more files"), MemoryError(), SystemExit(3), ValueError("a bug")], ids=repr
)
def test_what_others_raise_may_pass(error: BaseException) -> None:
    assert not is_final(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_full_disk_may_pass_and_a_missing_permission_is_not_given_by_a_restart(number: int, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path))
    with pytest.raises(LogError) as raised:
        raise disk.log_error(error) from error  # as the log does with every error of the operating system
    assert is_final(raised.value) == (number == errno.EACCES)


def test_a_handler_that_cannot_be_imported_never_can() -> None:
    assert is_final(ImportError("no module named shop"))
