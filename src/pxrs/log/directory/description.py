"""`topic.json`, the description of a topic in its folder, and the link that gives the topic its name.

`topics/<name>` is a link to `../logs/<id>`, the topic's folder. A deletion removes the link before the folder, and a
creation makes the link last, so a link always points to a whole folder. If `topic.json` is missing or damaged all the
same, or describes another topic than the link says, the topic counts as damaged: it cannot be opened, but its name is
taken, and it can be deleted. So it is with a topic whose `topic.json` this process may not read; that is reported as
LogNotReadable, not as damage. A link whose folder is missing is no topic: somebody has removed the folder by hand.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import xxhash

from pxrs import disk
from pxrs.errors import DamagedFrame, LogBusy, LogNotReadable, MisplacedFile
from pxrs.log.contract import DamagedTopic
from pxrs.model import Topic

META: Final = "topic.json"
_CHECKSUM: Final = "checksum"
_FIELDS: Final = frozenset(field.name for field in fields(Topic))
_LOOKS_MAX: Final = 1000
"""How often `look_up` starts again because the topic was deleted, and perhaps created again, between two system calls.
"""
_SETTLED_NS: Final = 100_000_000
"""How old a file must be for its times to tell it from a later one: a file system's clock ticks every few milliseconds,
so two files that are written within one tick, one after the other in the same inode, may look the same."""


def write_topic(folder: Path, topic: Topic) -> None:
    """Write `topic.json` of a topic, durably: readers find the former file or this one. The caller syncs the folder."""
    described = asdict(topic)
    text = json.dumps({**described, _CHECKSUM: _checksum(described)}, indent=2)
    disk.replace_file(str(folder / META), text.encode(), is_durable=True, mode=0o666)


def read_topic(path: Path) -> Topic:
    """The topic that this file describes. Raises DamagedFrame."""
    return _parsed(str(path), path.read_bytes())


def _parsed(path: str, data: bytes) -> Topic:
    try:
        found = json.loads(data)
        checksum = found.pop(_CHECKSUM, None)
        if checksum != _checksum(found):
            raise DamagedFrame(path, 0, f"the checksum {checksum!r} does not match")
        extra = {key: value for key, value in found.items() if key not in _FIELDS}
        kept = {key: value for key, value in found.items() if key in _FIELDS}
        return Topic(**{**kept, "extra": {**kept.get("extra", {}), **extra}})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise DamagedFrame(path, 0, f"it does not describe a topic: {error}") from error


def _checksum(described: dict[str, Any]) -> str:
    """The checksum of the description. It does not depend on the order of the keys or on white space."""
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())


class Descriptions:
    """Reads descriptions, and remembers each as long as its file is the same: `topic.json` is never written in place,
    so a change gives it another inode or other times. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, ...], Topic]] = {}
        """By the path of the file: its identity, and what it describes."""

    def read(self, path: str) -> Topic:
        """As `read_topic`. Raises OSError, DamagedFrame."""
        known = self._known.get(path)
        if known is not None and known[0] == _identity(os.stat(path)):
            return known[1]
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            topic = _parsed(path, file.read())
        if status.st_mtime_ns + _SETTLED_NS < time.time_ns():
            self._known[path] = _identity(status), topic
        return topic

    def keep_only(self, folders: Collection[str]) -> None:
        """Forget the topics whose folder's name, their id, is not among these."""
        for path in [path for path in self._known if path.rsplit("/", 2)[-2] not in folders]:
            self._known.pop(path, None)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def look_up(topics: Path, name: str, known: Descriptions | None = None) -> Topic | DamagedTopic | None:
    """The topic of this name; DamagedTopic if its description cannot be used; None if there is no such topic. Raises
    OSError if the file cannot be read for lack of memory or file descriptors.

    known: remembers what was read before."""
    link, read = f"{topics}/{name}", (known or Descriptions()).read
    for _ in range(_LOOKS_MAX):
        target = target_of(link)
        folder = link if target is None else f"{topics.parent}/logs/{target}"
        path = f"{folder}/{META}"
        try:
            topic = read(path)
        except (FileNotFoundError, NotADirectoryError):
            if target_of(link) != target:
                continue  # it was deleted meanwhile
            if not _is_folder(folder):
                return None
            what = "it is missing, and without it the topic cannot be opened"
            return DamagedTopic(name, target, DamagedFrame(path, 0, what))
        except DamagedFrame as error:
            return DamagedTopic(name, target, error)
        except OSError as error:
            if error.errno in (*disk.NO_DESCRIPTORS, errno.ENOMEM):
                raise  # this says nothing about the file
            if isinstance(unread := disk.log_error(error, path), LogNotReadable):
                return DamagedTopic(name, target, unread)
            what = f"it cannot be read: {error.strerror}"
            return DamagedTopic(name, target, DamagedFrame(path, 0, what))
        if topic.name != name or target not in (None, topic.id):
            what = f"it describes topic {topic.name} with the id {topic.id}, and {name} leads to it in {target}"
            return DamagedTopic(name, target, MisplacedFile(path, 0, what))
        return topic
    raise LogBusy(f"the topic {name} is deleted and made again faster than it can be opened")


def _is_folder(path: str) -> bool:
    """Whether the path is a folder and not a link: a link may have been made in its place a moment ago."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def target_of(link: str | Path) -> str | None:
    """The name of the folder that a link of a topic points to; None if the path does not exist or is no link."""
    try:
        return os.path.basename(os.readlink(link))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # no link
            return None
        raise
