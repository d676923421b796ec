"""Which keys of the registry a caller may read and write. Nothing here does I/O.

Groups, queues and publishing keep their state in keys of the registry, and clients read and write these keys by
themselves. So a permission for a group or a queue is one for its keys. Keys name queues and topics by id: `Names` tells
the name that belongs to an id.

What each role does with which keys, as recorded from real programs (tests/unit/server/test_auth_roles.py runs them):

    producer                  reads `sources/<topic>` if the log has no such topic
    member of a group         reads and watches `groups/<group>/`, reads `sources/<topic>`, `topics/<id>/start` and
                              `topics/<id>/gate`;
                              writes `groups/<group>/`, of which it deletes only what `_PASSING` lists, and
                              `topics/<id>/gate`
    reader of groups          scans `groups/`, `sources/`, and all of `groups/<group>/`
    administrator of a group  the same as a member; deletes checkpoints and other guards too
    putter of a queue         reads `queues/<queue>`, `standing/<id>`, `items/<id>/sequence`; scans `queues/`; creates
                              keys in `items/<id>/ready/` and `items/<id>/delayed/`, puts `items/<id>/sequence`; in a
                              transaction also its own keys in `takers/` and `outcomes/`
    taker of a queue          the same; reads and writes all of `items/<id>/`, reads and watches `takers/`, scans
                              `deleted/`; deletes outcomes of takers that are gone, and what is left of deleted queues
    administrator of a queue  the same; writes and deletes `queues/<queue>`, creates and deletes `standing/<id>`,
                              writes `deleted/<id>`
    driver of Spark           scans `spark/` and `spark/routed/`, reads or creates `spark/registry`; writes
                              `spark/<topic id>/<query>` and `spark/routed/<hub>.<query>`
    copier into a topic       reads and writes `topics/<id>/copies/<source id>`
    upkeep, in the server     writes `upkeep/` and `topics/<id>/start`

A prefix is readable if every key below it is. The folders in `LISTED`, which hold keys of many groups, queues or
topics, can be scanned by every caller, who gets the entries that it may read.

Takers trust each other in one thing: `takers/` and `outcomes/` do not name queues, so that who may put into one queue
can see the ids of all takers, and can write their outcomes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from pxrs.errors import InvalidKey
from pxrs.registry.values import ABSENT, Entry, check_key
from pxrs.server.auth.permissions import Grants

Rights = Mapping[str, str]
"""By action: the letters of what it permits on a key: r to read, expect and watch it; c to create it, in a commit that
expects it ABSENT; p to put it in any case; d to delete it. To put it as an ephemeral key needs d too, because the end
of the lease deletes the key: otherwise a member could delete a guard so (R4)."""

_GROUP: Final[Rights] = {"read": "r", "member": "rcp", "admin": "rcpd"}
_GROUP_PASSING: Final[Rights] = {"read": "r", "member": "rcpd"}
_PASSING: Final = frozenset({"members", "targets", "pinning", "paused", "assignment"})
"""What members delete of their group. The other keys guard writes and live as long as the group (R4)."""
_OF_A_TOPIC: Final = frozenset({"owners", "checkpoints", "starts", "pinning", "paused"})
"""Folders of a group whose keys go on with the id of a topic."""
_QUEUE: Final[Rights] = {"describe": "r", "admin": "rcpd"}
_STANDING: Final[Rights] = {"describe": "r", "admin": "rcd"}
_DELETED: Final[Rights] = {"take": "rd", "admin": "rcpd"}
_ITEMS: Final[Rights] = {"read": "r", "take": "rcpd"}
_ITEMS_TO_PUT: Final[Rights] = {"put": "c", "read": "r", "take": "rcpd"}
_SEQUENCE: Final[Rights] = {"put": "rcp", "read": "r", "take": "rcpd"}
_TAKER: Final[Rights] = {"describe": "r", "put": "rc"}
_TAKERS: Final = "takers/"
"""Keys here are always ephemeral, and only new ones are permitted, so that to create one needs no right to delete."""
_OUTCOME: Final[Rights] = {"put": "rcpd"}
_TOPIC: Final[Rights] = {"read": "r"}
_GATE: Final[Rights] = {"read": "rcp"}
"""For members of groups only: who gives a group a checkpoint writes the gate (O10)."""
_COPY: Final[Rights] = {"write": "rcp"}
_MANIFEST: Final[Rights] = {"write": "rcpd"}
_SOURCE: Final[Rights] = {"describe": "r", "admin": "rcpd"}
_INTERNAL: Final[Rights] = {"read": "r"}

INTERNAL: Final = ("upkeep/", "cluster/", "server/")
"""Prefixes of keys that only the server writes, whatever a token permits (W4, C6)."""
HIDDEN: Final = "server/"
"""Prefix of keys that no caller may read, whatever a token permits: they hold secrets of the server."""
LISTED: Final = ("groups/", "queues/", "sources/", "deleted/", "spark/", "spark/routed/")
_NAMED: Final = {
    "groups/": ("group", "read", "/"),
    "queues/": ("queue", "describe", ""),
    "sources/": ("topic", "describe", ""),
}
"""Folders whose keys go on with a name: its kind, the action that lets a caller read the keys, and what follows."""
_REGISTRY_ID: Final = "spark/registry"
"""The key with the id of the registry. Every caller may read it, and who may write anything may create it."""
_OPEN: Final = "groups"
"""A key that does not exist. Every caller may read it: workers do, to find out whether the registry answers."""
_ID: Final = re.compile(r"[0-9a-f]{32}")
PAGE: Final = 1_000
"""How many entries are read at a time of a folder that the caller may read in part."""


class Names(Protocol):
    """Tells names by ids. The calls may read the log and the registry, so they block."""

    def once(self) -> Names:
        """The same names for one call of a client, who may name thousands of ids that nothing has: the topics of the
        log are listed at most once for all of them."""

    def topic(self, id: str) -> str | None:
        """The name of the topic with this id; None if there is none, or not any more."""

    def queue(self, id: str) -> str | None:
        """The name of the queue with this id, also of a deleted one of which keys are left; None if there is none."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a key belongs to."""

    kind: str
    rights: Rights
    name: str | None
    """None: it is not known, or all names are concerned."""
    is_any: bool = False
    """The key belongs to all callers that have the right on at least one name."""


