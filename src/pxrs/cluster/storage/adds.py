"""`DoPut` of a storage node: a stream of adds from one broker.

The stream receives messages, checks them and submits their adds to the journal without waiting for earlier ones. After
each sync that includes adds of this stream, it sends an answer: the number of adds of the stream that are done, and a
list of those that were refused.

The length of all adds that are received and not synced is bounded for all streams together (`Budget`). Beyond it a
stream stops receiving, and gRPC's flow control slows down its broker (W5). It also stops while the broker does not
receive the refusals that it is answered with.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final

import xxhash

from pxrs.cluster import messages
from pxrs.cluster.messages import Add
from pxrs.cluster.storage.node import StorageNode, check_add
from pxrs.errors import InvalidRecord, PxrsError
from pxrs.server.budget import Budget
from pxrs.server.served import Send, Stalled

ANSWER_S: Final = 30.0
"""How long the broker may take to receive an answer."""
ADD_BYTES: Final = 1_000
"""How much memory an add takes beside its bytes."""
REFUSED_MAX: Final = 10_000
"""How many refusals may wait for the broker before the stream stops receiving."""


class AddStream:
    """One stream. It belongs to the event loop; only `_note` runs on the journal's thread."""

    def __init__(self, node: StorageNode, budget: Budget) -> None:
        self._node, self._budget = node, budget
        self._loop = asyncio.get_running_loop()
        self._count = 0
        """The number of adds that were received."""
        self._refused: deque[tuple[int, PxrsError]] = deque()
        """Refusals that were not sent yet. The journal's thread appends to it."""
        self._done = 0
        """Adds with a lower number are synced or refused. The journal's thread writes it, after `_refused`."""
        self._sent = 0
        """The value of `_done` in the last answer."""
        self._held: deque[tuple[int, int]] = deque()
        """For each message whose adds are not all done: the number after its last add, and its share of the budget."""
        self._is_scheduled = False
        """Whether a call of `_flush` is scheduled on the event loop."""
        self._is_news, self._is_sent = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._why: PxrsError | None = None

    def end(self, why: PxrsError) -> None:
        """End the stream with this error. Adds that were not answered may be stored."""
        if self._why is None:
            self._why = why
            if self._task is not None:
                self._task.cancel()

    async def serve(self, received: AsyncIterator[bytes], send: Send) -> None:
        """Store the adds of the stream until the broker ends it. Raises PxrsError, Stalled."""
        self._task = asyncio.current_task()
        answering = asyncio.ensure_future(self._answer(send))
        receiving = asyncio.ensure_future(self._receive(received))
        try:
            await asyncio.wait((answering, receiving), return_when=asyncio.FIRST_COMPLETED)
            for each in (answering, receiving):
                if each.done():
                    each.result()
            async with asyncio.timeout(ANSWER_S):  # the broker has ended its side: answer what it has sent
                while self._sent < self._count:
                    self._is_sent.clear()
                    await self._is_sent.wait()
        except asyncio.CancelledError:
            if self._why is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._why from None
        except TimeoutError:
            raise Stalled(f"an answer was not sent to the broker within {ANSWER_S:g} s") from None
        finally:
            answering.cancel()
            receiving.cancel()

    async def _receive(self, received: AsyncIterator[bytes]) -> None:
        async for message in received:
            while len(self._refused) > REFUSED_MAX:
                self._is_sent.clear()
                await self._is_sent.wait()
            taken = await self._budget.take(len(message))
            try:
                adds = messages.read_adds(message)
                taken = self._budget.exchange(taken, taken + ADD_BYTES * len(adds))
                _check(adds)
                self._count += len(adds)
                self._node.add(adds, self._count - len(adds), self._note)
            except BaseException:
                self._budget.give_back(taken)
                raise
            self._held.append((self._count, taken))
            if self._count <= self._done:  # all were synced before `_held` had this message
                self._flush()

    def _note(self, number: int, error: PxrsError | None) -> None:
        """An add is done. Called on the journal's thread, in the order of the adds."""
        if error is not None:
            self._refused.append((number, error))
        self._done = number + 1
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        while self._held and self._held[0][0] <= self._done:
            self._budget.give_back(self._held.popleft()[1])
        self._is_news.set()

    async def _answer(self, send: Send) -> None:
        while True:
            await self._is_news.wait()
            self._is_news.clear()
            # Read `_done` first: the journal's thread writes it after `_refused`.
            done, refused = self._done, []
            while self._refused:
                refused.append(self._refused.popleft())
            if done == self._sent and not refused:
                continue
            async with asyncio.timeout(ANSWER_S):
                await send(messages.answer(done, refused))
            self._sent = done
            self._is_sent.set()


def _check(adds: Sequence[Add]) -> None:
    """Raises InvalidArgument, InvalidRecord."""
    for add in adds:
        check_add(add)
        if xxhash.xxh3_64_intdigest(add.body[0]) != add.head.checksum:
            raise InvalidRecord(f"entry {add.entry} of ledger {add.ledger} was damaged in transit: send it again")
