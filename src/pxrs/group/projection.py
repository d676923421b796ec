"""A group's state as files that a person can read, beside a registry that is kept in files (F1, R9).

    consumer-groups/<group>/members.json                             who is there
    consumer-groups/<group>/owners.json                              who has which partition, under which epoch
    consumer-groups/<group>/offsets/<topic>/partition-<n>.offset     the offset of the next message to read

The registry is authoritative. pxrs writes these files and never reads them to decide anything. Each file is replaced as
a whole, at most about a second after a change of the group; files of one group may show different moments.

Who writes the files of a group:
- the leader of the group, while it leads: as work of `Registry.housekeeping`, so that no commit waits for the disk;
- a member that leaves the group, if no leader remains;
- an administrator who changes or deletes a group, and the janitor (`pxrs.upkeep`), if no member leads the group.

An flock on `consumer-groups/.lock` lets one process write at a time. It is taken before the registry is read, so the
process that writes last has read the latest state.

On failure: an error is logged, once until a write succeeds again, and has no other effect. The next write corrects the
files. The files are not synced to the disk: after a power loss they may be missing or outdated until the next change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from pxrs.errors import Closed
from pxrs.group.records import Keys, Leader, Member
from pxrs.group.snapshot import GroupState
from pxrs.registry.contract import Entry, Registry
from pxrs.registry.watch import Watch
from pxrs.scheduler import Next, Scheduled
from pxrs.wording import microseconds, rfc3339

_logger = logging.getLogger(__name__)

FOLDER: Final = "consumer-groups"
INTERVAL_S: Final = 1.0
"""How long after a change the files are written, with the changes that followed meanwhile."""
LOCK_WAIT_S: Final = 1.0
"""How long `refresh` waits for another process that holds the lock."""
CLOSE_WAIT_S: Final = 5.0
"""How long `Projection.close` waits for a refresh that is under way."""
_NAME_BYTES_MAX: Final = 200
"""Of a folder's name; a longer one is replaced by the topic's id. File systems allow 255."""


class _Next(Enum):
    """What the work of a projection does when it runs next. See `Projection`."""

    OPEN = auto()
    PAUSE = auto()
    WRITE = auto()


Names = Callable[[], Mapping[str, str]]
"""Gives the names of topics by their ids."""


def render(entries: Iterable[Entry], keys: Keys, names: Mapping[str, str]) -> dict[str, str]:
    """The text of each file, by its path in the group's folder. Empty if there is no such group.

    entries:  all keys of the group
    names:    names of topics by id. Topics that are not in it get the names that the members' records have"""
    state = GroupState.of(keys, entries)
    if not state.is_there:
        return {}
    shown = _Shown(state)
    known = {id: read.name for id, read in state.sources.items() if read.name}
    known |= state.topics_read()
    known = {topic: name for topic, name in known.items() if topic not in names}
    names = _distinct({**known, **names})
    files = {"members.json": _json(shown.list_members(names)), "owners.json": _json(shown.list_owners(names))}
    for (topic, partition), (checkpoint, _) in state.checkpoints.items():
        path = f"offsets/{_folder(names.get(topic, topic), topic)}/partition-{partition}.offset"
        files[path] = _json(
            {
                "offset": checkpoint.offset,
                "when": _moment(checkpoint.when),
                "by": checkpoint.by,
                "epoch": checkpoint.epoch,
            }
        )
    return files


