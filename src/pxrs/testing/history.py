"""A history of real processes at work on one registry, for `pxrs.testing.linearizability` to judge.

    history = record(["etcd://127.0.0.1:2379"], 5, 200, seed=7, keys=["a", "b", "c"], during=kill_the_leader)
    verdict = check(history)
    assert verdict.ok, verdict.explanation

Every client is a process of its own, so that nothing is shared but the store. All of them wait until the last one
is connected, then do a seeded random mix of reads and commits on the same few keys. The times are those of
`time.monotonic`, which on one machine is one clock for all processes.

What is recorded decides what can be proved:

- A commit whose reply was lost is recorded as unknown, without a return: it may still land.
- A call that failed with `RegistryUnavailable` had no effect, by contract, and is left out. A store that says so and
  applies the commit all the same is caught: somebody reads a version that nobody wrote.
- Any other error, or a client that dies, makes the recording fail. A history with a hole would prove nothing.

The seed repeats what the clients ask for as long as they get the same answers; how they interleave is up to
the machine.
"""

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any, Protocol

from pxrs.errors import Conflict, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.testing.linearizability import ABSENT, Commit, Get, Operation, Outcome

# The pause after a fault: long enough that an outage does not use up all operations, short enough to continue soon.
_PAUSE_MIN_S = 0.01
_PAUSE_MAX_S = 0.5
# The kinds of commit, and how often each is made among them.
_MIX = {"compare": 40, "guarded": 20, "create": 10, "blind": 12, "delete": 10, "only-expect": 8}
# How long a child may take to notice that it is killed.
_KILL_WAIT_S = 10.0


