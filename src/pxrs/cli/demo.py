"""`pxrs demo`: a group at work, with real processes, a real kill, a real zombie and an exact account (X19).

Three workers share a topic of eight partitions. One of them is killed with a message in hand, one is stopped past its
lease and woken again, so that its late commit must be refused. What each worker tells is kept: at the end every message
must have been handled, in order, and none again that lay before an accepted checkpoint.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

import pxrs
from pxrs.cli.demo_worker import TTL_S, WORK_S
from pxrs.errors import UnknownGroup
from pxrs.group.admin import GroupDescription, GroupHandle
from pxrs.group.records import Keys
from pxrs.producer import Producer
from pxrs.registry.address import parse

WORKERS: Final = ("anna", "ben", "cleo")
TOPIC: Final = "orders"
PARTITIONS: Final = 8
FIRST, MORE = 100, 50
KEYS: Final = 40
WAIT_S: Final = 60.0
LOOK_S: Final = 0.03
Place = tuple[int, int]
"""(partition, offset)."""


class Stuck(Exception):
    """The demo cannot go on."""


class Worker:
    """A worker process, and all that it has told."""

    def __init__(self, url: str, registry: str, group: str, name: str, folder: Path) -> None:
        self.name, self.state = name, "starting"
        self.told: list[str] = []
        self.in_hand: str | None = None
        self.handled = 0
        self.refused: str | None = None
        self._errors = folder / f"{name}.stderr"
        code = "from pxrs.cli.demo_worker import main; main()"
        command = [sys.executable, "-c", code, url, registry, TOPIC, group, name]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode().strip()
            self.told.append(text)
            what, _, detail = text.partition(" ")
            self.in_hand = detail if what == "began" else None
            self.handled += what == "handled"
            if what == "refused":
                self.refused = detail

    def signal(self, number: int, state: str) -> None:
        self.state = state
        self.process.send_signal(number)

    @property
    def is_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    def check(self) -> None:
        """Raise if it has ended and nobody has killed it."""
        if self.process.poll() not in (None, -signal.SIGKILL):
            self._reader.join(10)
            lines = self._errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise Stuck(f"{self.name} ended with exit code {self.process.returncode}: {lines[-1]}")

    def end(self) -> bool:
        """Let it finish, or make it; whether it left gracefully. All that it has told is here then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        return self.process.returncode == 0


@dataclass(frozen=True, slots=True)
class Account:
    messages: int
    lost: int
    """Sent and acknowledged to the sender, and never handled."""
    order_violations: int
    duplicates: int
    """Handled under a later epoch although they lay before a checkpoint that was accepted under an earlier one."""
    redone: int
    """Handled again because they were in hand, and not written down, when a worker was killed or stopped."""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.order_violations or self.duplicates)

    def __str__(self) -> str:
        return (
            f"{self.messages - self.lost} of {self.messages} messages accounted for: lost {self.lost}, "
            f"order violations {self.order_violations}, duplicates beyond the last checkpoint {self.duplicates}"
        )


def account(sent: Iterable[Place], told: Iterable[str]) -> Account:
    """Reckon up what the workers have told, in whatever order: the epochs say who came when."""
    handled: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    committed: dict[Place, int] = {}
    for line in told:
        what, *rest = line.split()
        if what in ("handled", "committed"):
            partition, epoch, offset = map(int, rest)
            if what == "handled":
                handled[partition][epoch].append(offset)
            else:
                committed[partition, epoch] = max(offset, committed.get((partition, epoch), 0))
    violations = duplicates = redone = 0
    done: set[Place] = set()
    for partition, epochs in handled.items():
        reached = checkpoint = 0
        for epoch, offsets in sorted(epochs.items()):
            # The first one may lie before what was reached, never behind it; the others follow one by one.
            violations += offsets[0] > reached
            violations += sum(after != before + 1 for before, after in pairwise(offsets))
            duplicates += sum(offset < checkpoint for offset in offsets)
            redone += sum(offset >= checkpoint and (partition, offset) in done for offset in offsets)
            done.update((partition, offset) for offset in offsets)
            reached = max(reached, offsets[-1] + 1)
            checkpoint = max(checkpoint, committed.get((partition, epoch), 0))
    places = set(sent)
    violations += len(done - places)  # what nobody has sent
    return Account(len(places), len(places - done), violations, duplicates, redone)


