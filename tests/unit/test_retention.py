"""Retention and those who have yet to read."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import RegistryUnavailable

LAST_WEEK = 7 * 86_400 * 1_000_000


@pytest.mark.parametrize("place", ["memory:", "directory"])
def test_what_a_group_has_yet_to_read_is_kept_if_the_topic_says_so(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pxrs.open("memory:" if place == "memory:" else tmp_path) as hub:
        topics = [
            hub.create_topic(name, partitions=1, retention=3600, segment_bytes=4096, keep_unread=name == "kept")
            for name in ("kept", "gone")
        ]
        for topic in topics:
            with hub.producer(topic.name, linger_s=0) as out:
                for number in range(10):
                    out.send(b"%d" % number + b"x" * 4096).result()
            for group, count in (("fast", 8), ("slow", 3)):
                with hub.consumer(topic.name, group) as inbox:
                    for _ in range(count):
                        inbox.poll(1)
                    inbox.commit()
        kept, gone = topics
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 7200 * 10**9)
        assert gone.retain() == {0: 10}
        assert kept.retain() == {0: 3}
        assert next(kept.messages(0, 3)).value[:1] == b"3"  # type: ignore[index]
        hub.group("slow").delete()
        assert kept.retain() == {0: 8}
        for group in hub.groups():
            hub.group(group).delete(force=True)
        assert kept.retain() == {0: 10}


def test_retention_that_cannot_ask_who_reads_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pxrs.open("memory:") as hub:
        topic = hub.create_topic("t", partitions=1, retention=1.0, keep_unread=True)

        def away(*arguments: object) -> None:
            raise RegistryUnavailable("away")

        monkeypatch.setattr(type(hub.registry), "_scan", away)
        with caplog.at_level(logging.WARNING), hub.producer("t", linger_s=0) as out:
            out.send(b"a", timestamp=LAST_WEEK).result()
            out.send(b"b", timestamp=LAST_WEEK).result()
        assert "retention of t failed" in caplog.text
        assert (topic.start(0), topic.end(0)) == (0, 2)
