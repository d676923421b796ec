"""`pxrs topic alter`: change the settings of a topic."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pxrs.cli.amounts import bytes_of_size, seconds_of, size
from pxrs.cli.options import At, Json, RegistryUrl, open_hub
from pxrs.model import CODECS, DURABILITIES, Topic

_NONE = "none"


def alter(
    name: str,
    at: At,
    retention: Annotated[
        str | None, typer.Option(metavar="DURATION|none", help="How long messages are kept; none: for ever.")
    ] = None,
    retention_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE|none", help="How much of each partition is kept; none: all.")
    ] = None,
    segment_bytes: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=size, help="How large a segment gets.")
    ] = None,
    segment_s: Annotated[
        str | None,
        typer.Option(
            "--segment-s",
            metavar="DURATION|none",
            help="After how long a new segment begins; none: a quarter of the retention.",
        ),
    ] = None,
    keep_unread: Annotated[
        bool | None, typer.Option("--keep-unread/--no-keep-unread", help="Keep what a group has yet to read.")
    ] = None,
    durability: Annotated[str | None, typer.Option(help=f"What sending waits for: {', '.join(DURABILITIES)}.")] = None,
    codec: Annotated[str | None, typer.Option(help=f"How batches are compressed: {', '.join(CODECS)}.")] = None,
    partitions: Annotated[int | None, typer.Option(help="Fixed: see `pxrs topic copy`.")] = None,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Change settings of a topic; those that are not given stay.

    Every process that sends uses them from its next append on, and retention from the next round of upkeep on."""
    given: dict[str, Any] = {
        "retention": _number("--retention", retention, seconds_of),
        "retention_bytes": _number("--retention-bytes", retention_bytes, bytes_of_size),
        "segment_s": _number("--segment-s", segment_s, seconds_of),
    }
    given |= {"segment_bytes": segment_bytes, "keep_unread": keep_unread, "durability": durability, "codec": codec}
    given["partitions"] = partitions
    changes = {each: None if value == _NONE else value for each, value in given.items() if value is not None}
    if not changes:
        raise typer.BadParameter("give a setting to change, such as --retention 7d")
    with open_hub(at, registry, needs_log=True) as hub:
        before = hub.topic(name).topic
        after = hub.alter_topic(name, **changes).topic  # type: ignore[arg-type]  # it checks them
    if as_json:
        typer.echo(json.dumps(settings_of(after)))
        return
    changed = before.differences(after)
    if not changed:
        typer.echo(f"{name} has these settings already")
        return
    for setting, (former, now) in changed.items():
        typer.echo(f"{name}: {setting} is {_shown(now)} now; it was {_shown(former)}")


def settings_of(topic: Topic) -> dict[str, Any]:
    """The settings of a topic as JSON, and as `pxrs topic describe` shows them."""
    return {
        "topic": topic.name,
        "id": topic.id,
        "partitioner": topic.partitioner,
        "codec": topic.codec,
        "durability": topic.durability,
        "retention_s": topic.retention_s,
        "retention_bytes": topic.retention_bytes,
        "segment_bytes": topic.segment_bytes,
        "segment_s": topic.segment_age_s,
        "keep_unread": topic.keep_unread,
    }


def _number(option: str, text: str | None, parse: Callable[[str], float]) -> float | str | None:
    """The number that an option gives, or the word none. Raises BadParameter."""
    if text is None or text == _NONE:
        return text
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or none", param_hint=option) from None


def _shown(value: object) -> str:
    if value is None:
        return _NONE
    return f"{value:g}" if isinstance(value, float) else str(value)