class Demo:
    def __init__(self, hub: pxrs.Hub, registry: str, group: str, folder: Path, console: Console) -> None:
        self._hub, self._console = hub, console
        self._topic = hub.create_topic(TOPIC, partitions=PARTITIONS)
        self._group = GroupHandle(hub.registry, group, hub)
        self._is_sqlite = hub.registry.url.startswith("sqlite:")
        self._sent: list[Place] = []
        self._workers = [Worker(hub.url, registry, group, name, folder) for name in WORKERS]
        self._live = Live(console=console, refresh_per_second=12)

    def run(self) -> bool:
        """Whether the account is exact."""
        try:
            with self._live, self._hub.producer(TOPIC) as out:
                self._story(out)
        finally:
            have_left = [worker.end() for worker in self._workers if not worker.is_killed]
        found = account(self._sent, [line for worker in self._workers for line in worker.told])
        self._console.print(f"\n[bold]account[/]: {found}", highlight=False, soft_wrap=True)
        self._console.print(
            f"handled again: {found.redone}, in hand and not yet written down when a worker was killed or stopped",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        if not all(have_left):
            self._console.print("[red]not every worker has left gracefully[/]")
        return found.is_exact and len(self._sent) == FIRST + MORE and all(have_left)

    def _story(self, out: Producer) -> None:
        anna, ben, cleo = self._workers
        self._until(lambda: self._owners() == set(WORKERS), "share the partitions")
        for worker in self._workers:
            worker.state = "running"
        self._send(out, FIRST)
        self._until(lambda: anna.handled >= 5 and anna.in_hand is not None, "handle messages")
        began = time.monotonic()
        anna.signal(signal.SIGKILL, "killed -9")
        self._until(lambda: self._owners() == {"ben", "cleo"}, "take over")
        self._say(f"anna was [red]killed[/]; the others own her partitions after {time.monotonic() - began:.2f} s")
        self._until(self._is_done, "handle the rest")
        self._say(f"all {FIRST} messages are done")
        self._send(out, MORE)
        if self._is_sqlite:
            self._say("no zombie here: SQLite has one writer, and one that is stopped in a commit stops the others")
        else:
            self._wake_a_zombie(ben, cleo)
        self._until(self._is_done, "handle the rest")
        self._say(f"all {FIRST + MORE} messages are done")

    def _wake_a_zombie(self, ben: Worker, cleo: Worker) -> None:
        began = self._stop_with_a_message_in_hand(ben)
        self._until(lambda: self._owners() == {"cleo"}, "take over")
        cleo.state = "owns everything"
        self._say(
            f"ben was [yellow]stopped[/] with a message in hand, and his lease of {self._ttl():g} s ran out; cleo took "
            f"over after {time.monotonic() - began:.2f} s"
        )
        ben.signal(signal.SIGCONT, "woken: a zombie")
        self._until(lambda: ben.refused is not None, "refuse the zombie")
        self._say(f"ben woke up, finished it and tried to commit: [green]refused[/] ({escape(str(ben.refused))})")
        ben.state, cleo.state = "a new member", "running"

    def _stop_with_a_message_in_hand(self, worker: Worker) -> float:
        """The moment when it was stopped."""
        while True:
            self._until(lambda: worker.in_hand is not None, "handle messages")
            stopped_at = time.monotonic()
            worker.signal(signal.SIGSTOP, "stopped")
            time.sleep(2 * WORK_S)  # had the signal come too late, it would have told of the end by then
            if worker.in_hand is not None:
                return stopped_at
            worker.signal(signal.SIGCONT, "running")

    def _ttl(self) -> float:
        with self._hub.registry.lease(TTL_S) as lease:
            return lease.ttl  # some stores grant more than was asked for

    def _send(self, out: Producer, count: int) -> None:
        first = len(self._sent)
        receipts = [out.send(b"%d" % n, key=b"account-%d" % (n % KEYS)) for n in range(first, first + count)]
        self._sent += [receipt.result(WAIT_S) for receipt in receipts]
        self._say(f"{count} {'more ' if first else ''}messages sent, and acknowledged")

    # Looking.

    def _describe(self) -> GroupDescription | None:
        try:
            return self._group.describe()
        except UnknownGroup:  # nobody has joined yet
            return None

    def _owners(self) -> set[str | None]:
        """None among them if a partition is free, or its owner gone."""
        rows = self._found.partitions if self._found is not None else ()
        owners = {row.owner_name if row.is_owner_there else None for row in rows}
        return owners if len(rows) == PARTITIONS else {None}

    def _is_done(self) -> bool:
        rows = self._found.partitions if self._found is not None else ()
        return sum(row.checkpoint or 0 for row in rows) == len(self._sent)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Look and redraw until the condition holds."""
        until = time.monotonic() + WAIT_S
        while True:
            self._found = self._describe()
            self._live.update(self._picture(self._found))
            if condition():
                return
            for worker in self._workers:
                worker.check()
            if time.monotonic() > until:
                raise Stuck(f"the workers did not {what} within {WAIT_S:g} s; is the registry very slow?")
            time.sleep(LOOK_S)

    def _say(self, text: str) -> None:
        self._live.console.print(f"  {text}", highlight=False, soft_wrap=True)

    def _picture(self, found: GroupDescription | None) -> Group:
        rows = found.partitions if found is not None else ()
        workers = Table(header_style="bold")
        for column in ("worker", "state", "partitions", "handled"):
            workers.add_column(column, justify="right" if column == "handled" else "left")
        for worker in self._workers:
            owned = " ".join(str(row.partition) for row in rows if row.owner_name == worker.name)
            workers.add_row(worker.name, worker.state, owned, str(worker.handled))
        partitions = Table(header_style="bold")
        for column in ("partition", "owner", "epoch", "checkpoint", "end", "lag"):
            partitions.add_column(column, justify="left" if column == "owner" else "right")
        for row in rows:
            numbers = (row.checkpoint, row.end, row.lag)
            owner = row.owner_name or "" if row.is_owner_there else f"[red]{escape(row.owner_name or '')}[/]"
            partitions.add_row(
                str(row.partition), owner, str(row.epoch), *("" if n is None else str(n) for n in numbers)
            )
        return Group(workers, partitions)


def demo(
    url: Annotated[
        str | None, typer.Option("--registry", help="Any registry; by default one of files, in a temporary directory.")
    ] = None,
) -> None:
    """Show a consumer group, a kill -9, a take-over and a zombie that is refused, with real processes."""
    console = Console()
    if url is not None and parse(url).scheme == "memory":
        raise typer.BadParameter("memory: is one process's own; the workers are several", param_hint="--registry")
    group = f"demo-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory(prefix="pxrs-demo-") as temporary:
        folder = Path(temporary)
        with pxrs.open(folder / "data", registry=url) as hub:
            hub.registry.get("groups")  # its tables are made before the workers race to make them
            where = escape(hub.registry.url)
            console.print(
                f"[bold]pxrs[/] demo on {where}: {len(WORKERS)} processes, {PARTITIONS} partitions\n",
                highlight=False,
                soft_wrap=True,
            )
            try:
                is_exact = Demo(hub, url or "", group, folder, console).run()
            except Stuck as error:
                console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
                is_exact = False
            finally:
                _forget(hub, group)
    if not is_exact:
        raise typer.Exit(1)


def _forget(hub: pxrs.Hub, group: str) -> None:
    """Leave nothing in somebody's registry. The group's name is never used again, so no guard is needed (R4)."""
    keys = [entry.key for entry in hub.registry.scan(Keys(group).root)]
    size = hub.registry.limits.commit_keys_max
    for at in range(0, len(keys), size):
        hub.registry.commit(delete=keys[at : at + size])
