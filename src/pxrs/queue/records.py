"""What a queue keeps in the registry: its keys, and the values under them. Nothing here does I/O.

    queues/<name>                       the queue's settings, with its id
    standing/<id>                       the existence key: written with the queue, deleted with it; every put expects it
    deleted/<id>                        the queue was deleted, and some of its keys may still be there
    items/<id>/ready/<name>             an item that can be taken; takers take them in the order of the keys
    items/<id>/inflight/<name>~<transaction>~<taker>    an item that this transaction of this taker has taken
    items/<id>/delayed/<due>~<name>     an item that cannot be taken before the time `due`
    items/<id>/dead/<when>~<name>       a dead letter, and when it became one
    items/<id>/turn                     FIFO queues: which taker may take, or before which time none may
    items/<id>/sequence                 FIFO queues: the number of the last item that was put
    items/<id>/sweeper                  ephemeral: the taker that returns items of dead takers and ends delays
    takers/<taker>                      ephemeral: a process that takes items, while its lease lives
    outcomes/<taker>-<slot>             the last transaction that was committed, or aborted, with this slot

An item's name is its place in the order, its id, and how often it was moved: `5000.<id>.2`. Each move gives the item a
name that no key had before. So a write that is applied late, expecting the key of an earlier name, is refused, also on
a store that counts the versions of a key from 1 again when the key is re-created (R4). For the same reason a put
expects the existence key, whose name holds the queue's id, and not the settings, whose name a later queue may have.

An item's value is a line of JSON and then the bytes as they were put.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pxrs.errors import InvalidItem, InvalidQueue, RegistryCorrupt
from pxrs.failures import Failure, last_lines
from pxrs.queue import policy as policies
from pxrs.queue.policy import Backoff, ExponentialBackoff, FixedBackoff, Policy
from pxrs.queue.states import ItemEvent, ItemState, item_after

QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
QUEUES: Final = "queues/"
DELETED: Final = "deleted/"
TAKERS: Final = "takers/"
OUTCOMES: Final = "outcomes/"
PRIORITY_MAX: Final = 4_999
KEY_BYTES_MAX: Final = 1_024
ERROR_CHARACTERS_MAX: Final = 300
ERROR_TYPE_CHARACTERS_MAX: Final = 100
_ROOM_BYTES: Final = 4_096
"""What a line of JSON may grow to while the item is moved, its key not counted: counts, and what a delivery failed
with, in escapes."""
_COUNTS_BYTES: Final = 200
"""The part of these bytes that names of fields, counts and times take at most."""
_FAILED_WITH: Final = ("error", "error_type", "traceback")
_PUT: Final = item_after(None, ItemEvent.PUT)
_PUT_DELAYED: Final = item_after(None, ItemEvent.PUT_DELAYED)
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder at each call
_decode: Final = json.JSONDecoder().decode


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's settings. They belong to it, not to a handle (Q3)."""

    name: str
    id: str
    policy: Policy
    is_fifo: bool
    backoff: Backoff | None
    created: float
    """Wall-clock seconds, to be shown."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.policy, Policy):
            raise InvalidQueue(f"policy must be AtLeastOnce(), ConsumeTimes(k) or ConsumeOnce(), not {self.policy!r}")
        if self.backoff is not None and not isinstance(self.backoff, FixedBackoff | ExponentialBackoff):
            raise InvalidQueue(
                f"backoff must be FixedBackoff(...), ExponentialBackoff(...) or None, not {self.backoff!r}"
            )

    def differences(self, asked: Queue) -> dict[str, tuple[object, object]]:
        """The settings in which a queue that is to be created would differ from this one, by the argument of
        `create_queue` that gives each: this queue's value and the other's. Empty if the two agree."""
        pairs: dict[str, tuple[object, object]] = {
            "policy": (self.policy, asked.policy),
            "fifo": (self.is_fifo, asked.is_fifo),
            "backoff": (self.backoff, asked.backoff),
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def dump(self) -> bytes:
        found = {
            "id": self.id,
            "policy": policies.dump(self.policy),
            "fifo": self.is_fifo,
            "backoff": None if self.backoff is None else policies.dump(self.backoff),
            "created": self.created,
        }
        return json.dumps(found, separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        try:
            found = json.loads(value)
            backoff = None if found["backoff"] is None else policies.load(found["backoff"])
            policy = policies.load(found["policy"])
            return cls(key[len(QUEUES) :], found["id"], policy, found["fifo"], backoff, found["created"])
        except (ValueError, TypeError, KeyError) as error:
            raise RegistryCorrupt(key, f"not a valid queue record: {error!r}") from error

    @property
    def root(self) -> str:
        return root_of(self.id)

    def folder(self, state: ItemState) -> str:
        """The folder of the keys of items in this state."""
        return f"items/{self.id}/{state.value}/"

    @property
    def ready(self) -> str:
        return f"items/{self.id}/ready/"

    @property
    def inflight(self) -> str:
        return f"items/{self.id}/inflight/"

    @property
    def delayed(self) -> str:
        return f"items/{self.id}/delayed/"

    @property
    def dead(self) -> str:
        return f"items/{self.id}/dead/"

    @property
    def turn(self) -> str:
        return f"items/{self.id}/turn"

    @property
    def sequence(self) -> str:
        return f"items/{self.id}/sequence"

    @property
    def sweeper(self) -> str:
        return f"items/{self.id}/sweeper"

    @property
    def key(self) -> str:
        return f"{QUEUES}{self.name}"

    @property
    def existence(self) -> str:
        """The key that is there exactly as long as the queue is. Its version never changes."""
        return f"standing/{self.id}"

    @property
    def deleted(self) -> str:
        return f"{DELETED}{self.id}"


def root_of(queue_id: str) -> str:
    return f"items/{queue_id}/"


def check_name(name: str) -> None:
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise InvalidQueue(
            f"queue name {name!r}: use up to 100 letters, digits, '.', '_' or '-', a letter or digit first"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """An item as it is stored."""

    order: str
    """Sorts the keys of ready items: the priority, as four digits, or in a FIFO queue the item's number."""
    id: str
    moves: int
    value: bytes
    put_at: float
    """Wall-clock seconds."""
    deliveries: int = 0
    key: bytes | None = None
    error: str = ""
    """What the last delivery failed with."""
    error_type: str = ""
    """Of a dead letter: the class of what was raised. Empty in records of version 0.1, as is `traceback`."""
    traceback: str = ""
    """Of a dead letter: where it was raised, as much of it as there is room for."""

    @property
    def name(self) -> str:
        return f"{self.order}.{self.id}.{self.moves:x}"

    def dump(self) -> bytes:
        found: dict[str, Any] = {"put_at": self.put_at, "deliveries": self.deliveries}
        if self.key is not None:
            found["key"] = base64.b64encode(self.key).decode()
        if self.error or self.error_type or self.traceback:
            found |= {name: text for name in _FAILED_WITH if (text := getattr(self, name))}
        return _encode(found).encode() + b"\n" + self.value

    @classmethod
    def load(cls, key: str, stored: bytes) -> Self:
        """Of a key in any of the four folders."""
        try:
            order, item, moves = name_in(key).split(".")
            line, _, value = stored.partition(b"\n")
            found = _decode(line.decode())
            put_at, deliveries = found["put_at"], found["deliveries"]
            if len(found) == 2:  # most items have neither a key nor a failed delivery
                return cls(order, item, int(moves, 16), value, put_at, deliveries)
            carried = base64.b64decode(found["key"]) if "key" in found else None
            failed_with = (str(found.get(name, "")) for name in _FAILED_WITH)
            return cls(order, item, int(moves, 16), value, put_at, deliveries, carried, *failed_with)
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryCorrupt(key, f"not a valid item record: {error!r}") from error

    @property
    def priority(self) -> int:
        """0 in a FIFO queue, which has no priorities."""
        return PRIORITY_MAX + 1 - int(self.order) if len(self.order) == 4 else 0

    def taken(self) -> Record:
        """The item with one more delivery counted. `dataclasses.replace` would take several times as long."""
        return Record(
            self.order,
            self.id,
            self.moves,
            self.value,
            self.put_at,
            self.deliveries + 1,
            self.key,
            self.error,
            self.error_type,
            self.traceback,
        )

    def moved(self, **changes: Any) -> Self:
        return replace(self, moves=self.moves + 1, **changes)

    def failed(self, failure: Failure, *, is_dead: bool) -> Self:
        """Moved because a delivery failed. A failure without a text keeps the text of the one before.

        Type and traceback are kept with dead letters alone: a person looks at those, while an item that is delivered
        again would carry them through every move."""
        error = failure.text[:ERROR_CHARACTERS_MAX] or self.error
        if not is_dead or not failure.text:
            return self.moved(error=error)
        room = _ROOM_BYTES - _COUNTS_BYTES - _json_bytes(error)
        kind = failure.type[:ERROR_TYPE_CHARACTERS_MAX]
        if _json_bytes(kind) > room:
            return self.moved(error=error)
        room -= _json_bytes(kind)
        return self.moved(error=error, error_type=kind, traceback=_last_lines_in(failure.traceback, room))

    def revived(self) -> Self:
        """A dead letter that is to be tried again, as if never delivered."""
        return self.moved(deliveries=0, error_type="", traceback="")


