"""`pxrs queue`: make work queues, put into them, take from them, look at them, and, in `dead_letters.py`, decide about
their dead letters."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import pxrs
from pxrs.cli import dead_letters
from pxrs.cli.amounts import duration
from pxrs.cli.dead_letters import Name, print_items
from pxrs.cli.input import Interrupts, end_after_second_interrupt, interrupted, is_typed, key_in, tell_typist
from pxrs.cli.options import ExistOk, Json, MaybeAt, RegistryUrl, Yes, check_given, confirm, open_hub
from pxrs.cli.queue_settings import (
    POLICY_HELP,
    BackoffName,
    Cap,
    Factor,
    First,
    Jitter,
    Pause,
    PolicyName,
    Times,
    alter,
    backoff_of,
    plain_settings,
    policy_of,
    words,
)
from pxrs.cli.terminal import (
    facts,
    show,
    tell_error,
)
from pxrs.errors import (
    InvalidItem,
    InvalidRecord,
    OutcomeUnknown,
    PxrsError,
    QueueExists,
    RegistryCorrupt,
    TransactionLost,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.queue.handle import Depth, QueueHandle
from pxrs.queue.items import Item
from pxrs.queue.records import PRIORITY_MAX, TAKERS, taker_in, time_in
from pxrs.queue.transaction import Transaction
from pxrs.wording import counted, time_text

app = typer.Typer(no_args_is_help=True)
app.command()(alter)
app.add_typer(dead_letters.app, name="dead", help="The items that were given up: list them, retry them, remove them.")

READ_BYTES: Final = 1 << 20
PUT_ITEMS: Final = 500
"""In one transaction, or as many as the store takes."""
TAKE_ITEMS: Final = 100
OWED_S: Final = 2.0
"""How long to wait for what is due, or was held by a dead process: it is about to be made ready."""
_LOOK_S: Final = 0.1
_DELAYED_MAX: Final = 64


@app.command()
def create(
    queue: Name,
    at: MaybeAt = None,
    policy: Annotated[PolicyName, typer.Option(help=POLICY_HELP)] = PolicyName.AT_LEAST_ONCE,
    times: Times = None,
    fifo: Annotated[
        bool, typer.Option("--fifo", help="Strictly first in, first out: one transaction at a time.")
    ] = False,
    backoff: Annotated[
        BackoffName | None, typer.Option(help="How long an item waits that came back; by default not at all.")
    ] = None,
    pause: Pause = None,
    first: First = None,
    factor: Factor = None,
    cap: Cap = None,
    jitter: Jitter = None,
    exist_ok: ExistOk = False,
    registry: RegistryUrl = None,
) -> None:
    """Make a work queue. `pxrs queue alter` changes its policy and backoff later."""
    rule = policy_of(policy, times)
    wait = backoff_of(backoff, {"pause": pause, "first": first, "factor": factor, "cap": cap, "jitter": jitter})
    check_given(at, registry)
    with pxrs.open(at, registry) as hub:
        told = f"made queue {queue}"
        try:
            hub.create_queue(queue, rule, fifo, wait)
        except QueueExists:
            if not exist_ok:
                raise
            hub.create_queue(queue, rule, fifo, wait, exist_ok=True)  # compares the settings
            told = f"queue {queue} is there already, with the same settings"
    typer.echo(told)


@app.command("list")
def list_(at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """List the queues, and how many items each holds, by where they are."""
    with open_hub(at, registry) as hub:
        found = list(_depths(hub))
    if as_json:
        for handle, depth in found:
            typer.echo(json.dumps({"queue": handle.name, **asdict(depth)}))
        return
    table = Table("queue", box=None, header_style="bold")
    _add_depth_columns(table)
    for handle, depth in found:
        table.add_row(handle.name, *_depth_cells(depth))
    show(table)


@app.command()
def describe(queue: Name, at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show a queue's settings, and how many items it holds."""
    with open_hub(at, registry) as hub:
        handle = hub.queue(queue)
        depth = handle.depth()
    if as_json:
        typer.echo(json.dumps({**plain_settings(handle), **asdict(depth)}))
        return
    settings: dict[str, object] = {
        "queue": handle.name,
        "id": handle.settings.id,
        "policy": words(handle.policy),
        "order": "strictly first in, first out" if handle.is_fifo else "by priority, then by age; best effort",
        "backoff": "none" if handle.backoff is None else words(handle.backoff),
        "created": time_text(handle.settings.created),
    }
    show(facts(settings), _depth_table(depth))


