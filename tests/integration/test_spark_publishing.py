"""Batches of a query on their way into a topic, interrupted at every step. No Spark: `Driver` does what Spark does.

The place is a real one, a directory log and a registry of files. What a driver does to them is counted; it dies, or is
held up while another one does its work, or hears nothing of what it has written, at each of these steps. In the end the
topic holds every message once, and the group's checkpoints say so.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs import disk
from pxrs.errors import (
    AppendFailed,
    BatchRefused,
    Conflict,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
    SequenceGap,
    UnknownProducer,
    UnknownTopic,
)
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.log.batch import Origin
from pxrs.log.contract import Append
from pxrs.log.outcomes import NotStored, Outcome
from pxrs.log.producers import BATCHES_KEPT, Producers
from pxrs.publishing import manifest, outage
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher, forget_deleted_topics, forget_topic
from pxrs.publishing.planning import Span, Spans
from pxrs.publishing.records import Manifest, published_spans
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.contract import ABSENT
from pxrs.registry.identity import fingerprint
from pxrs.testing import faults
from pxrs.testing.transfer import Transfer, transfer

SOAK = bool(os.environ.get("PXRS_SOAK"))
SEED = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
KEYS = Keys("g")
QUERY = "query"
SOURCE_PARTITIONS = 2
TARGET_PARTITIONS = 2
MESSAGES = 60
BATCH_ROWS = 15
"""Of each partition: two batches."""
TASKS = 6
"""Each has a piece for each partition: more than a partition remembers of a producer."""
WAIT_S = 30.0


class Crash(BaseException):
    """The process is gone. Nothing in the code under test catches it."""


class Superseded(Exception):
    """As Spark ends a driver that finds its own batch written down by another one."""


class NotExact(AssertionError):
    """The account does not come out even, or it cannot be finished."""


# A driver that can be interrupted.

Hook = Callable[[str], None]


class Watched:
    """Lets every call through, and tells of those that matter when they are made: a step is over."""

    def __init__(self, inner: Any, hook: Hook, kind: str, *names: str) -> None:
        self._inner, self._hook, self._kind, self._names = inner, hook, kind, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            result = found(*arguments, **named)
            self._hook(f"{self._kind}.{name}")
            return result

        return call


class WatchedLog(Watched):
    """Each partition of an append is a step: a log may have stored some of them when it fails."""

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        numbers = {append.partition for append in appends}
        found: dict[int, list[Outcome]] = {}
        for number in sorted(numbers):
            found[number] = self._inner.append([append for append in appends if append.partition == number])
            self._hook("log.append")
        return [found[append.partition].pop(0) for append in appends]


@dataclass
class Steps:
    """Counts what it is told of, and acts at one of them."""

    at: int | None = None
    act: Callable[[], None] = lambda: None
    only: str = ""
    """Of those alone that have this in their name."""
    count: int = 0

    def __call__(self, name: str) -> None:
        if self.only in name:
            self.count += 1
            if self.count == self.at:
                self.act()


def crash() -> None:
    raise Crash


def nothing(name: str) -> None: ...


class SparkLogs:
    """What Spark keeps in its checkpoint location: a driver that finds its batch there already gives up."""

    def __init__(self, folder: Path) -> None:
        self._planned, self._finished = folder / "offsets", folder / "commits"
        for log in (self._planned, self._finished):
            log.mkdir(parents=True, exist_ok=True)

    def last(self) -> tuple[int, Spans, bool]:
        """The last batch that was planned, and whether it is finished; -1 if there is none."""
        batch = len(list(self._planned.iterdir())) - 1
        if batch < 0:
            return batch, {}, True
        planned = json.loads((self._planned / str(batch)).read_text())
        return batch, {number: Span(*span) for number, span in planned}, (self._finished / str(batch)).exists()

    def plan(self, batch: int, spans: Spans) -> None:
        self._add(self._planned / str(batch), json.dumps(list(spans.items())))

    def finish(self, batch: int) -> None:
        self._add(self._finished / str(batch), "")

    def _add(self, path: Path, text: str) -> None:
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            raise Superseded from None


@dataclass
class Mutation:
    """What is done wrong on purpose."""

    publisher: type[Publisher] = Publisher
    staging: Callable[[str], Staging] = DirectoryStaging
    abort: Callable[[Driver, int], None] = lambda driver, batch: None


class Place:
    """A hub with the topics `in` and `out`, and Spark's checkpoint location."""

    def __init__(self, folder: Path, mutation: Mutation | None = None, is_one_hub: bool = True) -> None:
        self.url = str(folder)
        self.mutation = mutation or Mutation()
        self.is_one_hub = is_one_hub
        """Source and sink have the same registry: the checkpoints are in the manifest's commit (K3)."""
        self.has_gone_on = True
        """The query came back, so nothing that it has staged is left. What others leave is swept much later."""
        self.logs = SparkLogs(folder / "checkpoint")
        with pxrs.open(folder) as hub:
            hub.create_topic("in", partitions=SOURCE_PARTITIONS)
            hub.create_topic("out", partitions=TARGET_PARTITIONS)
        self.open()
        self.sent = [(b"key-%d" % (number % 10), b"%d" % number) for number in range(MESSAGES)]
        with self.hub.producer("in") as producer:
            for key, value in self.sent:
                producer.send(value, key, partition=int(value) % SOURCE_PARTITIONS)
        begin = Checkpoint(0).dump()
        numbers = range(SOURCE_PARTITIONS)
        self.hub.registry.commit(put={KEYS.checkpoint(self.source.id, number): begin for number in numbers})

    def open(self) -> None:
        self.hub = pxrs.open(self.url)
        self.source, self.target = self.hub.topic("in"), self.hub.topic("out")

    def checkpoints(self) -> dict[int, int]:
        entries = self.hub.registry.scan(f"{KEYS.checkpoints}{self.source.id}/")
        return dict(enumerate(Checkpoint.load(entry.key, entry.value).offset for entry in entries))

    def rows(self, number: int, start: int, end: int) -> list[tuple[bytes, bytes]]:
        messages = itertools.islice(self.source.messages(number, start), end - start)
        return [(message.key or b"", message.value or b"") for message in messages]

    def manifest(self) -> Manifest | None:
        entry = self.hub.registry.get(f"spark/{self.target.id}/{QUERY}")
        return None if entry is None else Manifest.load(entry)

    def staged(self) -> list[Path]:
        return [path for path in Path(self.url, "staging").rglob("*") if path.is_file()]

    def arrived(self) -> int:
        return sum(self.target.end(number) for number in range(TARGET_PARTITIONS))

    def account(self) -> Transfer:
        return transfer(self.sent, self.target, is_ordered=False)

    def check(self, what: object = "") -> None:
        """Everything arrived once, the group knows it, and nothing lies about. Raises NotExact."""
        found = self.account()
        if not found.is_exact:
            raise NotExact(f"{what}: {found}")
        if self.is_one_hub and self.hub.group("g").describe().lag:
            raise NotExact(f"{what}: the group's checkpoints are {self.checkpoints()}")
        if self.has_gone_on and self.staged():
            raise NotExact(f"{what}: left over: {self.staged()}")

    def close(self) -> None:
        self.hub.close()
        shutil.rmtree(self.url, ignore_errors=True)


