"""The gRPC service of a storage node: the methods of Arrow Flight that it supports, on `grpc.aio`
(docs/cluster-format.md).

As in `pxrs.server.service`, each method identifies its caller before it receives a request, and checks the caller's
permissions before it has any effect (W4). Every request names the node that it is meant for; a node that runs at the
former address of another node answers WrongNode (C5).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import grpc

from pxrs import __version__
from pxrs.cluster import messages
from pxrs.cluster.storage.adds import AddStream
from pxrs.cluster.storage.format import FORMAT, NUMBER_MAX
from pxrs.cluster.storage.node import StorageNode, is_ledger
from pxrs.cluster.storage.reading import Found
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import Closed, InvalidArgument, NotPermitted, PxrsError, ServerBusy, Unauthenticated, WrongNode
from pxrs.metrics.instruments import SERVER_RECEIVED, SERVER_SENT
from pxrs.remote import flight, wire
from pxrs.server.auth.gate import Caller, Gate, unauthenticated
from pxrs.server.budget import Budget
from pxrs.server.counts import CallCounts, CountedMessages, CountedReplies
from pxrs.server.given import Given, parse
from pxrs.server.pools import run
from pxrs.server.served import Stalled

_logger = logging.getLogger(__name__)

REQUEST_S: Final = 30.0
PIECE_BYTES: Final = 4 << 20
"""How many bytes of a read are read at a time and held until the broker has received them; at least one entry."""
INDEX_MAX: Final = 10_000
_DETAILS_MAX: Final = 500
_STATUSES: Final = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (Closed, grpc.StatusCode.UNAVAILABLE),
)

Method = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]
Result = dict[str, Any]


class Standing(NamedTuple):
    """What a node answers about itself to `storage.hello`."""

    cluster: str
    starts: int


class StorageService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Belongs to the event loop."""

    def __init__(
        self,
        node: StorageNode,
        standing: Standing,
        gate: Gate,
        limits: StorageLimits,
        collect: Callable[[], Result],
    ) -> None:
        """collect: runs a round of garbage collection and returns its result. It may block."""
        self._node, self._standing, self._gate, self._limits = node, standing, gate, limits
        self._collect, self._collecting = collect, threading.Lock()
        self.pool = ThreadPoolExecutor(limits.threads, "pxrs-storage-call")
        self._adding = Budget(limits.add_bytes_max, "adds that are not synced yet")
        self._reading = Budget(limits.read_held_bytes_max, "entries that brokers have not read yet")
        self.streams: dict[AddStream, Caller] = {}
        self.open = 0
        """The number of open calls."""
        self._is_draining = False
        self._counts = CallCounts()
        methods: dict[str, Method] = {"DoPut": self._do_put, "DoGet": self._do_get, "DoAction": self._do_action}
        self._handlers = {
            f"/{flight.SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(self._guarded(name, method))
            for name, method in methods.items()
        }
        self._actions: dict[str, Callable[[Given], Result]] = {
            messages.HELLO: self._hello,
            messages.FENCE: self._fence,
            messages.INDEX: self._index,
            messages.LEDGERS: self._ledgers,
            messages.LACKING: self._lacking,
            messages.COLLECT: self._collect_now,
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    async def refresh(self) -> None:
        """Read the tokens file again if it has changed, and end the streams of tokens that are no longer valid."""
        await asyncio.to_thread(self._gate.refresh)
        for stream, caller in list(self.streams.items()):
            if not self._gate.is_valid(caller):
                stream.end(unauthenticated())

    def leave(self) -> None:
        """Refuse further calls, and end the open streams."""
        self._is_draining = True
        for stream in list(self.streams):
            stream.end(Closed("the storage node is stopping"))

    # The methods.

    async def _do_put(self, received: AsyncIterator[bytes], context: Any) -> None:
        first = await self._request(received)
        about = Given("DoPut", self._json(flight.read_flight_data(first).command or b"", "the descriptor"))
        if about.text("storage") != messages.ADDS:
            raise InvalidArgument("DoPut of a storage node supports only streams of adds: see docs/cluster-format.md")
        self._check_node(about)
        stream = AddStream(self._node, self._adding)
        self.streams[stream] = context.caller
        try:
            await stream.serve(received, context.write)
        finally:
            del self.streams[stream]

    async def _do_get(self, received: AsyncIterator[bytes], context: Any) -> None:
        given = Given("DoGet", self._json(flight.read_ticket(await self._request(received)), "the ticket"))
        self._check_node(given)
        read = functools.partial(
            self._node.read,
            _ledger(given),
            given.whole("first"),
            given.whole("last"),
            min(given.whole("max_bytes"), self._limits.read_bytes_max),
            None if given.whole_or_none("recovery") is None else _recovery(given),
            heads=given.flag("heads"),
        )
        found = await run(self.pool, read)
        while True:
            taken = await self._reading.take(PIECE_BYTES, self._limits.read_stalled_s)
            try:
                piece = await run(self.pool, functools.partial(_piece, found))
                taken = self._reading.exchange(taken, max(taken, sum(map(len, piece))))  # an entry may be longer
                for each in piece:
                    async with asyncio.timeout(self._limits.read_stalled_s):
                        await context.write(each)
            except TimeoutError:
                raise Stalled(f"the broker read no entries for {self._limits.read_stalled_s:g} s") from None
            finally:
                self._reading.give_back(taken)
            if not piece:
                return

    async def _do_action(self, received: AsyncIterator[bytes], context: Any) -> None:
        name, body = flight.read_action(await self._request(received))
        action = self._actions.get(name)
        if action is None:
            raise InvalidArgument(f"a storage node has no call {name[:100]!r}; use {', '.join(self._actions)}")
        given = Given(name, self._json(body or b"{}", "the body"))
        if name != messages.HELLO or "node" in given.found:
            self._check_node(given)
        found = await run(self.pool, functools.partial(action, given))
        await context.write(flight.result(wire.dumps(found)))

    def _hello(self, given: Given) -> Result:
        return {
            "node": self._node.id,
            "cluster": self._standing.cluster,
            "starts": self._standing.starts,
            "format": FORMAT,
            "version": __version__,
        }

    def _fence(self, given: Given) -> Result:
        found = self._node.fence(_ledger(given), _recovery(given))
        return {"lac": found.lac, "last": found.last}

    def _index(self, given: Given) -> Result:
        limit = min(max(given.whole("limit"), 1), INDEX_MAX)
        found = self._node.page(_ledger(given), given.whole("after"), limit)
        entries = [
            [place.entry, place.offset, place.rows, place.size, place.last_timestamp, place.stored_at]
            for place in found.places
        ]
        return {
            "entries": entries,
            "lac": found.lac,
            "fenced": found.fence or None,
            "more": found.has_more,
        }

    def _ledgers(self, given: Given) -> Result:
        after, limit = given.text("after"), min(max(given.whole("limit"), 1), INDEX_MAX)
        found = [ledger for ledger, _ in self._node.ledgers() if ledger > after]
        return {"ledgers": found[:limit], "more": len(found) > limit}

    def _lacking(self, given: Given) -> Result:
        after, limit = given.text("after"), min(max(given.whole("limit"), 1), INDEX_MAX)
        found = [ledger for ledger in self._node.lacking() if ledger > after]
        return {"ledgers": found[:limit], "more": len(found) > limit}

    def _collect_now(self, given: Given) -> Result:
        if not self._collecting.acquire(blocking=False):  # calls that wait would take the threads of reads and fences
            raise ServerBusy("this node is already collecting garbage for another call: try again later")
        try:
            return self._collect()
        finally:
            self._collecting.release()

    def _check_node(self, given: Given) -> None:
        asked = given.text("node")
        if asked != self._node.id:
            raise WrongNode(asked[:100], self._node.id)

    def _json(self, data: bytes, what: str) -> dict[str, Any]:
        return parse(data, what, self._limits.request_bytes_max)

    async def _request(self, received: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await anext(received, None)
        except TimeoutError:
            raise InvalidArgument(f"the request of the call did not arrive within {REQUEST_S:g} s") from None
        if request is None:
            raise InvalidArgument("the call has no request: send one message")
        return request

    # Around each method.

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        """A handler that runs the method and turns an error that it raises into a gRPC status."""
        received, sent = SERVER_RECEIVED.of(name), SERVER_SENT.of(name)

        async def call(incoming: Any, context: Any) -> None:
            self.open += 1
            try:
                await context.send_initial_metadata(())  # see `pxrs.server.service`
                with self._counts.call(name):
                    if self._is_draining:
                        raise Closed("the storage node is stopping")
                    if self.open > self._limits.streams_max:
                        raise ServerBusy(f"{self._limits.streams_max:,} calls are open, the maximum: try later")
                    caller = self._identify(context)
                    await method(aiter(CountedMessages(incoming, received)), _Replies(context, sent, caller))
            except (PxrsError, flight.MalformedMessage) as error:
                await _abort(context, error)
            except Stalled as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except grpc.aio.InternalError:  # the broker has disconnected
                raise asyncio.CancelledError from None
            except Exception:
                if context.cancelled() or context.done():
                    raise asyncio.CancelledError from None
                _logger.exception("a call of a broker failed unexpectedly")
                await context.abort(grpc.StatusCode.INTERNAL, "the storage node failed unexpectedly; its log says why")
            finally:
                self.open -= 1

        return call

    def _identify(self, context: Any) -> Caller:
        """The caller. Raises Unauthenticated, and NotPermitted if its token does not have the grant cluster=member."""
        caller = self._gate.identify(dict(context.invocation_metadata() or ()), context.auth_context())
        if not caller.grants.may("cluster", "", "member"):
            raise NotPermitted(
                "the token does not permit the use of storage nodes; nothing was done. Brokers need the grant "
                "cluster=member"
            )
        return caller


class _Replies(CountedReplies):
    """The context that a method gets: where it writes replies, and its caller."""

    def __init__(self, context: Any, sent: Any, caller: Caller) -> None:
        super().__init__(context, sent)
        self.caller = caller


def _ledger(given: Given) -> str:
    ledger = given.text("ledger")
    if not is_ledger(ledger):
        raise InvalidArgument(f"{given.call}: {ledger[:200]!r} is not the id of a ledger")
    return ledger


def _recovery(given: Given) -> int:
    recovery = given.whole("recovery")
    if not 1 <= recovery <= NUMBER_MAX:
        raise InvalidArgument(f"{given.call}: recovery must be a number from 1 to {NUMBER_MAX:,}")
    return recovery


def _piece(found: Iterator[Found]) -> list[bytes]:
    """The next entries as messages, about PIECE_BYTES in total; empty at the end. May block."""
    piece, size = [], 0
    for each in found:
        piece.append(_message(each))
        size += len(piece[-1])
        if size >= PIECE_BYTES:
            break
    return piece


def _message(found: Found) -> bytes:
    if found.error is not None:
        return messages.data({"entry": found.entry, "error": wire.error_to_dict(found.error)})
    if found.head is None:
        return messages.data({"entry": found.entry, "unknown" if found.is_unknown else "missing": True})
    return messages.data({"entry": found.entry, "head": list(found.head)}, (found.body,))


async def _abort(context: Any, error: Exception) -> None:
    told = error if isinstance(error, PxrsError) else InvalidArgument(f"a message is malformed: {error}")
    code = next((code for kind, code in _STATUSES if isinstance(told, kind)), grpc.StatusCode.UNKNOWN)
    details = str(told).encode("ascii", "backslashreplace")[:_DETAILS_MAX].decode()
    await context.abort(code, details, ((wire.ERROR_METADATA, wire.error_to_metadata(told)),))