class _Shown:
    """A group's members and owners as the values of the JSON files."""

    def __init__(self, state: GroupState) -> None:
        self._state, self._meant = state, state.meant_for()

    def list_members(self, names: Mapping[str, str]) -> dict[str, Any]:
        leader = self._state.leader
        members = sorted(self._state.members.items(), key=lambda each: (each[1].since, each[0]))
        return {
            "generation": self._state.generation,
            "leader": None if leader is None else self._name(leader[0].incarnation),
            "members": [
                {
                    "name": member.name,
                    "host": member.host,
                    "pid": member.pid,
                    **_topics_of(member, names),
                    "since": _moment(member.since),
                    "incarnation": incarnation,
                }
                for incarnation, member in members
            ],
        }

    def list_owners(self, names: Mapping[str, str]) -> dict[str, Any]:
        """By topic and partition. `owner` is null also if the registry still names an owner whose lease has expired."""
        topics: dict[str, dict[str, Any]] = {}
        for place in sorted(
            {*self._state.checkpoints, *self._state.owners}, key=lambda each: (names.get(each[0], each[0]), each)
        ):
            topic, partition = place
            owner, _ = self._state.owner(place)
            if place in self._state.checkpoints or owner.incarnation in self._state.members:
                topics.setdefault(names.get(topic, topic), {})[str(partition)] = {
                    "owner": self._name(owner.incarnation),
                    "epoch": owner.epoch,
                    "meant_for": self._name(self._meant.get(place)),
                }
        return topics

    def _name(self, incarnation: str | None) -> str | None:
        member = self._state.members.get(incarnation or "")
        return None if member is None else member.name


