"""What each call of docs/wire.md does with the hub. The functions here may block: they run on threads of a pool."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pxrs import __version__
from pxrs.errors import InvalidArgument, PxrsError
from pxrs.metrics.instruments import SERVER_CALL, SERVER_CALLS
from pxrs.registry.lease import Lease
from pxrs.registry.values import Entry
from pxrs.remote import wire
from pxrs.server import recording, staging
from pxrs.server.given import Given
from pxrs.server.grants import seconds_left
from pxrs.server.pools import Pools
from pxrs.server.served import Result, Served

CAPABILITY_S_MAX: Final = 7 * 86_400
"""How long a token for executors is valid at most."""
SCAN_BYTES_MAX: Final = 1 << 20
"""How many bytes one answer to a scan has, or else one entry; the client asks for the rest."""
SCAN_PAGE: Final = 1_000
"""How many entries are read from the registry at a time at most."""
SCAN_PAGE_FIRST: Final = 64
"""How many entries are read first, while it is not known how large they are."""

SETTINGS_BYTES_MAX: Final = 16 << 10
"""How long the description of a new topic may be."""
_TOPIC_ID: Final = re.compile("[0-9a-f]{32}")


def _ping(served: Served, given: Given, at: float) -> Result:
    return {"server": f"pxrs {__version__}", "instance": served.instance, "wire": wire.VERSION}


def _identity(served: Served, given: Given, at: float) -> Result:
    home = served.hub.join_registry() if given.flag("joins") else served.hub.check_registry()
    return {"hub": None, "place": ""} if home is None else {"hub": home.hub, "place": home.place}


# The log.


def _topics(served: Served, given: Given, at: float) -> Result:
    visible = served.gate.topics(
        served.caller, served.hub.topics(internal=given.flag("internal")), lambda topic: topic.name
    )
    return {"topics": [wire.topic_to_dict(topic) for topic in visible]}


def _damaged_topics(served: Served, given: Given, at: float) -> Result:
    found = served.gate.topics(served.caller, served.hub.damaged_topics(), lambda topic: topic.name)
    return {"topics": [{"name": each.name, "id": each.id, "error": wire.error_to_dict(each.error)} for each in found]}


def _topic(served: Served, given: Given, at: float) -> Result:
    return {"topic": wire.topic_to_dict(served.topic(given).topic)}


def _create_topic(served: Served, given: Given, at: float) -> Result:
    settings = given.mapping("settings")
    identity = settings.get("id")
    # The id is the name of a folder on the server.
    if not isinstance(identity, str) or _TOPIC_ID.fullmatch(identity) is None:
        raise InvalidArgument(f"{given.call}: a topic's id must be a new UUID, as 32 lower-case hexadecimal digits")
    if len(wire.dumps(settings)) > SETTINGS_BYTES_MAX:
        raise InvalidArgument(f"{given.call}: the settings are longer than {SETTINGS_BYTES_MAX:,} bytes")
    try:
        asked = wire.topic_of(settings)
    except TypeError as error:
        raise InvalidArgument(f"{given.call}: the settings do not describe a topic: {error}") from error
    made = served.hub.create_described(asked, by=served.caller.who)
    return {"topic": wire.topic_to_dict(made.topic), "warnings": list(made.log.warnings)}


def _alter_topic(served: Served, given: Given, at: float) -> Result:
    """By the fields of the description, as `log.topic` returns them; a time is in seconds."""
    changes = given.mapping("changes")
    if len(wire.dumps(changes)) > SETTINGS_BYTES_MAX:
        raise InvalidArgument(f"{given.call}: the changes are longer than {SETTINGS_BYTES_MAX:,} bytes")
    return {
        "topic": wire.topic_to_dict(
            served.hub.alter_described(given.text("topic"), changes, by=served.caller.who).topic
        )
    }


def _delete_topic(served: Served, given: Given, at: float) -> Result:
    return {"id": served.hub.delete_topic(given.text("topic"), by=served.caller.who)}


def _bounds(served: Served, given: Given, at: float) -> Result:
    found = served.topic(given).bounds(given.partitions())
    return {"bounds": [[partition, *bounds] for partition, bounds in found.items()]}


def _owners(served: Served, given: Given, at: float) -> Result:
    return {"owners": [[partition, address] for partition, address in served.topic(given).owners().items()]}


def _offset_at(served: Served, given: Given, at: float) -> Result:
    return {"offset": served.topic(given).offset_at(given.whole("partition"), given.whole("timestamp"))}


def _plan_retention(served: Served, given: Given, at: float) -> Result:
    plan = served.topic(given).plan_retention(given.whole("now"), given.pairs("unread"))
    return {
        "starts": [list(each) for each in plan.starts.items()],
        "errors": [wire.error_to_dict(each) for each in plan.errors],
    }


def _trim(served: Served, given: Given, at: float) -> Result:
    topic = served.topic(given)
    moved = topic.trim(given.pairs("starts") or {})
    if moved:
        who = {} if served.caller.who is None else {"who": served.caller.who}
        served.hub.record_audit("retain", topic=topic.name, starts=moved, **who)
    return {"moved": [list(each) for each in moved.items()]}


def _check_writable(served: Served, given: Given, at: float) -> Result:
    served.topic(given).check_writable()
    return {}


def _retention_problem(served: Served, given: Given, at: float) -> Result:
    return {"problem": served.hub.topic(served.topic(given).name).retention_problem()}


# The registry.


def _get(served: Served, given: Given, at: float) -> Result:
    entry = served.hub.registry.get(given.text("key"))
    return {"entry": None if entry is None else wire.entry_to_list(entry)}


def _scan(served: Served, given: Given, at: float) -> Result:
    """In pages, so that neither an answer nor what is read for it is too long. Each page is a scan of its own, which
    R1 allows: a value is the one of some moment during the call."""
    prefix, after, limit = given.text("prefix"), given.text_or_none("after"), given.whole_or_none("limit")
    if limit is not None and limit < 1:
        raise InvalidArgument(f"{given.call}: limit is {limit}: send an integer of at least 1")
    found: list[Entry] = []
    size, wanted = 0, SCAN_PAGE_FIRST
    while True:
        if limit is not None:
            wanted = min(wanted, limit - len(found))
        page = served.gate.scan(served.caller, served.hub.registry.scan, prefix, after, wanted)
        for entry in page:
            size += len(entry.key) + len(entry.value)
            if found and size > SCAN_BYTES_MAX:
                return _scanned(found, has_more=True)
            found.append(entry)
        if len(page) < wanted or len(found) == limit:
            return _scanned(found, has_more=False)
        after = found[-1].key
        wanted = min(SCAN_PAGE, max(1, (SCAN_BYTES_MAX - size) * len(found) // size + 1))


def _scanned(entries: list[Entry], *, has_more: bool) -> Result:
    return {"entries": [wire.entry_to_list(entry) for entry in entries], "more": has_more}


def _commit(served: Served, given: Given, at: float) -> Result:
    secret = given.text_or_none("lease")
    with contextlib.nullcontext() if secret is None else served.grants.using(secret) as lease:
        versions = served.hub.registry.commit(
            given.versions("expect"),
            given.values("put"),
            given.values("ephemeral"),
            lease,
            given.texts("delete"),
            given.flag("quiet"),
        )
    return {"versions": versions}


def _sql(served: Served, given: Given, at: float) -> Result:
    place = served.hub.registry.sql_place()
    return {"place": None if place is None else [place.dialect, place.namespace, place.channel]}


def _lease(served: Served, given: Given, at: float) -> Result:
    return _granted(served.grants.take(given.number("ttl")), at)


def _attach(served: Served, given: Given, at: float) -> Result:
    with served.grants.using(given.text("secret"), is_renewed=True) as lease:
        return _granted(lease, at)


def _granted(lease: Lease, at: float) -> Result:
    return {"id": lease.id, "secret": lease.secret, "ttl": lease.ttl, "left_s": seconds_left(lease, at)}


def _renew(served: Served, given: Given, at: float) -> Result:
    with served.grants.using(given.text("secret"), is_renewed=True) as lease:
        return {"left_s": seconds_left(lease, at)}


def _end(served: Served, given: Given, at: float) -> Result:
    served.grants.end(given.text("secret"))
    return {}


# Tokens for the executors of Spark.


def _create_capability(served: Served, given: Given, at: float) -> Result:
    secret, seconds = given.text_or_none("lease"), given.number("seconds")
    if not 0 < seconds <= CAPABILITY_S_MAX:
        raise InvalidArgument(f"{given.call}: seconds is not between 0 and {CAPABILITY_S_MAX}")
    with contextlib.nullcontext() if secret is None else served.grants.using(secret) as lease:
        found = served.gate.issue(served.caller, given.texts("read"), given.texts("stage"), seconds, lease)
    return {"capability": None, "token": None} if found is None else {"capability": found[0], "token": found[1]}


def _end_capability(served: Served, given: Given, at: float) -> Result:
    served.gate.end(served.caller, given.text("capability"))
    return {}


Function = Callable[[Served, Given, float], Result]
"""Given the hub, the arguments, and when the request arrived on the registry's clock."""