def letters_of(grants: Grants, names: Names, key: str) -> str:
    """What the caller may do with this key: see `Rights`."""
    try:
        check_key(key)
    except InvalidKey:
        return "rcpd" if grants.is_admin else ""  # the registry refuses the key, with an error that says why
    if key.startswith(HIDDEN):
        return ""
    if key == _REGISTRY_ID:
        return "rc" if grants.is_writer else "r"
    is_internal = _is_internal(key)
    if grants.is_admin:
        return "r" if is_internal else "rcpd"
    found = "r" if grants.is_reader or key == _OPEN else ""
    if grants.has_prefixes:
        if grants.may("registry", key, "write"):
            found += "r" if is_internal else "rcpd"
        elif grants.may("registry", key, "read"):
            found += "r"
    subject = _subject(grants, names, key)
    if subject is not None:
        for action, letters in subject.rights.items():
            if subject.is_any:
                is_permitted = grants.may_any(subject.kind, action)
            else:
                is_permitted = grants.may(subject.kind, subject.name, action)
            found += letters if is_permitted else ""
    return found


def _is_internal(key: str) -> bool:
    return key.startswith(INTERNAL) or (key.startswith("topics/") and key.endswith("/start"))


def _subject(grants: Grants, names: Names, key: str) -> _Subject | None:
    """None if the key belongs to nothing that is known here."""
    match key.split("/"):
        case ["groups", group, *rest]:
            return _Subject("group", _GROUP_PASSING if rest and rest[0] in _PASSING else _GROUP, group)
        case ["queues", name, *_]:
            return _Subject("queue", _QUEUE, name)
        case ["standing", id, *_]:
            return _Subject("queue", _STANDING, _name_of(names.queue, id))
        case ["deleted", id, *_]:
            return _Subject("queue", _DELETED, _name_of(names.queue, id))
        case ["items", id, "sequence"]:
            return _Subject("queue", _SEQUENCE, _name_of(names.queue, id))
        case ["items", id, "ready" | "delayed", _]:
            return _Subject("queue", _ITEMS_TO_PUT, _name_of(names.queue, id))
        case ["items", id, *_]:
            return _Subject("queue", _ITEMS, _name_of(names.queue, id))
        case ["takers", *_]:
            return _Subject("queue", _TAKER, None, is_any=True)
        case ["outcomes", *_]:
            return _Subject("queue", _OUTCOME, None, is_any=True)
        case ["topics", id, "copies", *_]:
            return _Subject("topic", _COPY, _name_of(names.topic, id))
        case ["topics", id, *rest]:
            is_gate = rest == ["gate"] and grants.may_any("group", "member")
            return _Subject("topic", _GATE if is_gate else _TOPIC, _name_of(names.topic, id))
        case ["spark", "routed", *_]:
            return _Subject("topic", _MANIFEST, None)
        case ["spark", id, *_]:
            return _Subject("topic", _MANIFEST, _name_of(names.topic, id))
        case ["sources", name, *_]:
            return _Subject("topic", _SOURCE, name)
        case ["upkeep" | "cluster", *_]:
            return _Subject("hub", _INTERNAL, None)
    return None


