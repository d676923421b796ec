"""Copying a topic: equal by content, each message once, whatever is killed and whenever (decision 0060)."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.copying import copier, pieces
from pxrs.copying.records import CopyRecord, copy_key
from pxrs.errors import AppendUnknown, CopyFailed, InvalidArgument, InvalidTopic, OutcomeUnknown
from pxrs.hashing import murmur2
from pxrs.log.batch import Origin
from pxrs.log.contract import Append
from pxrs.log.outcomes import MaybeStored, Outcome, offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.server.serving import serving
from pxrs.testing import forked
from pxrs.testing.forked import Forked
from pxrs.testing.log_fixtures import records
from tests.acceptance.copying_process import LINE_BYTES

MESSAGES = 300
KILLS = 12 if os.environ.get("PXRS_SOAK") else 3
OTHERS = 2_100
PROCESS = "tests/acceptance/copying_process.py"
PIECE_ROWS, LINES_MAX = 9, 9
Row = tuple[bytes | None, bytes | None, int, Any]


def fill(hub: pxrs.Hub, partitions: int = 3, first: int = 0, count: int = MESSAGES) -> None:
    """The topic orders: with and without keys, values and headers, and with times of its own."""
    if not first:
        hub.create_topic("orders", partitions=partitions)
    with hub.producer("orders") as out:
        for number in range(first, first + count):
            key = None if number % 10 == 0 else b"k%d" % (number % 7)
            headers = [("n", b"%d" % number), ("empty", b"")] if number % 3 == 0 else None
            out.send(
                None if number % 50 == 1 else b"%d" % number, key=key, headers=headers, timestamp=number * 1_000_000
            )


def rows(hub: pxrs.Hub, topic: str) -> list[list[Row]]:
    """The messages of each partition, in their order."""
    handle = hub.topic(topic)
    return [
        [(message.key, message.value, message.timestamp, message.headers) for message in handle.messages(number)]
        for number in range(handle.partitions)
    ]


def check_equal(source: pxrs.Hub, target: pxrs.Hub, name: str = "copy") -> None:
    """Each message is there once, and those of each key are in their order."""
    before, after = rows(source, "orders"), rows(target, name)
    assert sorted(map(repr, chain(*before))) == sorted(map(repr, chain(*after)))
    for key in {row[0] for part in before for row in part} - {None}:
        (there,) = [part for part in after if any(row[0] == key for row in part)]
        expected = [row for part in before for row in part if row[0] == key]
        assert [row for row in there if row[0] == key] == expected, f"order of {key!r}"


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[tuple[pxrs.Hub, pxrs.Hub]]:
    with pxrs.open(tmp_path / "a", upkeep=False) as source, pxrs.open(tmp_path / "b", upkeep=False) as target:
        fill(source)
        yield source, target


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ROWS", 40)
    monkeypatch.setattr(copier, "_PAUSE_S", (0.0, 0.0))


@pytest.mark.parametrize("partitions", [1, 3, 5])
def test_a_copy_is_equal_by_content_and_goes_on_with_what_has_come_since(
    partitions: int, hubs: tuple[pxrs.Hub, pxrs.Hub]
) -> None:
    source, target = hubs
    source.alter_topic("orders", codec="lz4", retention=1e9)
    progress: list[pxrs.Copied] = []
    done = source.copy_topic("orders", "copy", to=target, partitions=partitions, on_progress=progress.append)
    assert done == progress[-1] == pxrs.Copied(MESSAGES, MESSAGES, MESSAGES)
    assert len(progress) >= MESSAGES // 40
    check_equal(source, target)
    topic = target.topic("copy").topic
    assert (topic.partitions, topic.codec, topic.retention_s, topic.revision) == (partitions, "lz4", 1e9, 0)
    if partitions == 3:
        assert rows(source, "orders") == rows(target, "copy"), "each message stays in its partition"
    fill(source, first=MESSAGES, count=50)
    assert source.copy_topic("orders", "copy", to=target).messages == 50
    assert source.copy_topic("orders", "copy", to=target).messages == 0
    check_equal(source, target)


def test_another_partitioner_decides_about_each_key_and_messages_without_a_key_are_spread(
    hubs: tuple[pxrs.Hub, pxrs.Hub],
) -> None:
    source, target = hubs
    target.create_topic("copy", partitions=3, partitioner="murmur2")
    source.copy_topic("orders", "copy", to=target)
    check_equal(source, target)
    copied = rows(target, "copy")
    for number, part in enumerate(copied):
        assert {murmur2(row[0]) % 3 for row in part if row[0] is not None} <= {number}, "where a producer sends the key"
    assert all(sum(row[0] is None for row in part) >= 5 for part in copied)


def test_a_copy_through_servers_is_equal_by_content(hubs: tuple[pxrs.Hub, pxrs.Hub]) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(pxrs.open(stack.enter_context(serving(hub)))) for hub in hubs]
        assert clients[0].copy_topic("orders", "copy", to=clients[1], partitions=4).messages == MESSAGES
        assert clients[0].copy_topic("orders", "beside").messages == MESSAGES
    check_equal(*hubs)
    check_equal(hubs[0], hubs[0], "beside")


class Killed(BaseException):
    """Stands for a SIGKILL at this moment: nothing in pxrs catches it."""


class Moments:
    """Counts the calls that change something, and kills before or after one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, kill_at: int) -> None:
        self.count, self._kill_at = 0, kill_at
        self._patch = patch

    def watch(self, target: object, name: str) -> None:
        call = getattr(target, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            self._pass()
            result = call(*arguments, **named)
            self._pass()
            return result

        self._patch.setattr(target, name, watched)

    def _pass(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            raise Killed


def copy_once(source: pxrs.Hub, target: pxrs.Hub, kill_at: int) -> int:
    """Copy with a kill at this moment. How many moments there were."""
    with pytest.MonkeyPatch.context() as patch:
        moments = Moments(patch, kill_at)
        log = target.log.topic("copy")
        moments.watch(target.registry, "commit")
        append = log.append

        def each_alone(appends: Sequence[Append]) -> list[Outcome]:
            """One partition after another, so that a kill comes between any two of them."""
            outcomes: list[Outcome] = []
            for number, each in enumerate(appends):
                if number:
                    moments._pass()
                outcomes += append([each])
            return outcomes

        patch.setattr(log, "append", each_alone)
        moments.watch(log, "append")
        source.copy_topic("orders", "copy", to=target)
        return moments.count


def test_killed_at_every_moment_and_resumed_each_message_is_there_once(tmp_path: Path) -> None:
    """Also killed a second time while it is resumed."""
    with pxrs.open(tmp_path / "a", upkeep=False) as source:
        fill(source, count=120)
        kill_at = 0
        while True:
            kill_at += 1
            with pxrs.open("memory:", upkeep=False) as target:
                target.create_topic("copy", partitions=2)
                try:
                    last = copy_once(source, target, kill_at)
                except Killed:
                    try:
                        copy_once(source, target, 1 + kill_at % 7)
                    except Killed:
                        copy_once(source, target, 0)
                    check_equal(source, target)
                    continue
                check_equal(source, target)
                assert last < kill_at
                break
        assert kill_at > 20


@pytest.mark.parametrize("is_served", [False, True], ids=["directories", "servers"])
def test_killed_by_sigkill_and_resumed_each_message_is_there_once(
    is_served: bool, hubs: tuple[pxrs.Hub, pxrs.Hub]
) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(hub)) if is_served else hub.url for hub in hubs]
        dice = random.Random(17)
        fill(hubs[0], first=MESSAGES, count=KILLS * LINES_MAX * PIECE_ROWS)  # so that no copy ends before its kill
        for _ in range(KILLS):
            reads, writes = os.pipe()
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, LINE_BYTES)  # the process waits until its last line was read
            with open(reads, buffering=1) as lines:
                process = Forked(PROCESS, [*urls, "2", str(PIECE_ROWS)], stdout=writes, is_mortal=True)
                os.close(writes)
                for _ in range(dice.randrange(1, LINES_MAX)):
                    assert lines.readline()
                process.send_signal(signal.SIGKILL)
                assert process.wait(30) == -signal.SIGKILL
        last = forked.run_text(PROCESS, [*urls, "2", str(PIECE_ROWS)])
        assert last.stdout.splitlines()[-1].startswith("done "), last.stderr
        count = sum(hubs[0].log.topic("orders").ends())
        assert int(last.stdout.split()[-1]) < count, "it has gone on where the last one was"
    check_equal(*hubs)