CALLS: Final[dict[str, Function]] = {
    "server.ping": _ping,
    "hub.identity": _identity,
    "log.topics": _topics,
    "log.damaged_topics": _damaged_topics,
    "log.topic": _topic,
    "log.create_topic": _create_topic,
    "log.alter_topic": _alter_topic,
    "log.delete_topic": _delete_topic,
    "topic.bounds": _bounds,
    "topic.owners": _owners,
    "topic.offset_at": _offset_at,
    "topic.plan_retention": _plan_retention,
    "topic.trim": _trim,
    "topic.check_writable": _check_writable,
    "topic.retention_problem": _retention_problem,
    "events.record": recording.record,
    "registry.get": _get,
    "registry.scan": _scan,
    "registry.commit": _commit,
    "registry.sql": _sql,
    "registry.lease": _lease,
    "registry.attach": _attach,
    "registry.renew": _renew,
    "registry.end": _end,
    "capability.create": _create_capability,
    "capability.end": _end_capability,
    **staging.CALLS,
}
RENEWALS: Final = frozenset({"registry.renew"})
"""Calls that run on the pool of renewals."""
LONG: Final = frozenset({"staging.publish"})
"""Calls that run on the pool of staging, because they may take long."""
EVENTS: Final = frozenset({"events.record"})
"""Calls that run on the pool of events."""
WATCHING: Final = ("topic.subscribe", "topic.unsubscribe", "registry.watch", "registry.unwatch")
"""Calls that belong to a control stream: see `control`."""