class Driver:
    """One process of the query: what Spark, the source and the sink do in it. Its tasks differ from the last one's."""

    def __init__(self, place: Place, hook: Hook = nothing, tasks: int = TASKS, seed: int = SEED) -> None:
        self.place, self.tasks = place, tasks
        self.random = random.Random(seed)
        self.incarnation = uuid.uuid4().hex
        self.hub = place.hub
        self.source, self.topic = place.source, place.target.topic
        log = self.hub.topic("out").log
        self.staging: Any = Watched(place.mutation.staging(place.url), hook, "staging", "feeds", "clear")
        self.registry: Any = Watched(self.hub.registry, hook, "registry", "get", "commit")
        self.publisher = place.mutation.publisher(self.registry, WatchedLog(log, hook, "log"), self.staging)
        self._is_clean = False
        self.fences: dict[int, int] = {}
        self.epochs: dict[int, int] = {}

    def claim(self) -> None:
        """The member's part: every partition is its own from now on."""
        for number in range(SOURCE_PARTITIONS):
            key = KEYS.owner(self.source.id, number)
            entry = self.hub.registry.get(key)
            epoch = 1 if entry is None else Owner.load(key, entry.value).epoch + 1
            owner = Owner(self.incarnation, epoch).dump()
            version = ABSENT if entry is None else entry.version
            self.epochs[number] = epoch
            self.fences[number] = self.hub.registry.commit({key: version}, {key: owner})[key]

    def run(self) -> None:
        """From where Spark's logs say, to the end of `in`."""
        self.claim()
        batch, spans, is_finished = self.place.logs.last()
        if not is_finished:
            self.work(batch, spans)
        while spans := self.plan(spans):
            batch += 1
            self.place.logs.plan(batch, spans)
            self.work(batch, spans)

    def clean_up(self) -> None:
        """As a driver's first commit does it for those who died."""
        self.publisher.finish_others()
        self._is_clean = True

    def plan(self, last: Spans) -> Spans:
        spans = {}
        for number in range(SOURCE_PARTITIONS):
            start = last[number].end if last else 0
            end = min(self.source.end(number), start + BATCH_ROWS)
            if start < end:
                spans[number] = Span(self.epochs[number], start, end)
        return spans

    def work(self, batch: int, spans: Spans) -> None:
        """One batch: read, staged in tasks, committed; then Spark writes down that it is over."""
        files = self.stage(batch, spans)
        try:
            if not self._is_clean:
                self.clean_up()
            self.publisher.publish(QUERY, batch, files, self.staging.feeds(QUERY, batch, self.incarnation))
        except Exception:
            self.place.mutation.abort(self, batch)
            raise
        self.place.logs.finish(batch)

    def stage(self, batch: int, spans: Spans) -> list[str]:
        """What its tasks have staged: the names that reach the driver."""
        registry = fingerprint(self.hub.registry) if self.place.is_one_hub else "another"
        feed = Feed("g", self.source.id, self.incarnation, registry, spans, self.fences, False)
        self.staging.announce(QUERY, batch, self.incarnation, feed)
        rows = [row for number, span in spans.items() for row in self.place.rows(number, span.start, span.end)]
        self.random.shuffle(rows)
        names: list[str | None] = []
        for task in range(self.tasks):
            part = rows[task :: self.tasks]
            attempts = [self._attempt(batch, task, part)]
            if self.random.random() < 0.2:  # a retry, or speculation: two have staged, and one is heard of
                self.random.shuffle(part)
                attempts.append(self._attempt(batch, task, part))
            names.append(self.random.choice(attempts))
        return [name for name in names if name is not None]

    def _attempt(self, batch: int, task: int, rows: Sequence[tuple[bytes, bytes]]) -> str | None:
        name: str | None = self.staging.stage(self.topic, QUERY, batch, task, [table_of(rows)]).name
        return name


def table_of(rows: Sequence[tuple[bytes, bytes]]) -> pa.RecordBatch:
    keys, values = ([row[column] for row in rows] for column in (0, 1))
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], ["key", "value"])


def take_over(place: Place) -> None:
    """Somebody else of the group, no Spark: goes on where the group's checkpoints are, and does the rest."""
    registry = place.hub.registry
    place.has_gone_on = False
    Driver(place).claim()
    Publisher(registry, place.hub.topic("out").log, DirectoryStaging(place.url)).finish_others()
    with place.hub.producer("out") as producer:
        for number, offset in place.checkpoints().items():
            end = place.source.end(number)
            for key, value in place.rows(number, offset, end):
                producer.send(value, key)
            producer.flush()
            registry.commit(put={KEYS.checkpoint(place.source.id, number): Checkpoint(end).dump()})


Places = Callable[..., Place]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Places]:
    """Makes a new place each time."""
    caplog.set_level(logging.ERROR, "pxrs")
    made: list[Place] = []
    numbers = itertools.count()
    monkeypatch.setattr(manifest, "_PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(outage, "_PAUSE_S", (0.0, 0.0))

    # Processes die here, not the power: there is no need for a disk, and thousands of files come and go.
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-publishing-", dir=folder) as root:

        def make(*arguments: Any, **named: Any) -> Place:
            made.append(Place(Path(root, str(next(numbers))), *arguments, **named))
            return made[-1]

        yield make
        for place in made:
            place.close()


def step_count(place: Place, only: str = "") -> int:
    """How many steps there are in a run that nothing interrupts."""
    steps = Steps(only=only)
    Driver(place, steps).run()
    place.check("without a fault")
    return steps.count


def run_quietly(work: Callable[[], None]) -> Exception | None:
    """The error by which it ended, if it is one that is meant to end a driver."""
    try:
        work()
    except (PxrsError, Superseded) as error:
        return error
    return None


# Deaths.


def try_every_crash(places: Places, *arguments: Any, successor: Callable[[Place], None] | None = None) -> int:
    """A driver dies at each step, and the next one goes on. Raises NotExact. How many steps there were."""
    count = step_count(places())
    for at in range(1, count + 1):
        place = places(*arguments)
        with suppress(Crash):  # or it comes to its end: one that does it wrong may have fewer steps
            Driver(place, Steps(at, crash)).run()
        try:
            (successor or next_driver(at))(place)
        except (PxrsError, OSError) as error:
            raise NotExact(f"SEED={SEED}: died at step {at}, and the next one cannot go on: {error}") from error
        place.check(f"SEED={SEED}: died at step {at}")
        place.close()
    return count


def next_driver(number: int) -> Callable[[Place], None]:
    """One whose rows come in another order, in other files and another number of them."""
    return lambda place: Driver(place, tasks=TASKS + number % 3 - 1, seed=SEED + number + 1).run()


@pytest.mark.parametrize("is_one_hub", [True, False], ids=["one hub", "two hubs"])
def test_k1_a_driver_may_die_at_every_step(places: Places, is_one_hub: bool) -> None:
    assert try_every_crash(places, None, is_one_hub) > 20


def test_k1_a_driver_may_die_at_every_step_with_a_log_that_forgets_every_producer_at_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Producers.__init__, "__defaults__", (0, -1))
    assert try_every_crash(places) > 20


def test_k3_another_member_goes_on_exactly_where_a_dead_driver_was(places: Places) -> None:
    try_every_crash(places, successor=take_over)


def test_k1_drivers_may_die_one_after_the_other(places: Places) -> None:
    count = step_count(places())
    chance = random.Random(SEED)
    for number in range(200 if SOAK else 20):
        place = places()
        for _ in range(4):
            try:
                Driver(place, Steps(chance.randrange(1, count), crash), chance.randrange(1, 9), chance.random()).run()
            except Crash:
                continue
        Driver(place, tasks=chance.randrange(1, 9), seed=number).run()
        place.check(f"SEED={SEED} {number}")
        place.close()