def test_a_lost_reply_to_the_commit_or_the_append_costs_and_doubles_nothing(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = hubs
    target.create_topic("copy", partitions=2)
    log, registry = target.log.topic("copy"), target.registry
    commit, append = registry.commit, log.append
    calls = 0

    def lossy_commit(expect: dict[str, int], *arguments: Any, **named: Any) -> dict[str, int]:
        nonlocal calls
        if not any("/copies/" in key for key in expect):
            return commit(expect, *arguments, **named)
        calls += 1
        if calls % 3 == 1:
            commit(expect, *arguments, **named)
        if calls % 3 != 0:
            raise OutcomeUnknown("no reply")
        return commit(expect, *arguments, **named)

    def lossy_append(appends: Sequence[Append]) -> list[Outcome]:
        nonlocal calls
        calls += 1
        entry = registry.get(copy_key(log.id, source.topic("orders").id))
        assert entry is not None
        assert CopyRecord.load(entry.key, entry.value).number == appends[0].origin.epoch, "sent, and not on record"
        outcomes = append(appends) if calls % 2 else []
        if calls % 5:
            return [MaybeStored(AppendUnknown("no reply"))] * len(appends)
        return outcomes or append(appends)

    monkeypatch.setattr(registry, "commit", lossy_commit)
    monkeypatch.setattr(log, "append", lossy_append)
    source.copy_topic("orders", "copy", to=target)
    check_equal(source, target)
    assert calls > 20


def stopped_at_its_append(
    source: pxrs.Hub, target: pxrs.Hub, meanwhile: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy whose process is stopped as it sends its third piece, and goes on after `meanwhile`."""
    log = target.log.topic("copy")
    append, calls = log.append, 0

    def late(appends: Sequence[Append]) -> list[Outcome]:
        nonlocal calls
        calls += 1
        if calls == 3:
            meanwhile()
        return append(appends)

    monkeypatch.setattr(log, "append", late)
    source.copy_topic("orders", "copy", to=target)


def test_a_copy_that_was_stopped_while_another_one_went_on_stores_nothing_more(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = hubs
    target.create_topic("copy", partitions=2)
    with (
        pxrs.open(source.url, upkeep=False) as again,
        pxrs.open(target.url, upkeep=False) as other,
        pytest.raises(CopyFailed),
    ):
        stopped_at_its_append(source, target, lambda: again.copy_topic("orders", "copy", to=other), monkeypatch)
    check_equal(source, target)


def test_a_copy_that_was_stopped_before_its_commit_changes_nothing(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = hubs
    target.create_topic("copy", partitions=2)
    registry = target.registry
    commit, calls = registry.commit, 0

    def late(expect: dict[str, int], *arguments: Any, **named: Any) -> dict[str, int]:
        nonlocal calls
        calls += any("/copies/" in key for key in expect)
        if calls == 3:
            calls += 1
            with pxrs.open(source.url, upkeep=False) as again, pxrs.open(target.url, upkeep=False) as other:
                again.copy_topic("orders", "copy", to=other)
        return commit(expect, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(registry, "commit", late)
        with pytest.raises(CopyFailed, match="another process is copying orders into copy"):
            source.copy_topic("orders", "copy", to=target)
    fill(source, first=MESSAGES, count=20)
    assert source.copy_topic("orders", "copy", to=target).messages == 20
    check_equal(source, target)


def test_a_target_that_has_forgotten_the_copy_knows_its_last_piece_all_the_same(
    hubs: tuple[pxrs.Hub, pxrs.Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = hubs
    log = target.create_topic("copy", partitions=2, durability="os").log
    with pytest.raises(Killed):
        copy_once(source, target, 9)
    assert OTHERS > 2 * PRODUCERS_MAX
    extra = [Append.encoded(n % 2, records([b"by another"]), Origin(uuid.uuid4(), 0, 0)) for n in range(OTHERS)]
    offsets_of(log.append(extra))
    source.copy_topic("orders", "copy", to=target)
    found = [row for part in rows(target, "copy") for row in part if row[1] != b"by another"]
    assert sorted(map(repr, found)) == sorted(map(repr, chain(*rows(source, "orders"))))


# From where to where.


def test_a_part_is_copied_by_offsets_and_by_times(hubs: tuple[pxrs.Hub, pxrs.Hub]) -> None:
    source, target = hubs
    begin, end = datetime.fromtimestamp(100, UTC), datetime.fromtimestamp(200, UTC)
    source.copy_topic("orders", "times", to=target, start=begin, end=end)
    assert {row[2] // 1_000_000 for part in rows(target, "times") for row in part} == set(range(100, 200))
    source.copy_topic("orders", "offsets", to=target, start=10, end=20)
    assert rows(target, "offsets") == [part[10:20] for part in rows(source, "orders")]
    source.copy_topic("orders", "offsets", to=target, start=10, end=25)
    assert rows(target, "offsets") == [part[10:25] for part in rows(source, "orders")]
    with pytest.raises(InvalidArgument, match="began at offset 10"):
        source.copy_topic("orders", "offsets", to=target, start=0)
    with pytest.raises(InvalidArgument, match="time zone"):
        source.copy_topic("orders", "offsets", to=target, end=datetime(2026, 1, 1))


def test_what_would_double_or_lose_messages_is_refused(hubs: tuple[pxrs.Hub, pxrs.Hub], tmp_path: Path) -> None:
    source, target = hubs
    with pytest.raises(InvalidTopic, match="into itself"):
        source.copy_topic("orders", "orders")
    with pytest.raises(InvalidTopic, match="begin with '_'"):
        source.copy_topic("orders", "_events")
    target.create_topic("copy", partitions=2)
    with pytest.raises(InvalidTopic, match="2 partitions, not 4"):
        source.copy_topic("orders", "copy", to=target, partitions=4)
    with target.producer("copy") as out:
        out.send(b"there before")
    with pytest.raises(CopyFailed, match="--append"):
        source.copy_topic("orders", "copy", to=target)
    assert source.copy_topic("orders", "copy", to=target, append=True).messages == MESSAGES
    assert source.copy_topic("orders", "copy", to=target).messages == 0, "it is on record now"


def test_messages_that_retention_removed_before_they_were_copied_are_told(hubs: tuple[pxrs.Hub, pxrs.Hub]) -> None:
    source, target = hubs
    source.alter_topic("orders", segment_bytes=4096)
    source.copy_topic("orders", "copy", to=target, end=10)
    fill(source, first=MESSAGES)
    log = source.topic("orders").log
    log.trim(dict(enumerate(log.ends())))
    assert max(log.start(number) for number in range(3)) > 10
    with pytest.raises(CopyFailed, match="retention has removed messages of orders"):
        source.copy_topic("orders", "copy", to=target)


def test_the_record_of_a_copy_goes_with_the_target(hubs: tuple[pxrs.Hub, pxrs.Hub]) -> None:
    source, target = hubs
    source.copy_topic("orders", "copy", to=target)
    key = copy_key(target.topic("copy").id, source.topic("orders").id)
    entry = target.registry.get(key)
    assert entry is not None
    record = CopyRecord.load(key, entry.value)
    assert (sum(record.positions), record.piece, record.source) == (MESSAGES, None, {"topic": "orders"})
    target.delete_topic("copy")
    assert target.registry.scan("topics/") == []
    source.copy_topic("orders", "copy", to=target)
    check_equal(source, target)
    assert [event.fields["messages"] for event in target.audit() if event.name == "audit.copy_topic"] == [MESSAGES] * 2


def test_the_command_copies_and_says_how_much(hubs: tuple[pxrs.Hub, pxrs.Hub]) -> None:
    source, target = hubs
    command = ["topic", "copy", "orders", "copy", "--at", source.url, "--to", target.url]
    done = forked.run_text("pxrs.cli", [*command, "--partitions", "2", "--until", "10"])
    assert done.stdout == "copied 30 messages of orders into copy\n", done.stderr
    done = forked.run_text("pxrs.cli", [*command, "--json"])
    assert json.loads(done.stdout) == {"topic": "orders", "target": "copy", "messages": 270, "offsets": 270}
    check_equal(source, target)
    assert forked.run_text("pxrs.cli", [*command, "--from", "soon"]).returncode == 2