class RecordingFailed(PxrsError):
    """A client did not finish, so there is no history: `client` is its number. The message says what happened to it."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(f"client {client}: {reason}")
        self.client = client
        self.reason = reason

    def __reduce__(self) -> tuple[type["RecordingFailed"], tuple[int, str]]:
        return type(self), (self.client, self.reason)


def record(
    urls: Sequence[str],
    clients: int,
    operations_per_client: int,
    seed: int,
    keys: Sequence[str],
    during: Callable[[], object] | None = None,
    *,
    deletes: bool = True,
    timeout: float = 120.0,
) -> list[Operation]:
    """Let `clients` processes work on one store, client i through `urls[i % len(urls)]`, and merge what they saw.

    `during` runs here, once, when about half of the operations are done, while the clients go on. `deletes=False`
    leaves deletions out, for a store that counts the versions of a re-created key from the start (R4). `timeout`
    bounds the wait before `during` and again the one after it; past it, and after any failure, the clients are
    killed and `RecordingFailed` is raised.
    """
    if clients < 1 or operations_per_client < 1 or not urls or not keys:
        raise ValueError("a history needs at least one url, client, operation and key")
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    start = context.Event()
    half = max(1, clients * operations_per_client // 2)
    with ExitStack() as cleanup:
        inboxes: dict[Connection, tuple[int, BaseProcess]] = {}
        for client in range(clients):
            inbox, outbox = context.Pipe(duplex=False)
            cleanup.callback(inbox.close)
            link = _Link(client, half, timeout, progress, start, outbox)
            job = (urls[client % len(urls)], seed, client, operations_per_client, tuple(keys), deletes, link)
            process = context.Process(target=_work, args=job, name=f"history-client-{client}", daemon=True)
            process.start()
            cleanup.callback(_end, process)
            outbox.close()  # the child's copy is now the only one, so its death is an end of file here
            inboxes[inbox] = (client, process)
        return _collect(inboxes, start, during, timeout)


def run_client(
    url: str,
    seed: int,
    client: int,
    operations: int,
    keys: Sequence[str],
    *,
    deletes: bool = True,
    on_ready: Callable[[], object] = lambda: None,
    on_operation: Callable[[], object] = lambda: None,
) -> list[Operation]:
    """Do `operations` calls on the registry at `url`, one after the other, and return what they saw.

    `on_ready` is called once connected, `on_operation` after every call, whether it is recorded or not.
    """
    import pxrs.registry

    with pxrs.registry.open(url) as registry:
        on_ready()
        user = _User(random.Random(f"{seed}/{client}"), client, tuple(keys), deletes)
        history: list[Operation] = []
        pause_s = _PAUSE_MIN_S
        for counter in range(operations):
            operation = user.act(registry, user.choose(counter))
            if operation is not None:
                history.append(operation)
            on_operation()
            if operation is None or operation.ret is None:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            else:
                pause_s = _PAUSE_MIN_S
        return history


# --- one client's behaviour ---


class _Entry(Protocol):
    @property
    def value(self) -> bytes: ...
    @property
    def version(self) -> int: ...


class _Registry(Protocol):
    """The part of `pxrs.registry.Registry` that is under test."""

    def get(self, key: str) -> _Entry | None: ...
    def commit(
        self, *, expect: Mapping[str, int], put: Mapping[str, bytes], delete: Sequence[str]
    ) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class _Read:
    key: str


@dataclass(frozen=True, slots=True)
class _Write:
    expect: dict[str, int] = field(default_factory=dict)
    put: dict[str, bytes] = field(default_factory=dict)
    delete: tuple[str, ...] = ()


class _User:
    """Chooses calls by what it last read, as programs do, and makes them."""

    def __init__(self, rng: random.Random, client: int, keys: tuple[str, ...], deletes: bool) -> None:
        self._rng = rng
        self._client = client
        self._keys = keys
        self._deletes = deletes
        self._seen: dict[str, int] = {}

    def choose(self, counter: int) -> _Read | _Write:
        """A read, or a commit over one or two keys whose value names this call and no other."""
        rng = self._rng
        value = f"{self._client}:{counter}".encode()
        keys = rng.sample(self._keys, min(len(self._keys), rng.choice((1, 2))))
        # A key that was never read, or not since a conflict, is mostly read before it is compared; otherwise a client
        # would expect ABSENT again and again.
        unread = [key for key in keys if key not in self._seen]
        if rng.random() < 0.35 or (unread and rng.random() < 0.6):
            return _Read((unread or keys)[0])
        expect = {key: self._seen.get(key, ABSENT) for key in keys}
        (kind,) = rng.choices(list(_MIX), list(_MIX.values()))
        if kind == "only-expect":
            return _Write(expect=expect)
        if kind == "guarded":  # the shape of a fence, and of write skew: both are expected, one is written
            return _Write(expect=expect, put={keys[-1]: value})
        if kind == "create":
            return _Write(expect=dict.fromkeys(keys, ABSENT), put=dict.fromkeys(keys, value))
        if kind == "blind":
            return _Write(put=dict.fromkeys(keys, value))
        if kind == "delete" and self._deletes:
            # With two keys, one is deleted and the other put, together.
            expected = expect if rng.random() < 0.5 else {}
            return _Write(expect=expected, put=dict.fromkeys(keys[1:], value), delete=(keys[0],))
        return _Write(expect=expect, put=dict.fromkeys(keys, value))

    def act(self, registry: _Registry, request: _Read | _Write) -> Operation | None:
        """Make one call. None if it is known to have had no effect and returned nothing."""
        return self._get(registry, request) if isinstance(request, _Read) else self._commit(registry, request)

    def _get(self, registry: _Registry, request: _Read) -> Get | None:
        call = time.monotonic()
        try:
            entry = registry.get(request.key)
        except (RegistryUnavailable, OutcomeUnknown):
            return None
        ret = time.monotonic()
        value, version = (None, ABSENT) if entry is None else (entry.value, entry.version)
        self._seen[request.key] = version
        return Get(client=self._client, call=call, ret=ret, key=request.key, value=value, version=version)

    def _commit(self, registry: _Registry, request: _Write) -> Commit | None:
        outcome: Outcome = "ok"
        versions: dict[str, int] = {}
        call = time.monotonic()
        try:
            told = registry.commit(expect=request.expect, put=request.put, delete=list(request.delete))
            versions = dict(told)
        except Conflict:
            outcome = "conflict"
        except OutcomeUnknown:
            outcome = "unknown"
        except RegistryUnavailable:
            return None
        ret = None if outcome == "unknown" else time.monotonic()
        if outcome == "ok":
            self._seen |= versions | dict.fromkeys(request.delete, ABSENT)
        else:
            for key in (*request.expect, *request.put, *request.delete):
                self._seen.pop(key, None)
        return Commit(
            client=self._client,
            call=call,
            ret=ret,
            expect=request.expect,
            put=request.put,
            delete=request.delete,
            outcome=outcome,
            versions=versions,
        )


# --- the processes ---


@dataclass(frozen=True, slots=True)
class _Link:
    """The connection of a child to its parent. It sends ("ready",), ("half",), then ("done", history) or ("failed",
    why)."""

    client: int
    half: int
    timeout: float
    progress: "Synchronized[int]"
    start: Event
    outbox: "Connection[tuple[Any, ...], Any]"

    def ready(self) -> None:
        self.outbox.send(("ready",))
        if not self.start.wait(self.timeout):
            raise RecordingFailed(self.client, f"the others were not ready within {self.timeout:g} s")

    def advance(self) -> None:
        with self.progress.get_lock():
            self.progress.value += 1
            is_half = self.progress.value == self.half
        if is_half:
            self.outbox.send(("half",))


def _work(
    url: str,
    seed: int,
    client: int,
    operations: int,
    keys: tuple[str, ...],
    deletes: bool,
    link: _Link,
) -> None:
    """The main function of a child."""
    try:
        history = run_client(
            url,
            seed,
            client,
            operations,
            keys,
            deletes=deletes,
            on_ready=link.ready,
            on_operation=link.advance,
        )
        link.outbox.send(("done", history))
    except Exception:
        link.outbox.send(("failed", traceback.format_exc()))
        raise


def _collect(
    inboxes: Mapping[Connection, tuple[int, BaseProcess]],
    start: Event,
    during: Callable[[], object] | None,
    timeout: float,
) -> list[Operation]:
    open_inboxes = dict(inboxes)
    history: list[Operation] = []
    ready = 0
    deadline = time.monotonic() + timeout
    while open_inboxes:
        for inbox, kind, payload in _receive(open_inboxes, deadline, timeout):
            if kind == "ready":
                ready += 1
                if ready == len(inboxes):
                    start.set()
            elif kind == "half" and during is not None:
                during()
                deadline = time.monotonic() + timeout
            elif kind == "failed":
                raise RecordingFailed(open_inboxes[inbox][0], payload)
            elif kind == "done":
                history += payload
                del open_inboxes[inbox]
    return sorted(history, key=lambda operation: operation.call)


def _receive(
    inboxes: Mapping[Connection, tuple[int, BaseProcess]], deadline: float, timeout: float
) -> Iterator[tuple[Connection, str, Any]]:
    """One message of every child that has one; there is at least one before the deadline."""
    talking = wait(list(inboxes), max(0.0, deadline - time.monotonic()))
    if not talking:
        client, _ = next(iter(inboxes.values()))
        raise RecordingFailed(client, f"not done within {timeout:g} s")
    for inbox in talking:
        assert isinstance(inbox, Connection)
        try:
            kind, *payload = inbox.recv()
        except EOFError:
            client, process = inboxes[inbox]
            process.join(_KILL_WAIT_S)
            raise RecordingFailed(client, f"died with exit code {process.exitcode}") from None
        yield inbox, kind, payload[0] if payload else None


def _end(process: BaseProcess) -> None:
    """Wait for a child that has finished, or kill it after a failure."""
    process.kill()
    process.join(_KILL_WAIT_S)
