"""Errors of backups and of restoring them."""

from __future__ import annotations

from pxrs.errors.general import PxrsError


class BackupError(PxrsError):
    """The base of every error of backups: a backup could not be made or restored."""

    code = "backup"


class BackupDamaged(BackupError):
    """A file of a backup is missing, or does not match the backup's manifest; `file` names it. Nothing was restored.
    Use another backup; or remove the file and back up into the same target again, which copies it again."""

    code = "backup.damaged"

    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        super().__init__(f"{file}: {what}")


class BackupIncomplete(BackupError):
    """A folder has no backup manifest: it is not a backup, or the backup was interrupted. Run `pxrs backup` again: it
    copies only what is still missing."""

    code = "backup.incomplete"


class RestoreRefused(BackupError):
    """The target of a restore is not empty. A backup is restored only into an empty directory and an empty registry.
    Nothing was written."""

    code = "backup.restore-refused"


class RestoreInterrupted(BackupError):
    """The restore of a backup into this directory has not finished, so messages, groups or queue items may be missing.
    If `pxrs restore` is still running, wait for it; otherwise remove the directory and the keys in its registry, and
    restore again."""

    code = "backup.restore-interrupted"

    def __init__(self, directory: str, registry: str) -> None:
        self.directory, self.registry = directory, registry
        super().__init__(
            f"the restore of a backup into {directory} has not finished: if `pxrs restore` is no longer running, "
            f"remove the directory and the keys in the registry {registry}, and restore the backup again"
        )
