"""Errors of backups and of restoring them."""

from __future__ import annotations

from pxrs.errors.general import PxrsError


class BackupError(PxrsError):
    """A backup could not be made or restored. The base of the errors of this kind."""

    code = "backup"


class BackupDamaged(BackupError):
    """A file of a backup is missing, or is not what the backup's manifest says; `file` names it. Nothing was restored.
    Use another backup, or make a new one: a backup into the same target copies the file again once it is removed."""

    code = "backup.damaged"

    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        super().__init__(f"{file}: {what}")


class BackupIncomplete(BackupError):
    """A folder has no manifest of a backup: it is none, or the backup was interrupted. Run `pxrs backup` again: it
    copies only what is still missing."""

    code = "backup.incomplete"


class RestoreRefused(BackupError):
    """A backup is restored only into an empty directory and an empty registry. Nothing was written."""

    code = "backup.restore-refused"


class RestoreInterrupted(BackupError):
    """A backup was being restored into this directory, and the process that did it has not finished, so messages,
    groups or items of queues may be missing. If `pxrs restore` is still running, wait for it; otherwise remove the
    directory and the keys that are in its registry, and restore again."""

    code = "backup.restore-interrupted"

    def __init__(self, directory: str, registry: str) -> None:
        self.directory, self.registry = directory, registry
        super().__init__(
            f"the restoration of a backup into {directory} is not finished: if `pxrs restore` is not running any more, "
            f"remove the directory and the keys in the registry {registry}, and restore the backup again"
        )
