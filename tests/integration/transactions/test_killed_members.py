"""Balances are exact though members are killed, stopped and woken (X20)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from pxrs.testing.forked import Forked
from pxrs.testing.waiting import eventually
from tests.integration.transactions.bookings import PARTITIONS, PATIENCE_S, Place

PROGRAM = Path(__file__).with_name("bookings.py")
EVENTS = 50 if os.environ.get("PXRS_SOAK") else 8


class Process:
    """A member in a process of its own."""

    def __init__(self, place: Place, name: str) -> None:
        self.name, self.errors = name, place.folder / f"{name}.stderr"
        url = place.engine_url + ("" if place.engine_url.startswith("sqlite") else f"?application_name={name}")
        arguments = [str(place.folder / "data"), place.registry, url, name, "1.5"]
        with self.errors.open("wb") as errors:
            self.process = Forked(str(PROGRAM), arguments, stderr=errors.fileno())

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.is_running:
            self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.mark.sampled(2)
def test_x20_balances_are_exact_though_members_are_killed_stopped_and_woken(place: Place) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    chance = random.Random(seed)
    processes: list[Process] = []
    stopped: list[Process] = []

    total = sent = 0
    place.hub.create_topic("t", partitions=PARTITIONS)
    out = place.hub.producer("t")

    def start() -> None:
        processes.append(Process(place, f"w{len(processes)}"))
        place.exits.callback(processes[-1].end)

    def running() -> list[Process]:
        return [each for each in processes if each.is_running and each not in stopped]

    def send() -> None:
        nonlocal total, sent
        for _ in range(20):
            sent += 1
            total += sent
            out.send(b"%d" % sent, b"key-%d" % sent)
        out.flush()
        time.sleep(0.01)

    for _ in range(3):
        start()
    for _ in range(EVENTS):
        until = time.monotonic() + chance.uniform(0.1, 1.0)
        while time.monotonic() < until:
            send()
        kind = chance.choice(["kill", "stop", "stop", "wake", "join"])
        if kind == "wake" and stopped:
            stopped.pop().wake()
        elif kind == "join" or len(running()) < 2:
            start()
        elif kind == "kill":
            killed = chance.choice(running()).process
            killed.kill()
            killed.wait(10)  # so that it does not count among those that run
        elif kind == "stop" and not stopped:
            stopped.append(chance.choice(running()))
            stopped[0].stop()
    while stopped:
        stopped.pop().wake()
    if place.engine.dialect.name == "postgresql":  # on SQLite nobody can take over from one that is in its body
        while len(running()) < 2:
            start()
        let_a_zombie_try(place, running, send, seed)
    while sum(each.is_running for each in processes) < 2:
        start()
    ends = [place.hub.topic("t").end(partition) for partition in range(PARTITIONS)]
    until = time.monotonic() + PATIENCE_S
    while [each.offset for each in place.checkpoints()] != ends:
        errors = "\n".join(f"{each.name}: {each.errors.read_text()[-1500:]}" for each in processes)
        assert time.monotonic() < until, f"SEED={seed}: {place.checkpoints()} of {ends}\n{errors}"
        time.sleep(0.05)
    for each in processes:
        each.end()
    assert place.sum == total, f"SEED={seed}"
    every = [(partition, offset) for partition, end in enumerate(ends) for offset in range(end)]
    assert [row[:2] for row in place.rows()] == every, f"SEED={seed}"


def let_a_zombie_try(place: Place, running: Callable[[], list[Process]], send: Callable[[], None], seed: int) -> None:
    """Stop a process in its body until others have handled its messages, and wake it."""

    def last_query(name: str) -> str:
        """In the transaction that it has open; empty if it has none."""
        with place.engine.connect() as db:
            query = "SELECT query FROM pg_stat_activity WHERE application_name = :name AND state != 'idle'"
            return "".join(db.execute(text(query), {"name": name}).scalars())

    def is_in_its_body(name: str) -> bool:
        return last_query(name).startswith("INSERT")  # not among the balances, whose rows it would keep locked

    def delay(seconds: float) -> None:
        """How long each further insertion takes at least."""
        body = f"BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END"
        place.run(f"CREATE OR REPLACE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")

    def is_all_done() -> bool:
        ends = [place.hub.topic("t").end(partition) for partition in range(PARTITIONS)]
        return [each.offset for each in place.checkpoints()] == ends

    chance = random.Random(seed)
    until = time.monotonic() + PATIENCE_S
    # A body takes less than a millisecond on a fast machine: too short to be met.
    delay(0.01)
    place.run("CREATE TRIGGER slow BEFORE INSERT ON done FOR EACH STATEMENT EXECUTE FUNCTION wait()")
    while True:
        assert time.monotonic() < until, f"SEED={seed}: none was ever met in its body"
        for process in running():
            send()
            # How long it takes until it handles these differs by a factor of a hundred between machines.
            time.sleep(0.2 * 2 ** -chance.uniform(0.0, 8.0))
            process.stop()
            if is_in_its_body(process.name):
                delay(0.0)  # others are to handle all that was sent
                # A statement that it sent before it was stopped may still arrive, and lock rows of the balances.
                eventually(
                    lambda name=process.name: is_all_done() or not is_in_its_body(name),  # type: ignore[misc]
                    PATIENCE_S,
                    what=f"SEED={seed}: nobody takes over from a stopped member",
                )
                if is_in_its_body(process.name):
                    process.wake()
                    eventually(lambda name=process.name: not last_query(name), PATIENCE_S, what=f"SEED={seed}")  # type: ignore[misc]
                    return
                delay(0.01)
            process.wake()
