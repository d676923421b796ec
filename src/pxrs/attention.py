"""What a person should look at in a hub: the rules, which `pxrs top` and the web page share.

They are functions of numbers that were read before; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pxrs.wording import command, counted

STALE_S: Final = 300.0
"""A partition with a lag whose checkpoint is older than this needs attention."""


class Attention(NamedTuple):
    """Something that a person should look at."""

    is_urgent: bool
    """Whether messages or items are not handled because of it."""
    kind: str
    """`topic`, `group`, `queue`, or `hub` if it is about none of these."""
    name: str
    text: str


def of_group(
    name: str,
    *,
    members: int,
    partitions: int,
    lag: int | None,
    paused: int,
    unowned: int,
    stale_s: float | None,
    problem: str | None,
    place: Sequence[str] = (),
) -> Iterator[Attention]:
    """lag: None if it is not known. unowned: how many partitions have no owner that is there. stale_s: the age of the
    oldest checkpoint of a partition with a lag. problem: why the lag is not known. place: the options that name the hub
    on the command line, for commands in the texts."""
    share = f"of {counted(partitions, 'partition')}"
    if paused:
        shown = f"`{command('group', 'describe', name, *place)}` shows how to continue"
        yield Attention(True, "group", name, f"{paused:,} {share} paused by a message that failed: {shown}")
    if lag and not members:
        yield Attention(True, "group", name, f"lag {lag:,}, and no members")
    elif members and unowned:
        yield Attention(False, "group", name, f"{unowned:,} {share} without an owner")
    if lag and members and stale_s is not None and stale_s > STALE_S:
        text = f"a partition with a lag has had no checkpoint for {counted(round(stale_s), 'second')}"
        yield Attention(False, "group", name, text)
    if problem is not None:
        yield Attention(False, "group", name, problem)


def of_queue(name: str, dead: int, *, is_exact: bool, place: Sequence[str] = ()) -> Iterator[Attention]:
    """dead: how many dead letters there are, or at least are. is_exact: whether all were counted. place: as in
    `of_group`."""
    if dead:
        letters = ("" if is_exact else "at least ") + counted(dead, "dead letter")
        listed, retried = (command("queue", "dead", what, name, *place) for what in ("list", "retry"))
        yield Attention(True, "queue", name, f"{letters}: see `{listed}`, then `{retried}`")
