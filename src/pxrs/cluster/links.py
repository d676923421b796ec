"""A broker's connection to one storage node.

All adds of a process to one node, of all ledgers, share one stream of `DoPut`. A thread of gRPC packs waiting adds into
messages; the link's thread receives the answers. The node answers adds in the order in which they were sent, when they
are synced; it may report a refused add earlier.

    adds waiting --(gRPC's thread packs them)--> sent, unanswered --(the link's thread)--> `done`

Unanswered adds are bounded in time and in bytes. If no answer arrives for `timeout_s`, counted from the call of `add`
or from the last answer if that was later, the link ends the stream, and every unanswered add fails with
NodeUnreachable; it is then not known whether the node has stored it. An add beyond `unanswered_bytes_max` fails at
once. A caller may repeat an add at any time, because a node stores an entry once.

After a stream has failed, the next add opens another one. For `PAUSE_S` after a failure adds fail at once, so that a
node that is away costs an occasional connection attempt, not one for each add.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pxrs import grpc_fork  # before grpc, which it imports with settings of its own

# isort: split
import grpc

from pxrs.cluster import messages
from pxrs.cluster.answers import EntryRead, Fenced, Hello, IndexPage, LinkSettings, open_channel, read_entry
from pxrs.cluster.ledgers import EntryHead
from pxrs.cluster.messages import Add, Piece
from pxrs.errors import InvalidUrl, LedgerFenced, NodeUnreachable, PxrsError, WrongNode
from pxrs.remote import flight, wire
from pxrs.remote.client.faults import error_in, text_of
from pxrs.remote.heap import keep_freed_blocks
from pxrs.waiting import start_thread

__all__ = ["EntryRead", "Fenced", "Hello", "IndexPage", "LinkSettings", "NodeLink"]

_logger = logging.getLogger(__name__)

PACK_BYTES: Final = 1 << 20
PACK_ADDS: Final = 500
"""Maximum length and number of adds of one message. A single add may be longer."""
PAUSE_S: Final = 0.2
LOOK_S: Final = 0.25
"""Interval at which the watchdog checks streams for missing answers."""

Done = Callable[[Exception | None], None]


class _Pending:
    """An add that the node has not answered."""

    __slots__ = ("add", "done", "given_at", "is_refused")

    def __init__(self, add: Add, done: Done) -> None:
        self.add, self.done = add, done
        self.given_at = time.monotonic()
        self.is_refused = False


class _Stream:
    """One call of `DoPut`. The link's lock guards it."""

    def __init__(self) -> None:
        self.call: Any = None
        self.unsent: deque[_Pending] = deque()
        self.unanswered: deque[_Pending] = deque()
        """All adds that are not answered, in order, including those in `unsent`."""
        self.answered = 0
        """How many adds were removed from `unanswered`, which is the number of its first add in the stream."""
        self.heard_at = 0.0
        self.why: str | None = None
        """Why this process has ended the stream; None while it has not."""


