"""`topic.json`, the description of a topic in its folder, and the link that gives the topic its name.

`topics/<name>` is a link to `../logs/<id>`, the topic's folder. A deletion removes the link before the folder, and a
creation makes the link last, so a link always points to a whole folder. If `topic.json` is missing or damaged all the
same, or describes another topic than the link says, the topic counts as damaged: it cannot be opened, but its name is
taken, and it can be deleted. A link whose folder is missing is no topic: somebody has removed the folder by hand.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import xxhash

from pxrs import disk
from pxrs.errors import DamagedFrame, LogBusy, MisplacedFile
from pxrs.log.contract import DamagedTopic
from pxrs.model import Topic

META: Final = "topic.json"
_CHECKSUM: Final = "checksum"
_LOOKS_MAX: Final = 1000
"""How often `look_up` starts again because the topic was deleted, and perhaps created again, between two system calls.
"""


def write_topic(folder: Path, topic: Topic) -> None:
    """Write `topic.json` of a topic, durably: readers find the former file or this one. The caller syncs the folder."""
    described = asdict(topic)
    text = json.dumps({**described, _CHECKSUM: _checksum(described)}, indent=2)
    disk.replace_file(str(folder / META), text.encode(), is_durable=True, mode=0o666)


def read_topic(path: Path) -> Topic:
    """The topic that this file describes. Raises DamagedFrame."""
    try:
        found = json.loads(path.read_bytes())
        checksum = found.pop(_CHECKSUM, None)
        if checksum != _checksum(found):
            raise DamagedFrame(str(path), 0, f"the checksum {checksum!r} does not match")
        known = {field.name for field in fields(Topic)}
        extra = {key: value for key, value in found.items() if key not in known}
        kept = {key: value for key, value in found.items() if key in known}
        return Topic(**{**kept, "extra": {**kept.get("extra", {}), **extra}})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise DamagedFrame(str(path), 0, f"it does not describe a topic: {error}") from error


def _checksum(described: dict[str, Any]) -> str:
    """The checksum of the description. It does not depend on the order of the keys or on white space."""
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())


def look_up(topics: Path, name: str) -> Topic | DamagedTopic | None:
    """The topic of this name; DamagedTopic if its description cannot be used; None if there is no such topic. Raises
    OSError if the file cannot be read for lack of memory or file descriptors."""
    link = topics / name
    for _ in range(_LOOKS_MAX):
        target = target_of(link)
        folder = link if target is None else topics.parent / "logs" / target
        try:
            topic = read_topic(folder / META)
        except (FileNotFoundError, NotADirectoryError):
            if target_of(link) != target:
                continue  # it was deleted meanwhile
            if not _is_folder(folder):
                return None
            what = "it is missing, and without it the topic cannot be opened"
            return DamagedTopic(name, target, DamagedFrame(str(folder / META), 0, what))
        except DamagedFrame as error:
            return DamagedTopic(name, target, error)
        except OSError as error:
            if error.errno in (*disk.NO_DESCRIPTORS, errno.ENOMEM):
                raise  # this says nothing about the file
            what = f"it cannot be read: {error.strerror}"
            return DamagedTopic(name, target, DamagedFrame(str(folder / META), 0, what))
        if topic.name != name or target not in (None, topic.id):
            what = f"it describes topic {topic.name} with the id {topic.id}, and {name} leads to it in {target}"
            return DamagedTopic(name, target, MisplacedFile(str(folder / META), 0, what))
        return topic
    raise LogBusy(f"the topic {name} is deleted and made again faster than it can be opened")


def _is_folder(path: Path) -> bool:
    """Whether the path is a folder and not a link: a link may have been made in its place a moment ago."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def target_of(link: Path) -> str | None:
    """The name of the folder that a link of a topic points to; None if the path does not exist or is no link."""
    try:
        return os.path.basename(os.readlink(link))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # no link
            return None
        raise
