"""What the pages show, as JSON: made from the books of `Observer`, and from nothing else.

The numbers of a group are those of `GroupHandle.describe`, those of a topic are its bounds, those of a queue its depth.
Each view is a dictionary of plain values; the scripts of the page show all texts in it as text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from pxrs.attention import Attention, of_group, of_queue
from pxrs.group.description import GroupDescription, PartitionDescription
from pxrs.queue.states import ItemState
from pxrs.web import browse, queues
from pxrs.web.groups import WatchedGroup
from pxrs.web.history import HOURS
from pxrs.web.observer import Observer
from pxrs.web.queries import SeenQuery
from pxrs.web.queues import ListedItem, WatchedQueue
from pxrs.web.timeline import timeline
from pxrs.web.topics import Glanced
from pxrs.wording import command

ATTENTION_MAX: Final = 100
ROWS_MAX: Final = 1_000
"""How many partitions the page of a topic or a group shows: a browser cannot show tens of thousands every second."""
TRACEBACKS_MAX: Final = 50
"""Of how many paused partitions the page of a group has the traceback."""


def status(observer: Observer) -> dict[str, Any]:
    """What every page shows at its head."""
    return {
        "hub": observer.hub.url,
        "registry": observer.hub.registry_address,
        "now": time.time(),
        "looked_at": observer.looked_at,
        "problem": observer.problem,
        "events_problem": observer.history.problem,
    }


def overview(observer: Observer) -> dict[str, Any]:
    now = time.time()
    topics = [_topic_row(each) for each in observer.topics.by_name.values() if not each.name.startswith("_")]
    groups = [_group_row(name, each, now) for name, each in observer.groups.there()]
    found = [_queue_row(each, now) for _, each in sorted(observer.queues.by_name.items())]
    damaged = [{"topic": each.name, "error": str(each.error)} for each in observer.topics.damaged]
    return {
        **status(observer),
        "attention": [
            {"level": "bad" if each.is_urgent else "warn", "kind": each.kind, "name": each.name, "text": each.text}
            for each in sorted(_attention(observer, groups, found, now), key=lambda each: not each.is_urgent)
        ][:ATTENTION_MAX],
        "topics": topics,
        "damaged_topics": damaged,
        "groups": groups,
        "queues": found,
        "queries": len(observer.queries.by_key),
    }


def _attention(
    observer: Observer, groups: list[dict[str, Any]], found: list[dict[str, Any]], now: float
) -> Iterator[Attention]:
    """What somebody should look at: by the rules of `pxrs.attention`, and what could not be read."""
    place = observer.hub.parts.place
    for each in observer.topics.damaged:
        yield Attention(True, "topic", each.name, f"damaged: {each.error}")
    for topic in observer.topics.by_name.values():
        if topic.error is not None:
            yield Attention(True, "topic", topic.name, f"cannot be read: {topic.error}")
    for problem in (*observer.queues.problems, *observer.queries.problems):
        yield Attention(True, "hub", "", problem)
    for row in groups:
        if row["error"]:
            yield Attention(True, "group", row["group"], row["error"])
        oldest = row["oldest_checkpoint"]
        yield from of_group(
            row["group"],
            members=row["members"],
            partitions=row["partitions"],
            lag=row["lag"],
            paused=row["paused"],
            unowned=row["unowned"],
            stale_s=None if oldest is None else now - oldest,
            problem=row["lag_problem"],
            place=place,
        )
    for row in found:
        yield from of_queue(row["queue"], row["dead"], is_exact=row["dead"] < queues.COUNT_MAX, place=place)


# Topics.


def _topic_row(topic: Glanced) -> dict[str, Any]:
    rates = topic.rates()
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "messages": topic.messages,
        "rate": None if rates is None else sum(rates),
        "problem": None if topic.error is None else str(topic.error),
    }


def topic(observer: Observer, name: str) -> dict[str, Any]:
    """Raises UnknownTopic."""
    found = observer.topics.ask_for(name, time.monotonic())
    found.look(time.monotonic())
    rates, bounds = found.rates(), found.found or ()
    sizes = found.log.stored_bytes()
    settings = {key: value for key, value in asdict(found.topic).items() if key not in ("name", "extra")}
    return {
        **status(observer),
        **_topic_row(found),
        "settings": {**settings, "segment_age_s": found.topic.segment_age_s},
        "bytes": None if sizes is None else sum(sizes),
        "rows": [
            {
                "partition": number,
                "start": each.start,
                "end": each.end,
                "bytes": None if sizes is None else sizes[number],
                "rate": None if rates is None else rates[number],
            }
            for number, each in enumerate(bounds[:ROWS_MAX])
        ],
        "readers": [
            {
                "group": name,
                "members": sum(found.name in member.topics for member in group.description.members),
                "lag": next((each.lag for each in group.description.topics if each.topic_id == found.id), None),
                "is_lag_exact": all(each.is_exact for each in group.description.topics if each.topic_id == found.id),
            }
            for name, group in observer.groups.there()
            if group.description is not None and any(each.topic_id == found.id for each in group.description.topics)
        ],
        "queries": [query.name for query in observer.queries.by_key.values() if found.id in query.writes],
    }


# Groups.


def _group_row(name: str, group: WatchedGroup, now: float) -> dict[str, Any]:
    found = group.description
    rows = () if found is None else found.partitions
    ages = [row.when for row in rows if row.lag and row.when]
    return {
        "group": name,
        "members": 0 if found is None else len(found.members),
        "partitions": len(rows),
        "lag": None if found is None else found.lag,
        "is_lag_exact": found is not None and found.is_lag_exact,
        "lag_problem": None if found is None else found.lag_problem,
        "paused": sum(row.paused is not None for row in rows),
        "unowned": sum(not row.is_owner_there for row in rows),
        "oldest_checkpoint": min(ages, default=None),
        "topics": [] if found is None else [each.topic for each in found.topics],
        "error": None if group.error is None else str(group.error),
    }


def group(observer: Observer, name: str) -> dict[str, Any]:
    """Raises UnknownGroup."""
    now = time.monotonic()
    found = observer.groups.find(name, now)
    for each in found.topics:  # have their offsets read at each refresh while somebody looks at the group
        if each.topic_id in observer.topics.by_id:
            observer.topics.by_id[each.topic_id].warm_until = now + 15.0
    return {**status(observer), **described(found, observer.hub.parts.place)}


def described(found: GroupDescription, place: Sequence[str] = ()) -> dict[str, Any]:
    """A description as the page gets it. place: the options that name the hub on the command line."""
    return {
        "group": found.name,
        "generation": found.generation,
        "leader": found.leader,
        "lag": found.lag,
        "is_lag_exact": found.is_lag_exact,
        "lag_problem": found.lag_problem,
        "members": [
            {**asdict(each), "topics": list(each.topics), "is_leader": each.incarnation == found.leader}
            for each in found.members
        ],
        "partitions": len(found.partitions),
        "paused": sum(each.paused is not None for each in found.partitions),
        "unowned": sum(not each.is_owner_there for each in found.partitions),
        "rows": _partition_rows(found, place),
        "topics": [asdict(each) for each in found.topics],
    }


def _partition_rows(group: GroupDescription, place: Sequence[str]) -> list[dict[str, Any]]:
    """At most `ROWS_MAX`, in their order: those that are paused, without an owner, or have the most lag."""
    rows: Sequence[PartitionDescription] = group.partitions
    if len(rows) > ROWS_MAX:
        urgent = sorted(rows, key=lambda each: (each.paused is None, each.is_owner_there, -(each.lag or 0)))[:ROWS_MAX]
        chosen = {(each.topic_id, each.partition) for each in urgent}
        rows = [each for each in rows if (each.topic_id, each.partition) in chosen]
    found = [asdict(each) for each in rows]
    for at, row in enumerate(row for row in found if row["paused"] is not None):
        row["paused"]["failure"] = None
        where = (group.name, row["topic"], row["partition"], *place)
        row["paused"]["commands"] = [command("group", what, *where) for what in ("retry", "skip")]
        if at >= TRACEBACKS_MAX:
            row["paused"]["traceback"] = ""
    return found


def group_timeline(observer: Observer, name: str, hours: float | None) -> dict[str, Any]:
    """hours: how far back; None: as far as there are events. Raises UnknownGroup."""
    now_us = int(time.time() * 1e6)
    since_us = now_us - int((HOURS if hours is None else hours) * 3600e6)
    found = observer.groups.find(name, time.monotonic())
    events = observer.history.of_group(name, since_us)
    seen = observer.groups.by_name[name].epochs
    if hours is None:
        first = min([*(event.at for event in events[:1]), *(at for _, at in seen.values())], default=now_us)
        since_us = max(since_us, min(first - 2_000_000, now_us - 60_000_000))
    return {**status(observer), **timeline(found, seen, events, since_us, now_us)}


# Queues.


def _queue_row(found: WatchedQueue, now: float) -> dict[str, Any]:
    rates = found.rates()
    counts = {state: found.counts.get(state, 0) for state in queues.STATES}
    return {
        "queue": found.queue.name,
        "ready": counts[ItemState.READY],
        "in_flight": counts[ItemState.IN_FLIGHT],
        "delayed": counts[ItemState.DELAYED],
        "dead": counts[ItemState.DEAD],
        "is_counted": max(counts.values()) < queues.COUNT_MAX,
        "oldest_age_s": None if found.oldest is None else max(0.0, now - found.oldest),
        "rate_in": None if rates is None else rates[0],
        "rate_out": None if rates is None else rates[1],
    }


def queue(observer: Observer, name: str) -> dict[str, Any]:
    """Raises UnknownQueue."""
    found = observer.queues.find(name)
    return {
        **status(observer),
        **_queue_row(found, time.time()),
        "settings": {
            "id": found.queue.id,
            "policy": repr(found.queue.policy),
            "fifo": found.queue.is_fifo,
            "backoff": repr(found.queue.backoff),
            "created": found.queue.created,
        },
        "retry": command("queue", "dead", "retry", name, *observer.hub.parts.place),
    }


def queue_item(listed: ListedItem) -> dict[str, Any]:
    item = listed.item
    return {
        "id": item.id,
        "key": browse.data(item.key),
        "value": browse.data(item.value),
        "priority": item.priority,
        "deliveries": item.deliveries,
        "put_at": item.put_at,
        "due_at": listed.due_at,
        "taker": listed.taker,
        "died_at": item.died_at,
        "error": item.error,
        "error_type": item.error_type,
        "traceback": item.traceback,
    }


# Streaming queries.


def queries(observer: Observer) -> dict[str, Any]:
    found = sorted(observer.queries.by_key.values(), key=lambda each: (each.groups, each.name, each.key))
    return {**status(observer), "queries": [_query_row(observer, each) for each in found]}


def _query_row(observer: Observer, query: SeenQuery) -> dict[str, Any]:
    by_id, groups = observer.topics.by_id, observer.groups.by_name
    batches = list(query.batches)
    lags = [groups[name].description for name in query.groups if name in groups]
    known = [each.lag for each in lags if each is not None]
    return {
        "query": query.name,
        "groups": query.groups,
        "is_of_dead_letters": query.is_of_dead_letters,
        "reads": [
            {"topic": by_id[id].name if id in by_id else id, "is_there": id in by_id}
            for id in sorted({source.rpartition("/")[2] for source in query.manifest.ranges})
        ],
        "writes": [
            {
                "topic": by_id[id].name if id in by_id else id,
                "is_there": id in by_id,
                "messages": by_id[id].messages if id in by_id else None,
            }
            for id in query.writes
        ],
        "batch": query.manifest.batch,
        "state": query.manifest.state.value,
        "committed_at": query.manifest.at,
        "members": sum(len(each.members) for each in lags if each is not None),
        "lag": None if not known or None in known else sum(each or 0 for each in known),
        "batches": [
            {
                "batch": each.number,
                "at": each.at,
                "rows": each.rows,
                "took_s": None if before is None or each.number != before.number + 1 else each.at - before.at,
            }
            for before, each in zip([None, *batches], batches, strict=False)
        ],
    }