def test_k1_a_process_may_be_killed_at_any_system_call(places: Places) -> None:
    """Within a step too: while it makes, names and removes files."""
    numbers = itertools.count()

    def run(act: Callable[[str], None], at: int | None) -> int:
        place = places()

        def work() -> None:
            place.open()  # the parent's is not for it
            with faults.counted(faults.Steps(at, act)) as steps:
                Driver(place).run()
            Path(place.url, "steps").write_text(str(steps.count))

        with faults.child(work) as pid:
            code = faults.wait_exit(pid)
        if at is None:
            assert code == 0
            return int(Path(place.url, "steps").read_text())
        assert code in (-signal.SIGKILL, 0)  # it may come to its end with a call or two less
        next_driver(next(numbers))(place)
        place.check(f"SEED={SEED}: killed at call {at}")
        place.close()
        return at

    count = run(lambda name: None, None)
    for at in random.Random(SEED).sample(range(1, count + 1), count if SOAK else 15):
        run(faults.kill, at)


# Drivers that were thought dead.


class Held:
    """A driver on a thread of its own, which stops at a step until it is let go."""

    def __init__(self, place: Place, at: int, only: str = "", **named: Any) -> None:
        self._stopped, self._go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.driver = Driver(place, Steps(at, self._stop, only), **named)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._stopped.wait(WAIT_S)

    def _stop(self) -> None:
        self._stopped.set()
        assert self._go.wait(WAIT_S)

    def _run(self) -> None:
        try:
            self.error = run_quietly(self.driver.run)
        finally:
            self._stopped.set()

    def go_on(self) -> Exception | None:
        """To its end."""
        self._go.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize("is_one_hub", [True, False], ids=["one hub", "two hubs"])
def test_k1_a_zombie_goes_on_when_its_successor_is_done(places: Places, is_one_hub: bool) -> None:
    count = step_count(places(None, is_one_hub))
    for at in range(1, count):
        place = places(None, is_one_hub)
        zombie = Held(place, at)
        next_driver(at)(place)
        zombie.go_on()
        settle(place)
        place.check(f"SEED={SEED}: held at step {at}")
        place.close()


def settle(place: Place) -> None:
    """One more driver, which does what is left, and removes what others have staged for nothing."""
    driver = Driver(place, seed=SEED + 2)
    driver.run()
    driver.clean_up()


def try_schedules(places: Places, is_one_hub: bool, only: str, mutation: Mutation | None = None) -> int:
    """One driver is held at any step, the next one too, then the first goes on, then the second. Raises NotExact."""
    count = step_count(places(mutation, is_one_hub), only)
    schedules = list(itertools.product(range(1, count + 1), repeat=2))
    # In any order: those that show a mutation lie close together.
    for first, second in random.Random(SEED).sample(schedules, len(schedules) if SOAK or mutation else 12):
        place = places(mutation, is_one_hub)
        one = Held(place, first, only)
        two = Held(place, second, only, tasks=TASKS + 1 - 2 * (first % 2), seed=SEED + 1)
        one.go_on()
        two.go_on()
        if (end := run_quietly(lambda: settle(place))) is not None:  # noqa: B023
            raise NotExact(f"SEED={SEED}: held at {first} and {second}, and the next one cannot go on: {end}") from end
        place.check(f"SEED={SEED}: held at {first} and {second}, which ended with {one.error!r}, {two.error!r}")
        place.close()
    return count


@pytest.mark.parametrize("is_one_hub", [True, False], ids=["one hub", "two hubs"])
def test_k1_two_drivers_at_once(places: Places, is_one_hub: bool) -> None:
    for only in ("registry", "log"):
        try_schedules(places, is_one_hub, only)


# Replies that are lost.


class Unheard:
    """A registry that does not answer some commits: what was asked for is done, or never, or later.

    numbers: which commits, counted from 1. lands: before how many calls from then on it is done; 0 is at once, None is
    never."""

    def __init__(self, inner: Any, numbers: Sequence[int], lands: int | None) -> None:
        self._inner, self._numbers, self._lands = inner, numbers, lands
        self._count = 0
        self._held: list[tuple[int, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str) -> Any:
        self.tick()
        return self._inner.get(key)

    def commit(self, *arguments: Any, **named: Any) -> Any:
        self.tick()
        self._count += 1
        if self._count not in self._numbers:
            return self._inner.commit(*arguments, **named)
        if self._lands is not None:
            self._held.append((self._lands + 1, arguments))
            self.tick()
        raise OutcomeUnknown("no answer")

    def tick(self) -> None:
        """One call later."""
        self._held = [(left - 1, arguments) for left, arguments in self._held]
        for left, arguments in self._held:
            if left == 0:
                with suppress(Conflict):
                    self._inner.commit(*arguments)


def drive(place: Place, unheard: Callable[[Any], Any], **named: Any) -> Any:
    """Run a driver that has this registry, to its end or its error."""
    driver = Driver(place, **named)
    driver.registry = unheard(place.hub.registry)
    log = place.hub.topic("out").log
    driver.publisher = place.mutation.publisher(driver.registry, log, driver.staging)
    run_quietly(driver.run)
    return driver.registry


def try_lost_replies(places: Places, mutation: Mutation | None = None, is_one_hub: bool = True, tries: int = 1) -> None:
    """The reply to each commit is lost, and to so many more after it. Raises NotExact."""
    count = step_count(places(None, is_one_hub), "commit")
    for number, lands in itertools.product(range(1, count + 1), (0, 1, 2, None)):
        place = places(mutation, is_one_hub)
        drive(place, lambda inner: Unheard(inner, range(number, number + tries), lands))  # noqa: B023
        if (end := run_quietly(Driver(place, tasks=TASKS - 1, seed=SEED + 1).run)) is not None:
            raise NotExact(f"SEED={SEED}: no reply to {number}, lands {lands}, and it cannot go on: {end}") from end
        place.check(f"SEED={SEED}: no reply to {number}, lands {lands}")
        place.close()


@pytest.mark.parametrize("is_one_hub", [True, False], ids=["one hub", "two hubs"])
def test_k1_a_commit_whose_reply_is_lost_may_have_landed_or_not_or_land_later(places: Places, is_one_hub: bool) -> None:
    try_lost_replies(places, is_one_hub=is_one_hub)


def test_k1_a_driver_that_gives_up_hearing_nothing_leaves_it_to_the_next(places: Places) -> None:
    try_lost_replies(places, tries=manifest._TRIES_MAX)


@pytest.mark.parametrize("is_one_hub", [True, False], ids=["one hub", "two hubs"])
def test_k1_a_manifest_may_land_while_the_next_driver_is_at_work(places: Places, is_one_hub: bool) -> None:
    count = step_count(places(None, is_one_hub), "get")
    for at in range(1, count + 1):
        place = places(None, is_one_hub)
        # The third commit is the second batch's manifest. All of its tries are on their way when the sender dies.
        late = drive(place, lambda inner: Unheard(inner, range(3, 100), 50))
        run_quietly(Driver(place, Steps(at, lambda: [late.tick() for _ in range(50)], "get"), seed=SEED + 1).run)  # noqa: B023
        Driver(place, seed=SEED + 2).run()
        place.check(f"SEED={SEED}: landed at the other one's call {at}")
        place.close()


class Away:
    """A registry of which every call is refused so many times before it comes through, for ever if None."""

    def __init__(self, inner: Any, refusals: int | None) -> None:
        self._inner, self._refusals = inner, refusals
        self._left = refusals
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("get", "scan", "commit"):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            if self._left is None or self._left > 0:
                self._left = None if self._left is None else self._left - 1
                self.refused += 1
                raise RegistryUnavailable("nobody answers")
            self._left = self._refusals
            return found(*arguments, **named)

        return call


def test_k1_a_registry_that_is_away_for_a_while_at_every_call_ends_no_batch(place: Place) -> None:
    away = drive(place, lambda inner: Away(inner, 2))
    place.check("no second driver was needed")
    assert away.refused > 20


def test_k1_a_registry_that_stays_away_ends_the_batch_and_the_next_driver_publishes_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PATIENCE_S", 0.05)
    driver = Driver(place)
    driver.claim()
    spans = driver.plan({})
    files = driver.stage(0, spans)
    feeds = driver.staging.feeds(QUERY, 0, driver.incarnation)
    publisher = Publisher(Away(place.hub.registry, None), place.hub.topic("out").log, driver.staging)
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="nobody answers"):
        publisher.publish(QUERY, 0, files, [replace(feed, lease_s=0.3) for feed in feeds])
    assert time.monotonic() - began >= 0.3, "as long as the lease of the query lives"
    place.logs.plan(0, spans)
    Driver(place, seed=SEED + 1).run()
    place.check()


