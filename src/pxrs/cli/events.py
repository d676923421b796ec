"""`pxrs events` and `pxrs audit`: what happened to a hub, and what administrators did to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import typer

from pxrs.cli import moments
from pxrs.cli.options import AskedAt, Json, RegistryUrl, open_hub
from pxrs.cli.terminal import echo, is_terminal, time_field
from pxrs.events.model import Event
from pxrs.events.names import text_of
from pxrs.wording import printable, rfc3339

_COLOURS: Final = {
    "taken_over": typer.colors.YELLOW,
    "fenced": typer.colors.RED,
    "refused": typer.colors.RED,
    "lost": typer.colors.RED,
    "lost_lease": typer.colors.RED,
    "paused": typer.colors.RED,
    "failed": typer.colors.RED,
    "stuck": typer.colors.RED,
    "dead": typer.colors.RED,
    "dead_lettered": typer.colors.RED,
    "dropped": typer.colors.RED,
    "returned": typer.colors.YELLOW,
    "retried": typer.colors.YELLOW,
    "skipped": typer.colors.YELLOW,
}
"""The colour of an event by the second part of its name; green for all others."""
Ago = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="WHEN", help="How long ago, such as 90s, 30m, 1h or 7d; or a time such as 2026-01-31T12:00Z."
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for further events, until interrupted.")]


def events(
    at: AskedAt = None,
    group: Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only events of this group.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only events of this topic.")] = None,
    since: Ago = None,
    follow: Follow = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Show what happened to a hub, oldest first: joins, hand-overs, fences, pauses, dead letters, upkeep.

    docs/events.md lists all events and their fields. Events are kept for a week.
    """
    moment = _moment(since)
    _check_log_is_given(at)
    with open_hub(at, registry, needs_log=True) as hub:
        _print(hub.events(group=group, topic=topic, since=moment, follow=follow), as_json)


def audit(
    at: AskedAt = None,
    since: Ago = None,
    follow: Follow = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Show what administrators did to a hub, oldest first: who did what, and when. It is kept for a year."""
    moment = _moment(since)
    _check_log_is_given(at)
    with open_hub(at, registry, needs_log=True) as hub:
        _print(hub.audit(since=moment, follow=follow), as_json)


def _check_log_is_given(at: str | None) -> None:
    """Raise BadParameter if the hub has no log: events are stored as messages, and a registry holds none."""
    if at is None:
        raise typer.BadParameter(
            "events are stored with the messages of a hub, and not in its registry: give the hub's directory or server "
            "with --at URL or PXRS_AT",
            param_hint="--at",
        )


def _moment(since: str | None) -> datetime | timedelta | None:
    try:
        return None if since is None else moments.since(since)
    except ValueError:
        raise typer.BadParameter(
            f"{since!r}: give how long ago, such as 90s, 30m, 1h or 7d, or a time such as 2026-01-31T12:00Z",
            param_hint="--since",
        ) from None


def _print(found: Iterator[Event], as_json: bool) -> None:
    has_colour = is_terminal() and not os.environ.get("NO_COLOR")
    try:
        for event in found:
            echo(json.dumps(plain(event)) if as_json else line(event, has_colour=has_colour))
    except KeyboardInterrupt:  # how --follow ends
        raise typer.Exit(130) from None


def plain(event: Event) -> dict[str, Any]:
    """The event as one JSON object."""
    return {**time_field("at", event.at), "name": event.name, "fields": dict(event.fields)}


def line(event: Event, *, has_colour: bool) -> str:
    """The event on one line: when, its name, and its text."""
    when = (rfc3339(event.at) or f"{event.at}us")[:23].replace("T", " ")
    name = printable(f"{event.name:<22}")
    text = printable(text_of(event.name, event.fields.items()))
    if has_colour:
        when = typer.style(when, dim=True)
        name = typer.style(name, fg=_COLOURS.get(event.name.partition(".")[2], typer.colors.GREEN))
    return f"{when}  {name}  {text}"
