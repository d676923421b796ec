"""Errors of registries. Each says whether the call had an effect: none, or OutcomeUnknown."""

from __future__ import annotations

from collections.abc import Sequence

from pxrs.errors.general import InvalidArgument, NoWritePermission, PxrsError


class RegistryError(PxrsError):
    """The base of every registry error."""

    code = "registry"


class Conflict(RegistryError):
    """An expectation of a commit did not hold, and nothing was written. Read `keys` again, and decide on the new
    values."""

    code = "registry.conflict"

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"not in the expected version: {', '.join(self.keys)}; nothing was written")


class OutcomeUnknown(RegistryError):
    """The reply to a commit was lost: the commit may have been applied or not, or may still be applied.

    A read that does not find the change proves nothing: the commit may still be applied. If you must know, have the
    commit also put a marker key that it expects to be ABSENT, and put another value there yourself, with the same
    expectation: exactly one of the two commits succeeds."""

    code = "registry.outcome-unknown"


class OutcomeLost(OutcomeUnknown):
    """The record of a transaction's outcome was removed before this process could read it, because the registry was
    unreachable for too long. Whether the transaction was committed can no longer be determined: look for what it would
    have changed."""

    code = "registry.outcome-lost"


class RegistryUnavailable(RegistryError):
    """The store could not be reached or did not answer in time, and the call had no effect. Try again later."""

    code = "registry.unavailable"


class StorageFull(RegistryUnavailable):
    """The store has no space left for its data, and the call had no effect. Free space, then try again."""

    code = "registry.storage-full"


class AccessDenied(RegistryError):
    """The store refused the credentials, or they lack a permission. The call had no effect. Correct or grant them."""

    code = "registry.access-denied"


class RegistryNotWritable(NoWritePermission, AccessDenied):
    """This process may read the registry and not write to it: see NoWritePermission."""

    code = "registry.not-writable"


class SchemaMissing(RegistryError):
    """The tables do not exist and were not to be created. Run what `pxrs registry ddl` prints."""

    code = "registry.schema-missing"


class RegistryReplaced(RegistryError):
    """The registry's file or directory was removed, moved, or replaced by another one while this handle was open.

    Nothing was written. If the original is put back, the handle works again. To use what is there now, such as a
    restored copy, close this handle and open a new one."""

    code = "registry.replaced"


class RegistryCorrupt(RegistryError):
    """Stored data is damaged or missing. Nothing is guessed: `where` names the place. Stop the processes that use the
    registry, and restore what is named from a copy (docs/registry.md, "A damaged file registry")."""

    code = "registry.corrupt"

    def __init__(self, where: str, what: str) -> None:
        self.where, self.what = where, what
        super().__init__(f"{where}: {what}")


class LeaseExpired(RegistryError):
    """The lease has ended, or may have; nothing was written. It cannot be revived: take a new one and claim again."""

    code = "registry.lease-expired"


class InvalidKey(RegistryError, InvalidArgument):
    """A key or prefix is not a plain slash path. Use segments of printable ASCII, none empty, `.` or `..`."""

    code = "registry.invalid-key"


class InvalidCommit(RegistryError, InvalidArgument):
    """A commit contradicts itself, such as a key both put and deleted, or an ephemeral key without a lease."""

    code = "registry.invalid-commit"


class ValueTooLarge(RegistryError, ValueError):
    """A value is larger than `limits.value_bytes_max`. Store it elsewhere and keep its address here."""

    code = "registry.value-too-large"


class CommitTooLarge(RegistryError, ValueError):
    """A commit holds more keys or bytes than `limits` allows. Split it, if its parts need not be applied atomically."""

    code = "registry.commit-too-large"