def _name_of(find: Callable[[str], str | None], id: str) -> str | None:
    """The name that belongs to an id. What has not the form of an id has no name, whatever a client has stored."""
    return find(id) if _ID.fullmatch(id) else None


def may_read(grants: Grants, names: Names, key: str) -> bool:
    return "r" in letters_of(grants, names, key)


def may_read_all(grants: Grants, names: Names, prefix: str) -> bool:
    """Whether every key below this prefix, which is empty or ends in a slash, may be read."""
    if not prefix:
        return False  # there are hidden keys
    # No id is `*`, and no grant is for exactly this name, so that only who may read all below the prefix may read this.
    return may_read(grants, names, f"{prefix}*")


def may_watch(grants: Grants, names: Names, watched: str) -> bool:
    """Whether a watch is permitted: of a prefix, or of one key, which does not end in a slash."""
    if not watched:
        return grants.is_reader  # a wake tells no key
    return may_read_all(grants, names, watched) if watched.endswith("/") else may_read(grants, names, watched)


def may_commit(
    grants: Grants,
    names: Names,
    expect: Mapping[str, int],
    put: Collection[str],
    ephemeral: Collection[str],
    delete: Collection[str],
    value_of: Callable[[str], bytes],
) -> bool:
    """Whether everything that a commit names is permitted.

    put:       the keys that it puts, also as ephemeral keys.
    ephemeral: those of them that it puts as ephemeral keys.
    value_of:  the value that is put under a key; asked for few keys, because values need not be decoded here."""
    for key in {*expect, *put, *delete}:
        letters = letters_of(grants, names, key)
        if key in ephemeral and "d" not in letters and not key.startswith(_TAKERS):
            return False
        creates = key in put and expect.get(key) == ABSENT
        if key in put and not ("p" in letters or ("c" in letters and creates)):
            creates = creates and _is_new_queue(grants, names, key, value_of)
            if not creates:
                return False
        elif key in put and not _may_put(grants, names, key, value_of):
            return False
        if key in delete and "d" not in letters:
            return False
        if key in expect and "r" not in letters and not creates:
            return False
    return True