def pool_of(pools: Pools, name: str) -> ThreadPoolExecutor:
    """The threads on which this call runs."""
    if name in EVENTS:
        return pools.events
    return pools.renewals if name in RENEWALS else pools.staging if name in LONG else pools.calls


def call(served: Served, name: str, arguments: dict[str, Any], arrived_at: float) -> Result:
    """Make one call, if the caller may. Raises PxrsError, without names and keys that the caller may not see."""
    function = CALLS.get(name)
    if function is None:
        raise unknown_call(name)
    began, outcome = time.monotonic(), "error"
    try:
        found = _call(served, name, function, arguments, arrived_at)
        outcome = "ok"
        return found
    finally:
        SERVER_CALL.of(name).observe(time.monotonic() - began)
        SERVER_CALLS.of(name, outcome).add()


def _call(served: Served, name: str, function: Function, arguments: dict[str, Any], arrived_at: float) -> Result:
    served.check(name, arguments)
    try:
        return function(served, Given(name, arguments), arrived_at)
    except PxrsError as error:
        shown = served.gate.shown(served.caller, error)
        if shown is error:
            raise
        raise shown from None


def unknown_call(name: str) -> InvalidArgument:
    return InvalidArgument(f"there is no call {name[:100]!r}; docs/wire.md lists them. Is the client newer?")