def test_k1_an_outcome_that_is_unknown_stays_so_when_the_registry_is_away_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try had no effect. The first one has, or will have."""
    monkeypatch.setattr(manifest, "PATIENCE_S", 0.0)
    driver = Driver(place)
    driver.claim()
    spans = driver.plan({})
    place.logs.plan(0, spans)
    files = driver.stage(0, spans)

    class Lost(Unheard):
        def commit(self, *arguments: Any, **named: Any) -> Any:
            if self._count:
                raise RegistryUnavailable("nobody answers")
            return super().commit(*arguments, **named)

    publisher = Publisher(Lost(place.hub.registry, [1], 0), place.hub.topic("out").log, driver.staging)
    with pytest.raises(OutcomeUnknown):
        publisher.publish(QUERY, 0, files, driver.staging.feeds(QUERY, 0, driver.incarnation))
    assert place.manifest() is not None
    Driver(place, seed=SEED + 1).run()
    place.check()


# What is refused, and what that leaves.


@pytest.fixture
def place(places: Places) -> Place:
    return places()


def batch_of(driver: Driver, batch: int, *spans: tuple[int, int]) -> None:
    """Publish a batch that reads these offsets, partition by partition."""
    driver.work(batch, {number: Span(driver.epochs[number], *span) for number, span in enumerate(spans)})


def state(place: Place) -> tuple[Any, ...]:
    return place.arrived(), place.checkpoints(), place.manifest()


def test_k2_a_smaller_batch_is_refused(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    for batch in (0, 1):
        batch_of(driver, batch, (5 * batch, 5 * batch + 5))
    before = state(place)
    with pytest.raises(BatchRefused, match="an old checkpoint location"):
        batch_of(driver, 0, (0, 5))
    assert state(place) == before


def test_k2_the_same_batch_with_other_input_is_refused(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 5))
    before = state(place)
    for spans in [((0, 6), (0, 5)), ((0, 5), (0, 4)), ((5, 10), (5, 10))]:
        with pytest.raises(BatchRefused, match="repeats batch 0 with other input"):
            batch_of(driver, 0, *spans)
    assert state(place) == before


def test_k2_the_same_batch_of_another_plan_is_refused_where_the_input_is_not_known(place: Place) -> None:
    """Of a source that is no topic, and a checkpoint location that was restored one batch back."""
    driver = Driver(place)

    def publish(batch: int, planned: str) -> None:
        name = driver.staging.stage(driver.topic, QUERY, batch, 0, [table_of([(b"k", b"v")])]).name
        driver.publisher.publish(QUERY, batch, [name], (), planned)

    publish(0, "a")
    publish(1, "b")
    publish(1, "b")
    publish(1, "")
    before = state(place)
    assert place.arrived() == 2
    with pytest.raises(BatchRefused, match="batch 1, and Spark has planned it anew: an old checkpoint location"):
        publish(1, "c")
    assert state(place) == before
    publish(2, "d")
    assert place.arrived() == 3


def test_k2_the_same_batch_with_the_same_input_is_done_once(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 5))
    before = state(place)
    with pytest.raises(Superseded):  # by Spark's own log, which is asked after the commit
        batch_of(driver, 0, (0, 5), (0, 5))
    assert state(place) == before
    assert place.arrived() == 10
    assert not place.staged()


def test_k3_the_checkpoint_moves_exactly_with_the_manifest(place: Place) -> None:
    seen: list[tuple[bool, dict[int, int], int]] = []

    def look(name: str) -> None:
        found = place.manifest()
        seen.append((found is not None and found.batch == 1, place.checkpoints(), place.arrived()))

    driver = Driver(place, look)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 3))
    seen.clear()
    batch_of(driver, 1, (5, 8))
    assert {is_there for is_there, _, _ in seen} == {True, False}
    for is_there, checkpoints, arrived in seen:
        assert checkpoints == ({0: 8, 1: 3} if is_there else {0: 5, 1: 3})
        assert arrived == 8 or is_there, "rows were there before the manifest"
    assert seen[-1] == (True, {0: 8, 1: 3}, 11)


def test_k3_a_stale_owner_publishes_nothing(place: Place) -> None:
    check_a_stale_owner_publishes_nothing(place)


def check_a_stale_owner_publishes_nothing(place: Place) -> None:
    """Raises NotExact."""
    stale = Driver(place)
    stale.claim()
    batch_of(stale, 0, (0, 5), (0, 5))
    before = state(place)
    Driver(place).claim()
    with suppress(PartitionLost):
        batch_of(stale, 1, (5, 10), (5, 10))
        raise NotExact("it was not refused")
    if state(place) != before:
        raise NotExact(f"{state(place)}, and before {before}")


def test_k3_one_lost_partition_of_several_refuses_the_batch(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    key = KEYS.owner(place.source.id, 1)
    entry = place.hub.registry.get(key)
    assert entry is not None
    place.hub.registry.commit({key: entry.version}, {key: Owner("another", 9).dump()})
    with pytest.raises(PartitionLost) as lost:
        batch_of(driver, 0, (0, 5), (0, 5))
    assert lost.value.partitions == (1,)
    assert state(place) == (0, {0: 0, 1: 0}, None)


def test_k3_a_group_that_was_reset_meanwhile_refuses_the_batch(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    place.hub.registry.commit(put={KEYS.checkpoint(place.source.id, 0): Checkpoint(3, by="reset").dump()})
    with pytest.raises(BatchRefused, match="the group was reset"):
        batch_of(driver, 0, (0, 5), (0, 5))
    assert state(place) == (0, {0: 3, 1: 0}, None)


def test_k3_a_checkpoint_that_moves_at_the_last_moment_refuses_the_batch(place: Place) -> None:
    key = KEYS.checkpoint(place.source.id, 0)
    meddle = Steps(3, lambda: place.hub.registry.commit(put={key: Checkpoint(4).dump()}) and None, "get")
    driver = Driver(place, meddle)
    driver.claim()
    with pytest.raises(PartitionLost):
        batch_of(driver, 0, (0, 5))
    assert state(place) == (0, {0: 4, 1: 0}, None)


def test_k1_the_next_batch_finishes_the_one_before_it(place: Place) -> None:
    """Also where nobody has cleaned up in between."""
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        batch_of(first, 0, (0, 5))
    second = Driver(place)
    second.claim()
    second._is_clean = True
    batch_of(second, 1, (5, 10))
    assert place.arrived() == 10
    assert not place.staged()


def test_k1_a_batch_of_many_pieces_may_be_cut_anywhere(places: Places) -> None:
    """Far more pieces in one partition than it remembers of a producer: what was stored is found again all the same."""
    place = places()
    driver = Driver(place, tasks=16)
    driver.claim()
    files = driver.stage(0, driver.plan({}))
    pieces = Counter(number for number, _ in driver.staging.chunks(place.target.id, QUERY, 0, files))
    assert min(pieces.values()) > BATCHES_KEPT
    steps = Steps(only="append")
    Driver(place, steps, tasks=16).run()
    place.check()
    for at in range(1, steps.count + 1):
        place = places()
        with pytest.raises(Crash):
            Driver(place, Steps(at, crash, "append"), tasks=16).run()
        next_driver(at)(place)
        place.check(f"SEED={SEED}: died after append {at}")


def test_s3_rows_of_a_key_stay_in_order_through_staging_and_publishing(place: Place) -> None:
    rows = [(b"key-%d" % (number % 7), b"%d" % number) for number in range(300)]
    driver = Driver(place)
    tables = [table_of(rows[at : at + 40]) for at in range(0, 300, 40)]
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, tables).name
    driver.publisher.publish(QUERY, 0, [name])
    assert transfer(rows, place.target) == Transfer(300)


def test_s3_rows_without_a_key_reach_all_partitions(place: Place) -> None:
    driver = Driver(place)
    table = pa.record_batch({"value": pa.array([b"%d" % number for number in range(20_000)])})
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table]).name
    driver.publisher.publish(QUERY, 0, [name])
    counts = [place.target.end(partition) for partition in range(place.target.partitions)]
    assert sum(counts) == 20_000
    assert min(counts) > 0
    assert max(counts) <= 2 * sum(counts) / len(counts)


def test_s3_rows_that_are_too_large_together_are_published_apart(place: Place) -> None:
    """A manifest that names what the log refuses could never be finished."""
    sizes = [3 << 20, 63 << 20, 3 << 20]
    table = pa.record_batch({"value": pa.array([bytes(size) for size in sizes]), "partition": pa.array([0] * 3)})
    driver = Driver(place)
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table]).name
    driver.publisher.publish(QUERY, 0, [name])
    found = itertools.islice(place.target.messages(0), place.target.end(0))
    assert [len(message.value or b"") for message in found] == sizes


def test_s3_what_another_attempt_has_staged_is_never_seen(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    names = [driver.staging.stage(driver.topic, QUERY, 0, 3, [table_of([(b"k", b"v")])]).name for _ in range(3)]
    assert len(set(names)) == 3
    driver.publisher.publish(QUERY, 0, [names[1]])
    assert place.arrived() == 1
    assert not place.staged()


def test_k1_a_manifest_whose_query_never_comes_back_is_finished_by_the_next_writer(place: Place) -> None:
    with pytest.raises(Crash):
        Driver(place, Steps(1, crash, "commit")).run()
    assert place.arrived() == 0
    log = place.hub.topic("out").log
    Publisher(place.hub.registry, log, DirectoryStaging(place.url)).finish_others()
    assert place.arrived() == 2 * BATCH_ROWS
    assert not place.staged()


def test_k1_a_manifest_names_nothing_that_is_gone(place: Place) -> None:
    """Nobody could ever finish it, and every writer to the topic tries to."""
    driver = Driver(place)
    driver.claim()
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"v")])]).name
    driver.staging.clear(driver.topic.id, QUERY, 0)
    with pytest.raises(BatchRefused, match="gone"):
        driver.publisher.publish(QUERY, 0, [name])
    assert place.manifest() is None
    driver.publisher.finish_others()


def test_k1_a_manifest_names_nothing_whose_folders_are_not_synced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a task has made which died before it could sync them; others find them there."""
    folder = Path(place.url, "staging", place.target.id, QUERY, "0")
    folder.mkdir(parents=True)
    synced: list[str] = []
    monkeypatch.setattr(disk, "sync_folder", lambda path: synced.append(str(path)))
    above = {str(each) for each in (folder, *folder.parents[:4])}
    seen: list[bool] = []
    driver = Driver(place, lambda name: seen.append(above <= set(synced)) if name == "registry.commit" else None)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    assert seen[0]


