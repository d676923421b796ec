"""`events.record`: events of clients, which the server stores in the internal topics of its hub.

No client appends to these topics itself. So the server can add who the caller is: the id of its token. An action of
`_audit` has it as `who`, and what the client says of its user as `claimed_by`; every other event has it as `via`.
"""

from __future__ import annotations

import re
import threading
from typing import Final

from pxrs.errors import InvalidArgument, ServerBusy
from pxrs.events.model import ACTION, EVENT_BYTES_MAX, Event
from pxrs.server.auth.gate import Caller
from pxrs.server.given import Given
from pxrs.server.served import Result, Served

EVENTS_MAX: Final = 1_000
"""How many events one call may have."""
STORED_S: Final = 4.0
"""How long a call may take from its arrival until its events are stored. The client waits for a little longer."""
_NAME: Final = re.compile(rf"[a-z]+\.{ACTION.pattern}")


def record(served: Served, given: Given, at: float) -> Result:
    """Store the events of a client. Answers when they are stored; raises ServerBusy if that takes too long."""
    texts = given.texts("events")
    if len(texts) > EVENTS_MAX:
        raise InvalidArgument(f"{given.call}: {len(texts):,} events; the maximum is {EVENTS_MAX:,}")
    events = [_stamped(served.caller, _event(given, text)) for text in texts]
    writer, stored, clock = served.hub.parts.events, threading.Semaphore(0), served.hub.registry.clock
    until = at + STORED_S
    if clock.now() >= until:  # it has waited for a thread so long that the client has given up
        raise ServerBusy(f"{given.call}: the events were not stored within {STORED_S:g} s")
    try:
        for event in events:
            if not writer.keep(event, stored.release):
                raise ServerBusy(f"{given.call}: too many events are waiting to be stored, or none can be stored")
        for _ in events:
            if not stored.acquire(timeout=max(0.0, until - clock.now())):
                raise ServerBusy(f"{given.call}: the events were not stored within {STORED_S:g} s")
    except ServerBusy:
        # The client sends them again: without this, the buffer would fill with copies of them during an outage.
        writer.withdraw(events)
        raise
    return {}


def _event(given: Given, text: str) -> Event:
    event = Event.load(text.encode()) if len(text) <= EVENT_BYTES_MAX else None
    if event is None or _NAME.fullmatch(event.name) is None:
        raise InvalidArgument(f"{given.call}: one of the events is malformed or too long: see docs/wire.md")
    return event


def _stamped(caller: Caller, event: Event) -> Event:
    if caller.who is None:
        return event
    if event.is_audit:
        said = {"who": caller.who, "claimed_by": event.fields.get("who")}
        return Event(event.name, event.at, {**event.fields, **said})
    return Event(event.name, event.at, {**event.fields, "via": caller.who})
