"""A query's driver that publishes batches into a topic, without Spark, and can be interrupted at every step.

The log is in a directory and the registry is made of files. `Steps` counts what a driver does to them: at each step the
driver dies, or is held up while another one does its work, or hears nothing of what it has written. In the end the
topic holds every message once, and the group's checkpoints say so (`Place.check`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import pxrs
from pxrs.errors import (
    Conflict,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    UnknownProducer,
)
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.log.contract import Append
from pxrs.log.outcomes import NotStored, Outcome
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.planning import Span, Spans
from pxrs.publishing.records import Manifest
from pxrs.publishing.staging.appends import producer_of
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.contract import ABSENT
from pxrs.registry.identity import fingerprint
from pxrs.testing.transfer import Transfer, transfer

SOAK = bool(os.environ.get("PXRS_SOAK"))
SEED = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
STEPS_MAX = None if SOAK else 10
"""At how many of its steps a driver dies or is held, one after the other; None for all. The seed chooses them."""
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

    def driver(self, *arguments: Any, **named: Any) -> Driver:
        return Driver(self, *arguments, **named)

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
        self.hook = hook
        self.staging: Any = Watched(place.mutation.staging(place.url), hook, "staging", "feeds", "clear")
        self.registry: Any = Watched(self.hub.registry, hook, "registry", "get", "commit")
        self.publisher = self.make_publisher()
        self._is_clean = False
        self.fences: dict[int, int] = {}
        self.epochs: dict[int, int] = {}

    def make_publisher(self) -> Publisher:
        log: Any = WatchedLog(self.hub.topic("out").log, self.hook, "log")
        return self.place.mutation.publisher(self.registry, log, self.staging)

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
            self.publish(batch, files, self.staging.feeds(QUERY, batch, self.incarnation))
        except Exception:
            self.place.mutation.abort(self, batch)
            raise
        self.place.logs.finish(batch)

    def publish(self, batch: int, files: list[Any], feeds: Sequence[Feed]) -> None:
        self.publisher.publish(QUERY, batch, files, feeds)

    def stage(self, batch: int, spans: Spans) -> list[Any]:
        """What its tasks have staged: the names that reach the driver."""
        registry = fingerprint(self.hub.registry) if self.place.is_one_hub else "another"
        feed = Feed("g", self.source.id, self.incarnation, registry, spans, self.fences, False)
        self.staging.announce(QUERY, batch, self.incarnation, feed)
        rows = [row for number, span in spans.items() for row in self.place.rows(number, span.start, span.end)]
        self.random.shuffle(rows)
        names: list[Any] = []
        for task in range(self.tasks):
            part = rows[task :: self.tasks]
            attempts = [self._attempt(batch, task, part)]
            if self.random.random() < 0.2:  # a retry, or speculation: two have staged, and one is heard of
                self.random.shuffle(part)
                attempts.append(self._attempt(batch, task, part))
            names.append(self.random.choice(attempts))
        return [name for name in names if name is not None]

    def _attempt(self, batch: int, task: int, rows: Sequence[tuple[bytes, bytes]]) -> Any:
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


def step_count(place: Place, only: str = "") -> int:
    """How many steps there are in a run that nothing interrupts."""
    steps = Steps(only=only)
    place.driver(steps).run()
    place.check("without a fault")
    return steps.count


def run_quietly(work: Callable[[], None]) -> Exception | None:
    """The error by which it ended, if it is one that is meant to end a driver."""
    try:
        work()
    except (PxrsError, Superseded) as error:
        return error
    return None


def try_every_crash(
    places: Places,
    *arguments: Any,
    successor: Callable[[Place], None] | None = None,
    steps_max: int | None = None,
) -> int:
    """A driver dies at each step, or at so many of them, and the next one goes on. Raises NotExact. Returns how many
    steps there were."""
    count = step_count(places())
    steps = range(1, count + 1)
    for at in steps if steps_max is None else sorted(random.Random(SEED).sample(steps, min(count, steps_max))):
        place = places(*arguments)
        with suppress(Crash):  # or it comes to its end: one that does it wrong may have fewer steps
            place.driver(Steps(at, crash)).run()
        try:
            (successor or next_driver(at))(place)
        except (PxrsError, OSError) as error:
            raise NotExact(f"SEED={SEED}: died at step {at}, and the next one cannot go on: {error}") from error
        place.check(f"SEED={SEED}: died at step {at}")
        place.close()
    return count


def next_driver(number: int) -> Callable[[Place], None]:
    """One whose rows come in another order, in other files and another number of them."""
    return lambda place: place.driver(tasks=TASKS + number % 3 - 1, seed=SEED + number + 1).run()


class Held:
    """A driver on a thread of its own, which stops at a step until it is let go."""

    def __init__(self, place: Place, at: int, only: str = "", **named: Any) -> None:
        self._stopped, self._go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.driver = place.driver(Steps(at, self._stop, only), **named)
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


def settle(place: Place) -> None:
    """One more driver, which does what is left, and removes what others have staged for nothing."""
    driver = place.driver(seed=SEED + 2)
    driver.run()
    driver.clean_up()


def try_schedules(places: Places, is_one_hub: bool, only: str, mutation: Mutation | None = None) -> int:
    """One driver is held at any step, the next one too, then the first goes on, then the second. Raises NotExact."""
    count = step_count(places(mutation, is_one_hub), only)
    schedules = list(itertools.product(range(1, count + 1), repeat=2))
    # In any order: those that show a mutation lie close together.
    for first, second in random.Random(SEED).sample(schedules, len(schedules) if SOAK or mutation else 6):
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


def batch_of(driver: Driver, batch: int, *spans: tuple[int, int]) -> None:
    """Publish a batch that reads these offsets, partition by partition."""
    driver.work(batch, {number: Span(driver.epochs[number], *span) for number, span in enumerate(spans)})


def state(place: Place) -> tuple[Any, ...]:
    return place.arrived(), place.checkpoints(), place.manifest()


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


def make_old(*folders: Path, age_s: float = 2 * 86_400.0) -> None:
    """As if nothing had happened there for so long."""
    then = time.time() - age_s
    for folder in folders:
        for each in (folder, *folder.rglob("*")):
            os.utime(each, (then, then))


class Unwilling:
    """A log that refuses what one query appends."""

    def __init__(self, place: Place, query: str, error: Exception) -> None:
        self._inner, self._error = place.hub.topic("out").log, error
        self._producer = producer_of(query, place.target.id)

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