def make_old(*folders: Path, age_s: float = 2 * 86_400.0) -> None:
    """As if nothing had happened there for so long."""
    then = time.time() - age_s
    for folder in folders:
        for each in (folder, *folder.rglob("*")):
            os.utime(each, (then, then))


def test_s3_what_is_staged_for_nothing_is_swept_when_nobody_adds_to_it_for_a_day(place: Place) -> None:
    staging = DirectoryStaging(place.url)
    for query in ("old", "at work", "writing", "needed"):
        for batch in (0, 1):
            staging.stage(place.target.topic, query, batch, 0, [table_of([(b"k", b"v")])])
        folder = Path(place.url, "staging", place.target.id, query)
        make_old(folder)
        if query == "at work":
            staging.stage(place.target.topic, query, 1, 1, [table_of([(b"k", b"v")])])
        if query == "writing":
            (file,) = (folder / "1").iterdir()
            os.utime(file)
    staging.sweep(place.target.id, {"needed": 1})
    left = {(path.parent.parent.name, path.parent.name) for path in place.staged()}
    assert left == {("at work", "1"), ("writing", "1"), ("needed", "1")}
    assert not Path(place.url, "staging", place.target.id, "old").exists()


def test_s3_what_a_query_with_a_manifest_leaves_is_swept_too(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"late")])])
    driver.stage(1, driver.plan({}))  # it dies here, and its checkpoint location is lost
    crashed = Driver(place, Steps(1, crash, "commit"))
    crashed.claim()
    with pytest.raises(Crash):
        fed_batch(crashed, "crashed", 0, (5, 8))
    feeds = Path(place.url, "staging", "feeds")
    make_old(Path(place.url, "staging", place.target.id))
    make_old(feeds / QUERY, age_s=31 * 86_400.0)
    unwilling(place, "crashed").clean_up()
    assert {path.relative_to(Path(place.url, "staging")).parts[1] for path in place.staged()} == {"crashed"}
    assert [path.name for path in feeds.iterdir()] == ["crashed"]


def test_s3_the_manifest_of_a_dead_job_is_forgotten_when_its_commit_can_come_no_more(place: Place) -> None:
    driver = Driver(place, Steps(1, crash, "commit"))
    name = driver.staging.stage(driver.topic, "job-1", 0, 0, [table_of([(b"k", b"v")])]).name
    with pytest.raises(Crash):
        driver.publisher.publish("job-1", 0, [name])
    publisher = Driver(place).publisher
    key = f"spark/{place.target.id}/job-1"
    for age_s, is_there in [(0, True), (3600, True), (2 * 86_400, False)]:
        if age_s:
            entry = place.hub.registry.get(key)
            assert entry is not None
            done = Manifest.load(entry)
            assert done.is_published
            place.hub.registry.commit({key: entry.version}, {key: replace(done, at=time.time() - age_s).dump()})
        publisher.finish_others()
        assert (place.hub.registry.get(key) is not None) == is_there
    assert place.arrived() == 1


