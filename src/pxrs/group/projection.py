"""A group's state as files that a person can read, beside a registry that is kept in files (F1, R9).

    consumer-groups/<group>/members.json                             the members that are there
    consumer-groups/<group>/owners.json                              the owner and epoch of each partition
    consumer-groups/<group>/offsets/<topic>/partition-<n>.offset     the offset of the next message to read

It is a projection: the registry decides, and pxrs never reads these files back. They are at most about a second behind
the registry. Each file is replaced as a whole; the files together do not show one moment.

Who writes: the leader, on a thread of its own, so that no commit waits for it; a member that leaves a group without a
leader; an administrator who changes a group without members, or deletes it; and the janitor. One process writes at a
time, under a lock that the kernel releases when the process ends. The lock is taken before the registry is read, so the
last process to write has read the newest state.

On failure: the failure is logged, once until writing works again, and has no other effect. The next process that writes
corrects what was left. Nothing is synced: after a power loss the files may be old or missing until the next change.
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
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from pxrs.errors import Closed
from pxrs.group.records import Keys, Leader
from pxrs.group.snapshot import GroupState
from pxrs.registry.contract import Entry, Registry
from pxrs.registry.watch import Watch
from pxrs.wording import microseconds, rfc3339

_logger = logging.getLogger(__name__)

FOLDER: Final = "consumer-groups"
INTERVAL_S: Final = 1.0
"""How long after a change the files are written; further changes in that time are written with it."""
LOCK_WAIT_S: Final = 1.0
"""How long to wait for another process that writes the same files."""
CLOSE_WAIT_S: Final = 5.0
_NAME_BYTES_MAX: Final = 200

Names = Callable[[], Mapping[str, str]]
"""Gives the names of topics by their ids."""


def render(entries: Iterable[Entry], keys: Keys, names: Mapping[str, str]) -> dict[str, str]:
    """The files of a group, by their paths within its folder, from all that the registry holds of the group; none if
    the group does not exist. names: the names of topics by id; names that members know are added to them."""
    state = GroupState.of(keys, entries)
    if not state.is_there:
        return {}
    shown = _Shown(state)
    known = {id: read.name for id, read in state.sources.items() if read.name}
    known |= {member.topic: member.topic_name for member in state.members.values()}
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
    """The parts of a group that the files show."""

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
                    "topic": names.get(member.topic, member.topic),
                    "since": _moment(member.since),
                    "incarnation": incarnation,
                }
                for incarnation, member in members
            ],
        }

    def list_owners(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The owners, by topic and partition. An owner that is gone is left out, even if nobody has claimed the
        partition yet."""
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


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """The names of topics, each used once: if a topic was deleted and created again, its name belongs to the later
    id."""
    last = {name: topic for topic, name in names.items()}
    return {topic: name for name, topic in last.items()}


def _folder(name: str, topic: str) -> str:
    """The name of a topic as the name of a folder. A source that is no topic may have any name."""
    quoted = quote(name, safe="")
    return topic if quoted.strip(".") == "" or len(quoted) > _NAME_BYTES_MAX else quoted


def _moment(seconds: float) -> str | None:
    time_us = microseconds(seconds)
    return None if time_us is None else rfc3339(time_us)


def _json(value: Any) -> str:
    return _indented(value, "") + "\n"


def _indented(value: Any, margin: str) -> str:
    """JSON with a line for each partition and each member."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not any(isinstance(each, dict | list) for each in items):
        return json.dumps(value, ensure_ascii=False)
    inner = [_indented(each, f"{margin}  ") for each in items]
    if isinstance(value, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in zip(value, inner, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(f"{margin}  {text}" for text in inner) + f"\n{margin}{closing}"


def projection_of(registry: Registry, keys: Keys, names: Names | None = None) -> Projection | None:
    """The projection of a group; None if the registry is not kept in files."""
    return None if registry.folder is None else Projection(registry, keys, registry.folder / FOLDER, names)


class Projection:
    """Keeps the files of one group up to date, from `start` until `close`. Raises no errors."""

    def __init__(self, registry: Registry, keys: Keys, root: Path, names: Names | None = None) -> None:
        self._registry, self._keys, self._root, self._names = registry, keys, root, names
        self._watch: Watch | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._is_troubled = False

    def start(self) -> None:
        """Begin to write: this member leads."""
        with self._guard:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name=f"pxrs-projection-{self._keys.group}", daemon=True)
                with contextlib.suppress(RuntimeError):  # the limit of threads is reached: the member calls this again
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Write a last time, unless another member leads and writes. Called after the member has left the group."""
        with self._guard:
            self._closing.set()
            thread, watch = self._thread, self._watch
        if watch is not None:
            watch.close()
        if thread is not None:
            thread.join(CLOSE_WAIT_S)
        self.refresh(only_if_nobody_leads=thread is None)

    def refresh(self, *, only_if_nobody_leads: bool = False) -> bool:
        """Write the files that differ from the registry, and remove those that it does not have. False if it has to be
        done again."""
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
            self._is_troubled = False
            return True
        except Closed:  # the registry or the log is closed: nothing can be written any more
            return True
        except Exception as error:  # noqa: BLE001 - logged: a projection that fails must not end the member
            if not self._is_troubled:
                _logger.warning("group %s: its readable files could not be written: %s", self._keys.group, error)
            self._is_troubled = True
            return False

    def _run(self) -> None:
        try:
            watch = self._registry.watch(self._keys.root)
        except Closed:
            return
        except Exception as error:  # noqa: BLE001 - see above
            _logger.warning("group %s: its readable files are not kept: %s", self._keys.group, error)
            return
        with self._guard:
            self._watch = watch
        try:
            # Pause first: changes come in bursts, and a rebalance must not be slowed down.
            while not self._closing.wait(INTERVAL_S):
                if not self.refresh():
                    watch.wake()
                watch.wait()
        except Closed:
            return
        finally:
            watch.close()


def _is_led(entries: Iterable[Entry], keys: Keys) -> bool:
    found = {entry.key: entry for entry in entries}
    leader = found.get(keys.leader)
    return leader is not None and keys.member(Leader.load(leader.key, leader.value).incarnation) in found


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock for writing, if it is free soon. The lock file is never removed, so that all processes lock the
    same file."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _try_lock(descriptor, time.monotonic() + LOCK_WAIT_S)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, until: float) -> bool:
    import fcntl  # imported here: this module is also imported on systems that have no fcntl, and no registry in files

    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)


def _replace(folder: Path, files: Mapping[str, str]) -> None:
    """Make the folder hold exactly these files. The caller holds the lock."""
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
        with contextlib.suppress(OSError):  # only empty folders are removed
            os.rmdir(name)