def _is_new_queue(grants: Grants, names: Names, key: str, value_of: Callable[[str], bytes]) -> bool:
    """Whether this is the existence key of a queue that is being created, whose id nobody knows yet. Its value is the
    queue's name. The commit expects the key ABSENT, so that it takes no queue's place."""
    folder, _, id = key.partition("/")
    return (
        folder == "standing"
        and _ID.fullmatch(id) is not None
        and names.queue(id) is None
        and grants.may("queue", value_of(key).decode(errors="replace"), "admin")
    )


def _may_put(grants: Grants, names: Names, key: str, value_of: Callable[[str], bytes]) -> bool:
    """What a put of this value needs beside the right to put the key."""
    if key == _REGISTRY_ID:
        return _ID.fullmatch(value_of(key).decode(errors="replace")) is not None
    if grants.is_admin or (grants.has_prefixes and grants.may("registry", key, "write")):
        return True
    match key.split("/"):
        case ["groups", _, folder, id, *_] if folder in _OF_A_TOPIC:
            # A checkpoint can keep retention from removing messages, so a group is no way around the topic's own
            # permissions. An id that no topic has is that of a table, or of a topic that was deleted.
            name = _name_of(names.topic, id)
            return name is None or grants.may("topic", name, "read")
        case ["standing" | "deleted", id]:
            # The value is the name by which the queue's keys are permitted: it is never changed.
            value = value_of(key).decode(errors="replace")
            name = _name_of(names.queue, id) or value
            return value == name and grants.may("queue", name, "admin")
        case ["queues", name]:
            # Who deletes the queue of this name deletes the items of the id in the value.
            return _name_of(names.queue, _id_in(value_of(key))) in (None, name)
    return True


def _id_in(record: bytes) -> str:
    """The id in the record of a queue; empty if it has none."""
    try:
        found = json.loads(record)
    except (ValueError, RecursionError):
        return ""
    id = found.get("id") if isinstance(found, dict) else None
    return id if isinstance(id, str) else ""


Scan = Callable[[str, str | None, int | None], list[Entry]]
"""`Registry.scan`."""


def may_scan(grants: Grants, names: Names, prefix: str) -> bool:
    return prefix in LISTED or (not prefix and grants.is_reader) or may_read_all(grants, names, prefix)


def scan_visible(
    grants: Grants, names: Names, scan: Scan, prefix: str, after: str | None, limit: int | None
) -> list[Entry]:
    """The same as `scan`, without the entries that the caller may not read. Fewer than `limit` means that there are no
    more. The caller must have the permission to scan this prefix (`may_scan`)."""
    if may_read_all(grants, names, prefix):
        return scan(prefix, after, limit)
    found: list[Entry] = []
    for beginning, is_whole_key in _beginnings(grants, prefix):
        start, size = max(after or "", _before(beginning)), 1 if is_whole_key else PAGE
        while limit is None or len(found) < limit:
            page = scan(prefix, start or None, size)
            inside = [e for e in page if e.key == beginning or (not is_whole_key and e.key.startswith(beginning))]
            found += [entry for entry in inside if may_read(grants, names, entry.key)]
            if is_whole_key or len(inside) < size:
                break
            start = page[-1].key
    return found[:limit]


def _beginnings(grants: Grants, prefix: str) -> list[tuple[str, bool]]:
    """What the keys below this prefix that the caller may read begin with, in order, and whether that is a whole key.
    No beginning includes another one, and what lies between them need not be scanned."""
    kind, action, end = _NAMED.get(prefix, ("", "", ""))
    if not kind or grants.has_prefixes:
        return [(prefix, False)]
    return sorted(
        (f"{prefix}{name.removesuffix('*')}{'' if name.endswith('*') else end}", not end and not name.endswith("*"))
        for name in grants.patterns(kind, action)
    )


def _before(beginning: str) -> str:
    """A text after which `scan` finds the first key that begins so: smaller than it, and greater than every smaller
    key, since keys have no character above `~`."""
    return f"{beginning[:-1]}{chr(ord(beginning[-1]) - 1)}\x7f" if beginning else ""