def test_s3_of_a_deleted_topic_nothing_is_left(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    for topic in (place.target.topic, place.source.topic):
        driver.staging.stage(topic, "another", 0, 0, [table_of([(b"k", b"v")])])
    forget_topic(place.hub.registry, DirectoryStaging(place.url), place.target.id)
    assert place.manifest() is None
    assert {path.parents[2].name for path in place.staged()} == {place.source.id}


def test_s3_what_comes_after_a_topic_was_deleted_goes_a_day_later(place: Place) -> None:
    """Late tasks have staged for it, or a late driver has written its manifest."""
    registry, staging = place.hub.registry, DirectoryStaging(place.url)

    def late(age_s: float) -> str:
        """The id of a topic that was deleted while a batch was on its way that has read, and made nothing."""
        topic = place.hub.create_topic("deleted", partitions=1)
        publisher = Publisher(registry, topic.log, staging)

        def write(*arguments: Any) -> int | None:
            place.hub.delete_topic("deleted")
            return written(*arguments)

        written, publisher._write = publisher._write, write  # type: ignore[method-assign]
        feed = Feed("g", place.source.id, "member", "another", {0: Span(1, 0, 5)}, {0: 1}, False)
        publisher.publish(QUERY, 0, [], [feed])
        staging.stage(topic.topic, "task", 0, 0, [table_of([(b"k", b"v")])])
        make_old(Path(place.url, "staging", topic.id), age_s=age_s)
        (entry,) = registry.scan(f"spark/{topic.id}/")
        registry.commit(put={entry.key: replace(Manifest.load(entry), at=time.time() - age_s).dump()})
        return topic.id

    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    driver.stage(1, driver.plan({}))
    hour, day = 3600.0, 86_400.0
    young, newly_written, newly_staged, old, damaged = (late(age_s) for age_s in (hour, *[2 * day] * 4))
    key = f"spark/{newly_written}/{QUERY}"
    registry.commit(put={key: Manifest(0, [], at=time.time()).dump(), f"spark/{damaged}/{QUERY}": b"damaged"})
    os.utime(Path(place.url, "staging", newly_staged, "task", "0"))
    registry.commit(put={"spark/of-another-log/query": Manifest(0, []).dump()})
    before = set(place.staged())
    Path(place.url, "staging", "of somebody else; who knows").mkdir()
    for folder in ("feeds", "of somebody else; who knows", place.target.id):
        make_old(Path(place.url, "staging", folder), age_s=40 * day)
    forget_deleted_topics(registry, staging, [topic.id for topic in place.hub.topics()])
    gone = {path.relative_to(Path(place.url, "staging")).parts[0] for path in before - set(place.staged())}
    assert gone == {old, damaged}
    left = {entry.key.split("/")[1] for entry in registry.scan("spark/")}
    assert left == {"registry", "of-another-log", place.target.id, young, newly_written, newly_staged}
    assert not Path(place.url, "staging", old).exists()
    forget_deleted_topics(registry, DirectoryStaging(place.url + "/nowhere"), [])


def test_k1_a_task_may_stage_while_another_writer_finishes_its_batch(place: Place) -> None:
    """A driver died behind its manifest. Its replay is at work when somebody else starts to write to the topic."""
    with pytest.raises(Crash):
        Driver(place, Steps(1, crash, "commit")).run()
    replay, other = Driver(place), Driver(place)
    replay.claim()
    batch, spans, _ = place.logs.last()

    def rows() -> Iterator[pa.RecordBatch]:
        yield table_of(place.sent[:5])
        other.clean_up()
        yield table_of(place.sent[5:10])

    name = replay.staging.stage(replay.topic, QUERY, batch, 0, rows()).name
    assert name is not None, "else nobody would miss it"
    assert place.arrived() == 2 * BATCH_ROWS
    replay.publisher.publish(QUERY, batch, [name])
    assert place.arrived() == 2 * BATCH_ROWS
    with pytest.raises(BatchRefused, match="are gone"):  # nobody has published this one
        replay.publisher.publish(QUERY, batch + 1, [name])
    replay.work(batch, spans)
    replay.run()
    place.check()


def test_k1_a_folder_that_is_removed_before_a_task_writes_into_it_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(place)
    make, opened = disk.make_folders, pa.OSFile
    chances = itertools.count()

    def made(path: Path) -> None:
        make(path)
        if next(chances) < 2:
            DirectoryStaging(place.url).clear(place.target.id, QUERY, 0)

    monkeypatch.setattr(disk, "make_folders", made)
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"v")])]).name
    driver.publisher.publish(QUERY, 0, [name])
    assert place.arrived() == 1
    chances = itertools.count()

    def open_late(path: str, mode: str) -> Any:
        if next(chances) < 2:
            shutil.rmtree(Path(path).parent)
        return opened(path, mode)

    monkeypatch.setattr(pa, "OSFile", open_late)
    driver.claim()
    driver.stage(1, driver.plan({}))
    assert len(driver.staging.feeds(QUERY, 1, driver.incarnation)) == 1


def test_s3_a_job_that_is_published_does_not_fail_because_its_manifest_stays(place: Place) -> None:
    driver = Driver(place)
    name = driver.staging.stage(driver.topic, "job", 0, 0, [table_of([(b"k", b"v")])]).name
    log = place.hub.topic("out").log
    publisher = Publisher(Unheard(place.hub.registry, [3], None), log, driver.staging)
    publisher.publish("job", 0, [name])
    publisher.forget("job")
    assert place.arrived() == 1
    publisher.finish_others()
    publisher.forget("job")
    assert place.hub.registry.scan(f"spark/{place.target.id}/") == []
    assert place.arrived() == 1


# Manifests that cannot be finished.


