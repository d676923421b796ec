"""The manifest of a backup: which files it consists of, and where each of them belongs in a hub's directory.

`backup.json` is one line, the XXH3-64 of the rest in hexadecimal, a blank, and JSON. It is replaced as a whole after
everything that it names is on the medium, so a folder with a manifest is a whole backup, and a folder without one is an
interrupted one. Nothing here does I/O.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from pxrs.errors import BackupDamaged

NAME: Final = "backup.json"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file of the backup."""

    path: str
    """Where it is in the backup's folder."""
    place: str
    """Where it belongs in the hub's directory; empty for the file with the registry's keys."""
    bytes: int
    checksum: str
    """XXH3-128 of its bytes, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class CopiedPartition:
    """A partition as it is in the backup."""

    number: int
    start: int
    """The first offset."""
    end: int
    """The offset behind the last one."""
    whole_end: int
    """Where the copied frames end. Smaller than `end` if the hub itself lacks published messages (decision 0013): then
    the offsets between belong to no message."""
    has_start_file: bool
    """Whether the file `start` is written: not if nothing was ever removed."""


@dataclass(frozen=True, slots=True)
class CopiedTopic:
    """A topic of the backup."""

    id: str
    name: str
    partitions: tuple[CopiedPartition, ...]


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """All that there is to know about a backup beside the bytes of its files."""

    id: str
    hub: str
    """The id of the hub that was copied; empty if its directory records none."""
    begun_at: float
    """When the backup began, in seconds since 1970: every message that was acknowledged before is in it."""
    ended_at: float
    directory: str
    registry: str
    """The address of the registry, without a password."""
    moment: str
    """At which moment the registry was copied, in the words of the store."""
    keys: int
    """How many keys of the registry are in the backup."""
    version: str
    """The version of pxrs that made the backup."""
    topics: tuple[CopiedTopic, ...] = ()
    files: tuple[CopiedFile, ...] = ()
    deleted: tuple[str, ...] = ()
    """The ids of topics that were deleted and of which the registry may still hold keys."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Topics that are damaged and are not in the backup, by name, and what is wrong with each."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def registry_file(self) -> CopiedFile:
        return next(file for file in self.files if not file.place)

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def load(cls, file: str, text: str | None) -> Self:
        """Raises BackupDamaged. text: None if the checksum does not match."""
        if text is None:
            raise BackupDamaged(file, "its checksum does not match")
        try:
            found: dict[str, Any] = json.loads(text)
            if found.pop("format") != FORMAT:
                raise BackupDamaged(file, "the backup was made by a version of pxrs with another format")
            found["topics"] = tuple(
                CopiedTopic(each["id"], each["name"], tuple(CopiedPartition(**part) for part in each["partitions"]))
                for each in found["topics"]
            )
            found["files"] = tuple(CopiedFile(**each) for each in found["files"])
            found["deleted"] = tuple(found["deleted"])
            manifest = cls(**found)
        except (ValueError, TypeError, KeyError) as error:
            raise BackupDamaged(file, f"it is not the manifest of a backup: {error!r}") from error
        for copied in manifest.files:
            for path in (copied.path, copied.place):
                if path.startswith("/") or ".." in path.split("/"):
                    raise BackupDamaged(
                        file, f"the manifest names the file {path}, which is outside the backup: use another backup"
                    )
            if copied.place and not copied.place.startswith(("logs/", "staging/")):
                raise BackupDamaged(
                    file, f"the manifest names {copied.place}, a file that backups do not contain: use another backup"
                )
        for name in (*(name for topic in manifest.topics for name in (topic.id, topic.name)), *manifest.deleted):
            if "/" in name or name in ("", ".", ".."):
                raise BackupDamaged(
                    file, f"the manifest contains the invalid topic name or id {name!r}: use another backup"
                )
        return manifest