class NodeLink:
    """Threads share it."""

    def __init__(self, node: str, address: str, settings: LinkSettings | None = None) -> None:
        grpc_fork.freeze_in_children()
        keep_freed_blocks()
        self.node, self.address = node, address
        self._settings = settings or LinkSettings()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failing: deque[tuple[_Pending, PxrsError]] = deque()
        """Adds that `add` has refused; the link's thread calls their `done`."""
        self._stream: _Stream | None = None
        self._unanswered_bytes = 0
        self._down: tuple[float, PxrsError] | None = None
        """After a failure: until when adds fail at once (monotonic), and with which error."""
        self._is_closed = False
        self._channel = open_channel(address, self._settings)
        self._put: Any = self._channel.stream_stream(f"/{flight.SERVICE}/DoPut")
        self._get: Any = self._channel.unary_stream(f"/{flight.SERVICE}/DoGet")
        self._action: Any = self._channel.unary_stream(f"/{flight.SERVICE}/DoAction")
        self._thread = start_thread(self._run, f"pxrs-node-link-{node[:8]}")
        _WATCHDOG.add(self)

    # Adds.

    @property
    def unanswered_bytes(self) -> int:
        """The length of all unanswered adds. A caller that waits while this is large is slowed down; otherwise its adds
        fail, and it replaces the node."""
        return self._unanswered_bytes

    def add(
        self,
        ledger: str,
        entry: int,
        head: EntryHead,
        body: Sequence[Piece],
        lac: int,
        recovery: int | None,
        done: Done,
    ) -> None:
        """Send an entry. Returns at once. The link's thread calls `done` once: with None when the node has synced the
        entry, otherwise with NodeUnreachable, LedgerFenced or WrongNode. After `close`, this method calls it."""
        pending = _Pending(Add(ledger, entry, lac, recovery, head, body), done)
        with self._lock:
            stream = self._stream
            refusal = self._refusal(pending)
            if refusal is None:
                if stream is None:
                    stream = self._stream = _Stream()
                was_idle = not stream.unanswered
                stream.unsent.append(pending)
                stream.unanswered.append(pending)
                self._unanswered_bytes += head.size
                if was_idle or len(stream.unsent) == 1:
                    self._changed.notify_all()
            elif not self._is_closed:
                self._failing.append((pending, refusal))
                self._changed.notify()
        if refusal is not None and self._is_closed:
            _tell(pending, refusal)

    def _refusal(self, pending: _Pending) -> PxrsError | None:
        """Why an add fails at once; None if it does not. Under the lock."""
        if self._is_closed:
            return self._unreachable("the link was closed")
        if self._down is not None:
            if time.monotonic() < self._down[0]:
                return self._down[1]
            self._down = None
        if (
            self._unanswered_bytes + pending.add.head.size > self._settings.unanswered_bytes_max
            and self._unanswered_bytes
        ):
            return self._unreachable(f"{self._unanswered_bytes:,} bytes of adds are unanswered, the maximum")
        return None

    def _unreachable(self, why: str) -> NodeUnreachable:
        return NodeUnreachable(self.node, f"{self.address}: {why}")

    def _run(self) -> None:
        """The link's thread: opens streams, receives answers, and calls `done`."""
        while True:
            with self._lock:
                while self._stream is None and not self._failing and not self._is_closed:
                    self._changed.wait()
                failing, self._failing = self._failing, deque()
                stream = self._stream
                is_closed = self._is_closed
            for pending, error in failing:
                _tell(pending, error)
            if stream is not None:
                self._end(stream, self._receive(stream))
            elif is_closed:
                return

    def _receive(self, stream: _Stream) -> PxrsError:
        """Run a stream until it ends. Returns why it has ended."""
        try:
            call = self._put(self._packed(stream), metadata=self._settings.metadata())
        except (ValueError, InvalidUrl) as error:  # the channel is closed, or there is no token
            return self._unreachable(str(error))
        with self._lock:
            stream.call, stream.heard_at = call, time.monotonic()
            if self._is_closed or stream.why is not None:
                call.cancel()
        try:
            for message in call:
                self._answered(stream, *messages.read_answer(message))
            why = "the node ended the stream"
        except grpc.RpcError as failure:
            told = error_in(failure)
            if isinstance(told, WrongNode):
                return told
            why = f"{told or text_of(failure)}"
        except (KeyError, TypeError, ValueError, flight.MalformedMessage) as error:
            why = f"malformed answer: {error}"
        finally:
            call.cancel()
        return self._unreachable(stream.why or why)

    def _answered(self, stream: _Stream, synced: int, refused: Sequence[tuple[int, PxrsError]]) -> None:
        told: list[tuple[_Pending, PxrsError | None]] = []
        with self._lock:
            stream.heard_at = time.monotonic()
            for number, error in refused:
                if 0 <= number - stream.answered < len(stream.unanswered):
                    pending = stream.unanswered[number - stream.answered]
                    pending.is_refused = True
                    told.append((pending, error))
            while stream.unanswered and (stream.answered < synced or stream.unanswered[0].is_refused):
                pending = stream.unanswered.popleft()
                stream.answered += 1
                self._unanswered_bytes -= pending.add.head.size
                if not pending.is_refused:
                    told.append((pending, None))
            failing, self._failing = self._failing, deque()
        for pending, refusal in (*told, *failing):
            _tell(pending, refusal)

    def _end(self, stream: _Stream, error: PxrsError) -> None:
        with self._lock:
            left = [pending for pending in stream.unanswered if not pending.is_refused]
            self._unanswered_bytes -= sum(pending.add.head.size for pending in stream.unanswered)
            stream.unanswered.clear()
            stream.unsent.clear()
            stream.why = stream.why or str(error)
            if self._stream is stream:
                self._stream = None
            self._down = time.monotonic() + PAUSE_S, error
            self._changed.notify_all()
        if left and not self._is_closed:
            _logger.warning("the stream to node %s failed with %d unanswered adds: %s", self.node, len(left), error)
        for pending in left:
            _tell(pending, error)

    def _packed(self, stream: _Stream) -> Iterator[bytes]:
        """The messages of a stream. gRPC iterates over them on a thread of its own."""
        yield messages.adds_begin(self.node)
        while True:
            with self._lock:
                while not stream.unsent and stream.why is None and not self._is_closed:
                    self._changed.wait()
                if stream.why is not None or self._is_closed:
                    return
                batch: list[Add] = []
                size = 0
                while stream.unsent and len(batch) < PACK_ADDS:
                    size += stream.unsent[0].add.head.size
                    if batch and size > PACK_BYTES:
                        break
                    batch.append(stream.unsent.popleft().add)
            yield messages.adds(batch)

    def look(self, now: float) -> None:
        """End the stream if the node has not answered in time. The watchdog calls this."""
        with self._lock:
            stream = self._stream
            if stream is None or not stream.unanswered or stream.why is not None:
                return
            waits_s = now - max(stream.unanswered[0].given_at, stream.heard_at)
            if waits_s < self._settings.timeout_s:
                return
            stream.why = f"no answer for {waits_s:.1f} s"
            call = stream.call
            self._changed.notify_all()
        if call is not None:
            call.cancel()

    # Calls other than adds.

    def fence(self, ledger: str, recovery: int, timeout_s: float | None = None) -> Fenced:
        """Have the node refuse all adds to the ledger except those of recoveries with this number or a higher one. The
        fence is synced when this returns. Raises LedgerFenced if a higher number has fenced the ledger,
        NodeUnreachable, WrongNode."""
        found = self._call(messages.FENCE, {"ledger": ledger, "recovery": recovery}, timeout_s)
        return Fenced(int(found["lac"]), int(found["last"]))

    def index(self, ledger: str, after: int = -1, limit: int = 10_000, timeout_s: float | None = None) -> IndexPage:
        """The first `limit` entries after the entry `after` that the node has. Raises NodeUnreachable, WrongNode."""
        found = self._call(messages.INDEX, {"ledger": ledger, "after": after, "limit": limit}, timeout_s)
        entries = [
            (entry, EntryHead(offset, rows, size, last_timestamp, stored_at, 0))
            for entry, offset, rows, size, last_timestamp, stored_at in found["entries"]
        ]
        return IndexPage(entries, int(found["lac"]), found["fenced"], bool(found["more"]))

    def ledgers(self, after: str = "", limit: int = 10_000, timeout_s: float | None = None) -> tuple[list[str], bool]:
        """The first `limit` ids after `after` of ledgers that the node has, and whether there are more. Raises as
        `index`."""
        found = self._call(messages.LEDGERS, {"after": after, "limit": limit}, timeout_s)
        return [str(each) for each in found["ledgers"]], bool(found["more"])

    def lacking(self, after: str = "", limit: int = 10_000, timeout_s: float | None = None) -> tuple[list[str], bool]:
        """As `ledgers`, only those of which the node may have lost entries (C7): it is in doubt about them, or cannot
        read some."""
        found = self._call(messages.LACKING, {"after": after, "limit": limit}, timeout_s)
        return [str(each) for each in found["ledgers"]], bool(found["more"])

    def collect(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Have the node collect garbage now. Returns what it removed. Raises as `index`."""
        return self._call(messages.COLLECT, {}, timeout_s)

    def hello(self, timeout_s: float | None = None) -> Hello:
        """Raises as `index`."""
        found = self._call(messages.HELLO, {}, timeout_s)
        return Hello(found["node"], found["cluster"], int(found["starts"]), int(found["format"]), found["version"])

    def read(
        self,
        ledger: str,
        first: int,
        last: int,
        max_bytes: int = 16 << 20,
        recovery: int | None = None,
        *,
        heads: bool = False,
        timeout_s: float | None = None,
    ) -> list[EntryRead]:
        """The node's answers for the entries from `first` to `last` (inclusive), up to `max_bytes`, but at least one.
        recovery: the node first fences the ledger with this number. heads: read only the headers of each entry's
        frames. Raises NodeUnreachable, LedgerFenced, WrongNode."""
        ticket = {
            "node": self.node,
            "ledger": ledger,
            "first": first,
            "last": last,
            "max_bytes": max_bytes,
            "recovery": recovery,
            "heads": heads,
        }
        request = flight.ticket(wire.dumps(ticket))
        return [read_entry(message, is_whole=not heads) for message in self._messages(self._get, request, timeout_s)]

    def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        request = flight.action(name, wire.dumps({"node": self.node, **arguments}))
        for message in self._messages(self._action, request, timeout_s):
            return wire.loads(flight.read_result(message))
        raise self._unreachable(f"the call {name} returned no answer")

    def _messages(self, method: Any, request: bytes, timeout_s: float | None) -> list[bytes]:
        """The messages that answer a call."""
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        try:
            return list(method(request, timeout=limit_s, metadata=self._settings.metadata()))
        except grpc.RpcError as failure:
            error = error_in(failure)
            if isinstance(error, LedgerFenced | WrongNode):
                raise error from None
            raise self._unreachable(f"{error or text_of(failure)}") from None
        except (ValueError, InvalidUrl) as error:  # the channel is closed, or there is no token
            raise self._unreachable(str(error)) from error

    def close(self) -> None:
        """Close the link. Unanswered adds fail with NodeUnreachable. Idempotent. A `done` callback must not call this,
        because it waits for the link's thread."""
        _WATCHDOG.discard(self)
        with self._lock:
            self._is_closed = True
            stream = self._stream
            if stream is not None and stream.why is None:
                stream.why = "the link was closed"
            call = None if stream is None else stream.call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        self._thread.join()
        self._channel.close()


def _tell(pending: _Pending, error: Exception | None) -> None:
    try:
        pending.done(error)
    except Exception:
        _logger.exception("the callback of an add to a storage node failed")


class _Watchdog:
    """Checks all links of this process for missing answers, on one thread that runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakSet[NodeLink] = weakref.WeakSet()
        self._is_running = False

    def add(self, link: NodeLink) -> None:
        with self._lock:
            self._links.add(link)
            if not self._is_running:
                start_thread(self._run, "pxrs-node-links")
                self._is_running = True

    def discard(self, link: NodeLink) -> None:
        with self._lock:
            self._links.discard(link)

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                links = list(self._links)
                if not links:
                    self._is_running = False
                    return
            now = time.monotonic()
            for link in links:
                link.look(now)
            del links


_WATCHDOG: Final = _Watchdog()