class Unwilling:
    """A log that refuses what one query appends."""

    def __init__(self, place: Place, query: str, error: Exception) -> None:
        self._inner, self._error = place.hub.topic("out").log, error
        self._producer = uuid.uuid5(manifest._NAMESPACE, f"{query}/{place.target.id}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        if any(append.origin.producer == self._producer for append in appends):
            return [NotStored(self._error)] * len(appends)
        return self._inner.append(appends)


FORGOTTEN = UnknownProducer("producers were forgotten")


def unwilling(place: Place, query: str = QUERY, error: Exception = FORGOTTEN) -> Driver:
    driver = Driver(place)
    log: Any = Unwilling(place, query, error)
    driver.publisher = Publisher(place.hub.registry, log, driver.staging)
    driver.claim()
    return driver


def leave_behind(place: Place) -> Driver:
    """A driver whose first batch has a manifest, and dies."""
    driver = Driver(place, Steps(1, crash, "commit"))
    driver.claim()
    with pytest.raises(Crash):
        batch_of(driver, 0, (0, 5), (0, 5))
    return driver


@pytest.mark.parametrize("error", [FORGOTTEN, SequenceGap("a new epoch begins with batch 0")])
def test_k1_a_manifest_that_cannot_be_finished_stops_its_own_query_alone(
    place: Place, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(place)
    other = unwilling(place, error=error)
    other.clean_up()
    for batch in range(4):
        fed_batch(other, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    assert place.arrived() == 20
    assert caplog.messages == [f"batch 0 of query {QUERY} is not finished, and cannot be: {error}"]


@pytest.mark.parametrize("error", [AppendFailed("no space left"), UnknownTopic("out")])
def test_k1_what_concerns_the_topic_stops_everybody(place: Place, error: Exception) -> None:
    leave_behind(place)
    with pytest.raises(type(error)):
        unwilling(place, error=error).clean_up()


def cut_staged(place: Place, size: int = -40) -> str:
    """Cut off the last file that the manifest names; what is said of it."""
    found = place.manifest()
    assert found is not None
    path = Path(place.url, "staging", place.target.id, QUERY, "0", found.files[-1])
    path.write_bytes(path.read_bytes()[:size])
    return f"the staged file {path} cannot be read: "


def empty_staged(place: Place) -> str:
    return cut_staged(place, 0)


def damage_manifest(place: Place) -> str:
    key = f"spark/{place.target.id}/{QUERY}"
    place.hub.registry.commit(put={key: b"damaged"})
    return f"{key}: it is no manifest: "


@pytest.mark.parametrize("damage", [cut_staged, empty_staged, damage_manifest])
def test_k1_what_is_damaged_stops_its_own_query_alone(
    place: Place, damage: Callable[[Place], str], caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(place)
    said = damage(place)
    staged = set(place.staged())
    make_old(Path(place.url, "staging", place.target.id))
    other = Driver(place)
    other.clean_up()
    other.claim()
    in_part = place.arrived()
    for batch in range(3):
        fed_batch(other, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    at_work = Driver(place)
    at_work.claim()
    for batch in range(3, 5):
        fed_batch(at_work, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    assert place.arrived() == in_part + 25
    assert len(caplog.messages) == 2, "one of each publisher"
    assert all(said in message and QUERY in message for message in caplog.messages)
    arrow = {path for path in staged if path.suffix == ".arrow"}
    assert arrow <= set(place.staged()), "who mends it needs them"
    with pytest.raises(BatchRefused, match=r"new checkpoint location") as caught:
        at_work.publisher.publish(QUERY, 0, sorted(path.name for path in arrow))
    assert said in str(caught.value)
    assert place.arrived() == in_part + 25


def test_k1_what_stops_everybody_stops_every_batch(place: Place) -> None:
    other = unwilling(place, error=AppendFailed("no space left"))
    leave_behind(place)
    other.claim()
    name = other.staging.stage(other.topic, "other", 0, 0, [table_of([(b"k", b"v")])]).name
    other.publisher.publish("other", 0, [name])  # somebody may still be at it
    name = other.staging.stage(other.topic, "other", 1, 0, [table_of([(b"k", b"v")])]).name
    for _ in range(3):
        with pytest.raises(AppendFailed):
            other.publisher.publish("other", 1, [name])
    assert place.arrived() == 1


def test_k1_its_own_query_hears_what_to_do_about_a_manifest_that_cannot_be_finished(place: Place) -> None:
    leave_behind(place)
    again = unwilling(place)
    for batch, span in ((0, (0, 5)), (1, (5, 10))):
        with pytest.raises(
            BatchRefused, match=r"were forgotten\..*topic out.*look at its end.*new checkpoint location"
        ):
            batch_of(again, batch, span, span)


def test_k1_a_manifest_of_an_earlier_version_knows_no_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is finished as long as the log has forgotten no producer; if not, it stops nobody else."""

    def left_behind(place: Place) -> None:
        leave_behind(place)
        key = f"spark/{place.target.id}/{QUERY}"
        entry = place.hub.registry.get(key)
        assert entry is not None
        found = json.loads(entry.value)
        for name in ("ends", "planned", "at"):
            del found[name]
        place.hub.registry.commit({key: entry.version}, {key: json.dumps(found).encode()})

    place = places()
    left_behind(place)
    Driver(place).clean_up()
    assert place.arrived() == 10
    monkeypatch.setattr(Producers.__init__, "__defaults__", (0, -1))
    place = places()
    left_behind(place)
    for number in range(TARGET_PARTITIONS):
        with place.hub.producer("out") as producer:
            producer.send(b"of somebody who is forgotten", partition=number)
    other = Driver(place)
    other.clean_up()
    other.claim()
    fed_batch(other, "other", 0, (5, 10))
    assert place.arrived() == TARGET_PARTITIONS + 5
    assert len(caplog.messages) == 1


# Several queries, several sources, several runs.


def fed_batch(driver: Driver, query: str, batch: int, span: tuple[int, int], number: int = 0) -> None:
    """Publish what a query reads of one partition of the source, to partition 0, with a publisher that is at work."""
    place, spans = driver.place, {number: Span(driver.epochs[number], *span)}
    feed = Feed("g", place.source.id, driver.incarnation, fingerprint(place.hub.registry), spans, driver.fences, True)
    driver.staging.announce(query, batch, driver.incarnation, feed)
    rows = place.rows(number, *span)
    table = table_of(rows).append_column("partition", pa.array([0] * len(rows), pa.int32()))
    staged = driver.staging.stage(driver.topic, query, batch, 0, [table])
    driver.publisher.publish(query, batch, [staged.name], driver.staging.feeds(query, batch, driver.incarnation))


def values(place: Place) -> list[int]:
    return [int(message.value or b"") for message in itertools.islice(place.target.messages(0), place.target.end(0))]


def test_k3_what_a_dead_member_left_is_published_before_what_follows(place: Place) -> None:
    """Also by one who has been at work for long."""
    second = Driver(place)
    second.clean_up()
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        fed_batch(first, "first", 0, (0, 5))
    assert place.arrived() == 0
    assert place.checkpoints()[0] == 5
    second.claim()
    fed_batch(second, "second", 0, (5, 10))
    assert values(place) == [int(value) for _, value in place.rows(0, 0, 10)]
    assert not place.staged()


def test_k1_what_a_query_left_in_other_partitions_is_published_by_one_at_work(place: Place) -> None:
    second = Driver(place)
    second.clean_up()
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        fed_batch(first, "first", 0, (0, 5))
    second.claim()
    fed_batch(second, "second", 0, (0, 5), 1)
    assert place.arrived() == 5, "somebody may still be at it"
    fed_batch(second, "second", 1, (5, 10), 1)
    assert place.arrived() == 15
    assert not place.staged()


def test_k2_the_same_batch_with_other_input_is_refused_also_if_its_group_is_elsewhere(places: Places) -> None:
    place = places(None, is_one_hub=False)
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    with pytest.raises(BatchRefused, match="repeats batch 0 with other input"):
        batch_of(driver, 0, (0, 8))


def test_k3_what_an_earlier_run_has_announced_counts_no_more(place: Place) -> None:
    first, second = Driver(place), Driver(place)
    first.claim()
    first.stage(0, first.plan({}))
    (torn,) = Path(place.url, "staging", "feeds", QUERY).iterdir()
    second.claim()
    second.stage(0, second.plan({}))
    torn.write_text("")  # renamed, and not yet written when the power went
    (feed,) = second.staging.feeds(QUERY, 0, second.incarnation)
    assert feed.fences == second.fences
    batch_of(second, 0, (0, 5), (0, 5))
    assert place.arrived() == 10
    assert not place.staged()


def test_k3_two_sources_of_a_query_may_share_a_group_and_both_are_checkpointed(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    registry = fingerprint(place.hub.registry)
    spans = [{0: Span(1, 0, 5)}, {1: Span(1, 0, 3)}]
    feeds = [
        Feed("g", place.source.id, f"m{at}", registry, each, {at: driver.fences[at]}, True)
        for at, each in enumerate(spans)
    ]
    for feed in feeds:
        driver.staging.announce(QUERY, 0, "run", feed)
    found = driver.staging.feeds(QUERY, 0, "run")
    assert found == feeds
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of(place.sent[:8])]).name
    with pytest.raises(PartitionLost):
        driver.publisher.publish(QUERY, 0, [name], [*found, replace(feeds[0], incarnation="before it moved")])
    assert state(place) == (0, {0: 0, 1: 0}, None)
    driver.publisher.publish(QUERY, 0, [name], found)
    assert place.checkpoints() == {0: 5, 1: 3}


def test_k1_a_batch_that_is_repeated_without_reading_is_finished_from_what_was_staged_first(places: Places) -> None:
    """The driver died at each step of its first batch; the next one knows from the manifest that it need not read."""
    count = step_count(places())
    finished = 0
    for at in range(1, count + 1):
        place = places()
        driver = Driver(place, Steps(at, crash))
        with suppress(Crash):
            driver.run()
        batch, spans, is_finished = place.logs.last()
        found = published_spans(place.hub.registry, "g", place.source.id, spans)
        assert set(found) in (set(), set(spans)), "all or nothing"
        if found and not is_finished:
            finished += 1
            again = Driver(place, seed=SEED + 1)
            again.claim()
            feed = Feed("g", place.source.id, again.incarnation, fingerprint(place.hub.registry), {}, {}, False)
            again.staging.announce(QUERY, batch, again.incarnation, feed)
            feeds = again.staging.feeds(QUERY, batch, again.incarnation)
            again.publisher.publish(QUERY, batch, [], feeds)
            place.logs.finish(batch)
        Driver(place, seed=SEED + 2).run()
        place.check(f"SEED={SEED}: died at step {at}")
        place.close()
    assert finished > 5


def test_k2_a_batch_that_reads_and_makes_nothing_may_be_repeated_with_something(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    nothing = Feed("g", place.source.id, driver.incarnation, fingerprint(place.hub.registry), {}, {}, True)
    driver.publisher.publish(QUERY, 0, [], [nothing])
    batch_of(driver, 0, (0, 5))
    assert place.arrived() == 5


def test_k3_one_registry_is_known_by_whatever_name(place: Place) -> None:
    link = Path(place.url).with_name("link")
    link.symlink_to(place.url)
    store = f"sqlite:///{place.url}/r.db"
    names = [(place.url, None), (link, None), (link, f"{place.url}/registry"), (place.url, store)]
    ids = []
    for url, registry in [*names, (place.url, f"{store}?namespace=other")]:
        with pxrs.open(url, registry=registry) as hub:
            ids.append(fingerprint(hub.registry))
    link.unlink()
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids)) == 3


# Done wrong on purpose: the account must not come out even.


class Direct(Publisher):
    """No manifest: the driver's commit appends what its tasks have staged."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        self._append(query, Manifest(batch, list(files), ends=[0] * TARGET_PARTITIONS))
        parts: dict[str, CheckpointWrite] = {}
        for feed in feeds:
            self._add_checkpoints(feed, parts)
        checkpoints = FencedWrite(list(parts.values()))
        self._registry.commit(checkpoints.expect, checkpoints.put)
        self._staging.clear(self._topic.id, query, batch)


class OwnFiles(Publisher):
    """A replay publishes what it has staged itself, in place of what the manifest names."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        entry = self._registry.get(self._prefix + query)
        if entry is not None and (last := Manifest.load(entry)).batch == batch and not last.is_published:
            mine = Manifest(batch, list(files), last.ranges, ends=last.ends or [0] * TARGET_PARTITIONS)
            self._finish(
                query, mine, self._registry.commit({entry.key: entry.version}, {entry.key: mine.dump()})[entry.key]
            )
            return
        super().publish(query, batch, files, feeds)

    def finish_others(self) -> None:
        """It would finish what the manifest names before the replay comes."""


class LateCheckpoints(Publisher):
    """The checkpoints are written when the batch is published, in a commit of their own (K3)."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        super().publish(query, batch, files)
        for feed in feeds:
            keys = Keys(feed.group)
            spans = feed.spans.items()
            put = {keys.checkpoint(feed.topic, number): Checkpoint(span.end).dump() for number, span in spans}
            self._registry.commit(put=put)


class Overwriting(Publisher):
    """What is there when the last batch is finished is written over, whatever it is by then."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        ours = Manifest(batch, list(files), ends=[0] * TARGET_PARTITIONS)
        entry = self._registry.get(self._prefix + query)
        if entry is not None:
            last = Manifest.load(entry)
            self._finish(query, last, entry.version)
            if last.batch == batch:
                return
            entry = self._registry.get(entry.key)
        version = self._write(query, ours, ABSENT if entry is None else entry.version, ())
        if version is None:
            self.publish(query, batch, files, feeds)
        else:
            self._finish(query, ours, version)


class ClearedFirst(Publisher):
    """The staged files go before it is written down that they are published."""

    def _append(self, query: str, manifest: Manifest) -> None:
        super()._append(query, manifest)
        self._staging.clear(self._topic.id, query, manifest.batch)


class SameNames(DirectoryStaging):
    """Staged files without the random part of their names: two tries of a task write to the same one."""

    def stage(self, *arguments: Any) -> Any:
        staged = super().stage(*arguments)
        topic, query, batch = arguments[:3]
        folder = self._root / topic.id / query / str(batch)
        plain = f"{str(staged.name)[:5]}.arrow"
        (folder / str(staged.name)).rename(folder / plain)
        return staged._replace(name=plain)


def delete_staged(driver: Driver, batch: int) -> None:
    """An abort that takes back what its tasks have staged."""
    driver.staging.clear(driver.topic.id, QUERY, batch)


def delete_manifest(driver: Driver, batch: int) -> None:
    """An abort that takes the commit back."""
    registry = driver.hub.registry
    entry = registry.get(f"spark/{driver.topic.id}/{QUERY}")
    if entry is not None and Manifest.load(entry).batch == batch:
        registry.commit(delete=[entry.key])


def test_mutation_no_manifest_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(Direct))


def test_mutation_the_sequence_is_the_batch_alone_is_caught(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = places()
    for origin in (lambda who, batch, piece: Origin(who, batch, 0), lambda who, batch, piece: Origin(who, 0, batch)):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "Origin", origin)
            place = places()
            Driver(place).run()
            with pytest.raises(NotExact):
                place.check()
    Driver(whole).run()
    whole.check()


@pytest.mark.parametrize("abort", [delete_staged, delete_manifest])
def test_mutation_an_abort_that_undoes_is_caught(places: Places, abort: Callable[[Driver, int], None]) -> None:
    with pytest.raises(NotExact):
        try_failed_appends(places, Mutation(abort=abort))
    try_failed_appends(places)


def try_failed_appends(places: Places, mutation: Mutation | None = None) -> None:
    """The driver's commit took effect, and an error follows: Spark calls `abort`. Raises NotExact."""

    def fail() -> None:
        raise BatchRefused("something else")

    for at in range(1, step_count(places(), "append") + 1):
        place = places(mutation)
        run_quietly(Driver(place, Steps(at, fail, "append")).run)
        if (end := run_quietly(lambda: next_driver(at)(place))) is not None:  # noqa: B023
            raise NotExact(f"SEED={SEED}: failed at append {at}, and the next one cannot go on: {end}") from end
        place.check(f"SEED={SEED}: failed at append {at}")


def test_mutation_staged_names_without_the_random_part_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(staging=SameNames))


def test_mutation_a_replay_that_publishes_its_own_files_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(OwnFiles))


def test_mutation_checkpoints_beside_the_manifest_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(LateCheckpoints), successor=take_over)
    with pytest.raises(NotExact):
        check_a_stale_owner_publishes_nothing(places(Mutation(LateCheckpoints)))


def test_mutation_a_manifest_that_is_written_over_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_schedules(places, False, "", Mutation(Overwriting))


def test_mutation_files_that_go_before_the_manifest_says_so_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(ClearedFirst))