def _topics_of(member: Member, names: Mapping[str, str]) -> dict[str, Any]:
    """What a member reads: `topic`, or `topics` if it reads several."""
    topics = [names.get(each.id, each.id) for each in member.reads]
    return {"topic": topics[0]} if len(topics) == 1 else {"topics": topics}


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Names by id, each name once: if a topic was deleted and created again, only the last id in `names` has the
    name."""
    last = {name: topic for topic, name in names.items()}
    return {topic: name for name, topic in last.items()}


def _folder(name: str, topic: str) -> str:
    """The folder for a topic's name, quoted; the topic's id if the name cannot be that of a folder. The name of a
    source that is no topic may have any characters."""
    quoted = quote(name, safe="")
    return topic if quoted.strip(".") == "" or len(quoted) > _NAME_BYTES_MAX else quoted


def _moment(seconds: float) -> str | None:
    time_us = microseconds(seconds)
    return None if time_us is None else rfc3339(time_us)


def _json(value: Any) -> str:
    return _indented(value, "") + "\n"


def _indented(value: Any, margin: str) -> str:
    """JSON with one line for each partition and each member: an object without nested ones is on one line."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not any(isinstance(each, dict | list) for each in items):
        return json.dumps(value, ensure_ascii=False)
    inner = [_indented(each, f"{margin}  ") for each in items]
    if isinstance(value, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in zip(value, inner, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(f"{margin}  {text}" for text in inner) + f"\n{margin}{closing}"


def projection_of(registry: Registry, keys: Keys, names: Names | None = None) -> Projection | None:
    """None if the registry is not kept in files."""
    return None if registry.folder is None else Projection(registry, keys, registry.folder / FOLDER, names)


class Projection:
    """Writes the files of one group. Threads share it. No method raises an error of the registry or of the disk.

    What the work of a started projection does when it runs:

    | state of `_next` | what it does | next state | runs again |
    |---|---|---|---|
    | OPEN | opens a watch on all keys of the group | WRITE; OPEN if that failed | after `INTERVAL_S` |
    | PAUSE | a change has woken it: lets more changes come | WRITE | after `INTERVAL_S` |
    | WRITE | writes the files | PAUSE | after a change |
    | WRITE, but the files could not be written | | WRITE | after `INTERVAL_S` |
    """

    def __init__(self, registry: Registry, keys: Keys, root: Path, names: Names | None = None) -> None:
        self._registry, self._keys, self._root, self._names = registry, keys, root, names
        self._guard = threading.Lock()
        """Guards `_is_closed`, and `_scheduled` until it is set."""
        self._is_closed = False
        self._scheduled: Scheduled | None = None
        """The work; None before `start`."""
        self._next = _Next.OPEN
        """Only the work reads and writes it."""
        self._watch: Watch | None = None
        """On all keys of the group. Opened by the work; closed by the work or by `close`."""
        self._has_failed = False
        """Whether the last refresh failed: then the next failure is not logged."""

    def start(self) -> None:
        """Write the files from now on, after each change. Idempotent. Called when the member has become the leader."""
        with self._guard:
            if self._scheduled is None and not self._is_closed:
                name = f"pxrs-projection-{self._keys.group}"
                try:
                    self._scheduled = self._registry.housekeeping.add(name, self._work)
                except RuntimeError as error:  # no thread can be started: the member's next round calls `start` again
                    self._log(error)

    def close(self) -> None:
        """Stop, and write a last time: always if this was started, otherwise only if nobody leads the group. Called
        when the member has left the group."""
        with self._guard:
            self._is_closed = True
            scheduled = self._scheduled
        if scheduled is not None:
            scheduled.end(CLOSE_WAIT_S)
        if self._watch is not None:
            self._watch.close()
        self.refresh(only_if_nobody_leads=scheduled is None)

    def refresh(self, *, only_if_nobody_leads: bool = False) -> bool:
        """Write the files that differ from what the registry has, and remove those of what it does not have. False if
        that failed, or another process has held the lock for `LOCK_WAIT_S`."""
        try:
            self._root.mkdir(exist_ok=True)
            with _locked(self._root) as is_locked:
                if not is_locked:
                    return False
                entries = self._registry.scan(self._keys.root)
                if only_if_nobody_leads and _is_led(entries, self._keys):
                    return True
                files = render(entries, self._keys, self._names() if self._names is not None else {})
                _replace(self._root / self._keys.group, files)
            self._has_failed = False
            return True
        except Closed:  # the registry or the log was closed: nothing can be read any more
            return True
        except Exception as error:  # noqa: BLE001 - logged; no caller depends on these files
            self._log(error)
            return False

    def _log(self, error: Exception) -> None:
        if not self._has_failed:
            _logger.warning("group %s: its readable files could not be written: %s", self._keys.group, error)
        self._has_failed = True

    def _work(self) -> Next | None:
        if self._is_closed:
            return None
        if self._watch is not None and self._watch.is_closed:  # the registry was closed
            return None
        if self._next is _Next.OPEN:
            return self._open()
        if self._next is _Next.PAUSE:
            self._next = _Next.WRITE
            return Next(pause_s=INTERVAL_S)
        if not self.refresh():
            return Next(pause_s=INTERVAL_S)
        self._next = _Next.PAUSE
        return Next()

    def _open(self) -> Next | None:
        with self._guard:  # `start` holds it until `_scheduled` is set
            scheduled = self._scheduled
        assert scheduled is not None
        try:
            self._watch = self._registry.watch(self._keys.root)
        except Closed:
            return None
        except Exception as error:  # noqa: BLE001 - as in `refresh`
            self._log(error)
            return Next(pause_s=INTERVAL_S)
        if self._is_closed:  # `close` has not waited for this call, and has found no watch
            self._watch.close()
            return None
        self._watch.subscribe(scheduled.wake)
        self._next = _Next.WRITE
        return Next(pause_s=INTERVAL_S)


def _is_led(entries: Iterable[Entry], keys: Keys) -> bool:
    found = {entry.key: entry for entry in entries}
    leader = found.get(keys.leader)
    return leader is not None and keys.member(Leader.load(leader.key, leader.value).incarnation) in found


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock of all groups' files; False if another process has held it for `LOCK_WAIT_S`. The lock's file is
    never removed: two processes could hold locks on two files of that name."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _try_lock(descriptor, time.monotonic() + LOCK_WAIT_S)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, until: float) -> bool:
    import fcntl  # not on Windows, where this module is imported too, but no registry is kept in files

    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)


def _replace(folder: Path, files: Mapping[str, str]) -> None:
    """Make the folder hold these files and no others. The caller holds the lock."""
    if not files:
        if folder.exists():
            shutil.rmtree(folder)
        return
    there = {Path(parent, name) for parent, _, names in os.walk(folder) for name in names}
    wanted = {folder / path: text.encode() for path, text in files.items()}
    for parent in sorted({path.parent for path in wanted}):
        parent.mkdir(parents=True, exist_ok=True)
    fresh = folder / ".new"
    for path, data in wanted.items():
        if path not in there or path.read_bytes() != data:
            fresh.write_bytes(data)
            fresh.replace(path)
    for path in there - wanted.keys():
        path.unlink(missing_ok=True)
    for name, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            os.rmdir(name)
