"""The journal: every change is a numbered file, and publishing it is one system call.

The problem: several processes change several keys together, any of them may be killed or stopped between any two
system calls, and no process may wait for one that is stopped. So there is no lock between processes. A change is
written to a scratch file and synced, then published by `link(2)` as the next number: that call is the commit point, for
all keys at once. `EEXIST` means that another process was first: read what it published, check again, try the next
number (R9).

The folders are described in `layout.py`.

Compaction: the last entry of a generation is a *seal* that names the folder in which the next entries are. A process
that has read up to the seal continues in that folder. The process that published the seal then publishes a snapshot in
the new folder, for processes that open the registry later, and moves the old folders away. Each step is one system call
that takes effect or fails because another process was first, and no folder name is used twice: a process that was
stopped during a compaction gets `ENOENT`, never an entry of another generation under the number that it expects.

Durable before acknowledged: a process syncs the scratch file before the link, and the folder after it. A process that
follows a seal syncs the folder of the seal before it writes to the next folder. A failure after the link is an unknown
outcome.

A missing entry has one of two causes:
- A power loss may keep an entry and lose the one before it, if neither was synced. Then neither was acknowledged. The
  process that opens the registry next publishes a seal under the number of the missing entry, so that the entries with
  higher numbers no longer count.
- Something other than pxrs removed the file. Each entry records up to which number its author had synced, and entries
  of the next generation are written only after the seal was synced. If these records show that a missing entry was
  synced, opening raises RegistryCorrupt.
No power loss happens while a handle is open, so an open handle raises RegistryCorrupt for any missing entry. Before it
publishes, the handle checks that the last entry that it has read is there, and that the one after the next is not.
At its first use after `INSPECT_S`, and before a compaction, it compares the whole folder with what it has read. So a
handle never publishes under the number of a single removed entry. It does so in a gap of several entries only if all of
them were published and removed within the last second.

A process that may not write reads in the same way. It publishes neither the seal that cuts off what a power loss left
behind a missing entry, nor a snapshot: it shows the state up to the missing entry, and follows the seal once a process
that may write has published it.

Only `prepared` and `finish_compaction` may be called without the lock of `SharedJournal`. A call that is interrupted in
the middle, by an error or by a signal, leaves the field `torn` set: the state is loaded anew before it is used again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from pxrs.errors import OutcomeUnknown, RegistryCorrupt, RegistryReplaced, RegistryUnavailable
from pxrs.registry.file.codec import JournalEntry, Seal, decode_entry, decode_snapshot, encode_entry, encode_snapshot
from pxrs.registry.file.folder import Folder, Generation
from pxrs.registry.file.layout import Layout, read_file
from pxrs.registry.state import Change, State

log = logging.getLogger(__name__)

ENTRIES_MIN = 1024
"""A generation is sealed when it has this many entries, or a quarter of the number of keys if that is more: so
the cost of the snapshot, spread over the commits between two of them, does not grow with the number of keys."""
INSPECT_S = 1.0
"""After this time an open handle compares the entries in the folder with those that it has read, at its next use."""
INSPECT_SHARE = 0.01
"""The part of the time that such comparisons may take: they are made more seldom if the folder is large."""
OPEN_TRIES = 100
FOLLOW_TRIES = 5


class Published(NamedTuple):
    """A step that was published. It is durable once its generation is synced."""

    generation: Generation
    number: int
    changed: list[str]


class NotMade(Exception):
    """There is no registry in the folder, or none that is whole yet, and this process may not make it."""


class Journal:
    """The state of a registry folder, kept up to date by reading what was published."""

    def __init__(self, root: Path, *, may_write: bool = True) -> None:
        """may_write: this process has the permission. Without it, raises NotMade if the registry is not there."""
        self.root, self._may_write = root, may_write
        self.generation: Generation  # what `_load` finds
        self._layout = Layout(root)
        self.generations, self.scratch = self._layout.generations, self._layout.scratch
        self.prepared = self._layout.prepared
        if may_write:
            self._layout.make_folders()
        try:
            self._folder = Folder(str(root))
        except (FileNotFoundError, NotADirectoryError):
            if may_write:
                raise
            raise NotMade from None
        self.state = State()
        self.number = 0
        """The number of the last entry that is in `state`."""
        self.synced = 0
        """All entries up to this number are on disk. Every thread may set it after a sync; it may be too low."""
        self.torn = False
        self._begun_at = 0
        """The number before the first entry of this generation that this handle had to read."""
        self._number_max = 0
        """The highest `number` that this handle has had."""
        self._origin_name: bytes | None = None
        """The content of the file `origin` when the journal was opened: it identifies the registry."""
        self._cut_off: tuple[str, int, int] | None = None
        """Where this handle found an entry missing that no seal stands for yet: the path of the generation, the number
        of the last entry before it, and that of the last one behind it. Those behind it are no part of the state."""
        self._is_open = False
        self._inspect_at = 0.0
        """When, on `time.monotonic()`, the folder is to be compared with what was read."""
        self._load()
        self.catch_up()
        self._settle_end()
        self._origin_name = self._layout.origin()
        self._is_open = True
        self._inspect_at = time.monotonic() + INSPECT_S

    # Reading.

    def catch_up(self) -> list[str] | None:
        """Read what others have published; returns the keys that changed, or None if that is not known."""
        changed: list[str] = []
        known = not self.torn
        if self.torn:
            self._load()
        self.torn = True
        while True:
            entry = self._read_entry(self.number + 1)
            if entry is None:
                # If the folder is in place after the entry was not there, nothing was missed.
                if not self.generation.in_place():
                    self._load()
                    known = False
                elif not self._is_open or time.monotonic() < self._inspect_at or self._inspect():
                    break
                continue
            self.number += 1
            if isinstance(entry.step, Seal):
                known = self._follow(entry.step) and known
            else:
                changed += self.state.apply(entry.step, self.number)
        if self.number < self._number_max:
            raise self._removed(
                self.number + 1, f"this process has read entries up to {self._number_max}, which no longer exist"
            )
        self._number_max = self.number
        self.torn = False
        return changed if known else None

    def _read_entry(self, number: int) -> JournalEntry | None:
        path = self.generation.entry(number)
        data = read_file(path)
        return None if data is None else decode_entry(data, path)

    def _follow(self, seal: Seal) -> bool:
        """Go on in the folder that the seal names; False if that is gone too and all was loaded anew."""
        # Sync the seal first, so that a power loss cannot keep an entry of the next generation and lose the seal before
        # it.
        sealed = self.generation
        sealed.sync()
        try:
            self.generation = Generation(str(self.generations / seal.successor))
        except FileNotFoundError:
            # pxrs moves the successor away only once a later generation is live, and then `_load` finds that one; but
            # not always at once, if another compaction makes the next one live while `_load` looks at the folders.
            for _ in range(FOLLOW_TRIES):
                self._load()
                if self.generation.number > sealed.number:
                    return False
            raise RegistryCorrupt(
                str(self.generations / seal.successor),
                f"this folder of the journal is missing, although the last entry of {sealed.path} names it as the next "
                f"one: it was removed, or is missing from a copy. Nothing was written. {self._advice('folder')}",
            ) from None
        self._begun_at = self.number
        return True

    def _load(self) -> None:
        """Set `state`, `number` and `generation` from the newest snapshot."""
        self._check_same_registry()
        self._inspect_at = 0.0
        for _ in range(OPEN_TRIES):
            folder = self._layout.newest_live()
            if folder is None and self._may_write:
                folder = self._layout.make_origin()
            elif folder is None:
                self._check_made()
            data = None if folder is None else read_file(f"{folder}/snapshot")
            if folder is None or data is None:
                continue  # another process has compacted it away meanwhile
            state, number = decode_snapshot(data, f"{folder}/snapshot")
            with contextlib.suppress(FileNotFoundError):
                self.generation = Generation(folder)
                self.state, self.number, self._begun_at = state, number, number
                return
        if self._layout.newest_live() is None:
            raise RegistryCorrupt(str(self.root), "no generation with a snapshot is left, so its state is lost")
        raise RegistryUnavailable(
            f"{self.root}: the newest generation was replaced {OPEN_TRIES} times while it was being opened"
        )

    def _check_made(self) -> None:
        """Raise NotMade if no process has made the registry yet: none has published a first snapshot."""
        name = self._layout.origin()
        first = f"{self.generations}/{(name or b'').decode()}"
        # Compaction moves the first folder away once a later one is live, which `newest_live` finds at the next look.
        if not self._is_open and (name is None or (os.path.isdir(first) and not os.path.exists(f"{first}/snapshot"))):
            raise NotMade

    def _check_same_registry(self) -> None:
        """Raise RegistryReplaced if the directory is not the one that was opened, or holds another registry."""
        if not self._folder.in_place():
            raise RegistryReplaced(
                f"{self.root}: this directory was removed or moved while it was open; nothing was written. Put it back"
            )
        if self._origin_name is not None and self._layout.origin() != self._origin_name:
            raise RegistryReplaced(
                f"{self.root}: the registry in this directory was removed while it was open, or replaced by another "
                "one; nothing was written. Put the original back, or open the registry again to use what is there now"
            )

    # Missing entries.

    def _inspect(self) -> bool:
        """Compare the entries in the folder with those that were read. False if there is more to read, or the folder
        was moved away. Raises RegistryCorrupt if one was removed, or if history goes on without this handle."""
        began = time.monotonic()
        numbers, later = self.generation.numbers(), self._layout.entry_after(self.generation)
        if numbers is None:
            return False
        read = range(self._begun_at + 1, self.number + 1)
        missing = next((n for n in read if n not in numbers and not self.generation.has_entry(n)), None)
        last = max(numbers, default=0)
        if missing is None and later is None and (last <= self.number or self._is_cut_off(last)):
            now = time.monotonic()
            self._inspect_at = now + max(INSPECT_S, (now - began) / INSPECT_SHARE)
            return True
        # Others may have published, sealed and moved the folder while it was read. First look for the entry, then for
        # the folder: the other way round, a folder that is moved in between would be taken for one without the entry.
        if (missing is None and self.generation.has_entry(self.number + 1)) or not self.generation.in_place():
            return False
        if missing is not None:
            raise self._removed(missing, "this process had read it")
        raise self._removed(self.number + 1, f"later ones exist, such as {later or last}")

    def _is_cut_off(self, last: int) -> bool:
        """Whether all entries up to this one are those that were found behind a missing one at opening."""
        cut_off = self._cut_off
        return cut_off is not None and cut_off[:2] == (self.generation.path, self.number) and last <= cut_off[2]

    def _ends_here(self) -> bool:
        """As `_inspect`, but by two names alone: the last entry that was read, and the one after the next."""
        generation = self.generation
        has_last = self.number == self._begun_at or generation.has_entry(self.number)
        if has_last and not generation.has_entry(self.number + 2):
            return True
        # The entry first, then the folder, as in `_inspect`.
        if (has_last and generation.has_entry(self.number + 1)) or not generation.in_place():
            return False
        if not has_last:
            raise self._removed(self.number, "this process had read it")
        raise self._removed(self.number + 1, f"entry {self.number + 2} exists")

    def _settle_end(self) -> None:
        """At opening: if an entry is missing and there are later ones, publish a seal under the number of the missing
        one, unless that one was synced. A process that may not write ignores the later ones until another process has
        published the seal."""
        for _ in range(OPEN_TRIES):
            numbers, later = self.generation.numbers(), self._layout.entry_after(self.generation)
            behind = [] if numbers is None else sorted(n for n in numbers if n > self.number + 1)
            if numbers is not None and not behind and later is None:
                return
            before = self.generation, self.number
            self.catch_up()
            if (self.generation, self.number) != before:
                continue  # another process has published the missing entry just now
            self._check_never_synced(behind, later)
            if not self._may_write:
                self._cut_off = self.generation.path, self.number, behind[-1]
                return
            if self.seal():
                self.catch_up()

    def _check_never_synced(self, behind: list[int], later: str | None) -> None:
        """Raise RegistryCorrupt if the next entry, which is missing, was on disk: it may have been acknowledged."""
        hole = self.number + 1
        if later is not None:
            raise self._removed(hole, f"{later} was written after this entry was on disk")
        are_old = False
        for number in reversed(behind):
            entry = self._read_entry(number)
            if entry is not None and entry.synced is not None and entry.synced >= hole:
                raise self._removed(hole, f"entry {number} was written after this entry was on disk")
            are_old |= entry is not None and entry.synced is None
        log.warning(
            "%s is missing, but %d later entries exist; they are ignored from now on. %s",
            self.generation.entry(hole),
            len(behind),
            "Some were written by version 0.1 and do not record whether the missing one was ever on disk: if there was "
            "no power loss, somebody removed it, and what was committed since then is lost"
            if are_old
            else "This is the result of a power loss; none of them had been acknowledged",
        )

    def _removed(self, number: int, proof: str) -> RegistryCorrupt:
        return RegistryCorrupt(
            self.generation.entry(number),
            f"this entry of the journal is missing, although {proof}: it was removed, or the file system lost it. "
            f"Nothing was written. {self._advice('file')}",
        )

    def _advice(self, missing: str) -> str:
        return (
            f"Stop all processes that use this registry; then put the {missing} back from a copy, or restore all of "
            f"{self.root} from a copy. docs/registry.md says what to do if there is none"
        )

    # Writing.

    def publish(self, scratch: str, step: Change | Seal) -> Published | None:
        """Publish a prepared step as the next number; None if another process was first: catch up and try again.

        On success the step is applied, and its generation is to be synced before it is acknowledged.
        """
        generation = self.generation
        if self._is_open and not self._ends_here():
            return None
        self.torn = True
        try:
            os.link(scratch, generation.entry(self.number + 1))
        except (FileExistsError, FileNotFoundError):
            if not os.path.exists(scratch):
                raise RegistryUnavailable(
                    f"{scratch}, a temporary file of this commit, was removed before the commit was published, and "
                    f"nothing was changed: try again, and exclude {self.root} from programs that remove temporary files"
                ) from None
            self.torn = False
            return None
        try:
            in_place = generation.in_place()
        except (OSError, RegistryReplaced) as error:
            raise OutcomeUnknown(
                f"{generation.path}: the entry was published, but whether it is in the live "
                f"generation could not be checked: {error}"
            ) from error
        if not in_place:
            # Either other processes have sealed the generation and moved the folder behind this entry, or the link went
            # into a folder that was being removed. Which of the two is not known, so the outcome is unknown.
            raise OutcomeUnknown(f"{generation.path} was compacted at the moment of the commit")
        changed: list[str] = []
        if isinstance(step, Change):  # a seal is followed by reading it, as all others do
            self.number += 1
            changed = self.state.apply(step, self.number)
            self._number_max = self.number
        self.torn = False
        return Published(generation, self.number, changed)

    # Compaction.

    @property
    def compaction_due(self) -> bool:
        return self.number - self._begun_at >= max(ENTRIES_MIN, len(self.state.records) // 4)

    def inspect_next(self) -> None:
        """Let the next `catch_up` compare the whole folder with what was read, however short the last time is ago.

        Called before a compaction: it would move the folder away, and with it the proof that an entry was removed."""
        self._inspect_at = 0.0

    def seal(self) -> bool:
        """Let history go on in a new folder, which `catch_up` then finds; False if others were first."""
        step = Seal(self._layout.new_folder(self.generation.number + 1))
        with self.prepared(encode_entry(step, self.synced)) as scratch:
            sealed = self.publish(scratch, step) is not None
        if not sealed:
            # The process that published first may have compacted it away already.
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.generations / step.successor)
        return sealed

    def snapshot(self) -> tuple[Generation, bytes]:
        """What `finish_compaction` needs: the present generation and state."""
        return self.generation, encode_snapshot(self.state, self.number)

    def finish_compaction(self, generation: Generation, snapshot: bytes) -> None:
        """Make the generation live, then move away all before it. Needs no lock, and may be left undone."""
        self._layout.publish_snapshot(generation.path, snapshot)
        if os.path.exists(f"{generation.path}/snapshot"):
            generation.sync()
            self._layout.discard_before(generation.number)