def _json_bytes(text: str) -> int:
    return len(json.dumps(text))


def _last_lines_in(text: str, bytes_max: int) -> str:
    """As many of the last lines as take so many bytes in JSON, whose escapes are up to twelve times as long."""
    characters_max = max(0, bytes_max)
    while _json_bytes(text) > bytes_max and characters_max:
        text = last_lines(text, characters_max)
        characters_max = characters_max * 3 // 4
    return text if _json_bytes(text) <= bytes_max else ""


def new_record(value: bytes | str, key: bytes | str | None, priority: int, now: float, value_bytes_max: int) -> Record:
    """An item that was never anywhere. Raises InvalidItem, also for one that the store would refuse."""
    data = _bytes_of("value", value)
    carried = None if key is None else _bytes_of("key", key)
    if carried is not None and len(carried) > KEY_BYTES_MAX:
        raise InvalidItem(f"the key has {len(carried):,} bytes; the limit is {KEY_BYTES_MAX:,}")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise InvalidItem(f"priority must be a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}, not {priority!r}")
    most = value_bytes_max - _ROOM_BYTES - len(carried or b"") * 4 // 3
    if len(data) > most:
        raise InvalidItem(
            f"the item has {len(data):,} bytes; the limit of this store is {most:,}: keep the data elsewhere and put "
            "its address"
        )
    # By age within a priority: ids begin with the time.
    item = f"{int(now * 1e6):014x}{secrets.token_hex(5)}"
    return Record(f"{PRIORITY_MAX + 1 - priority:04d}", item, 0, data, now, key=carried)


