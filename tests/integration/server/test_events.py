"""Events of clients: a server whose `_events` cannot be written to serves everything else, and takes no event twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pxrs.errors import InvalidArgument, ServerBusy
from pxrs.events import Event
from pxrs.events.storing import EventStore
from pxrs.model import EVENTS_TOPIC
from pxrs.server import recording
from tests.integration.server.conftest import Start
from tests.integration.server.peer import Control, connect

WAIT_S = 20.0


def text(member: str, at: int = 1) -> str:
    return json.dumps({"name": "member.joined", "at": at, "fields": {"group": "g", "member": member}})


class SlowDisk:
    """While it is slow, appends to `_events` do not end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_free, self.entered = threading.Event(), threading.Semaphore(0)
        store = EventStore.store

        def slow(mine: EventStore, name: str, events: Sequence[Event]) -> None:
            if name == EVENTS_TOPIC:
                self.entered.release()
                assert self.is_free.wait(WAIT_S)
            store(mine, name, events)

        monkeypatch.setattr(EventStore, "store", slow)


def test_w6_events_that_wait_for_a_disk_delay_no_other_call(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    running = start(threads=2)
    with connect(running.address) as channel, Control(channel) as control:
        numbers = [control.begin("events.record", events=[text("m")]) for _ in range(10)]
        assert disk.entered.acquire(timeout=WAIT_S)
        assert control.make("registry.get", key="a") == {"entry": None}
        disk.is_free.set()
        assert [control.answer(number)["result"] for number in numbers] == [{}] * 10


def test_events_that_are_not_stored_in_time_are_withdrawn_so_that_the_client_may_send_them_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_s = recording.STORED_S
    monkeypatch.setattr(recording, "STORED_S", 2.0)
    disk = SlowDisk(monkeypatch)
    running = start()
    with connect(running.address) as channel, Control(channel) as control:
        first = control.begin("events.record", events=[text("first")])
        assert disk.entered.acquire(timeout=WAIT_S)  # it is being stored, and that cannot be undone
        monkeypatch.setattr(recording, "STORED_S", 0.1)
        for _ in range(5):
            with pytest.raises(ServerBusy):
                control.make("events.record", events=[text("again")])
        assert "error" in control.answer(first)
        monkeypatch.setattr(recording, "STORED_S", stored_s)
        disk.is_free.set()
        assert running.hub.parts.events.flush(WAIT_S)
        assert control.make("events.record", events=[text("again")]) == {}
    assert [each.fields["member"] for each in running.hub.events(group="g")] == ["first", "again"]


@pytest.mark.parametrize("at", [1 << 63, -1, "now"])
def test_an_event_of_a_time_that_no_message_can_have_is_refused(start: Start, at: Any) -> None:
    running = start()
    with connect(running.address) as channel, Control(channel) as control:
        with pytest.raises(InvalidArgument):
            control.make("events.record", events=[text("m", at)])
        assert control.make("events.record", events=[text("n")]) == {}
    assert [each.fields["member"] for each in running.hub.events(group="g")] == ["n"]
