"""Arguments that name something of a hub, completed by the shell from the hub that --at or PXRS_AT names.

A shell asks for every press of the tab key, and a person waits: what is not known after `TIME_S` is not offered. No
error is shown, because it would be printed into the line that is being typed; the command itself tells it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from pxrs.hub import Hub

TIME_S: Final = 2.0
"""For how long the names are waited for, once what reads them is imported."""


def _names(listed: Callable[[Hub], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """A function that completes names. listed: reads them from an open hub."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        found: list[str] = []
        at, registry = ctx.params.get("at"), ctx.params.get("registry")
        if at is None and registry is None:
            return []
        # Imported before the time counts: on a busy machine that alone may take as long.
        import pxrs.opening  # noqa: F401

        # On a thread, because a server that cannot be reached is waited for much longer than TIME_S.
        reader = threading.Thread(target=_read, args=(listed, at, registry, found), daemon=True)
        reader.start()
        reader.join(TIME_S)
        return sorted(name for name in found if name.startswith(incomplete))

    return complete


def _read(listed: Callable[[Hub], Iterable[str]], at: Any, registry: Any, found: list[str]) -> None:
    from pxrs.cli.options import open_hub

    try:
        with open_hub(at, registry) as hub:
            found.extend(listed(hub))
    except Exception:  # noqa: BLE001, S110 - see above
        pass


def _topics(hub: Hub) -> list[str]:
    return [topic.name for topic in hub.topics()]


def _sources(hub: Hub) -> list[str]:
    return [*_topics(hub), *(source.name for source in hub.sources())]


complete_topic: Final = _names(_topics)
complete_source: Final = _names(_sources)
complete_group: Final = _names(lambda hub: hub.groups())
complete_queue: Final = _names(lambda hub: [queue.name for queue in hub.queues()])

TopicName = Annotated[str, typer.Argument(help="The topic's name.", autocompletion=complete_topic)]
SourceName = Annotated[
    str, typer.Argument(help="The name of the topic or registered source.", autocompletion=complete_source)
]