def in_sequence(record: Record, number: int) -> Record:
    """The same item with its number in a FIFO queue."""
    return replace(record, order=f"{number:016x}")


def name_in(key: str) -> str:
    """The item's name in a key of any of the four folders."""
    _, folder, last = key.rsplit("/", 2)
    match folder:
        case "inflight":
            return last.partition("~")[0]
        case "delayed" | "dead":
            return last.partition("~")[2]
    return last


def taker_in(inflight_key: str) -> str:
    return inflight_key.rpartition("~")[2]


def time_in(key: str) -> float:
    """When a delayed item is due, or when a dead one died; wall-clock seconds."""
    try:
        return int(key.rpartition("/")[2].partition("~")[0], 16) / 1e6
    except ValueError as error:
        raise RegistryCorrupt(key, "the key does not contain a valid time") from error


def key_of(queue: Queue, record: Record, state: ItemState | None, when: float = 0.0) -> str:
    """The key of an item that is READY, DELAYED or DEAD. when: when a delayed item is due, or when a dead one died."""
    assert state is not None
    if state is ItemState.READY:
        return f"{queue.ready}{record.name}"
    return f"{queue.folder(state)}{int(when * 1e6):016x}~{record.name}"


def first_key(queue: Queue, record: Record, delay_s: float, now: float) -> str:
    """The key under which an item is put now."""
    return key_of(queue, record, _PUT_DELAYED if delay_s > 0 else _PUT, now + delay_s)


@dataclass(frozen=True, slots=True)
class Turn:
    """Which taker may take from a FIFO queue: one transaction at a time.

    holder:     the taker of the transaction that has taken items; empty if no transaction has.
    not_before: if there is no holder, the time before which none may take: the first item waits for its backoff."""

    holder: str = ""
    not_before: float = 0.0

    def dump(self) -> bytes:
        return _encode({"holder": self.holder, "not_before": self.not_before}).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        try:
            found = json.loads(value)
            return cls(str(found["holder"]), float(found["not_before"]))
        except (ValueError, TypeError, KeyError) as error:
            raise RegistryCorrupt(key, f"not a valid turn record: {error!r}") from error


def load_number(key: str, value: bytes) -> int:
    """The value of a FIFO queue's key `sequence`."""
    try:
        return int(value)
    except ValueError as error:
        raise RegistryCorrupt(key, f"not a valid number: {error}") from error


def _bytes_of(what: str, value: bytes | str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidItem(f"the {what} cannot be written as UTF-8: {error}") from error
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise InvalidItem(f"the {what} must be bytes or str, not {type(value).__name__}")
