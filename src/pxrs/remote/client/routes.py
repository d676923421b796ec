"""Which broker of a cluster serves which partition, as a client knows it.

Any broker of the address answers who owns what. The client then asks each owner directly, over a connection of its own
to it. A broker that does not serve a partition says so (PartitionMoved), and the client asks again who owns it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from pxrs.errors import Closed, PartitionMoved
from pxrs.log.contract import TopicLog
from pxrs.model import Topic
from pxrs.remote.client.session import Session
from pxrs.remote.client.settings import Settings
from pxrs.remote.client.topic import RemoteTopic
from pxrs.waiting import seconds_left

ASK_S: Final = 0.05
"""How often the owners of a topic are asked for at most."""
ANSWER_S: Final = 20.0
"""How long a broker may take to answer, unless the `patience` of the address is shorter: longer than an append waits
there for its acknowledgements."""
ABSENT_S: Final = 60.0
"""How long a broker must be absent before its connection is given up: longer than any call to it may take."""


class Peers:
    """The connections of this process to the single brokers of a cluster. Threads share it."""

    def __init__(self, settings: Settings) -> None:
        """settings: those of the cluster's address; token and TLS are the same for every broker."""
        self._settings = settings
        self._lock = threading.Lock()
        self._is_closed = False
        self._sessions: dict[str, Session] = {}
        self._topics: dict[tuple[str, str], RemoteTopic] = {}
        self._absent: dict[str, float] = {}
        """Since when `keep` misses the broker of a session (monotonic)."""

    def check(self) -> None:
        if self._is_closed:
            raise Closed(f"the log {self._settings.shown} was closed")

    def topic(self, address: str, topic: Topic) -> RemoteTopic:
        """The topic at the broker with this address, host and port."""
        with self._lock:
            self.check()
            known = self._topics.get((address, topic.id))
            if known is None:
                session = self._sessions.get(address)
                if session is None:
                    session = self._sessions[address] = Session(self._settings_of(address))
                known = self._topics[address, topic.id] = RemoteTopic(topic, session)
            return known

    def keep(self, addresses: Collection[str], topics: Collection[str]) -> list[Session]:
        """Forget the topics that are not among these, by their ids, and the brokers whose addresses were not among
        these for ABSENT_S. Returns the sessions of these brokers, which the caller closes."""
        now = time.monotonic()
        with self._lock:
            self._absent = {each: self._absent.get(each, now) for each in self._sessions if each not in addresses}
            gone = [address for address, since in self._absent.items() if now - since >= ABSENT_S]
            self._topics = {key: each for key, each in self._topics.items() if key[0] not in gone and key[1] in topics}
            return [self._sessions.pop(address) for address in gone]

    def is_at(self, address: str, handle: TopicLog) -> bool:
        """Whether the handle is that of a topic at the broker with this address."""
        with self._lock:
            return self._topics.get((address, handle.id)) is handle

    def _settings_of(self, address: str) -> Settings:
        # A broker that hangs must not hold up a call for longer than the address allows.
        answer_s = min(ANSWER_S, self._settings.patience_s)
        return replace(
            self._settings,
            shown=f"pxrs://{address}",
            targets=(address,),
            timeout_s=answer_s,
            patience_s=answer_s,
            is_direct=True,
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
            self._topics.clear()
        for session in sessions:
            session.close()


class AskedRoutes:
    """The routes of one topic; see `routed.Routes`. Threads share it."""

    def __init__(
        self, topic: Topic, peers: Peers, ask: Callable[[], Mapping[int, str]], check: Callable[[], object]
    ) -> None:
        """ask: asks any broker for the address of each partition's owner; may wait, and raises what concerns the whole
        topic. check: raises Closed or UsedAfterFork."""
        self._topic, self._peers, self._ask, self._check = topic, peers, ask, check
        self._lock = threading.Lock()
        self._owners: dict[int, str] = {}
        self._asking = threading.Lock()
        """Held while the owners are asked for: threads that need them at the same time ask once."""
        self._asked_at = float("-inf")

    def check(self) -> None:
        self._check()

    def owners(self) -> Mapping[int, str]:
        return self._ask()

    def handle(self, partition: int) -> TopicLog:
        address = self._owners.get(partition)
        if address is None:
            if not self._asking.acquire(timeout=seconds_left(threading.TIMEOUT_MAX)):
                raise PartitionMoved(f"{self._topic.name}/{partition}: no broker named its owner in time")
            try:
                address = self._owners.get(partition)
                if address is None:
                    self._refresh()
                    address = self._owners.get(partition)
            finally:
                self._asking.release()
        if address is None:
            raise PartitionMoved(f"{self._topic.name}/{partition}: no broker has claimed the partition yet")
        return self._peers.topic(address, self._topic)

    def _refresh(self) -> None:
        time.sleep(max(0.0, self._asked_at + ASK_S - time.monotonic()))
        self._asked_at = time.monotonic()
        found = self._ask()
        with self._lock:
            self._owners = dict(found)

    def forget(self, partition: int, handle: TopicLog) -> None:
        with self._lock:
            address = self._owners.get(partition)
            if address is not None and self._peers.is_at(address, handle):
                del self._owners[partition]