@app.command()
def depth(queue: Name, at: MaybeAt = None, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show how many items a queue holds: ready, delayed, in flight and dead."""
    with open_hub(at, registry) as hub:
        found = hub.queue(queue).depth()
    if as_json:
        typer.echo(json.dumps({"queue": queue, **asdict(found)}))
    else:
        show(_depth_table(found))


@app.command()
def put(
    queue: Name,
    at: MaybeAt = None,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[VALUE]...", help="By default each line of standard input.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Values are JSON objects; this field is each item's key.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-PRIORITY_MAX, max=PRIORITY_MAX, help="Higher ones are taken first.")
    ] = 0,
    delay: Annotated[
        float | None, typer.Option(metavar="DURATION", parser=duration(0), help="How long they are not taken.")
    ] = None,
    registry: RegistryUrl = None,
) -> None:
    """Put each value as an item; all are durable when it ends.

    Lines are put as they arrive. A field that is null is no key. A value that cannot be put ends it, when those before
    it are durable. Ctrl-C ends it too: it says how many items were put, and the exit code is 130.
    """
    options: dict[str, Any] = {"priority": priority, "delay": delay}
    if not values and sys.stdin is None:
        raise InvalidItem("standard input is closed; give it the lines to put, or give values")
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} put"), TimeElapsedColumn())
    is_shown = console.is_terminal and (bool(values) or not is_typed())
    bar = Progress(*columns, console=console, disable=not is_shown)
    with open_hub(at, registry) as hub:
        limit = hub.registry.limits.value_bytes_max
        putter = _Putter(hub, hub.queue(queue), key, options, "value" if values else "line")
        if not values:
            tell_typist(f"put into {queue} as an item")
        with bar, Interrupts() as interrupts:
            task = bar.add_task("putting", total=None)
            batches = [[os.fsencode(value) for value in values]] if values else _lines(limit, interrupts)
            try:
                for batch in batches:
                    for at_row in range(0, len(batch), PUT_ITEMS):
                        putter.put(batch[at_row : at_row + PUT_ITEMS])
                        bar.update(task, completed=putter.count)
                        interrupts.check()
            except KeyboardInterrupt:
                done = f"put {counted(putter.count, 'item')} into {queue}"
                if interrupts.count > 1:
                    unknown = "whether the items after them were put is not known"
                    bar.stop()
                    end_after_second_interrupt(f"{done}; {unknown}")
                raise interrupted(f"{done}; what was put is durable") from None
    typer.echo(f"put {counted(putter.count, 'item')} into {queue}")


@app.command()
def take(
    queue: Name,
    at: MaybeAt = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="At most so many.")] = 1,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION", parser=duration(0), help="How long to wait for so many; by default not at all."
        ),
    ] = None,
    peek: Annotated[bool, typer.Option("--peek", help="Only show the first ones, and leave them there.")] = False,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Take items, print them, and remove them from the queue once they are printed.

    On a terminal control characters are shown escaped, such as \\x07. With --json nothing is lost: key and value are
    text if their bytes are UTF-8; if not, key_base64 or value_base64 stands in their place.
    """
    if peek and timeout is not None:
        raise typer.BadParameter("--peek does not wait: leave --timeout out")
    if sys.stdout is None:
        tell_error("standard output is closed: what is taken could not be printed")
        raise typer.Exit(2)
    with open_hub(at, registry) as hub:
        if peek:
            print_items(hub.queue(queue).peek(count), as_json)
            return
        handle = hub.queue(queue)  # an unknown queue is told before this process registers as a taker
        until, left = time.monotonic() + (timeout or 0.0), count
        while left:
            with hub.transaction() as tx:
                items = _take(tx, handle, min(left, TAKE_ITEMS), max(0.0, until - time.monotonic()))
                print_items(items, as_json)
                _remove(tx, items)
            if not items:
                return
            left -= len(items)


@app.command()
def delete(queue: Name, at: MaybeAt = None, yes: Yes = False, registry: RegistryUrl = None) -> None:
    """Remove a queue and all its items, dead letters too."""
    with open_hub(at, registry) as hub:
        items = counted(sum(asdict(hub.queue(queue).depth()).values()), "item")
        confirm(f"Remove queue {queue} and its {items} for good?", yes)
        hub.delete_queue(queue)
    typer.echo(f"removed queue {queue} and its {items}")


class _Putter:
    """Puts values, several in a transaction, and knows at every moment how many of them are in the queue."""

    def __init__(self, hub: pxrs.Hub, queue: QueueHandle, key: str | None, options: dict[str, Any], what: str) -> None:
        """what: what a value is called when something is wrong with it."""
        self._hub, self._queue, self._field, self._options, self._what = hub, queue, key, options, what
        self.count = 0

    def put(self, values: list[bytes]) -> None:
        while values:
            try:
                tx, fitting, refusal = self._fill(values)
                is_committed = _commit(tx, f"whether the last {counted(fitting, self._what)} are in the queue")
            except PxrsError as error:
                error.add_note(f"{self._said('were', 'was')} put before")
                raise
            if is_committed:
                self.count += fitting
                values = values[fitting:]
                if refusal is not None:
                    said = f"{self._said('before it were', 'before it was')} put"
                    raise InvalidItem(f"{self._what} {self.count + 1:,}: {refusal}; {said}") from refusal

    def _fill(self, values: list[bytes]) -> tuple[Transaction, int, PxrsError | None]:
        """A transaction with as many of them as one may hold, and why the next one can never be put, if that is so."""
        tx = self._hub.transaction()
        for number, value in enumerate(values):
            try:
                key = None if self._field is None else key_in(value, self._field)
                tx.put(self._queue, value, key=key, **self._options)
            except (InvalidItem, InvalidRecord) as error:
                return tx, number, error
            except TransactionTooLarge as error:
                return tx, number, None if number else error
        return tx, len(values), None

    def _said(self, several: str, one: str) -> str:
        verb = one if self.count == 1 else several
        return f"{counted(self.count, self._what)} {verb}"


def _lines(line_bytes_max: int, interrupts: Interrupts) -> Iterator[list[bytes]]:
    """The lines of standard input, as many at a time as have come: nobody waits for a batch to be full."""
    rest = b""
    while piece := interrupts.wait(lambda: os.read(sys.stdin.fileno(), READ_BYTES)):
        *lines, rest = (rest + piece).split(b"\n")
        yield [line.removesuffix(b"\r") for line in lines]
        if len(rest) > line_bytes_max:
            break  # it is refused for its size; what follows is never looked at
    if rest:
        yield [rest.removesuffix(b"\r")]


def _take(tx: Transaction, queue: QueueHandle, count: int, timeout: float) -> list[Item]:
    """What comes in time, and in any case what is owed by now: this process may be the first for long that takes here,
    and has only begun to bring it back."""
    items = tx.take_many(queue, count, timeout)
    until = time.monotonic() + OWED_S
    while not items:
        is_owed = _is_owed(queue)
        items = tx.take_many(queue, count, _LOOK_S if is_owed else 0.0)  # once more: it may have come meanwhile
        if not is_owed or time.monotonic() > until:
            break
    return items


def _is_owed(queue: QueueHandle) -> bool:
    """Whether an item is delayed and due, or in the hands of a process that is gone."""
    registry, settings = queue.store.registry, queue.settings
    for entry in registry.scan(settings.delayed, limit=_DELAYED_MAX):
        with suppress(RegistryCorrupt):  # one that is damaged hides none behind it
            if time_in(entry.key) <= time.time():
                return True
            break
    # The items first: a taker is there before anything is in its hands.
    holders = {taker_in(entry.key) for entry in registry.scan(settings.inflight)}
    return not holders <= {entry.key.removeprefix(TAKERS) for entry in registry.scan(TAKERS)}


def _remove(tx: Transaction, printed: list[Item]) -> None:
    """Commit; if the reply was lost, say what became of what was printed."""
    one = len(printed) == 1
    what = "the last item that was printed" if one else f"the last {len(printed):,} items that were printed"
    if not _commit(tx, f"whether {what} {'was' if one else 'were'} removed from the queue"):
        lost = TransactionLost([item.id for item in printed], "its commit did not reach the store")
        lost.add_note(f"{what} {'is' if one else 'are'} still in the queue")
        raise lost


def _commit(tx: Transaction, question: str) -> bool:
    """Whether it was committed. If the reply was lost, that is found out; question: what stays open if it cannot be."""
    try:
        tx.commit()
    except OutcomeUnknown:
        try:
            return tx.outcome() == "committed"
        except PxrsError as error:
            error.add_note(f"{question} could not be found out")
            raise
    return True


def _depths(hub: pxrs.Hub) -> Iterator[tuple[QueueHandle, Depth]]:
    for handle in hub.queues():
        try:
            yield handle, handle.depth()
        except UnknownQueue:  # deleted just now
            continue


def _depth_table(found: Depth) -> Table:
    table = Table(box=None, header_style="bold")
    _add_depth_columns(table)
    table.add_row(*_depth_cells(found))
    return table


def _add_depth_columns(table: Table) -> None:
    for column in asdict(Depth(0, 0, 0, 0)):
        table.add_column(column.replace("_", " "), justify="right")


def _depth_cells(found: Depth) -> list[str]:
    return [f"{count:,}" for count in asdict(found).values()]
