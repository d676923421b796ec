"""Retention of one topic: remove the messages that its settings allow, now.

For a topic without `keep_unread` the log decides alone. For one with `keep_unread` the groups of the hub's registry
decide too, in this order (O10; `pxrs.group.retention` has the schedules):

1. `Belonging.check_retention`: the registry that this process has is the one in which the hub's groups are.
2. `move_start` commits the new start of each partition to the key `topics/<id>/start`, expecting the key
   `topics/<id>/gate`, which every commit writes that gives a group a first or an earlier checkpoint.
3. Under the lock of the hub's record, `check_retention` again, and then `TopicLog.trim` removes the messages. `pxrs
   registry adopt` takes the same lock, so messages are removed only if the registry that was asked is still the hub's.

Every step may be repeated, by any number of processes: a start only moves forward, and `trim` removes what lies before
it. A process that is stopped between two steps and goes on an hour later removes nothing that another process would not
have removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pxrs.errors import LogError, LogNotWritable, PxrsError
from pxrs.log.contract import RetentionPlan, TopicLog

if TYPE_CHECKING:
    from pxrs.belonging import Belonging
    from pxrs.hub_parts import HubParts
    from pxrs.registry.contract import Registry


def retain(parts: HubParts, log: TopicLog) -> dict[int, int]:
    """Remove the messages that the topic's retention allows. Returns the new starts of the partitions that moved.

    Raises LogNotWritable if a server keeps the log. For a topic with `keep_unread`: raises WrongRegistry or
    RetentionPostponed, with nothing removed, if this process may remove nothing."""
    if parts.log.is_kept_by_server:
        raise LogNotWritable(parts.url, f"{parts.url}: the server does the retention of {log.name}; clients cannot")
    log.refresh()
    if not log.keeps_unread:
        return log.retain(log.clock.wall_time_us())
    if parts.belonging is not None:
        parts.belonging.check_retention(log.name)  # before the registry is opened, which may create an empty one
    return _retain_unread(log, parts.registry.get(), parts.belonging)


def problem_of(parts: HubParts, log: TopicLog) -> str | None:
    """Why `retain` would remove nothing in this process; None if nothing prevents it."""
    parts.check_usable()
    if parts.log.is_kept_by_server:
        return log.retention_problem()
    if not log.keeps_unread or parts.belonging is None:
        return None
    try:
        parts.belonging.check_retention(log.name)
    except PxrsError as error:
        return str(error)
    return None


def _retain_unread(log: TopicLog, registry: Registry, belonging: Belonging | None) -> dict[int, int]:
    from pxrs.group.retention import move_start
    from pxrs.registry.steps import drive

    plan = RetentionPlan({}, [])

    def decide(unread: Mapping[int, int]) -> Mapping[int, int]:
        nonlocal plan
        plan = log.plan_retention(log.clock.wall_time_us(), unread)
        return plan.starts

    starts = drive(move_start(log.id, decide), registry, None)
    behind = _behind(log, starts, plan)
    moved: dict[int, int] = {}
    if behind and belonging is None:
        moved = log.trim(behind)
    elif behind and belonging is not None:
        with belonging.record.locked():
            belonging.check_retention(log.name)
            moved = log.trim(behind)
    if plan.errors:
        raise plan.errors[0]
    return moved


def _behind(log: TopicLog, starts: Mapping[int, int], plan: RetentionPlan) -> dict[int, int]:
    """The partitions that still hold messages from before their committed start, and that start.

    These are the partitions of this plan, and those of an earlier retention that died before it had called `trim`, or
    before every file was removed; in the latter case the plan names the partition again."""
    found = {}
    for number, start in starts.items():
        try:
            if number < log.partitions and (number in plan.starts or log.start(number) < start):
                found[number] = start
        except LogError as error:  # a damaged partition does not keep the others from being trimmed
            plan.errors.append(error)
    return found
